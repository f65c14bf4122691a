"""Two processes train one model: gradients of the same global batch, going on with another number of them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from frostline.trainer.checkpoint import load
from frostline.trainer.distributed import _buckets
from frostline.trainer.recorder import read_metrics

WORK = """
import torch
from torch import nn
import frostline as fl

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 1)
    def forward(self, x):
        return self.head(self.body(x).tanh())

def noisy(x, rng):
    return torch.tensor(x) + 0.1 * float(rng.standard_normal())

def loss(model, batch):
    with open("seen.txt", "a") as f:
        f.write("".join(f"{key} {float(x[0]):.6f}\\n" for key, x in zip(batch.keys_of_rows, batch["seen"])))
    if FULL and batch.n_rows > 3:
        raise torch.OutOfMemoryError("planted")
    return (model(batch["seen"]) - 1).square().mean()

FULL = False

def workload(*, full: bool = False) -> fl.Workload:
    global FULL
    FULL = full
    rows = [{"key": f"k{i:02d}", "x": [float(i) / 27, 1.0, -1.0, 0.5]} for i in range(27)]
    data = fl.Pipeline(
        fl.Source.table(rows),
        fl.Stage("seen", noisy, reads="x", random=True, eval=lambda x: torch.tensor(x)), outputs=("seen",),
    )
    return fl.Workload(data, model=fl.lazy(Net), loss=loss, batch_size=8,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
        training={"log_every": 2})
"""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def run(folder: Path, world: int, *arguments: str, work: str = WORK) -> str:
    """`frostline train` in so many processes, as torchrun would start them."""
    folder.mkdir(exist_ok=True)
    (folder / "my_work.py").write_text(work)
    command = [sys.executable, "-m", "frostline", "train", "my_work.py", *arguments, "--out", "run", "--live"]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
    processes = [
        subprocess.Popen(
            [*command, "--device", "cpu"], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1",
                 "PYTHONFAULTHANDLER": "1"},
        )
        for rank in range(world)
    ]  # fmt: skip
    told = [process.communicate(timeout=300)[0] for process in processes]
    if any(process.returncode for process in processes):
        pytest.fail("\n".join([f"{[process.returncode for process in processes]}", *told]))
    return "".join(told)


def model_of(folder: Path) -> dict[str, Any]:
    return load(folder / "run").groups["model"]


def seen(folder: Path) -> list[str]:
    return sorted({*(folder / "seen.txt").read_text().splitlines()})


def test_two_processes_train_as_one_and_go_on_as_one(tmp_path: Path) -> None:
    """Sums in another order: 1e-5 of a weight after 12 steps, where rounding (6e-8) grows with each."""
    run(tmp_path / "one", 1, "--steps", "12")
    run(tmp_path / "two", 2, "--steps", "12")
    one, two = model_of(tmp_path / "one"), model_of(tmp_path / "two")
    for name, value in one.items():
        assert torch.allclose(value, two[name], rtol=1e-5, atol=1e-6), name
    losses = [[line["loss"] for line in read_metrics(tmp_path / n / "run")] for n in ("one", "two")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    # data and augmentation are the same bits in any layout: every (key, value) that a model saw
    assert seen(tmp_path / "one") == seen(tmp_path / "two")
    # begun by two, gone on with by one, in the middle of an epoch
    run(tmp_path / "mixed", 2, "--steps", "6")
    told = run(tmp_path / "mixed", 1, "--steps", "12")
    assert "written by 2 processes, this is one of 1" in told
    for name, value in one.items():
        assert torch.allclose(value, model_of(tmp_path / "mixed")[name], rtol=1e-5, atol=1e-6), name
    assert seen(tmp_path / "mixed") == seen(tmp_path / "one")


def test_ranks_evaluate_and_a_short_batch_leaves_one_without_rows(tmp_path: Path) -> None:
    """About 17 samples in batches of 8: the last has a row or two. Stopped before it, and gone on."""
    settings = 'training={"log_every": 2, "eval_every": 2}, splits={"train": 0.8, "val": 0.2}'
    work = WORK.replace("range(27)", "range(22)").replace('training={"log_every": 2}', settings)
    run(tmp_path / "two", 2, "--steps", "2", work=work)
    told = run(tmp_path / "two", 2, "--steps", "6", work=work)
    assert "held out: loss" in told
    lines = read_metrics(tmp_path / "two" / "run")
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [2, 4, 6]


def test_no_thread_of_the_group_is_left_when_the_training_has_ended(tmp_path: Path) -> None:
    """They crashed one process in fifty on its way out, after all its work was done."""
    if not Path("/proc/self/task").is_dir():
        pytest.skip("threads are not listed here")
    look = """
import atexit, os
def threads():
    names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
    open("threads.txt", "a").write("".join(names))
atexit.register(threads)
"""
    run(tmp_path / "two", 2, "--steps", "2", work=WORK + look)
    left = (tmp_path / "two" / "threads.txt").read_text().split("\n")
    assert len(left) >= 2
    assert not [name for name in left if "gloo" in name or "tcpstore" in name]


def test_out_of_memory_on_one_rank_is_agreed_on(tmp_path: Path) -> None:
    told = run(tmp_path / "full", 2, "full=true", "--steps", "4")
    run(tmp_path / "two", 2, "--steps", "4")
    assert "2 from now on" in told
    for name, value in model_of(tmp_path / "two").items():
        assert torch.allclose(value, model_of(tmp_path / "full")[name], rtol=1e-5, atol=1e-6), name


def test_figures_that_some_ranks_lack_and_buffers_that_move_later_are_those_of_all(tmp_path: Path) -> None:
    some = """
    found = {"loss": (model(batch["seen"]) - 1).square().mean()}
    rank = int(os.environ["RANK"])
    if rank:
        found = {"second": torch.tensor(2.0), "third": torch.tensor(3.0), **found}
    if model.passes == 5:
        open(f"mean-{rank}.txt", "w").write(str(model.mean.tolist()))
    model.passes += 1
    if model.passes > 2:
        model.mean.lerp_(batch["seen"].mean(0), 0.5)
    return found
"""
    own = """
        self.register_buffer("passes", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))
"""
    work = WORK.replace("import torch\n", "import os, torch\n", 1)
    work = work.replace('    return (model(batch["seen"]) - 1).square().mean()\n', some.lstrip("\n"))
    work = work.replace("nn.Linear(6, 1)\n", "nn.Linear(6, 1)\n" + own.lstrip("\n"))
    run(tmp_path / "two", 2, "--steps", "6", work=work)
    last = read_metrics(tmp_path / "two" / "run")[-1]
    assert (last["second"], last["third"]) == (2.0, 3.0)
    means = [(tmp_path / "two" / f"mean-{rank}.txt").read_text() for rank in range(2)]
    assert means[0] == means[1] != str([0.0] * 4)


def test_buckets_keep_order_and_dtype() -> None:
    tensors = [
        torch.zeros(5 << 20),
        torch.zeros(3, dtype=torch.float64),
        torch.zeros(5 << 20),
        torch.zeros(2),
    ]
    assert [[len(t) for t in bucket] for bucket in _buckets(tensors)] == [[5 << 20, 5 << 20], [3], [2]]
