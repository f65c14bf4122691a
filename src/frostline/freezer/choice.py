"""Threads or processes: whichever measures faster, where the run is long enough for that to matter."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from frostline.errors import FrostlineError, UsageError
from frostline.execution import Early
from frostline.execution.slab import Layout
from frostline.freezer.child import Child, close_all
from frostline.freezer.progress import Reporter
from frostline.freezer.workers import Given, Parts, Processes, Threads, Workers, cores, packed, rate_of

Asked = Literal["auto", "threads", "processes"]
_WORTH_S = 10.0
"""Below so many seconds of work in threads, measuring costs more than it can give."""
_WORTH_STARTING_S = 15.0
"""The same where no process was started ahead."""
_FASTER = 1.2
_AS_FAST = 1.0
"""Enough where they take turns with the networks of this process, which run faster without decoding threads
beside them (by a tenth on two cores)."""
_TASK_S = {"threads": 0.002, "processes": 0.05}
"""A task for a worker takes about so long: handing one over costs some 50 µs, to a process some 300."""
_HATCH_CORES = 4
_HATCH_SAMPLES = 1000
_READERS = 3
"""Threads that only read rows of a store: more get into each other's way, and that of the main thread."""
_SWITCH_S = 0.0005


def group_size(sample_s: float, block: int, *, early: bool, kind: str = "threads") -> int:
    """Samples a task; a whole block where there is nothing to compute, only to read."""
    if not early:
        return block
    most = max(1, min(block, round(_TASK_S[kind] / max(sample_s, 1e-7))))
    return -(-block // -(-block // most))  # tasks of a block alike: a short last one leaves a worker idle


def hatch(early: Early, samples: int, *, asked: Asked, n: int | None, wanted: bool = True) -> list[Child]:
    """Start worker processes ahead, where they are likely to be used: they take seconds to import torch.

    wanted: False where nothing will be computed, as in a dry run; then none is started.
    """
    n = n or cores()
    likely = n >= _HATCH_CORES and samples >= _HATCH_SAMPLES and early.stages
    if not wanted or asked == "threads" or not (likely or asked == "processes") or not early.stages:
        return []
    try:
        packed(early)
    except UsageError:
        return []  # `start` says why
    return [Child() for _ in range(n)]


@dataclass(frozen=True)
class Wanted:
    """What is known of the work when its workers are chosen."""

    asked: Asked = "auto"
    n: int | None = None
    sample_s: float = 0.0
    block: int = 1
    """Samples a block."""
    sample: Mapping[str, Any] | None = None
    """Values of one sample, as they come to the stages that take several."""
    pin: bool = False
    turns: bool = False
    """Workers and this process take turns on the same cores; see `Stream`."""
    parts: Parts | None = None
    """What the stages stood on before they were called; see `Processes`."""

    @property
    def layout(self) -> Layout | None:
        ahead = 3 * (self.n or cores())
        return Layout.of(self.block, self.sample, ahead=ahead) if self.sample else None


def start(
    early: Early,
    places: Sequence[int],
    wanted: Wanted,
    *,
    given: Given | None,
    reporter: Reporter,
    hatched: Sequence[Child] = (),
) -> Workers:
    """The workers to use. `asked="auto"` measures, if the run is long and the stages can travel."""
    n, asked = wanted.n or cores(), wanted.asked
    if asked == "processes" and given is None:
        return _processes(early, n, wanted, hatched)
    if asked == "processes":  # not refused: by now rows that changed are deleted, and the run must go on
        reporter.note("threads it is, for now: worker processes cannot be given rows of a store")
    threads = Threads(early, n if early.stages else min(n, _READERS), given)
    if asked != "auto" or not early.stages or given is not None or n == 1:
        return threads
    if not hatched and len(places) * wanted.sample_s / n <= _WORTH_STARTING_S:
        return threads
    try:
        return _faster(threads, early, places, wanted, hatched, reporter)
    except FrostlineError as e:
        reporter.note(f"threads it is: {e}")
        return threads


def _processes(early: Early, n: int, wanted: Wanted, hatched: Sequence[Child]) -> Processes:
    return Processes(early, n, layout=wanted.layout, pin=wanted.pin, hatched=hatched, parts=wanted.parts)


def _faster(
    threads: Threads,
    early: Early,
    places: Sequence[int],
    wanted: Wanted,
    hatched: Sequence[Child],
    reporter: Reporter,
) -> Workers:
    block = wanted.block
    group = group_size(wanted.sample_s, block, early=True)
    in_threads = rate_of(threads, places, group=group, block=block, seconds=1.0)
    if len(places) / in_threads < _WORTH_S:
        close_all(hatched)
        return threads
    processes = _processes(early, threads.n, wanted, hatched)
    try:
        group = group_size(wanted.sample_s, block, early=True, kind="processes")
        rate_of(processes, places, group=1, block=block, seconds=0.0)  # most have started after this
        in_processes = rate_of(processes, places, group=group, block=block, seconds=1.0)
    except BaseException:
        processes.close()
        raise
    told = f"{in_threads:,.0f} samples/s prepared in threads, {in_processes:,.0f} in processes"
    if in_processes > (_AS_FAST if wanted.turns else _FASTER) * in_threads:
        reporter.note(f"processes it is: {told}")
        threads.close()
        return processes
    reporter.note(f"threads it is: {told}")
    processes.close()
    return threads


@contextmanager
def quick_switches() -> Iterator[None]:
    """Threads hand the GIL on ten times as often as usual.

    The thread that queues kernels needs it for microseconds, and would otherwise wait 5 ms for it each time
    that a worker thread computes in Python.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
