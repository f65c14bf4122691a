"""Threads or processes: whichever measures faster, where the run is long enough for that to matter."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

from frostline.errors import FrostlineError, UsageError
from frostline.execution import Early
from frostline.freezer.progress import Reporter
from frostline.freezer.workers import Given, Processes, Threads, Workers, cores

Asked = Literal["auto", "threads", "processes"]
_WORTH_S = 30.0
"""Below so many seconds of work in threads, starting processes and measuring costs more than it can give."""
_FASTER = 1.2
_TASK_S = 0.002
"""A task for a worker takes about so long: handing one over costs some 50 µs."""


def group_size(sample_s: float, block: int, *, early: bool) -> int:
    """Samples a task; a whole block where there is nothing to compute, only to read."""
    if not early:
        return block
    return max(1, min(block, round(_TASK_S / max(sample_s, 1e-7))))


def start(
    early: Early,
    places: Sequence[int],
    *,
    asked: Asked,
    n: int | None,
    sample_s: float,
    given: Given | None,
    reporter: Reporter,
) -> Workers:
    """The workers to use. `asked="auto"` measures, if the run is long and the stages can travel."""
    n = n or cores()
    if asked == "processes" and given is None:
        return Processes(early, n)
    if asked == "processes":  # not refused: by now rows that changed are deleted, and the run must go on
        reporter.note("threads it is, for now: worker processes cannot be given rows of a store")
    threads = Threads(early, n, given)
    long = len(places) * sample_s / n > _WORTH_S
    if asked == "threads" or not early.stages or given is not None or not long or n == 1:
        return threads
    try:
        processes = Processes(early, n)
    except UsageError as e:
        reporter.note(f"threads it is: {e}")
        return threads
    return _faster(threads, processes, places, sample_s, reporter)


def _faster(
    threads: Threads, processes: Processes, places: Sequence[int], sample_s: float, reporter: Reporter
) -> Workers:
    some = places[: max(2 * threads.n, min(len(places), int(threads.n / max(sample_s, 1e-6))))]
    try:
        _rate(processes, some[: processes.n])  # starting them does not count
        rates = {w.kind: _rate(w, some) for w in (threads, processes)}
    except FrostlineError as e:
        processes.close()
        reporter.note(f"threads it is: {e}")
        return threads
    better: Workers = processes if rates["processes"] > _FASTER * rates["threads"] else threads
    other: Workers = threads if better is processes else processes
    other.close()
    reporter.note(
        f"{better.kind}: {rates[better.kind]:,.1f} samples/s prepared, {other.kind} {rates[other.kind]:,.1f}"
    )
    return better


def _rate(workers: Workers, places: Sequence[int]) -> float:
    began = time.perf_counter()
    for future in [workers.submit([place]) for place in places]:
        future.result()
    return len(places) / (time.perf_counter() - began)
