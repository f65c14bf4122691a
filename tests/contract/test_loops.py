"""The examples in docs/loops: killed in the middle of an epoch and run again, they end as if left alone.

Each runs in children of one process that has imported the library before (which takes most of the time). The
children end themselves by a true SIGKILL: in mid-epoch, just after an epoch's end, and more than once.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import frostline as fl

LOOPS = Path(__file__).resolve().parents[2] / "docs" / "loops"
KEYS = [f"clip-{i:02}" for i in range(94)]
SERVE = """
import importlib, json, os, runpy, signal, sys
sys.path.insert(0, sys.argv[1])                 # as for a script that lies there
for module in sys.argv[2:]:
    importlib.import_module(module)
for line in sys.stdin:
    children = []
    for job in json.loads(line):
        child = os.fork()
        if not child:
            code = 1
            try:
                signal.alarm(500)               # one that hangs fails
                os.dup2(2, 1)                   # what an example prints is not an answer
                os.environ.update(job["env"])
                sys.argv = job["argv"]
                runpy.run_path(sys.argv[0], run_name="__main__")
                code = 0
            except BaseException:
                import traceback
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print(json.dumps(codes), flush=True)
os._exit(0)                                     # tearing the libraries down takes seconds
"""


class Example:
    """One of the scripts, in a process that forks a child (or one per rank) for each run."""

    def __init__(self, script: str, modules: tuple[str, ...]) -> None:
        self.script = str(LOOPS / script)
        quiet = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}
        source = str(Path(fl.__file__).parents[1])
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SERVE, str(LOOPS), "frostline.feed", *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **quiet, "PYTHONPATH": source},
        )

    def run(self, out: Path, *options: Any, ranks: int = 1) -> list[dict[int, list[Any]]]:
        """Exit codes are as the options ask; what each rank's steps saw: {step: [(epoch, keys), …]}."""
        argv = [self.script, str(out), *map(str, options)]
        jobs = [{"argv": argv, "env": env} for env in environments(ranks)]
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(jobs) + "\n")
        self._process.stdin.flush()
        expected = -signal.SIGKILL if "--kill-at" in options else 0
        assert json.loads(self._process.stdout.readline()) == [expected] * ranks
        return [taken(file) for file in sorted(out.glob("seen*.jsonl"))]

    def close(self) -> None:
        self._process.communicate(timeout=200)


def environments(ranks: int) -> list[dict[str, str]]:
    """What torchrun sets; nothing for one process."""
    if ranks == 1:
        return [{}]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    same = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [{**same, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(ranks)]


def taken(file: Path) -> dict[int, list[Any]]:
    """What a run noted, and the file is gone: the next run's notes are its own."""
    steps: dict[int, list[Any]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        steps.setdefault(row["step"], []).append((row["epoch"], row["keys"]))
    file.unlink()
    return steps


def merged(runs: list[dict[int, list[Any]]]) -> dict[int, list[Any]]:
    """Steps after the last checkpoint are made again: what counts is what the last to make one saw."""
    out: dict[int, list[Any]] = {}
    for run in runs:
        assert run, "a run that trained nothing"
        assert min(run) <= len(out), "steps were left out"
        out |= run
    return out


def orders(steps: dict[int, list[Any]]) -> list[list[str]]:
    """The keys of each epoch as they came."""
    out: dict[int, list[str]] = {}
    for batches in steps.values():
        for epoch, keys in batches:
            out.setdefault(epoch, []).extend(keys)
    return [out[epoch] for epoch in sorted(out)]


def epochs(steps: dict[int, list[Any]]) -> list[list[str]]:
    return [sorted(keys) for keys in orders(steps)]


def same_weights(a: Path, b: Path) -> bool:
    one, two = (load_file(out / "final.safetensors") for out in (a, b))
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def interrupted(example: Example, out: Path, kills: list[int], *options: Any) -> dict[int, list[Any]]:
    runs = [example.run(out, "--kill-at", step, *options)[0] for step in kills]
    return merged([*runs, example.run(out, *options)[0]])


def started(script: str, *modules: str) -> Iterator[Example]:
    """`modules`: those that the script imports, also in passing."""
    missing = [name for name in modules if find_spec(name.partition(".")[0]) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    example = Example(script, modules)
    yield example
    example.close()


@pytest.fixture(scope="module")
def lightning() -> Iterator[Example]:
    yield from started("lightning_fit.py", "lightning.pytorch")


@pytest.fixture(scope="module")
def accelerate() -> Iterator[Example]:
    yield from started("accelerate_loop.py", "accelerate", "torch._dynamo")


@pytest.fixture(scope="module")
def trainer() -> Iterator[Example]:
    yield from started("hf_trainer.py", "accelerate", "transformers.trainer")


def check(example: Example, tmp_path: Path, kills: list[int], *options: Any) -> None:
    alone, broken = tmp_path / "alone", tmp_path / "broken"
    whole = merged(example.run(alone, *options))
    assert epochs(whole) == [KEYS] * 3
    assert len(set(map(tuple, orders(whole)))) == 3, "an epoch has the order of another"
    assert interrupted(example, broken, kills, *options) == whole
    assert same_weights(alone, broken)


def test_lightning_goes_on_in_mid_epoch_and_between_epochs(lightning: Example, tmp_path: Path) -> None:
    check(lightning, tmp_path, [6, 12, 17, 26])  # checkpoints are at 4, 8, 12 (an epoch's end), 16 …


def test_accelerate_goes_on_in_mid_epoch_and_between_epochs(accelerate: Example, tmp_path: Path) -> None:
    check(accelerate, tmp_path, [6, 12, 17, 26])


@pytest.mark.parametrize("data", ["feed", "dataset"])
def test_the_hf_trainer_goes_on_in_mid_epoch_and_between_epochs(
    trainer: Example, tmp_path: Path, data: str
) -> None:
    check(trainer, tmp_path, [3, 10, 13], "--data", data)  # an epoch has 5 steps, of 3, 3, 3, 3, 2 batches


def test_two_processes_of_accelerate_go_on_as_two(accelerate: Example, tmp_path: Path) -> None:
    alone, broken = tmp_path / "alone", tmp_path / "broken"
    whole = accelerate.run(alone, ranks=2)
    first = accelerate.run(broken, "--kill-at", 17, ranks=2)
    second = accelerate.run(broken, ranks=2)
    assert [merged([a, b]) for a, b in zip(first, second, strict=True)] == whole
    assert same_weights(alone, broken)
    assert [sorted(a + b) for a, b in zip(*map(epochs, whole), strict=True)] == [KEYS] * 3


def test_what_two_processes_began_one_finishes(accelerate: Example, tmp_path: Path) -> None:
    first = accelerate.run(tmp_path, "--kill-at", 17, ranks=2)
    second = accelerate.run(tmp_path)[0]  # from the checkpoint at 16
    begun = [{step: seen for step, seen in rank.items() if step < 16} for rank in first]
    by_both = [a + b for a, b in zip(*map(epochs, begun), strict=True)]
    rest = epochs(second)
    assert sorted(second) == list(range(16, 36))
    assert [sorted(by_both[0]), sorted(by_both[1] + rest[0]), rest[1]] == [KEYS] * 3
