"""How a training uses memory and its device, measured without making the device wait."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch

_DRAIN_AT = 64
"""Steps that may wait to be looked at before `Busy` looks by itself, so that events are reused."""

_CUDA = {
    "allocated_bytes": ("allocated_bytes", "all", "current"),
    "peak_allocated_bytes": ("allocated_bytes", "all", "peak"),
    "reserved_bytes": ("reserved_bytes", "all", "current"),
    "peak_reserved_bytes": ("reserved_bytes", "all", "peak"),
    "inactive_split_bytes": ("inactive_split_bytes", "all", "current"),
    "alloc_retries": ("num_alloc_retries",),
    "ooms": ("num_ooms",),
}


def memory(device: str | torch.device) -> dict[str, float]:
    """Memory of this process now. Asks the allocator's own counters, so nothing is synchronised.

    >>> sorted(memory("cpu"))
    ['peak_rss_bytes', 'rss_bytes']

    Everywhere: `rss_bytes`, `peak_rss_bytes`: main memory of this process, now and at most.
    On CUDA also
    `allocated_bytes`, `peak_allocated_bytes`: in tensors, now and at most (since the last
    `torch.cuda.reset_peak_memory_stats`);
    `reserved_bytes`, `peak_reserved_bytes`: held by the allocator, which is what others cannot have;
    `fragmentation`: 1 − allocated / reserved, 0 when nothing is reserved;
    `inactive_split_bytes`: free pieces of blocks that are in use elsewhere, so they cannot be given back;
    `alloc_retries`: how often the allocator emptied its cache to go on (each stalls the device);
    `ooms`: how often it gave up.
    On MPS `allocated_bytes`, `reserved_bytes` and `fragmentation`.
    """
    device = torch.device(device)
    found = _resident()
    if device.type == "cuda":
        stats = torch.cuda.memory_stats_as_nested_dict(device)  # the flat one sorts a hundred names
        found |= {name: _within(stats, path) for name, path in _CUDA.items()}
    elif device.type == "mps":
        found["allocated_bytes"] = float(torch.mps.current_allocated_memory())
        found["reserved_bytes"] = float(torch.mps.driver_allocated_memory())
    if "reserved_bytes" in found:
        reserved = found["reserved_bytes"]
        found["fragmentation"] = 1 - found["allocated_bytes"] / reserved if reserved else 0.0
    return found


def _within(stats: Any, path: Sequence[str]) -> float:
    """Nothing is there before the first tensor."""
    for name in path:
        stats = stats.get(name, {})
    return float(stats or 0)


def _resident() -> dict[str, float]:
    now = float(_process(os.getpid()).memory_info().rss)
    return {"rss_bytes": now, "peak_rss_bytes": max(now, _peak_rss())}


@cache
def _process(pid: int) -> psutil.Process:
    """Finding out who one is takes longer than what is asked then; a fork is somebody else."""
    return psutil.Process(pid)


def _peak_rss() -> float:
    status = Path("/proc/self/status")
    if status.exists():  # not getrusage: on Linux its peak includes the process that started this one
        lines = status.read_text(encoding="ascii", errors="replace").splitlines()
        return 1024.0 * next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)
    if sys.platform == "win32":
        return float(_process(os.getpid()).memory_info().peak_wset)
    import resource  # not on Windows

    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)  # bytes on macOS


class _Event(Protocol):
    def record(self) -> None: ...
    def query(self) -> bool: ...
    def elapsed_time(self, other: Any) -> float: ...


class _Tick:
    """The clock of the CPU, asked like a device event: what was recorded is done. Milliseconds."""

    def __init__(self) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: _Tick) -> float:
        return 1000 * (other.at - self.at)


def _cuda_event() -> _Event:
    event: _Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event


class Busy:
    """The share of the time in which the device had a step to work on, between two readings.

    >>> busy = Busy("cpu")
    >>> for _ in range(3):
    ...     busy.begin()          # after the batch arrived
    ...     _ = sum(range(1000))  # the step
    ...     busy.end()
    >>> 0 < busy.read() <= 1
    True

    On CUDA an event is recorded at both ends of a step, on the current stream, and looked at only once the
    device has passed it: nothing waits. Gaps between steps (waiting for data) count as idle; gaps inside a
    step, between two kernels, do not, so a step made of tiny kernels looks busier than it is. On the CPU it
    is the time inside steps over all time. On other devices nothing is known, and `read()` is None.
    """

    def __init__(self, device: str | torch.device) -> None:
        kind = torch.device(device).type
        made: dict[str, Callable[[], _Event]] = {
            "cuda": _cuda_event,
            "cpu": _Tick,
        }
        self._new = made.get(kind)
        self._open: _Event | None = None
        self._spare: list[_Event] = []
        self._pending: deque[tuple[bool, _Event, _Event]] = deque()
        self._last: _Event | None = None
        self._fresh = True
        self._busy_ms = self._span_ms = 0.0

    def begin(self) -> None:
        """A step starts. A step that was begun and not ended (out of memory) is forgotten."""
        if self._new is None:
            return
        if len(self._pending) >= _DRAIN_AT:
            self._drain()
        self._open = self._recorded(self._new)

    def end(self) -> None:
        """The step that was begun has been queued."""
        if self._new is not None and self._open is not None:
            self._pending.append((self._fresh, self._open, self._recorded(self._new)))
            self._open, self._fresh = None, False

    def read(self) -> float | None:
        """The share since the last reading, up to the last step that is done. None when none is."""
        self._drain()
        busy, span, self._busy_ms, self._span_ms = self._busy_ms, self._span_ms, 0.0, 0.0
        return min(1.0, busy / span) if span > 0 else None

    def pause(self) -> None:
        """The time from the last step to the next (an evaluation, a save) is not idle: leave it out."""
        self._fresh = True

    def _recorded(self, new: Callable[[], _Event]) -> _Event:
        event = self._spare.pop() if self._spare else new()
        event.record()
        return event

    def _drain(self) -> None:
        while self._pending and self._pending[0][2].query():  # asks, does not wait
            fresh, start, end = self._pending.popleft()
            since = start if fresh or self._last is None else self._last
            self._busy_ms += start.elapsed_time(end)
            self._span_ms += since.elapsed_time(end)
            self._spare += [start] if self._last is None else [start, self._last]
            self._last = end
