"""Saving and loading a checkpoint of 1 GB, against plain torch.save and torch.load.

`.venv/bin/python benchmarks/checkpoint.py`. The tensors are those of a transformer of 85 million parameters
in float32 with AdamW's two moments. All sides in turn, on the same disk; ratios are theirs over ours, round
by round: 1 and more is no slower.

save, all of them with what was written synced to the disk:
- ours: `Checkpoints.save`. A folder of safetensors files, a checksum of every byte, every file and the folder
  synced, renamed, pointed at, the one before deleted.
- torch: `torch.save` into a new file, fsync, then the file before is deleted: like ours, the old one is there
  until the new one is whole.
- torch, over: `torch.save` over the file before, fsync: what many do; killed in between, both are lost. The
  goal is held against the faster of the two.

load: `checkpoint.load`, every byte held against its checksum, against `torch.load(weights_only=True)`. The
files are in the page cache, as after a run that wrote them.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "src"), str(Path(__file__).resolve().parents[1])]

from benchmarks import common  # noqa: E402
from frostline.timing import Spread, interleave, ratio, spread  # noqa: E402
from frostline.trainer.checkpoint import Checkpoints, load  # noqa: E402

_WIDTH = 768
_LAYER = {
    "qkv": (3 * _WIDTH, _WIDTH), "out": (_WIDTH, _WIDTH), "up": (4 * _WIDTH, _WIDTH),
    "down": (_WIDTH, 4 * _WIDTH), "norm": (_WIDTH,), "bias": (_WIDTH,),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", help="where to write; a temporary folder otherwise")
    args = parser.parse_args()
    groups = tensors(args.layers, args.device)
    total = sum(t.nbytes for group in groups.values() for t in group.values())
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        saves, loads = rounds(Path(folder), groups, args.rounds)
    contests = {"save": saves, "load": loads}
    table = [row for what, found in contests.items() for row in measured(what, found, total)]
    common.print_table(f"a checkpoint of {total / 1e9:.2f} GB, tensors on {args.device}", table)
    goals = [
        common.goal_over(f"{what}: time of the fastest torch over ours", 1.0, against(found))
        for what, found in contests.items()
    ]
    options = "" if len(sys.argv) == 1 else " " + " ".join(sys.argv[1:])
    device = "cpu" if args.device == "cpu" else common.device_name()
    also = Path(os.environ["OUT"]) if os.environ.get("OUT") else None
    common.write_results("checkpoint", device, table, goals, f"benchmarks/checkpoint.py{options}", also=also)


def tensors(layers: int, device: str) -> dict[str, dict[str, Tensor]]:
    torch.manual_seed(0)
    shapes = {f"layers.{i}.{name}": shape for i in range(layers) for name, shape in _LAYER.items()}
    model = {name: torch.randn(shape, device=device) for name, shape in shapes.items()}
    moments = {
        f"{name}/{kind}": torch.randn(shape, device=device)
        for name, shape in shapes.items()
        for kind in ("exp_avg", "exp_avg_sq")
    }
    return {"model": model, "optimizer": moments | {f"{name}/step": torch.tensor(100.0) for name in shapes}}


Times = dict[str, list[float]]


def rounds(folder: Path, groups: dict[str, dict[str, Tensor]], n: int) -> tuple[Times, Times]:
    checkpoints, plain = Checkpoints(folder / "checkpoints", keep=1), folder / "plain.pt"
    numbers = iter(range(1, 3 * n + 9))
    saves = {
        "ours": timed(lambda: checkpoints.save(next(numbers), groups, {"epoch": 1})),
        "torch": timed(lambda: torch_save_anew(groups, folder, next(numbers))),
        "torch, over": timed(lambda: torch_save(groups, plain)),
    }
    loads = {
        "ours": timed(lambda: load(folder / "checkpoints")),
        "torch": timed(lambda: torch.load(plain, weights_only=True, map_location="cpu")),
    }
    for contest in (saves, loads):
        interleave(contest, rounds=1)  # the first of each pays for what is made once
    compare(load(folder / "checkpoints").groups, groups)
    return interleave(saves, rounds=n), interleave(loads, rounds=3 * n)  # a load is short, its spread is not


def timed(run: Callable[[], object]) -> Callable[[], float]:
    def once() -> float:
        os.sync()  # what the one before left to write is not ours to wait for
        began = time.perf_counter()
        kept = run()
        took = time.perf_counter() - began
        del kept
        return took

    return once


def torch_save(groups: dict[str, dict[str, Tensor]], path: Path) -> None:
    torch.save(groups, path)
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def torch_save_anew(groups: dict[str, dict[str, Tensor]], folder: Path, number: int) -> None:
    before = list(folder.glob("new-*.pt"))
    torch_save(groups, folder / f"new-{number}.pt")
    for path in before:
        path.unlink()


def compare(found: dict[str, dict[str, Tensor]], given: dict[str, dict[str, Tensor]]) -> None:
    for group, some in given.items():
        for name, tensor in some.items():
            assert torch.equal(found[group][name], tensor.cpu()), f"{group}/{name} is not what was saved"


def against(found: Times) -> Spread:
    every = [ratio(seconds, found["ours"]) for who, seconds in found.items() if who != "ours"]
    return min(every, key=lambda over: over.median)


def measured(what: str, found: Times, total: int) -> list[dict[str, Any]]:
    rows = []
    for who, seconds in found.items():
        s, times = spread(seconds), ratio(seconds, found["ours"])
        rows.append({
            "what": what, "who": who, "s": s.median, "s_low": s.low, "s_high": s.high,
            "gb_per_s": total / 1e9 / s.median, "over_ours": times.median, "low": times.low,
            "high": times.high, "rounds": len(seconds),
        })  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
