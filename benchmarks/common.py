"""What the benchmarks share: versions, the commit, tables, and the file in which the outcome is kept."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from frostline.timing import Spread

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("frostline", "torch", "numpy", "safetensors", "xxhash")


def versions(*more: str) -> dict[str, str]:
    """Versions of Python, the system and the packages that matter; what is not installed is left out."""
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.release()}"}
    installed = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions()}
    return found | {name: installed[name.lower()] for name in (*PACKAGES, *more) if name.lower() in installed}


def _ticks() -> tuple[int, int]:
    """Clock ticks of all cores so far: in all, and those that the host of a virtual machine took away."""
    stat = Path("/proc/stat")
    counts = [int(word) for word in stat.read_text().split("\n")[0].split()[1:9]] if stat.exists() else []
    return (sum(counts), counts[7]) if len(counts) == 8 else (0, 0)


_BEGAN = _ticks()


def machine() -> dict[str, Any]:
    """The processor, how many of its cores this process may use, and what share of them the host took."""
    model, info = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if info.exists() and (named := re.search(r"model name\s*:\s*(.+)", info.read_text())):
        model = named[1].strip()
    ticks, stolen = (now - then for now, then in zip(_ticks(), _BEGAN, strict=True))
    return {
        "cpu": model, "cores": len(os.sched_getaffinity(0)), "stolen": round(stolen / max(ticks, 1), 3)
    }  # fmt: skip


def disk_bytes() -> int:
    """What this process has read from disks, not from the page cache."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


def device_name() -> str:
    """The GPU as it stands in the name of a result, e.g. "h200"; "cpu" where there is none."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    words = re.findall(r"[a-z0-9]+", torch.cuda.get_device_name().lower())
    return "-".join(word for word in words if word != "nvidia")


def git_commit() -> str:
    """The commit that is measured, with a + when files differ from it; "none" where nothing is committed."""
    carried = ROOT / ".measured-commit"  # beside a copy of the tree that has no history
    if carried.exists():
        return carried.read_text().strip()
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run(
        [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False
    )
    if head.returncode:
        return "none"
    code = ["src", "benchmarks/*.py", "benchmarks/peers", "tests/unit/profiler", "examples"]
    command = [*git, "status", "--porcelain", "--", *code]
    changed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return head.stdout.strip() + ("+" if changed.strip() else "")


def goal(
    text: str,
    target: float,
    value: float,
    *,
    at_most: bool = False,
    within: tuple[float, float] | None = None,
) -> dict[str, Any]:
    """A goal and whether it was met: `value` has to reach `target`, or with `at_most` to stay within it.

    within: the ends of the rounds, or of an interval; the page says where the target lies between them.
    """
    kept = {"goal": text, "target": target, "value": value}
    kept["met"] = value <= target if at_most else value >= target
    return kept if within is None else kept | {"low": within[0], "high": within[1]}


def goal_over(text: str, target: float, found: Spread) -> dict[str, Any]:
    """A goal for a ratio: its median has to reach the target."""
    return goal(text, target, found.median, within=(found.low, found.high))


Interval = tuple[float, float, float]
"""A figure, and its 95 % interval."""


def typical_ratio(a: Sequence[float], b: Sequence[float]) -> Interval:
    """a over b by pairs: their geometric mean without the outermost fiftieths.

    For many short turns on a host that changes its pace by itself. Not the median, nor without the outermost
    tenths: where a tenth of the turns has more to do (those that also log), these would be left out.
    """
    value, low, high = typical_difference([math.log(x) for x in a], [math.log(x) for x in b])
    return math.exp(value), math.exp(low), math.exp(high)


def typical_difference(a: Sequence[float], b: Sequence[float]) -> Interval:
    """a minus b by pairs: their mean without the outermost fiftieths."""
    import numpy as np

    apart = np.asarray(a) - np.asarray(b)

    def middle(values: Any) -> Any:
        values = np.sort(values, axis=-1)
        cut = values.shape[-1] // 50
        return values[..., cut : values.shape[-1] - cut].mean(-1)

    drawn = np.random.default_rng(0).choice(apart, (4000, len(apart)))
    low, high = np.percentile(middle(drawn), [2.5, 97.5])
    return float(middle(apart)), float(low), float(high)


def fed_against_kept(
    step: Callable[[Any], Any], fed: Iterator[Any], kept: Any, *, rounds: int, settle: int = 2, steps: int = 4
) -> tuple[dict[str, list[float]], Interval]:
    """Samples/s of a step on batches that are fed and on one that stays, in turns; one over the other.

    settle: steps before the clock of a turn starts, in which the feed uses or fills up what it keeps ready.
    """
    import torch

    from frostline.timing import interleave

    def done() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def rate(batches: Iterator[Any]) -> float:
        for _ in range(settle):
            step(next(batches))
        done()
        rows, began = 0, time.perf_counter()
        for _ in range(steps):
            batch = next(batches)
            step(batch)
            rows += batch.n_rows
        done()
        return rows / (time.perf_counter() - began)

    runs = {"fed": lambda: rate(fed), "kept": lambda: rate(repeat(kept))}
    for one in runs.values():
        one()
    found = interleave(runs, rounds=rounds)
    return found, typical_ratio(found["fed"], found["kept"])


def print_table(title: str, rows: Sequence[dict[str, Any]]) -> None:
    names = [n for n in dict.fromkeys(name for row in rows for name in row) if n != "commit"]
    cells = [names, *([_text(row.get(name, "")) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    print(f"\n{title}")
    for line in cells:
        print(
            "  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip(),
            flush=True,
        )


def _text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def repeatable(command: str) -> str:
    """The command as anybody would give it: without the folders of the machine it ran on.

    >>> repeatable("benchmarks/freeze.py --rounds 3 --also /somewhere")
    'benchmarks/freeze.py --rounds 3'
    """
    return re.sub(r" --(also|scratch)[ =]\S+", "", command)


def write_results(
    name: str,
    device: str,
    rows: list[dict[str, Any]],
    goals: list[dict[str, Any]],
    command: str,
    *,
    also: Path | None = None,
    quiet: bool = False,
) -> Path:
    """Print the goals; keep the outcome as benchmarks/results/<name>-<device>.json (and in `also`)."""
    if not quiet:
        print_table("goals", goals)
    record = {
        "name": name, "device": device, "machine": machine(), "versions": versions(), "commit": git_commit(),
        "command": repeatable(command), "rows": rows, "goals": goals,
    }  # fmt: skip
    for folder in (RESULTS, *([also] if also else [])):
        folder.mkdir(parents=True, exist_ok=True)
        aside = folder / f".{name}-{device}.json"  # a benchmark that is cut off leaves the last whole one
        aside.write_text(json.dumps(record, indent=1) + "\n")
        aside.replace(folder / f"{name}-{device}.json")
    return RESULTS / f"{name}-{device}.json"
