"""Two processes make the update of one. They are started with torch.distributed's gloo on the CPU, as torchrun would."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import train
from mas_rl import Scripted, blank_metrics, evaluate, train_step, world
from test_policy import make, randomise, weights
from test_rollouts import fresh
from test_speed import SAMPLES

ROOT = Path(__file__).parent.parent
CASES = {   # what the first process has of the seven samples, and how it is learned
    "halves": (range(0, 4), {}),
    "unequal shares, several epochs, KL": (range(0, 2), {"epochs": 2, "kl_coef": 0.1}),
    "mean over samples": (range(0, 5), {"aggregate": "sequence"}),
    "all in one process": (range(0, 7), {}),
    "nothing to learn in the first": (range(1, 3), {}),
}


def step(name: str, rank: int | None) -> dict:
    """The metrics and weights after an update of all samples, or of one process's."""
    mine, how = CASES[name]
    policy = randomise(make(lr=1e-3)["solver"])
    samples = [replace(s, advantage=0.0 if name.startswith("nothing") and i in mine else s.advantage) for i, s in enumerate(SAMPLES)]
    if rank is not None:
        samples = [s for i, s in enumerate(samples) if (i in mine) == (rank == 0)]
    metrics = policy.update(samples, **how)
    return {"metrics": metrics, "weights": torch.cat([w.flatten() for w in weights(policy)]).tolist()}


def play(rank: int | None) -> dict:
    """A step and an evaluation of four envs, or of a process's share, with answers that differ between the processes."""
    envs = fresh(4) if rank is None else fresh(2)
    def policies(*texts):
        return {"coarse": Scripted([text for text in texts]), "fine": Scripted(["2"])}
    first = policies("8", "7", "6", "8") if rank is None else policies("8", "7") if rank == 0 else policies("6", "8")
    metrics, samples = train_step(envs, first, "grpo", branches=2)
    later = policies("8", "1", "8", "8") if rank is None else policies("8") if rank == 0 else policies("1", "8")
    return {"metrics": {k: v for k, v in metrics.items() if "second" not in k}, "envs": [s.env for s in samples],
            "evaluation": evaluate(fresh(4), later), "world": world()}


def main() -> None:
    """What each of the two processes does."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    results = {name: step(name, rank) for name in CASES} | {"play": play(rank)}
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(results))
    train.leave_processes()


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The results of both processes."""
    folder = tmp_path_factory.mktemp("two")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    started = [subprocess.Popen([sys.executable, __file__, folder], env=os.environ | where | {"RANK": str(rank)}) for rank in range(2)]
    assert [process.wait(timeout=120) for process in started] == [0, 0]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_two_processes_make_the_update_of_one(two, name):
    alone = step(name, None)
    assert two[0][name]["weights"] == two[1][name]["weights"]           # exactly: they stay one policy
    assert two[0][name]["weights"] == pytest.approx(alone["weights"], abs=1e-5)
    for result in two:
        for key, value in alone["metrics"].items():
            assert result[name]["metrics"][key] == (value if value is None else pytest.approx(value, rel=1e-4)), key


def test_metrics_and_evaluation_are_those_of_all_envs(two):
    """Four envs, two plays each. In one process coarse says 8 7 6 8 8 7 6 8: three plays in the order of the envs reach 10."""
    assert [result["play"]["world"] for result in two] == [[0, 2], [1, 2]]
    assert two[0]["play"]["envs"] == two[1]["play"]["envs"] and sorted(set(two[0]["play"]["envs"])) == [0, 1, 2, 3]
    metrics = two[0]["play"]["metrics"]
    assert metrics == two[1]["play"]["metrics"] and set(metrics) == {k for k in blank_metrics("grpo", {"coarse": Scripted([]), "fine": Scripted([])}) if "second" not in k}
    # the first process plays 8 7 8 7, the second 6 8 6 8: four of eight end at 10
    assert metrics["success"] == 0.5 and metrics["calls"] == 16 and metrics["calls/fine"] == 1
    # of the envs 0 2 the first answers 8 8, of 1 3 the second 1 8
    assert two[0]["play"]["evaluation"] == two[1]["play"]["evaluation"] == {"eval/success": 0.75, "eval/turns": 1.0}
    assert play(None)["evaluation"]["eval/success"] == 0.75


if __name__ == "__main__":
    main()
