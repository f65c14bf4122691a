"""The training loop against the shortest loop one could write, and training from a feed against one batch.

    .venv/bin/python benchmarks/train_overhead.py                           2 cores, no GPU
    PYTHONPATH=src python3 benchmarks/train_overhead.py                     on the GPU

Overhead: one model, one optimiser, one batch on the device, steps of either loop in turns, in some processes.
Ours logs every 10 steps, counts, watches for numbers that are none and for memory; the other calls loss,
backward, step, zero_grad and nothing else. (Two models of the same make differ by more than that on a host
that launches kernels all the time.) There a step may take a fifth longer than the one before it, so every
turn also tells what it spent outside the four calls that both loops make: a loop's own time, which hardly
varies. (Not so on the CPU: looking whether gradients are numbers brings them into the cache for the update,
and who gives their memory back differs.) Both loops update with torch's fused kernel; on the CPU, where
torch itself chooses another one for a loop by hand, a third contestant does so, too.

Feed (GPU only): rows of 6 MB from a store in memory, through supply, feed and step, against the same step on
one batch that stays on the device, 4 steps of either in turns after 2 that use up what was prepared ahead.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from common import (
    device_name,
    fed_against_kept,
    goal,
    print_table,
    typical_difference,
    typical_ratio,
    write_results,
)
from torch import Tensor, nn

import frostline as fl
from frostline.batch import Batch
from frostline.step import Step
from frostline.supply import supply
from frostline.timing import interleave, spread
from frostline.trainer.checkpoint import Checkpoints
from frostline.trainer.distributed import Single
from frostline.trainer.limits import Limits
from frostline.trainer.loop import Loop, Parts
from frostline.trainer.progress import TrainProgress
from frostline.trainer.recorder import Recorder
from frostline.trainer.schedule import Schedule
from frostline.training import Training

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
FRAMES, TOKENS, WIDTH = 16, 325, 384
DEFAULT = "by hand, torch's default update"


class Perceptron(nn.Module):
    """About 20 ms a step of 64 rows on two cores."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(4)]
        self.layers = nn.Sequential(*layers, nn.Linear(1024, 10))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class Foveated(nn.Module):
    """The step of a foveated video model: queries look at stored features, a language model of SmolLM2-135M's
    size reads one token a frame and asks the next queries. A coarse pass, two fine ones."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaModel

        shape = {
            "hidden_size": 576,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
        }
        config = LlamaConfig(**shape, intermediate_size=1536, vocab_size=8, max_position_embeddings=64)
        self.llm = LlamaModel(config)
        self.static = nn.Parameter(torch.randn(WIDTH))
        self.query, self.token = nn.Linear(576, WIDTH, bias=False), nn.Linear(WIDTH, 576)
        self.head = nn.Linear(576, WIDTH)

    def forward(self, x_BTND: Tensor) -> Tensor:
        query = self.static.expand(*x_BTND.shape[:2], 1, WIDTH)
        total = x_BTND.new_zeros((), dtype=torch.float32)
        for _ in range(3):
            seen = nn.functional.scaled_dot_product_attention(query.to(x_BTND.dtype), x_BTND, x_BTND)
            hidden = self.llm(inputs_embeds=self.token(seen.squeeze(2))).last_hidden_state
            query = self.query(hidden).unsqueeze(2)
            total = total + (self.head(hidden).float() - x_BTND.mean(2).float()).square().mean()
        return total


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["x"]).square().mean() if not CUDA else model(batch["x"])


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-5, fused=True)


class OneBatch:
    """Stands for a supply: the same batch for ever."""

    epoch = 0

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def n_batches(self, epoch: int | None = None) -> int:
        return 1000

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": 0, "cursor": 0}

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield self._batch


class Within:
    """Seconds that were spent in the calls that any loop makes."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def one(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                self.seconds += time.perf_counter() - began

        return one


Turn = tuple[float, float]
"""Seconds a step, and those of them that are the loop's own."""


def make(batch: Batch, folder: Path, within: Within) -> dict[str, Callable[[int], Turn]]:
    """n steps of our loop, and of the loops by hand."""
    precision = "bf16" if CUDA else "fp32"
    model = new_model()
    data = fl.Pipeline(fl.Source.table([{"key": "a", "x": 0.0}]))
    size = batch.n_rows
    of = within.timed(loss)
    work = fl.Workload(data, model=model, loss=of, optimizer=adamw, batch_size=size, name="overhead")
    optimizer = adamw(model)
    step = Step(model, of, optimizer, training=Training(precision=precision), device=DEVICE)  # type: ignore[arg-type]
    limits = Limits(None, print)
    source: Any = OneBatch(batch)
    loop = Loop(
        Parts(work, step, source, None, Schedule("constant"), None, limits, Checkpoints(folder / "ck"),
              Recorder(folder), TrainProgress(quiet=True), Single())
    )  # fmt: skip
    batches = loop._batches()
    # as late as here: torch wraps an optimiser's step when it is made
    optimizer.step = within.timed(optimizer.step)  # type: ignore[method-assign]
    optimizer.zero_grad = within.timed(optimizer.zero_grad)  # type: ignore[method-assign]

    def ours() -> None:
        loop._one(next(batches))
        loop._between()

    def by_hand() -> None:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=CUDA):
            value = of(model, batch)
        value.backward()
        del value  # its graph goes within the step, as in any loop: thousands of nodes take milliseconds
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def by_default() -> None:
        for group in optimizer.param_groups:
            group["fused"] = None
        by_hand()
        for group in optimizer.param_groups:
            group["fused"] = True

    def turn(one: Callable[[], None], n: int) -> Turn:
        within.seconds, began = 0.0, time.perf_counter()
        for _ in range(n):
            one()
        if CUDA:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        return seconds / n, (seconds - within.seconds) / n

    loops = {"frostline": ours, "by hand": by_hand} | ({} if CUDA else {DEFAULT: by_default})
    return {name: partial(turn, one) for name, one in loops.items()}


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return (Foveated() if CUDA else Perceptron()).to(DEVICE)


def new_batch(rows: int) -> Batch:
    torch.manual_seed(1)
    if CUDA:
        x = torch.randn(rows, FRAMES, TOKENS, WIDTH, device=DEVICE, dtype=torch.float16).bfloat16()
    else:
        x = torch.randn(rows, 1024)
    return Batch({"x": x}, [str(i) for i in range(rows)])


Turns = dict[str, dict[str, list[float]]]
"""Of `step` and `own`, by loop: seconds, turn by turn."""


def take_turns(rounds: int, folder: Path) -> Turns:
    within = Within()
    loops = make(new_batch(64), folder, within)
    n = 1 if CUDA else 20  # what launching a GPU step takes follows what else the host does
    for loop in loops.values():
        loop(10)
    gc.collect()
    gc.freeze()  # what imports left is not looked through again in the middle of somebody's turn
    own: dict[str, list[float]] = {name: [] for name in loops}

    def timed(name: str) -> float:
        seconds, rest = loops[name](n)
        own[name].append(rest)
        return seconds

    turns = {name: partial(timed, name) for name in loops}
    with patch.object(Tensor, "backward", within.timed(Tensor.backward)):
        return {"step": interleave(turns, rounds=rounds), "own": own}


def in_processes(processes: int, rounds: int) -> Turns:
    """The turns of several processes. None gives memory back before its end: whether large blocks go back to
    the system and are asked for again in each step is chance, and takes 10 of 35 ms on two cores."""
    found: Turns = {what: defaultdict(list) for what in ("step", "own")}
    keeping = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
    for _ in range(processes):
        command = [sys.executable, __file__, "--turns", "--rounds", str(rounds)]
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | keeping
        )
        for what, loops in json.loads(done.stdout.splitlines()[-1]).items():
            for name, values in loops.items():
                found[what][name] += values
    return found


def overhead(found: Turns) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    step, own = found["step"], found["own"]
    rows = []
    for what, values in (("step", step), *([("outside the four calls", own)] if CUDA else [])):
        for name, one_by_one in values.items():
            s = spread([1000 * v for v in one_by_one])
            rows.append({"what": f"{what}, {name}", "ms": s.median, "low": s.low, "high": s.high})
    shares = {
        f"overhead over a loop {name}": [value - 1 for value in typical_ratio(step["frostline"], values)]
        for name, values in step.items()
        if name != "frostline"
    }
    if CUDA:
        usual = spread(step["by hand"]).median
        apart = typical_difference(own["frostline"], own["by hand"])
        shares["of it outside the calls that both make"] = [value / usual for value in apart]
    for what, (value, low, high) in shares.items():
        rows.append({"what": f"{what}, % of a step (95 % interval)", "ms": 100 * value, "low": 100 * low,
                     "high": 100 * high})  # fmt: skip
    aim = 0.01 if CUDA else 0.02
    goals = [
        goal(f"{what}, share of the step", aim, value, at_most=True, within=(low, high))
        for what, (value, low, high) in shares.items()
    ]
    return rows, goals


def from_feed(rounds: int, folder: Path, n_rows: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    root = folder / "store"
    with fl.Store.create(root, {"x": fl.Field((24, TOKENS, WIDTH), "float16")}) as writer:
        for start in range(0, n_rows, 16):
            values = torch.randn(16, 24, TOKENS, WIDTH, device=DEVICE).half().cpu()
            writer.append_batch([f"k{start + i:05d}" for i in range(16)], {"x": values}, take=True)
    table = [{"key": f"k{i:05d}", "x": 0.0} for i in range(n_rows)]
    data = fl.Pipeline(fl.Source.table(table), outputs=("x",))
    work = fl.Workload(data, run=print, name="feed")
    batches = supply(
        work, {"data": fl.Store.open(root)}, split=None, batch_size=64, device=DEVICE, tier="pinned"
    )
    model = new_model()
    step = Step(model, sixteen, adamw(model), training=Training(precision="bf16"), device=DEVICE)
    coming = (batch for _ in repeat(None) for batch in batches)
    found, (share, low, high) = fed_against_kept(step, coming, next(iter(batches)), rounds=rounds)
    rows: list[dict[str, Any]] = []
    for name, values in (("from a feed", found["fed"]), ("one batch kept", found["kept"])):
        s = spread(values)
        rows.append({"what": f"samples/s, {name}", "samples_per_s": s.median, "low": s.low, "high": s.high})
    rows.append({"what": "from a feed over one batch kept (95 % interval)", "share": share, "low": low,
                 "high": high})  # fmt: skip
    batches.close()
    text = "training from a feed of 6 MB rows, share of one batch that stays"
    return rows, [goal(text, 0.97, share, within=(low, high))]


def sixteen(model: nn.Module, batch: Batch) -> Tensor:
    out: Tensor = model(batch["x"][:, :FRAMES].bfloat16())
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=120 if CUDA else 12, help="of the overhead, a process")
    parser.add_argument("--processes", type=int, default=2 if CUDA else 8, help="of the overhead")
    parser.add_argument("--turns", action="store_true", help="take turns in this process, print their times")
    parser.add_argument("--feed-rounds", type=int, default=40)
    parser.add_argument("--rows", type=int, default=1024, help="rows of 6 MB in the store of the feed")
    parser.add_argument("--also", type=Path, help="another folder for the result")
    given = parser.parse_args()
    if given.turns:
        with tempfile.TemporaryDirectory() as place:
            print(json.dumps(take_turns(given.rounds, Path(place))))
        return
    command = " ".join(["benchmarks/train_overhead.py", *sys.argv[1:]])
    rows, goals = overhead(in_processes(given.processes, given.rounds))
    print_table("overhead", rows)
    if CUDA:
        with tempfile.TemporaryDirectory() as place:
            more, reached = from_feed(given.feed_rounds, Path(place), given.rows)
        print_table("from a feed", more)
        rows, goals = rows + more, goals + reached
    kept = write_results("train_overhead", device_name(), rows, goals, command, also=given.also)
    print(f"kept in benchmarks/results/{kept.name}")


if __name__ == "__main__":
    main()
