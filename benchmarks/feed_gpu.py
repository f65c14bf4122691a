"""The feed on a GPU: rows from RAM and from device memory, against the copies themselves.

`PYTHONPATH=src python3 benchmarks/feed_gpu.py` writes benchmarks/results/feed-<card>.json. Rows of
[24, 325, 384] bf16 (6 MB) and of [768] f16 (1.5 KB), random order, files in the page cache.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "src"), str(Path(__file__).resolve().parents[1])]

import frostline as fl  # noqa: E402
from benchmarks import common  # noqa: E402
from frostline.timing import interleave, ratio, spread  # noqa: E402

CLIP, VECTOR = (24, 325, 384), (768,)
BATCH = {"clip": 64, "vector": 4096}
ROWS = {"clip": 1500, "vector": 400_000}
BLOCK_S = 0.8
Run = Callable[[], float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "frostline-bench")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=None, help="also write the results into this folder")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    goals: list[dict[str, Any]] = []
    with_clips(args, rows, goals)
    with_vectors(args, rows)
    common.write_results(
        "feed", common.device_name(), rows, goals, command="benchmarks/feed_gpu.py", also=args.out
    )


def store(folder: Path, kind: str, codec: str) -> fl.Store:
    """Seeded rows, written once."""
    shape, dtype = (CLIP, "bfloat16") if kind == "clip" else (VECTOR, "float16")
    n, step = ROWS[kind], 50 if kind == "clip" else 20_000
    with fl.Store.create(
        folder / f"{kind}-{codec.replace('/', '-')}", {"x": fl.Field(shape, dtype, codec=codec)}, resume=True
    ) as writer:
        noise = torch.randn((step, *shape), generator=torch.Generator().manual_seed(0)).to(
            getattr(torch, dtype)
        )
        for start in range(len(writer), n, step):
            noise.view(step, -1)[:, 0] = torch.arange(start, start + step) % 256
            writer.append_batch([f"row-{i}" for i in range(start, start + step)], {"x": noise})
    return fl.Store.open(folder / f"{kind}-{codec.replace('/', '-')}")


def ours(opened: fl.Store, kind: str, tier: str, fields: Any = None) -> Run:
    feed = fl.Feed(opened, BATCH[kind], device="cuda", tier=tier, fields=fields)
    batches = endless(feed)
    for _ in range(8):
        next(batches)
    return lambda: rate(lambda: len(next(batches)))


def endless(feed: fl.Feed) -> Iterator[torch.Tensor]:
    while True:
        for batch in feed:
            yield batch["x"]


def rate(step: Callable[[], int]) -> float:
    """What `step` returns, a second, with the device's work done."""
    torch.cuda.synchronize()
    n, began = 0, time.perf_counter()
    while time.perf_counter() - began < BLOCK_S:
        n += step()
    torch.cuda.synchronize()
    return n / (time.perf_counter() - began)


def copy_rate(rows: int, row_bytes: int, *, pinned: bool) -> Run:
    """Rows per second of one large copy: pinned host to device, or device to device."""
    n_bytes = rows * row_bytes
    source = (
        torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)
        if pinned
        else torch.randint(0, 255, (n_bytes,), dtype=torch.uint8, device="cuda")
    )
    target = torch.empty(n_bytes, dtype=torch.uint8, device="cuda")

    def step() -> int:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return rows

    return lambda: rate(step)


def with_clips(args: argparse.Namespace, rows: list[Any], goals: list[Any]) -> None:
    raw, int8 = store(args.folder, "clip", "raw"), store(args.folder, "clip", "int8/token")
    size = raw.fields["x"].row_bytes
    runs: dict[str, Run] = {
        "copy: pinned host to device": copy_rate(BATCH["clip"], size, pinned=True),
        "copy: device to device": copy_rate(BATCH["clip"], size, pinned=False),
        "raw, mmap": ours(raw, "clip", "mmap"),
        "raw, pinned": ours(raw, "clip", "pinned"),
        "raw, device": ours(raw, "clip", "device"),
        "int8/token, mmap": ours(int8, "clip", "mmap"),
        "int8/token, pinned": ours(int8, "clip", "pinned"),
        "int8/token, device": ours(int8, "clip", "device"),
        "raw, mmap, 8 of 24 frames": ours(raw, "clip", "mmap", [fl.Pick("x", 8)]),
    }
    results = interleave(runs, rounds=args.rounds)
    for name, values in results.items():
        rows.append(row_of("clip", name, values, size / 3 if "8 of 24" in name else size))
    common.print_table(f"6 MB rows, batches of {BATCH['clip']}", rows)
    median = {name: spread(values).median for name, values in results.items()}
    # a gather reads and writes every byte, as a copy does: the two rates compare directly
    share = ratio(results["raw, device"], results["copy: device to device"]).median
    goals += [
        common.goal("6 MB bf16 rows, RAM (page cache) to GPU, GB/s", 24.0, median["raw, mmap"] * size / 1e9),
        common.goal(
            "6 MB bf16 rows, RAM (pinned tier) to GPU, GB/s", 24.0, median["raw, pinned"] * size / 1e9
        ),
        common.goal("int8 rows (page cache) to GPU, rows/s", 6500.0, median["int8/token, mmap"]),
        common.goal("device tier, share of the card's copy bandwidth", 0.6, share),
    ]


def with_vectors(args: argparse.Namespace, rows: list[Any]) -> None:
    raw, int8 = store(args.folder, "vector", "raw"), store(args.folder, "vector", "int8/token")
    runs = {
        f"{codec}, {tier}": ours(opened, "vector", tier)
        for codec, opened in (("raw", raw), ("int8/token", int8))
        for tier in ("mmap", "pinned", "device")
    }
    first = len(rows)
    for name, values in interleave(runs, rounds=args.rounds).items():
        rows.append(row_of("vector", name, values, raw.fields["x"].row_bytes))
    common.print_table(f"1.5 KB rows, batches of {BATCH['vector']}", rows[first:])


def row_of(kind: str, name: str, values: list[float], row_bytes: float) -> dict[str, Any]:
    found = spread(values)
    return {
        "kind": kind,
        "name": name,
        "rows_per_s": found.median,
        "rows_per_s_low": found.low,
        "rows_per_s_high": found.high,
        "gb_per_s": found.median * row_bytes / 1e9,
    }


if __name__ == "__main__":
    main()
