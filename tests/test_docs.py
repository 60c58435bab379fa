"""The README is true: its commands parse, its examples run, its table is the program's, and every test and metric it names exists."""

import re
import shlex
from pathlib import Path
from random import Random

import algorithms
import envs
import mas_rl
import train
from mas_rl import Scripted, blank_metrics, credit, parallel_rollout

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_every_command_is_understood():
    commands = [c for block in re.findall(r"```bash\n(.*?)```", README, re.S) for c in re.split(r"\n|&&", block)] + re.findall(r"`(python train.py[^`]*)`", README)
    commands = [shlex.split(c)[2:] for c in commands if "train.py" in c and "--help" not in c]
    assert len(commands) >= 5
    for flags in commands:
        train.make_parser().parse_args(flags)


def test_the_table_of_methods_is_the_one_in_the_code():
    rows = {r[0].strip("` "): r[1:] for r in (line.split("|")[1:-1] for line in README.splitlines() if re.match(r"\| `[\w-]+` \| (parallel|tree)", line))}
    assert set(rows) == set(algorithms.METHODS)
    for name, method in algorithms.METHODS.items():
        sampler, credited, score, mean, std = (cell.strip() for cell in rows[name])
        assert sampler.startswith(method.sampler) and credited == method.credit and score == method.score_per
        assert mean == f"{' + '.join(method.mean.by)}, {method.mean.unit}s" and std in (mean, "the same") and method.std == method.mean


def test_the_examples_run(monkeypatch):
    monkeypatch.setattr(algorithms, "METHODS", dict(algorithms.METHODS))
    monkeypatch.setattr(envs, "TASKS", dict(envs.TASKS))
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(blocks) == 2 and all(len(block.strip().splitlines()) < 20 for block in blocks)
    for block in blocks:
        exec(block, {"__name__": "readme"})
    env = envs.TASKS["parity"](level=1)
    env.reset(Random(1))
    samples, finals = parallel_rollout([env], {"speaker": Scripted(["yes", "no"])}, 2)
    credit(samples, algorithms.METHODS["dr-grpo"])
    assert [env.success() for env in finals] == [s.reward for s in samples] and sorted(s.reward for s in samples) == [0, 1]
    assert envs.play(env, lambda env, agent: env.solve(agent))[1].success()


def test_names_in_the_readme_exist():
    tests = "".join(p.read_text() for p in (ROOT / "tests").glob("test_*.py"))
    for name in re.findall(r"`(test_\w+)`", README):
        assert f"def {name}(" in tests, name
    for module, name in re.findall(r"`(algorithms|envs|mas_rl)\.(?!py)(\w+)`", README):
        assert hasattr({"algorithms": algorithms, "envs": envs, "mas_rl": mas_rl}[module], name), name


def test_every_metric_is_explained():
    documented = README[README.index("## Metrics"):]
    for method in algorithms.METHODS:
        for key in blank_metrics(method, {"solver": Scripted([])}):
            name = key.split("/")[0]
            assert f"`{name}" in documented or key == "tokens", key


def test_readme_is_short_and_links_to_files_that_are_there():
    assert len(README.splitlines()) <= 200
    for link in re.findall(r"\]\(([^)]+)\)", README):
        assert link.startswith("http") or (ROOT / link).exists(), link


def test_the_docstring_example_of_algorithms():
    assert [round(a, 6) for a in algorithms.group_advantages([1, 0, 0, 1], mean_keys=["q"] * 4).tolist()] == [0.866024, -0.866024, -0.866024, 0.866024]
