"""The command line: what a user types, what they get, and what a slip of theirs is told."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import train
from algorithms import METHODS
from envs import TASKS

ROOT = Path(__file__).parent.parent


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path):
    """Data and folders of every kind of wrong."""
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "prose.jsonl").write_text("Once upon a time")
    (tmp_path / "few.jsonl").write_text('{"question": "1 + 1", "answer": 2}\n')
    (tmp_path / "good.jsonl").write_text("".join(f'{{"question": "What is {i} + 1?", "answer": {i + 1}}}\n' for i in range(30)))
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    (tmp_path / "started" / "checkpoints").mkdir(parents=True)
    (tmp_path / "started" / "config.json").write_text(json.dumps({"task": "math", "seed": 1}))
    for name, config in (("list", [1]), ("unknown", {"task": "chess"}), ("all-data", {"data": "x", "eval_n": 0, "model": "m"})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_text("")
    return tmp_path


BAD = [
    ("--task chess", "argument --task: invalid choice: 'chess' (choose from"), ("--method ppo", "argument --method: invalid choice: 'ppo' (choose from"),
    ("--task search --corpus {}/good.jsonl", "--corpus holds the passages of --data or --eval-data"), ("--evaluate Expert", "allowed are expert, random, and runs that are there"),
    ("--evaluate random --eval-n 0", "evaluates nothing; give --eval-n N"),
    ("--branches 1", "'1' is not a whole number of at least 2"), ("--turns 0", "'0' is not a whole number of at least 1"),
    ("--steps -3", "'-3' is not a whole number of at least 0"), ("--envs many", "'many' is not a whole number of at least 1"),
    ("--lr fast", "'fast' is not a number of at least 0"), ("--lr nan", "'nan' is not a number"), ("--kl inf", "'inf' is not a number"),
    ("--alpha -1", "'-1' is not a number of at least 0"), ("--clip 2", "'2' is not a number from 0 to 1"), ("--temperature 0", "'0' is not a number"),
    ("--seed 1.5", "'1.5' is not a whole number"), ("--level 9", "invalid choice: 9"), ("--nonsense 1", "unrecognized arguments: --nonsense 1"),
    ("--model ./not-there", "--model ./not-there: no such folder"), ("--model nowhere/at-all", "--model nowhere/at-all: neither a folder nor downloaded"),
    ("--model {}/folder", "no config.json with *.safetensors"), ("--model gpt", "neither a folder nor downloaded"), ("--model a/b/c", "no such folder, and no hub id"), ("--rank 99999", "from 1 to 4096"), ("--device tpu", "--device tpu: allowed are"),
    ("--model {0}/model --data {0}/nothing.jsonl", "nothing.jsonl: no such file"), ("--model {0}/model --data {0}/empty.jsonl", "the file is empty"),
    ("--model {0}/model --data {0}/prose.jsonl", "line 1: not JSON"), ("--model {0}/model --data {0}/few.jsonl", "too few problems"),
    ("--model {0}/model --data {0}/good.jsonl --eval-data {0}/empty.jsonl", "the file is empty"), ("--data {}/good.jsonl", "need a real model"),
    ("--model {0}/model --eval-data {0}/good.jsonl --eval-n 0", "evaluates nothing"),
    ("--sharing everyone", "--sharing everyone: allowed are shared, per-role"), ("--sharing reasoner=x", "for every role"), ("--sharing reasoner=x.y,tool=z", "for every role"),
    ("--sharing reasoner=x,reasoner=y,tool=z", "for every role"), ("--sharing reasoner=0,tool=1", "a letter, then"), ("--evaluate {}/unknown", "a task or a method that is not there"),
    ("--out {0}/" + 300 * "a", "File name too long"),
    ("--out {}/file/run", "cannot be written"), ("--out {}/run", "there is a run in it already"), ("--out /proc/run", "cannot be written"),
    ("--evaluate {}/nothing", "no such folder"), ("--evaluate {}/folder", "config.json is missing or damaged"), ("--evaluate {}/broken", "missing or damaged"),
    ("--evaluate {}/started", "no checkpoint in it"), ("--evaluate {}/list", "missing or damaged"), ("--evaluate {}/started --eval-n 0", "give --eval-n N"),
    ("--evaluate {}/all-data --eval-n 3", "trained on all of its --data"), ("--evaluate {}/started --seed 2", "--seed 2 contradicts the run, which has 1"), ("--show 3", "give --evaluate too"),
    ("--lr judge=1", "--lr names judge; allowed are reasoner, tool"), ("--lr tool=fast", "'fast' is not a number of at least 0"), ("--lr tool=1,tool=2", "names a role twice"),
    ("--sharing shared --temperature tool=0.5", "--temperature: reasoner and tool share an adapter"), ("--devices tool=cpu", "--device names tool; needed is one for each of reasoner, tool"),
    ("--devices reasoner=cpu,tool=tpu", "--device tpu: allowed are"), ("--model reasoner=tiny,tool=tiny", "tiny is made for a whole team"), ("--model reasoner={0}/model,tool={0}/nothing", "nothing: no such folder"),
    ("--task math --size 5", "--size is no setting of --task math"), ("--task sudoku --size 5", "a sudoku has 4 or 9 rows"), ("--task sokoban --size 4", "5 to 10 rows"), ("--task sokoban --size 9 --boxes 3", "with 3 boxes at most 8"),
    ("--single-agent --turns 3", "--turns 3: this team has one turn"), ("--reasoners 2 --turns 2", "--turns 2: this team has one turn"),
    ("--task sokoban --boxes 9", "'9' is not a whole number from 1 to 3"), ("--corpus x.jsonl", "--corpus is for --task search"), ("--reasoners 2 --single-agent", "no single agent"),
    ("--task plan-path --model {0}/model --data {0}/good.jsonl", "reads none from files"), ("--task search --evaluate expert --eval-data {0}/good.jsonl", "give --corpus FILE"),
    ("--task search --evaluate expert --corpus {0}/good.jsonl --eval-data {0}/good.jsonl", 'good.jsonl, line 1: no "text"'), ("--task code --evaluate expert --eval-data {0}/good.jsonl", 'needed are "tests"')]


@pytest.mark.parametrize("flags, says", BAD, ids=[flags for flags, _ in BAD])
def test_bad_input_ends_in_one_line_and_status_2(files, flags, says, capsys, monkeypatch):
    monkeypatch.chdir(files)
    before = sorted(files.rglob("*"))
    with pytest.raises(SystemExit) as end:
        train.parse(flags.format(files).split())
    message = capsys.readouterr().err
    assert end.value.code == 2 and says in message and message.count("\n") == 1, message
    assert sorted(files.rglob("*")) == before           # nothing was written, nothing was lost


def test_bad_input_is_answered_within_two_seconds_without_torch(files):
    for flags in ("--task chess", f"--model {files}/model --data {files}/prose.jsonl", "--model nowhere/at-all"):
        start = time.time()
        done = subprocess.run([sys.executable, "-X", "importtime", ROOT / "train.py", *flags.split()], capture_output=True, text=True, cwd=files)
        assert done.returncode == 2 and time.time() - start < 4 and "Traceback" not in done.stderr
        assert not re.search(r"\| +torch$", done.stderr, re.M)
        assert done.stdout == "" and sum(line.startswith("train.py: ") for line in done.stderr.splitlines()) == 1


def test_a_model_that_transformers_cannot_load_is_one_line(files, capsys):
    with pytest.raises(SystemExit) as end:
        train.main(f"--model {files}/model --steps 1 --out {files}/new".split())
    message = capsys.readouterr().err
    assert end.value.code == 2 and message.startswith(f"train.py: --model {files}/model on cpu cannot be set up: ") and message.count("\n") == 1
    assert not list((files / "new").iterdir())      # no run has begun: the folder is still free, and not offered as one
    train.parse(f"--model {files}/model --steps 1 --out {files}/new".split())


def test_flags_name_every_method_and_task():
    assert train.METHOD_NAMES == list(METHODS)
    text = train.make_parser().format_help()
    assert all(name in text for name in list(METHODS) + list(TASKS))


# -- data -------------------------------------------------------------------------------------------------------------


def test_problems_for_evaluation_are_never_trained_on(files):
    args = train.parse(f"--model {files}/model --data {files}/good.jsonl --out {files}/a".split())
    kept = {p.question for p in args.problems["eval"]["good"]}
    assert kept and not kept & {p.question for p in args.problems["train"]} and len(kept) + len(args.problems["train"]) == 30
    (files / "test.jsonl").write_text((files / "good.jsonl").read_text().split("\n")[0])
    args = train.parse(f"--model {files}/model --data {files}/good.jsonl --eval-data {files}/test.jsonl --out {files}/b".split())
    assert len(args.problems["train"]) == 29 and [len(p) for p in args.problems["eval"].values()] == [1]
    args = train.parse(f"--model {files}/model --data {files}/few.jsonl --eval-n 0 --out {files}/c".split())
    assert len(args.problems["train"]) == 1 and args.problems["eval"] == {}


def test_a_run_is_scored_from_any_folder(files, monkeypatch):
    monkeypatch.chdir(files)
    args = train.parse("--model model --data good.jsonl --out a".split())
    train.write_config(files / "a", args)
    (files / "a/checkpoints/step-000000").mkdir(parents=True)
    (files / "a/checkpoints/step-000000/step.json").write_text("{}")
    monkeypatch.chdir(files / "folder")
    again = train.parse("--evaluate ../a --model ../model --data ../good.jsonl".split())
    assert (again.model, again.data) == (f"{files}/model", f"{files}/good.jsonl")


def test_each_problem_of_a_file_is_evaluated_once(files):
    args = train.parse(f"--model {files}/model --eval-data {files}/good.jsonl {files}/few.jsonl --out {files}/a".split())
    sets = train.eval_sets(args)
    assert {name: len(envs) for name, envs in sets.items()} == {"good": 30, "few": 1}
    assert len({env.problem.question for env in sets["good"]}) == 30


def test_defaults_of_tiny_and_real_models(files):
    tiny = train.parse(["--out", f"{files}/a"])
    assert (tiny.turns, tiny.max_new_tokens, tiny.steps, tiny.lr) == (2, 48, 20, 1e-3)
    real = train.parse(f"--model {files}/model --out {files}/b".split())
    assert (real.turns, real.steps, real.lr) == (4, 200, 1e-5)      # tokens: 1024, or half the context
    verify = train.parse(f"--task math-verify --model {files}/model --out {files}/c".split())
    assert verify.turns == 2


# -- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A base that is made in seconds and knows little: enough to see that everything is wired."""
    import mas_rl
    folder = tmp_path_factory.mktemp("small")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setitem(mas_rl.TINY, "plays", 40)
        patch.setitem(mas_rl.TINY, "steps", 40)
        patch.setattr(TASKS["code"], "recipe", {"plays": 10})
        patch.chdir(folder)
        yield folder


def rows_of(run):
    return [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]


SHORT = "--steps 2 --envs 2 --branches 2 --eval-n 4 --eval-every 1 --max-new-tokens 16"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("task, sharing", [("math", "per-role"), ("math", "shared"), ("math-verify", "per-role"), ("math-verify", "solver=team,verifier=team")])
def test_any_method_with_any_team_and_any_sharing(small, capsys, method, task, sharing):
    out = small / f"{method}-{task}-{sharing}".replace("=", "-").replace(",", "-")
    train.main(f"--task {task} --method {method} --sharing {sharing} {SHORT} --out {out}".split())
    printed = capsys.readouterr().out
    assert re.match(r"model tiny: [\d,]+ parameters, frozen; [\d,]+ train, in \d LoRA adapters? of rank 16 .*; device \w+, float32, 1 CPU thread\n", printed)
    assert "before training" in printed and "step    2" in printed and f"--evaluate {out} --show 3" in printed

    rows = rows_of(out)
    assert [row["step"] for row in rows] == [0, 1, 2] and all(list(row) == list(rows[0]) for row in rows)
    assert rows[0]["eval/success"] is not None and rows[1]["lr"] == 1e-3 and rows[2]["calls"] > rows[1]["calls"] > rows[0]["calls"] == 0
    config = json.loads((out / "config.json").read_text())
    assert config["method"] == method and config["branches"] == 2 and config["max_new_tokens"] == 16
    assert (out / "curves.png").stat().st_size > 10_000
    calls = [json.loads(line) for line in (out / "transcripts.jsonl").read_text().splitlines()]
    assert {call["step"] for call in calls} == {1, 2} and all(call["prompt"] and "advantage" in call for call in calls)
    assert [c.name for c in sorted((out / "checkpoints").iterdir())] == ["step-000001", "step-000002"]
    adapters = {f.name for f in (out / "checkpoints" / "step-000002").iterdir() if f.is_dir()}
    agents = TASKS[task]().agents
    assert adapters == ({"shared"} if sharing == "shared" else {"team"} if "=" in sharing else set(agents))


@pytest.mark.parametrize("flags", ["sokoban --sharing shared", "code --method dr-mas", "search --method grpo", "math --reasoners 2 --tools 1"])
def test_every_team_of_the_papers_is_trained_and_scored(small, capsys, flags):
    out = small / flags.replace(" ", "")
    train.main(f"--task {flags} --steps 1 --envs 1 --branches 2 --eval-n 2 --max-new-tokens 12 --out {out}".split())
    train.main(f"--evaluate {out} --show 1".split())
    assert "step-000001, step 1, 2 problems: eval/success" in capsys.readouterr().out
    assert rows_of(out)[-1]["calls"] > 0 and (out / "checkpoints" / "step-000001" / "step.json").exists()


def test_evaluate_scores_a_finished_run_and_shows_plays(small, capsys):
    train.main(f"--task math {SHORT} --seed 3".split())
    capsys.readouterr()
    run = "runs/math-at-grpo-seed3"
    train.main(["--evaluate", run, "--show", "2"])
    printed = capsys.readouterr().out
    final = rows_of(run)[-1]["eval/success"]
    assert f"step 2, 4 problems: eval/success {final:.3f}" in printed
    assert printed.count("= play ") == 2 and "reasoner is asked" in printed and "tool answers (team reward" in printed
    group = printed[printed.index("one group of the tree"):]
    assert group.count("advantage") == 2 and group.count("walked on") == 1 and "K = 2" in group

    (small / run / "checkpoints/step-000002/tool/adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(SystemExit) as end:
        train.main(["--evaluate", run])
    assert end.value.code == 2 and "step-000002 cannot be read (" in capsys.readouterr().err


def test_a_second_run_does_not_touch_the_first(small, capsys):
    train.main("--task math-verify --method grpo --steps 0 --eval-n 2 --max-new-tokens 8".split())
    first = (small / "runs/math-verify-grpo-seed0/metrics.jsonl").read_text()
    train.main("--task math-verify --method grpo --steps 0 --eval-n 2 --max-new-tokens 8".split())
    assert (small / "runs/math-verify-grpo-seed0/metrics.jsonl").read_text() == first
    assert (small / "runs/math-verify-grpo-seed0-2/config.json").exists()
    capsys.readouterr()


def test_the_same_seed_gives_the_same_run_with_and_without_evaluation(small, capsys):
    """Evaluation leaves the random streams alone; the same command twice gives the same numbers."""
    rows = []
    for i, flags in enumerate(("--eval-n 4", "--eval-n 4", "--eval-n 0")):
        train.main(f"--task math-verify --single-agent --method dr-mas --steps 2 --envs 2 --branches 2 --max-new-tokens 8 --epochs 2 --kl 0.01 {flags} --out {small}/same{i}".split())
        rows.append([{k: v for k, v in row.items() if "second" not in k and "eval" not in k} for row in rows_of(small / f"same{i}")])
    assert rows[0] == rows[1] == rows[2] and rows[0][1]["kl/solver"] is not None
    capsys.readouterr()


def test_several_plays_per_problem_give_avg_and_pass(small, capsys):
    train.main(f"--task math-verify --single-agent --method grpo --steps 1 --envs 1 --branches 2 --eval-n 3 --eval-k 4 --max-new-tokens 8 --out {small}/k".split())
    final = rows_of(small / "k")[-1]
    assert final["eval/success"] == final["eval/avg@4"] <= final["eval/pass@4"]
    capsys.readouterr()


def test_an_interrupted_run_saves_what_it_has(small, capsys, monkeypatch):
    import mas_rl
    original, steps = mas_rl.train_step, []

    def interrupted(*args, **how):
        steps.append(1)
        if len(steps) == 2:
            raise KeyboardInterrupt
        return original(*args, **how)

    monkeypatch.setattr(mas_rl, "train_step", interrupted)
    with pytest.raises(SystemExit) as end:
        train.main(f"--task math-verify --steps 5 --envs 1 --branches 2 --eval-n 0 --max-new-tokens 8 --out {small}/stopped".split())
    assert "the adapters are saved" in str(end.value.code)
    train.main(["--evaluate", f"{small}/stopped", "--eval-n", "2"])
    assert "step 1, 2 problems" in capsys.readouterr().out


def test_the_team_learns(tmp_path, capsys, monkeypatch):
    """The README's command, with a base made in fewer steps and a third of the learning: the solver learns to carry."""
    import mas_rl
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(mas_rl.TINY, "plays", 1000)
    monkeypatch.setitem(mas_rl.TINY, "steps", 500)
    train.main(f"--task math-verify --method dr-mas --steps 8 --eval-n 60 --eval-every 9 --out {tmp_path}/run".split())
    rows = rows_of(tmp_path / "run")
    assert rows[0]["eval/success"] <= 0.7 and rows[-1]["eval/success"] >= rows[0]["eval/success"] + 0.2
    capsys.readouterr()


# -- several processes, models, rates ---------------------------------------------------------------------------------


def torchrun(folder, script, flags):
    """Two processes of a script that has `train` and a small base."""
    (folder / "script.py").write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\nimport mas_rl, train\n"
                                      f"mas_rl.TINY |= dict(plays=40, steps=40)\n{script}\ntrain.main(sys.argv[1:])\n")
    return subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", folder / "script.py",
                           *flags.split()], capture_output=True, text=True, cwd=folder, timeout=240)


def test_two_processes_write_one_run(small, capsys):
    done = torchrun(small, "", f"--task math-verify {SHORT} --out {small}/two")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("model tiny: ") == done.stdout.count("everything is in") == 1 and ", 2 processes\n" in done.stdout
    rows = rows_of(small / "two")
    assert [row["step"] for row in rows] == [0, 1, 2] and rows[-1]["calls"] >= 2 * 2 * 2 * 2       # steps, envs, branches, agents
    calls = [json.loads(line) for line in (small / "two/transcripts.jsonl").read_text().splitlines()]
    assert {call["env"] for call in calls} == {0}
    assert [c.name for c in sorted((small / "two/checkpoints").iterdir())] == ["step-000001", "step-000002"]
    train.main(["--evaluate", f"{small}/two"])      # in one process: the same answers, as greedy ones are
    assert f"eval/success {rows[-1]['eval/success']:.3f}" in capsys.readouterr().out


def test_a_process_that_fails_ends_all_of_them(small):
    fails = "def broken(*a, **k): raise ValueError('the second has lost its way')\nif train.RANK: mas_rl.train_step = broken"
    start = time.time()
    done = torchrun(small, fails, f"--task math-verify {SHORT} --out {small}/failed")
    assert done.returncode != 0 and "ValueError: the second has lost its way" in done.stderr and time.time() - start < 90
    assert len(rows_of(small / "failed")) == 1


@pytest.mark.parametrize("flags, says", [("--envs 5", "--envs 5 cannot be divided among 2 processes; give a multiple of 2"),
                                         ("--device cuda:1", "--device with 2 processes: allowed are cuda"), ("--device reasoner=cpu,tool=cpu", "with 2 processes")])
def test_what_processes_cannot_share_is_refused_once(files, capsys, monkeypatch, flags, says):
    monkeypatch.chdir(files)
    monkeypatch.setattr(train, "PROCESSES", 2)
    for rank, lines in ((0, 1), (1, 0)):
        monkeypatch.setattr(train, "LOCAL_RANK", rank)
        with pytest.raises(SystemExit) as end:
            train.parse(flags.split())
        message = capsys.readouterr().err
        assert end.value.code == 2 and message.count("\n") == lines and (not lines or says in message)


def test_each_process_plays_its_own_envs(files, monkeypatch):
    args = train.parse(f"--envs 4 --out {files}/shares".split())
    alone = [env.observe("reasoner") for env in train.reset_envs(args, 3)]
    monkeypatch.setattr(train, "PROCESSES", 2)
    shares = []
    for rank in range(2):
        monkeypatch.setattr(train, "RANK", rank)
        shares += [env.observe("reasoner") for env in train.reset_envs(args, 3)]
    assert shares == alone and len(set(alone)) == 4


def test_roles_have_their_own_rates_limits_and_temperatures(small, capsys):
    """The tool agent's rate is 0: it has a gradient, and its adapter stays what it was, B = 0."""
    from safetensors.torch import load_file
    train.main(f"--task math --method dr-mas --steps 2 --envs 4 --branches 8 --eval-n 0 --lr tool=0 --max-new-tokens reasoner=24,tool=14 --temperature tool=0.5 --out {small}/roles".split())
    config = json.loads((small / "roles/config.json").read_text())
    assert config["lr"] == {"reasoner": 1e-3, "tool": 0} and config["temperature"] == {"reasoner": 1.0, "tool": 0.5}
    rows = rows_of(small / "roles")
    assert (rows[1]["lr/reasoner"], rows[1]["lr/tool"]) == (1e-3, 0) and rows[1]["length/tool"] <= 14 < rows[1]["length/reasoner"] <= 24
    assert rows[1]["grad_norm/reasoner"] > 0 and rows[1]["grad_norm/tool"] > 0
    moved = {name: any(w.abs().max() > 0 for key, w in load_file(small / f"roles/checkpoints/step-000002/{name}/adapter_model.safetensors").items() if "lora_B" in key)
             for name in ("reasoner", "tool")}
    assert moved == {"reasoner": True, "tool": False}
    train.main(f"--evaluate {small}/roles --eval-n 2".split())
    capsys.readouterr()


def test_roles_on_models_of_different_sizes(small, capsys):
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    train.main(f"--task math --steps 0 --eval-n 0 --out {small}/base".split())
    kept = re.search(r"kept in (\S+)\n", capsys.readouterr().out)[1]
    tokenizer = AutoTokenizer.from_pretrained(kept)
    torch.manual_seed(0)
    size = dict(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=512)
    LlamaForCausalLM(LlamaConfig(**size, eos_token_id=tokenizer.eos_token_id, pad_token_id=0)).save_pretrained(small / "other")
    tokenizer.save_pretrained(small / "other")
    train.main(f"--task math --model reasoner={kept},tool={small}/other --devices reasoner=cpu,tool=cpu --threads 1 --steps 1 --envs 2 --branches 2 --max-new-tokens 8 "
               f"--eval-n 2 --gradient-checkpointing --out {small}/sizes".split())
    printed = capsys.readouterr().out
    assert [len(re.findall(rf"model {name}: [\d,]+ parameters, frozen; [\d,]+ train, in 1 LoRA adapter of rank 16 \({role}\)", printed))
            for name, role in ((kept, "reasoner"), (small / "other", "tool"))] == [1, 1]
    train.main(f"--evaluate {small}/sizes".split())
    assert "step-000001, step 1, 2 problems" in capsys.readouterr().out


def test_out_of_memory_ends_with_advice_and_the_adapters(small, capsys, monkeypatch):
    import mas_rl
    import torch
    original, steps = mas_rl.train_step, []

    def large(*args, **how):
        steps.append(1)
        if len(steps) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nGPU 0 has ...")
        return original(*args, **how)

    monkeypatch.setattr(mas_rl, "train_step", large)
    with pytest.raises(SystemExit) as end:
        train.main(f"--task math-verify --steps 5 --envs 2 --branches 2 --eval-n 0 --max-new-tokens 8 --out {small}/full".split())
    message = str(end.value.code)
    assert message.count("\n") == 0 and "out of memory (CUDA out of memory. Tried to allocate 20.00 GiB.): --envs 2 x --branches 2" in message
    assert "lower --batch-tokens or add --gradient-checkpointing" in message and f"after step 1; the adapters are saved in {small}/full/checkpoints/step-000001. python train.py --evaluate {small}/full" in message
    assert (small / "full/checkpoints/step-000001/step.json").exists()
    capsys.readouterr()


# -- without a model --------------------------------------------------------------------------------------------------


def test_expert_and_random_play_a_task_without_torch():
    script = "import sys, train; train.main(sys.argv[1:]); assert 'torch' not in sys.modules"
    def played(*flags):
        return subprocess.run([sys.executable, "-c", script, *flags], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    expert = played("--task", "search", "--evaluate", "expert", "--eval-n", "20")
    assert expert.startswith("expert on 20 problems of search: success 1.000, turns 3.00\n  verifier: 3.00 calls a play, reward a call: team 0.000, local 1.000")
    chance = played("--task", "sudoku", "--evaluate", "random", "--eval-n", "5", "--turns", "2")
    assert chance.startswith("random on 5 problems of sudoku: success 0.000, turns 2.00\n") and "reasoner: 2.00 calls" in chance
    assert chance == played("--task", "sudoku", "--evaluate", "random", "--eval-n", "5", "--turns", "2")


def test_the_expert_plays_every_row_of_a_file_and_is_shown(files, capsys):
    train.main(f"--evaluate expert --data {files}/good.jsonl --show 2".split())
    printed = capsys.readouterr().out
    assert "expert on 30 problems of math: success 1.000" in printed and printed.count("= play ") == 2
    assert printed.count("reasoner is asked:\nWhat is ") == 2 and printed.count("tool answers (team reward 1, local 1)") == 2


@pytest.mark.parametrize("task, settings", [("plan-path", {"turns": 2, "size": 4}), ("code", {"turns": 2, "steps": 10}), ("search", {"invalid_penalty": 0.01}),
                                            ("sokoban", {"size": 5}), ("math", {"turns": 2, "max_new_tokens": 48, "invalid_penalty": 0.1, "steps": 20})])
def test_each_task_brings_its_own_defaults_for_the_tiny_model(task, settings, tmp_path):
    args = vars(train.parse(["--task", task, "--out", str(tmp_path / "run")]))
    assert {name: args[name] for name in settings} == settings
    assert vars(train.parse(["--task", task, "--out", str(tmp_path / "other"), "--turns", "3", "--steps", "7"]))["turns"] == 3
