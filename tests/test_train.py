"""The command line: what a user types, what they get, and what a slip of theirs is told."""

import json
import re
import shutil
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


def test_the_team_learns(tmp_path):
    """The README's command, with the real base and half the steps: the solver learns to carry."""
    flags = "--task math-verify --method dr-mas --steps 10 --eval-n 100"
    done = subprocess.run([sys.executable, ROOT / "train.py", *flags.split()], capture_output=True, text=True, cwd=tmp_path,
                          env={"XDG_CACHE_HOME": str(tmp_path), "PATH": "", "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    rows = rows_of(tmp_path / "runs/math-verify-dr-mas-seed0")
    assert rows[0]["eval/success"] <= 0.7 and rows[-1]["eval/success"] >= rows[0]["eval/success"] + 0.2
    shutil.rmtree(tmp_path / "runs")


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
