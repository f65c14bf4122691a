"""Opening a large store, finding a key, and what a commit costs after many.

`.venv/bin/python benchmarks/open_store.py`. One million rows in the index (their values are one number
each: the index is what is measured). Files are in the page cache, as after a run that wrote them. Every
figure is the median over rounds, with its ends.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "src"), str(Path(__file__).resolve().parents[1])]

import frostline as fl  # noqa: E402
from benchmarks import common  # noqa: E402
from frostline.timing import spread  # noqa: E402

FIELDS = {"n": fl.Field((), "int64")}
STEP = 50_000
OPEN = """
import sys, time
import frostline as fl
fl.Store
import torch
started = time.perf_counter()
store = fl.Store.open(sys.argv[1])
print(time.perf_counter() - started, len(store))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--commits", type=int, nargs="+", default=[10, 1_000, 10_000])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows, goals = opening(Path(folder) / "large", args.rows, args.rounds)
        costs, more = commits(Path(folder) / "many", args.commits, args.rounds)
    options = "" if len(sys.argv) == 1 else " " + " ".join(sys.argv[1:])
    common.write_results(
        "open_store", "cpu", rows + costs, goals + more, f"benchmarks/open_store.py{options}"
    )


def measured(what: str, unit: str, values: list[float], **more: Any) -> dict[str, Any]:
    found = spread(values)
    return {"what": what, "unit": unit, "median": found.median, "low": found.low, "high": found.high, **more}


def timed(run: Callable[[], object], rounds: int, *, per: int = 1) -> list[float]:
    out = []
    for _ in range(rounds):
        started = time.perf_counter()
        run()
        out.append((time.perf_counter() - started) / per)
    return out


def opening(path: Path, n: int, rounds: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Written in batches, so that the index is in as many runs as a real one."""
    with fl.Store.create(path, FIELDS) as writer:
        for start in range(0, n, STEP):
            some = range(start, min(n, start + STEP))
            writer.append_batch([f"clips/{i:09d}.mp4" for i in some], {"n": np.arange(some.start, some.stop)})
    fresh = [float(_run([sys.executable, "-c", OPEN, str(path)]).split()[0]) for _ in range(rounds)]
    again = timed(lambda: fl.Store.open(path), rounds)
    store = fl.Store.open(path)
    draw = random.Random(0)
    keys = [f"clips/{draw.randrange(n):09d}.mp4" for _ in range(2000)]
    found = timed(lambda: [store.keys.position(key) for key in keys], rounds, per=len(keys))
    missed = timed(lambda: ["no " + key in store for key in keys], rounds, per=len(keys))
    more = {"rows": n, "runs": len(store.commit.runs)}
    rows = [
        measured("open, in a fresh process", "s", fresh, **more),
        measured("open, again", "s", again, **more),
        measured("find a key that is there", "s", found, **more),
        measured("find a key that is not", "s", missed, **more),
    ]
    common.print_table(f"a store of {n:,} rows", rows)
    return rows, [
        common.goal(f"open {n:,} rows in a fresh process, s", 0.5, spread(fresh).median, at_most=True)
    ]


def _run(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def commits(path: Path, marks: list[int], rounds: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The cost of a one-row commit after so many, averaged over 64: every eighth merges runs."""
    rows: list[dict[str, Any]] = []
    bytes_of_commit: list[int] = []
    with fl.Store.create(path, FIELDS, rows_per_shard=1) as writer:
        done = 0
        for mark in marks:
            done = _commit(writer, done, max(done, mark))
            after, seconds, sizes = done, [], []
            for _ in range(rounds):
                before, started = _size(path), time.perf_counter()
                done = _commit(writer, done, done + 64)
                seconds.append((time.perf_counter() - started) / 64)
                sizes.append((_size(path) - before) / 64)
            newest = max((path / "commits").iterdir())
            bytes_of_commit.append(newest.stat().st_size)
            runs = len(fl.Store.open(path).commit.runs)
            more = {"after_commits": after, "runs": runs, "commit_json_bytes": bytes_of_commit[-1]}
            rows.append(measured("a commit of one row", "s", seconds, **more))
            rows.append(measured("a commit of one row", "bytes", sizes, **more))
    common.print_table("what a commit costs", rows)
    goal = common.goal(
        f"commit JSON after {marks[-1]:,} commits, bytes", 8192, bytes_of_commit[-1], at_most=True
    )
    return rows, [goal]


def _commit(writer: Any, start: int, stop: int) -> int:
    for i in range(start, stop):
        writer.append(f"clips/{i:09d}.mp4", {"n": i})
    writer.commit()
    return stop


def _size(path: Path) -> int:
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


if __name__ == "__main__":
    main()
