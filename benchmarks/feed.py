"""The feed against other loaders and against memcpy, in one run: `.venv-bench/bin/python benchmarks/feed.py`.

Rows of [24, 325, 384] bf16 (6 MB) and of [768] f16 (1.5 KB), random order, warm page cache unless a row says
cold. What runs in this process takes turns in short blocks with memcpy; loaders with workers run in processes
of their own, each round beside a block of ours. Every figure is the median over rounds, with its ends.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "src"), str(Path(__file__).resolve().parents[1])]

import frostline as fl  # noqa: E402
from benchmarks import common, peers  # noqa: E402
from benchmarks.peers.measure import evict, warm  # noqa: E402
from frostline.timing import Spread, interleave, ratio, spread  # noqa: E402

THREADS = 2
BLOCK_S = 0.6
SETTLE = 6
"""Batches before the clock starts: more than a feed keeps ready."""
LEFT_OUT = ("pt-mmap-w0", "pt-mmap-w2", "tensordict-w0", "hf-datasets", "lance-w0", "zarr-w0")
"""Left out to save time, not all of them slower; measured once, see docs/log.md."""
Run = Callable[[], float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()) / "frostline-bench",
        help="where the data goes (8 GB)",
    )
    parser.add_argument("--rounds", type=int, default=9, help="rounds in this process")
    parser.add_argument(
        "--peer-rounds", type=int, default=3, help="rounds of loaders with processes of their own"
    )
    parser.add_argument(
        "--only", nargs="*", choices=SECTIONS, help="these sections; the others' results stay"
    )
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    goals: list[dict[str, Any]] = []
    for name in args.only or SECTIONS:
        make_room(args.folder)
        first = len(rows)
        SECTIONS[name](args, rows, goals)
        rows[first:] = [{"commit": common.git_commit(), **row} for row in rows[first:]]
    if args.only:
        keep_others(rows, goals)
    common.write_results("feed", "cpu", rows, goals, command="benchmarks/feed.py")


def make_room(folder: Path) -> None:
    """Ten formats of the same rows do not fit the page cache together; each section warms what it reads."""
    evict(folder)


def keep_others(rows: list[Any], goals: list[Any]) -> None:
    """Put the sections that were not run in front, as they were measured last."""
    old = json.loads((common.RESULTS / "feed-cpu.json").read_text())
    kinds, abouts = {row["kind"] for row in rows}, {about(goal) for goal in goals}
    kept = [row for row in old["rows"] if row["kind"] not in kinds]
    rows[:0] = [{"commit": old["commit"], **row} for row in kept]
    goals[:0] = [goal for goal in old["goals"] if about(goal) not in abouts]


def about(goal: dict[str, Any]) -> str:
    """A goal's text without the name of the peer that did best, which may be another one the next time."""
    text = str(goal["goal"])
    return text.partition(" (")[0]


# our stores


def store(folder: Path, kind: str, codec: str = "raw") -> fl.Store:
    """The peers' rows in a store, written once."""
    path = folder / kind / f"frostline-{codec.replace('/', '-')}"
    rows = peers.KINDS[kind]
    field = fl.Field(rows.shape, str(rows.dtype), codec=codec)
    with fl.Store.create(path, {"x": field}, resume=True) as writer:
        if not len(writer):
            for i, row in enumerate(peers.make_rows(rows)):
                writer.append(f"row-{i}", {"x": row})
    warm(path)
    return fl.Store.open(path)


def endless(feed: fl.Feed) -> Iterator[torch.Tensor]:
    while True:
        for batch in feed:
            yield batch["x"]


def ours(
    opened: fl.Store, kind: str, *, tier: str = "mmap", fields: Any = None, touched: bool = False
) -> Run:
    """Rows per second of a feed, over a block of an endless iteration."""
    feed = fl.Feed(opened, peers.KINDS[kind].batch_size, tier=tier, fields=fields)
    batches = endless(feed)
    next(batches)
    return lambda: rows_per_second(batches, touched=touched)


def rows_per_second(batches: Iterator[torch.Tensor], *, touched: bool = False) -> float:
    """Over a block; `touched`: beside loaders with workers, whose batches are not in our memory before.

    What was made ready while others had their turn is used up first: 3 to 6 % of a block would be for free.
    """
    for _ in range(SETTLE):
        next(batches)
    n, began = 0, time.perf_counter()
    while (took := time.perf_counter() - began) < BLOCK_S:
        batch = next(batches)
        if touched:
            peers.touch(batch)
        n += len(batch)
    return n / took


# the limit


def memcpy(kind: str, *, whole: bool = False) -> Run:
    """Rows per second of memcpy from random rows in huge pages into a reused buffer, with the feed's threads.

    whole: the batch as one block; glibc then stores past the cache, which it does not for a row of 6 MB.
    """
    layout = peers.KINDS[kind]
    row = int(np.prod(layout.shape)) * layout.dtype.itemsize
    n = min(layout.n, (1 << 30) // row)
    batch = layout.batch_size
    source = room(n * row)
    targets = [[room(batch * row) for _ in range(2)] for _ in range(THREADS)]
    copy, base = ctypes.memmove, source.ctypes.data

    def work(k: int, until: float, done: list[int]) -> None:
        rng = np.random.default_rng()
        while time.perf_counter() < until:
            to = targets[k][done[k] % 2].ctypes.data
            if whole:
                copy(to, base + int(rng.integers(n - batch)) * row, batch * row)
            elif row < 1 << 16:  # a Python call a row would measure Python: numpy's take is memcpy a row
                np.take(
                    source.reshape(n, row),
                    rng.integers(0, n, batch),
                    axis=0,
                    out=targets[k][done[k] % 2].reshape(batch, row),
                    mode="clip",
                )
            else:
                for i, r in enumerate(rng.integers(0, n, batch).tolist()):
                    copy(to + i * row, base + r * row, row)
            done[k] += 1

    def run() -> float:
        done, began = [0] * THREADS, time.perf_counter()
        threads = [threading.Thread(target=work, args=(k, began + BLOCK_S, done)) for k in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(done) * batch / (time.perf_counter() - began)

    return run


def room(n: int) -> Any:
    memory = mmap.mmap(-1, n)
    memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    array[:] = 1
    return array


# what is measured


def one_process(args: argparse.Namespace, kind: str, rows: list[Any], goals: list[Any]) -> None:
    """Everything that runs in one process, in turns."""
    plain, int8 = store(args.folder, kind), store(args.folder, kind, "int8/token")
    runs: dict[str, tuple[str, Run]] = {
        "memcpy": (f"limit: memcpy of random rows, {THREADS} threads, reused buffers", memcpy(kind)),
        "memcpy-block": (
            f"memcpy of a whole batch as one block, {THREADS} threads",
            memcpy(kind, whole=True),
        ),
        "frostline mmap": ("raw, mmap tier", ours(plain, kind)),
        "frostline disk": ("raw, disk tier (preadv), warm", ours(plain, kind, tier="disk")),
        "frostline pinned": ("raw, host-memory tier", ours(plain, kind, tier="pinned")),
        "frostline int8": ("int8/token, mmap tier, decoded to the row's dtype", ours(int8, kind)),
    }
    peer = peers.PEERS["tensordict-w0"]
    if peer.unavailable() is None:
        own = peers.prepared(peer, args.folder, kind)
        warm(own)
        loader = peer.loader(own, peers.KINDS[kind].batch_size)
        batches = (batch for _ in iter(int, 1) for batch in loader)
        next(batches)
        runs[f"tensordict {peer.version}"] = (peer.settings, lambda: rows_per_second(batches))
    results = interleave({name: run for name, (_, run) in runs.items()}, rounds=args.rounds)
    for name, (settings, _) in runs.items():
        rows.append(row_of(kind, name, settings, results[name], results["memcpy"], "memcpy"))
    common.print_table(f"{kind}: one process, {args.rounds} rounds", rows[-len(runs) :])
    if kind == "clip":
        for tier, words in (("pinned", "held in memory"), ("mmap", "from the page cache")):
            share = ratio(results[f"frostline {tier}"], results["memcpy"])
            goals.append(common.goal_over(f"6 MB rows {words}: share of memcpy", 0.85, share))
    beside = next((n for n in results if n.startswith("tensordict")), None)
    if beside:
        words = "6 MB" if kind == "clip" else "1.5 KB"
        target = 1.1 if kind == "clip" else 1.0
        goals.append(
            common.goal_over(
                f"{words} rows: over tensordict memmap in one process",
                target,
                ratio(results["frostline mmap"], results[beside]),
            )
        )


def picked(args: argparse.Namespace, rows: list[Any], goals: list[Any]) -> None:
    """8 of 24 frames."""
    opened = store(args.folder, "clip")
    runs: dict[str, Run] = {"frostline Pick": ours(opened, "clip", fields=[fl.Pick("x", 8)])}
    for peer in peers.PICKS.values():
        if peer.unavailable() is None:
            own = peers.prepared(peer, args.folder, "clip")
            warm(own)
            loader = peer.loader(own, peers.KINDS["clip"].batch_size)
            batches = (batch for _ in iter(int, 1) for batch in loader)
            next(batches)
            runs[peer.name] = lambda batches=batches: rows_per_second(batches)
    results = interleave(runs, rounds=args.rounds)
    first = next(n for n in results if n != "frostline Pick")
    for name in runs:
        settings = peers.PICKS[name].settings if name in peers.PICKS else "fl.Pick('x', 8), mmap tier"
        rows.append(
            row_of("clip, 8 of 24 frames", name, settings, results[name], results[first], first, share=1 / 3)
        )
    common.print_table("8 of 24 frames", rows[-len(runs) :])
    mine = results["frostline Pick"]
    goals += [
        common.goal_over(f"8 of 24 frames: over {name}", target, ratio(mine, results[name]))
        for name, target in (("safetensors-slice", 2.0), ("memmap-frames", 1.0))
        if name in results
    ]


def cold(args: argparse.Namespace, rows: list[Any], goals: list[Any]) -> None:
    """Rows that are not in the page cache."""
    path = store(args.folder, "clip").path
    memmaps = {f"numpy {name}": peers.PEERS[name] for name in ("memmap-batched-w0", "memmap-w0")}
    for peer in memmaps.values():
        peers.prepared(peer, args.folder, "clip")
    from_disk: dict[str, list[float]] = {}

    def feed(tier: str) -> float:
        evict(path)
        n = n_bytes = 0
        before, began = common.disk_bytes(), time.perf_counter()
        for batch in fl.Feed(fl.Store.open(path), peers.KINDS["clip"].batch_size, tier=tier):
            n += len(batch["x"])
            n_bytes += batch["x"].nbytes
        took = time.perf_counter() - began
        gave(f"frostline {tier}", (common.disk_bytes() - before) / n_bytes)
        return n / took

    def memmap(name: str) -> float:
        told = peers.measure_cold(memmaps[name], args.folder, "clip")
        gave(name, told["from_disk"])
        return float(told["rows_per_s"])

    def gave(name: str, share: float) -> None:
        if share < 0.9:  # somebody still maps the files: they cannot be evicted then
            raise RuntimeError(f"{name}: {share:.0%} came from the disk, so it was not cold")
        from_disk.setdefault(name, []).append(share)

    runs: dict[str, Run] = {
        **{name: partial(memmap, name) for name in memmaps},
        "frostline disk": lambda: feed("disk"),
        "frostline mmap": lambda: feed("mmap"),
    }
    results = interleave(runs, rounds=max(3, args.rounds // 2))
    best = max(memmaps, key=lambda name: spread(results[name]).median)
    for name, values in results.items():
        settings = "evicted before each round, one epoch"
        if name in memmaps:
            settings += f"; {memmaps[name].settings}"
        row = row_of("clip, cold", name, settings, values, results[best], "the best memmap")
        rows.append(row | {"from_disk": spread(from_disk[name]).median})
    common.print_table("cold", rows[-len(runs) :])
    gain = ratio(results["frostline disk"], results[best])
    goals.append(common.goal_over(f"cold rows: disk tier over mmap ({best})", 2.0, gain))


def with_workers(args: argparse.Namespace, kind: str, rows: list[Any], goals: list[Any]) -> None:
    """Loaders as people run them, each in a process of its own, in rounds with ours."""
    opened = store(args.folder, kind)
    mine = ours(opened, kind, touched=True)
    told: dict[str, dict[str, Any]] = {}
    results: dict[str, list[float]] = {"frostline mmap": []}
    for _ in range(args.peer_rounds):
        for name, peer in peers.PEERS.items():
            if name in LEFT_OUT or "unavailable" in told.get(name, {}):
                continue
            told[name] = peers.measure_in_venv(peer, args.folder, kind, 2.5)
            results.setdefault(name, []).append(told[name].get("rows_per_s", 0.0))
            warm(opened.path)
            results["frostline mmap"].append(mine())
    ours_by_round = results.pop("frostline mmap")
    per_round = len(ours_by_round) // args.peer_rounds
    beside = [
        spread(ours_by_round[i * per_round : (i + 1) * per_round]).median for i in range(args.peer_rounds)
    ]
    found: dict[str, Spread] = {}
    alone: dict[str, Spread] = {}
    first = len(rows)
    rows.append(
        row_of(
            f"{kind}, loaders",
            "frostline mmap",
            f"feed in one process, {THREADS} threads",
            beside,
            beside,
            "frostline",
        )
    )
    for name, values in results.items():
        if "unavailable" in told[name]:
            rows.append(
                {
                    "kind": f"{kind}, loaders",
                    "name": name,
                    "unavailable": told[name]["unavailable"],
                    "settings": told[name]["settings"],
                }
            )
            continue
        gain = ratio(beside, values)
        label = f"{name} {told[name]['version']}"
        rows.append(
            row_of(f"{kind}, loaders", label, told[name]["settings"], values, beside, "frostline")
            | {"ours_over_it": gain.median}
        )
        (found if told[name]["way"] == peers.OWN_LOADER else alone)[name] = gain
    common.print_table(f"{kind}: loaders as people run them", rows[first:])
    words = "6 MB" if kind == "clip" else "1.5 KB"
    for group, which, target in ((found, "best peer loader", 5.0), (alone, "best peer in one process", 1.0)):
        best = min(group, key=lambda n: group[n].median)
        goals.append(common.goal_over(f"{words} rows: over the {which} ({best})", target, group[best]))
    if kind == "clip":
        goals.append(common.goal_over("6 MB rows: over .pt + DataLoader, two workers", 15.0, found["pt-w2"]))


def row_of(
    kind: str,
    name: str,
    settings: str,
    values: list[float],
    base: list[float],
    base_name: str,
    share: float = 1.0,
) -> dict[str, Any]:
    layout = peers.KINDS[kind.split(",")[0]]
    row_bytes = int(np.prod(layout.shape)) * layout.dtype.itemsize * share
    rate, over = spread(values), ratio(values, base)
    return {
        "kind": kind,
        "name": name,
        "settings": settings,
        "rows_per_s": rate.median,
        "rows_per_s_low": rate.low,
        "rows_per_s_high": rate.high,
        "gb_per_s": rate.median * row_bytes / 1e9,
        f"over_{base_name.replace(' ', '_')}": over.median,
        "over_low": over.low,
        "over_high": over.high,
    }


SECTIONS: dict[str, Callable[[argparse.Namespace, list[Any], list[Any]], None]] = {
    "clips": lambda args, rows, goals: one_process(args, "clip", rows, goals),
    "vectors": lambda args, rows, goals: one_process(args, "vector", rows, goals),
    "picks": picked,
    "cold": cold,
    "clip-loaders": lambda args, rows, goals: with_workers(args, "clip", rows, goals),
    "vector-loaders": lambda args, rows, goals: with_workers(args, "vector", rows, goals),
}


if __name__ == "__main__":
    main()
