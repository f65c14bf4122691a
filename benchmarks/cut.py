"""What the cut planner says before a run, against what then happens.

    .venv/bin/python benchmarks/cut.py

Three workloads made on the spot, whose best cuts differ: decoding large pictures (store the frames, since a
random crop comes after them), a frozen encoder (store its features), and numbers that cost next to nothing
(store nothing). A fourth has rows so small that both ways take about as long: what counts there is that
neither is forecast wrongly. The best cut and its rival are really frozen. Then, in each round, the plan is
made anew from 5 % of the samples, and both cuts are run for an epoch or two: batches as a training gets
them, and its step. A cut's first epoch warms up, and is not counted. What is kept is the middle ratio of
forecast and epoch over the rounds: on shared cores, whose speed drifts within seconds, one tells little.
"""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import ROOT, device_name, goal, print_table, write_results
from torch import nn

import frostline as fl
from frostline.cut import CutPlan, Option, plan, step_cost
from frostline.freezer.options import Options
from frostline.freezer.progress import Reporter
from frostline.freezer.run import run
from frostline.step import Step
from frostline.supply import supply
from frostline.timing import ratio
from frostline.training import Training

WITHIN = 0.15
_RATE = 1e-7
"""So small that nothing is learned: a loss that reaches zero leaves numbers in the optimizer that are too
small for a CPU's quick way, and a step takes a third longer than the same step before it."""
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


@dataclass(frozen=True)
class Case:
    """A workload, for how long it is to run, and where the line should be."""

    name: str
    make: Callable[[Path], fl.Workload]
    epochs: int
    best: tuple[str, ...]
    rival: tuple[str, ...]
    """Another cut that is run too: a choice between two is only as good as both figures."""
    clear: bool = True
    """Whether the first is much better: then it must be chosen. Of two that are close, either may be."""


# --- the workloads ------------------------------------------------------------------------------------


def make_pictures(folder: Path, n: int) -> None:
    from PIL import Image

    folder.mkdir()
    for i in range(n):
        place = folder / f"{i:05d}.jpg"
        if i >= 16:  # 16 different ones, copied: every file is opened, read and decoded all the same
            shutil.copyfile(folder / f"{i % 16:05d}.jpg", place)
            continue
        noise = np.random.default_rng(i).integers(0, 256, (48, 64, 3), np.uint8)
        Image.fromarray(noise).resize((1280, 960)).save(place, quality=90)


def decode(path: str) -> np.ndarray[Any, Any]:
    from PIL import Image

    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB").resize((128, 96))).transpose(2, 0, 1).copy()


def crop(frame: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    y, x = int(rng.integers(0, 17)), int(rng.integers(0, 49))
    return frame[:, y : y + 80, x : x + 80].float() / 255


def trained(model: Callable[[], nn.Module], data: fl.Pipeline, reads: str, batch_size: int) -> fl.Workload:
    return fl.Workload(
        data, model=fl.lazy(model), loss=lambda net, batch: net(batch[reads].float()).square().mean(),
        optimizer=lambda net: torch.optim.AdamW(net.parameters(), _RATE), batch_size=batch_size,
    )  # fmt: skip


def small_conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 8, stride=4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4))


def decoding(scratch: Path) -> fl.Workload:
    make_pictures(scratch / "pictures", 1440)
    data = fl.Pipeline(
        fl.Source.files(str(scratch / "pictures" / "*.jpg")),
        fl.Stage("frames", decode, reads="path"),
        fl.Stage("crop", crop, reads="frames", random=True),
    )
    model = small_conv()
    model(torch.zeros(1, 3, 80, 80))
    return trained(lambda: model, data, "crop", 32)


def drawn(number: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(number).random((64, 192), np.float32))


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(192, 3, 768, batch_first=True, dropout=0.0)
    net = nn.Sequential(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False))
    return net.eval().requires_grad_(False)


def encoding(scratch: Path) -> fl.Workload:
    data = fl.Pipeline(
        fl.Source.table([{"key": f"{i:05d}", "number": i} for i in range(3200)]),
        fl.Stage("patches", drawn, reads="number"),
        fl.Stage("features", fl.lazy(encoder), reads="patches", on="device", batch_size=16),
    )
    return trained(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64 * 192, 64)), data, "features", 32)


def scaled(number: float) -> torch.Tensor:
    """64 KB that take some microseconds to make: less than to write them once, about as much as to read."""
    return torch.full((64, 256), number)


def numbers(scratch: Path) -> fl.Workload:
    data = fl.Pipeline(
        fl.Source.table([{"key": f"{i:05d}", "number": float(i)} for i in range(6000)]),
        fl.Stage("scaled", scaled, reads="number"),
    )
    model = nn.Sequential(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 1))
    return trained(lambda: model, data, "scaled", 32)


def waved(number: float) -> torch.Tensor:
    return torch.full((64,), number).cos()


def tiny(scratch: Path) -> fl.Workload:
    data = fl.Pipeline(
        fl.Source.table([{"key": f"{i:05d}", "number": float(i)} for i in range(24000)]),
        fl.Stage("waved", waved, reads="number"),
    )
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))
    return trained(lambda: model, data, "waved", 64)


CASES = [
    Case("decoding", decoding, 10, ("frames",), ()),
    Case("encoder", encoding, 10, ("features",), ()),
    Case("cheap numbers", numbers, 2, (), ("scaled",)),
    Case("tiny rows", tiny, 2, (), ("waved",), clear=False),
]


# --- what happens -------------------------------------------------------------------------------------


class Cut:
    """A cut of a case: forecast and run in turns."""

    def __init__(self, case: Case, work: fl.Workload, fields: tuple[str, ...], scratch: Path) -> None:
        self.case, self.work, self.fields = case, work, fields
        self.name = " and ".join(fields) or "nothing"
        self.forecasts: list[Option] = []
        self.took: list[float] = []
        self.store, self.bytes, self.freeze_s = None, 0, 0.0
        if fields:
            root = scratch / "-".join(fields)
            outcome = run(
                next(iter(work.pipelines.values())), root, Options(cut=fields), Reporter(quiet=True)
            )
            self.store, self.freeze_s = outcome.store, outcome.seconds
            self.bytes = sum(p.stat().st_size for p in root.rglob("*") if p.is_file())

    def epochs(self, n: int) -> None:
        """Time an epoch: the middle one of n."""
        work, stores = self.work, None if self.store is None else {"data": self.store}
        model = work.model.get().to(DEVICE).train()
        step = Step(model, work.loss, work.optimizer(model), training=Training(), device=DEVICE)  # type: ignore
        batches = supply(work, stores, split=None, batch_size=work.batch_size or 1, device=DEVICE)
        took, warm_up = list[float](), not self.took
        for _ in range(n + warm_up):
            began = time.perf_counter()
            for batch in batches:
                step(batch)
            if CUDA:
                torch.cuda.synchronize()
            took.append(time.perf_counter() - began)
        batches.close()
        self.took.append(statistics.median(took[-n:]))

    def row(self) -> dict[str, Any]:
        forecasts = [option.epoch_s for option in self.forecasts]
        off = ratio(forecasts, self.took)
        size = statistics.median(option.bytes for option in self.forecasts)
        return {
            "case": self.case.name, "stored": self.name,
            "epoch_forecast_s": statistics.median(forecasts), "epoch_s": statistics.median(self.took),
            "epoch_off": off.median - 1, "low": off.low - 1, "high": off.high - 1,
            "bytes_forecast": size, "bytes": self.bytes,
            "bytes_off": size / self.bytes - 1 if self.bytes else 0.0,
            "freeze_forecast_s": statistics.median(option.freeze_s for option in self.forecasts),
            "freeze_s": self.freeze_s,
        }  # fmt: skip


def measure(case: Case, scratch: Path, rounds: int) -> tuple[list[Any], list[Any]]:
    work = case.make(scratch)
    cuts = [Cut(case, work, fields, scratch) for fields in (case.best, case.rival)]
    chosen: list[CutPlan] = []
    for k in range(rounds):
        step = step_cost(work, device=DEVICE)
        began = time.perf_counter()
        chosen.append(plan(work, epochs=case.epochs, device=DEVICE, step=step, out=scratch / "store"))
        print(f"{case.name}, {k + 1} of {rounds}: planned in {time.perf_counter() - began:.1f} s", flush=True)
        for one in cuts:
            option = chosen[-1].option(one.fields)
            if option is None:
                raise RuntimeError(f"{case.name}: {one.name} is not among the cuts that were compared")
            one.forecasts.append(option)
            one.epochs(2 if one.fields == case.best else 1)
    print(chosen[-1].table(), flush=True)
    rows = [one.row() for one in cuts]
    goals = []
    if case.clear:
        named = " and ".join(case.best) or "nothing"
        right = min(int(found.cut == case.best) for found in chosen)
        goals.append(goal(f"{case.name}: {named} chosen, in every round", 1, right))
    runs = {one.fields: one.freeze_s + case.epochs * statistics.median(one.took) for one in cuts}
    longer = max(runs.get(found.cut, math.inf) for found in chosen) / min(runs.values()) - 1
    goals.append(goal(f"{case.name}: the run, longer than the best by", WITHIN, longer, at_most=True))
    for row in rows:
        what = f"{case.name}, {row['stored']} stored"
        goals.append(goal(f"{what}: epoch forecast off by", WITHIN, abs(row["epoch_off"]), at_most=True))
        if row["bytes"]:
            goals.append(goal(f"{what}: bytes forecast off by", WITHIN, abs(row["bytes_off"]), at_most=True))
    return rows, goals


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="of a forecast and epochs after it")
    parser.add_argument("--threads", type=int, help="torch's; 1 where others use the same cores")
    parser.add_argument("--only", help="only cases whose name contains this")
    parser.add_argument("--also", type=Path, help="another folder for the result")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    command = " ".join(["benchmarks/cut.py", *sys.argv[1:]])
    rows, goals = [], []
    for case in CASES:
        if not given.only or given.only in case.name:
            with tempfile.TemporaryDirectory() as folder:
                some, reached = measure(case, Path(folder), given.rounds)
            print_table(case.name, some)
            rows += some
            goals += reached
    kept = write_results("cut", device_name(), rows, goals, command, also=given.also)
    print(f"kept in {kept.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
