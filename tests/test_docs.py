"""The README is true: its commands parse, its examples run, its table is the program's, and every test and metric it names exists."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import algorithms
import envs
import mas_rl
import train
from mas_rl import Scripted, blank_metrics

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_every_command_is_understood():
    commands = [c for block in re.findall(r"```bash\n(.*?)```", README, re.S) for c in re.split(r"\n|&&", block)] + re.findall(r"`(python train.py[^`]*)`", README)
    commands = [shlex.split(c.partition("train.py ")[2]) for c in commands if "train.py" in c and "--help" not in c]
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


def test_a_method_and_a_task_are_added_as_the_readme_says(tmp_path):
    """The README's row and class, pasted into copies of the files; the command line knows both, and the expert wins."""
    row, task = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(row.splitlines()) < 20 and len(task.splitlines()) < 20
    for name in ("algorithms.py", "envs.py", "train.py"):
        text = (ROOT / name).read_text()
        if name == "algorithms.py":
            last_row = next(line for line in text.splitlines(True) if line.startswith('    "at-grpo": Method('))
            text = text.replace(last_row, last_row + row)
        (tmp_path / name).write_text(text + ("\n\n" + task if name == "envs.py" else ""))
    script = ("import train; from random import Random; from algorithms import METHODS; from envs import TASKS, play\n"
              "args = train.parse(['--task', 'parity', '--method', 'dr-grpo', '--out', 'run'])\n"
              "assert METHODS[args.method].std is None and METHODS[args.method].mean == METHODS['grpo'].mean\n"
              "env = train.make_env(args, 'train'); env.reset(Random(1))\n"
              "print(play(env, lambda env, agent: env.solve(agent))[1].success())")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "True\n", done.stderr


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
