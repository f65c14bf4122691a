"""What a training measures of itself, without making the device wait."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
from torch import Tensor

from frostline.errors import UsageError

_DRAIN_AT = 64
"""Steps that may wait to be looked at before `Busy` looks by itself, so that events are reused."""

_CUDA = {
    "allocated_bytes": "allocated_bytes.all.current",
    "peak_allocated_bytes": "allocated_bytes.all.peak",
    "reserved_bytes": "reserved_bytes.all.current",
    "peak_reserved_bytes": "reserved_bytes.all.peak",
    "inactive_split_bytes": "inactive_split_bytes.all.current",
    "alloc_retries": "num_alloc_retries",
    "ooms": "num_ooms",
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
        stats = torch.cuda.memory_stats(device)
        found |= {name: float(stats.get(key, 0)) for name, key in _CUDA.items()}
    elif device.type == "mps":
        found["allocated_bytes"] = float(torch.mps.current_allocated_memory())
        found["reserved_bytes"] = float(torch.mps.driver_allocated_memory())
    if "reserved_bytes" in found:
        reserved = found["reserved_bytes"]
        found["fragmentation"] = 1 - found["allocated_bytes"] / reserved if reserved else 0.0
    return found


def _resident() -> dict[str, float]:
    now = float(psutil.Process().memory_info().rss)
    return {"rss_bytes": now, "peak_rss_bytes": max(now, _peak_rss())}


def _peak_rss() -> float:
    status = Path("/proc/self/status")
    if status.exists():  # not getrusage: on Linux its peak includes the process that started this one
        lines = status.read_text(encoding="ascii", errors="replace").splitlines()
        return 1024.0 * next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)
    if sys.platform == "win32":
        return float(psutil.Process().memory_info().peak_wset)
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


class Meter:
    """Means of figures that live on the device, fetched in one transfer.

    >>> meter = Meter()
    >>> meter.add({"loss": torch.tensor(1.0), "lr": 0.1}, weight=3)
    >>> meter.add({"loss": torch.tensor(5.0), "lr": 0.1})
    >>> meter.count({"overflows": torch.tensor(True)})
    >>> meter.read()
    {'loss': 2.0, 'lr': 0.1, 'overflows': 1.0}
    >>> meter.read()
    {}

    `add` and `count` only queue work; `read` is the one place that waits for the device. Values are copied at
    once, because a compiled step may overwrite its outputs. Sums are kept in float64 (float32 on MPS).
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._weights: dict[str, float | None] = {}
        """By name, in the order in which the names came. None: a count."""
        self._host: dict[str, float] = {}
        self._sums: dict[tuple[torch.device, tuple[str, ...]], Tensor] = {}

    def add(self, values: Mapping[str, Tensor | float], weight: float = 1) -> None:
        """Figures of a step; `weight` is what they are a mean over, such as the number of samples.

        With weight 0 (an empty share of a batch) the figures are named, and their values do not matter.
        """
        if not (_is_number(weight) and 0 <= weight < math.inf):
            raise UsageError(f"Meter.add(…): weight is {weight!r}; a number from 0, on the host")
        self._take("add", values, weight)
        for name in values:
            self._weights[name] = (self._weights.get(name) or 0) + weight

    def count(self, values: Mapping[str, Tensor | float]) -> None:
        """Figures that are added up instead."""
        self._take("count", values, 1)
        self._weights.update(dict.fromkeys(values))

    def read(self, across: Callable[[Tensor], Tensor] | None = None) -> dict[str, float]:
        """Every mean and count since the last reading, then forgets. A mean over nothing is nan.

        across: adds a vector up over the ranks (an all_reduce). All ranks must have named the same figures
        in the same order.
        """
        weights, host, sums = self._weights, self._host, self._sums
        self._reset()
        on_device = [name for _, names in sums for name in names]
        flat = _fetched(
            list(sums.values()),
            [host.get(name, 0.0) for name in weights] + [weight or 0.0 for weight in weights.values()],
            across,
        )
        end = len(on_device) + len(weights)
        totals = dict.fromkeys(weights, 0.0)
        for name, value in zip([*on_device, *weights], flat[:end], strict=True):
            totals[name] += value
        return {
            name: totals[name] if weight is None else totals[name] / over if over else math.nan
            for (name, weight), over in zip(weights.items(), flat[end:], strict=True)
        }

    def state(self) -> dict[str, Any]:
        """What was added so far, for a checkpoint: plain values, every bit kept. Waits for the device."""
        sums = [[*names] for _, names in self._sums]
        values = [vector.tolist() for vector in self._sums.values()]
        return {"weights": dict(self._weights), "host": dict(self._host), "names": sums, "sums": values}

    def load_state(self, state: Mapping[str, Any], device: str | torch.device) -> None:
        """Go on adding where `state` was taken."""
        place = torch.empty(0, device=device).device  # with its number, as figures have it
        self._weights, self._host = dict(state["weights"]), dict(state["host"])
        self._sums = {
            (place, tuple(names)): torch.tensor(values, dtype=_precision(place), device=place)
            for names, values in zip(state["names"], state["sums"], strict=True)
        }

    @torch.no_grad()
    def _take(self, verb: str, values: Mapping[str, Tensor | float], weight: float) -> None:
        self._check(verb, values)
        on_device: dict[torch.device, dict[str, Tensor]] = {}
        for name, value in values.items():
            if isinstance(value, Tensor):
                on_device.setdefault(value.device, {})[name] = value
            elif weight:
                self._host[name] = self._host.get(name, 0.0) + float(value) * weight
        for device, tensors in on_device.items():
            vector = _stacked(tensors, device) if weight else _zeros(tensors, device)
            place = (device, tuple(tensors))
            before = self._sums.get(place)
            # not in place: what an evaluation under inference_mode made may not be written to later
            self._sums[place] = vector * weight if before is None else before.add(vector, alpha=weight)

    def _check(self, verb: str, values: Mapping[str, Tensor | float]) -> None:
        problems = []
        for name, value in values.items():
            if isinstance(value, Tensor):
                if value.numel() != 1 or value.is_complex():
                    shape = tuple(value.shape)
                    problems.append(f"{name!r} is {value.dtype} of shape {shape}; one real number")
            elif not _is_number(value):
                problems.append(f"{name!r} is {type(value).__name__}; a number, or a tensor of one number")
            if (self._weights.get(name, 0) is None) is (verb == "add") and name in self._weights:
                problems.append(f"{name!r} was a {'count' if verb == 'add' else 'mean'} before")
        if problems:
            raise UsageError(f"Meter.{verb}(…) cannot take these figures:", problems=problems)


def _is_number(value: object) -> bool:
    return isinstance(value, Real)  # numpy's numbers are, tensors are not


def _fetched(
    parts: list[Tensor], on_host: list[float], across: Callable[[Tensor], Tensor] | None
) -> list[float]:
    """The vectors and then the numbers, in one transfer; added up over the ranks before it."""
    device = next((part.device for part in parts if part.device.type != "cpu"), torch.device("cpu"))
    parts = [part.to(device) for part in parts]
    if across is None:
        return [*(torch.cat(parts).tolist() if parts else []), *on_host]
    parts.append(torch.tensor(on_host, dtype=_precision(device), device=device))
    return [float(value) for value in across(torch.cat(parts)).tolist()]


def _precision(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _zeros(tensors: Mapping[str, Tensor], device: torch.device) -> Tensor:
    return torch.zeros(len(tensors), dtype=_precision(device), device=device)


def _stacked(tensors: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """One vector of them all: three kernels, however many figures there are."""
    precision = _precision(device)
    if len({t.dtype for t in tensors.values()}) > 1:  # stacking would round a large count to a float32
        return torch.stack([t.reshape(()).to(precision) for t in tensors.values()])
    return torch.stack([t.reshape(()) for t in tensors.values()]).to(precision)
