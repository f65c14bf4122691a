"""What the device does during a few steps, by torch's own tracer: busy time, and why it was idle.

The tracer slows the host down, so only the device's side is used: how long kernels and copies ran. How long
a step takes is pass A's to say.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
_NEAR = 3e-6
"""Seconds: shorter gaps between kernels are the device's own."""

_QUIET = 1e-3
"""Seconds without a call of torch that are no longer Python between two calls."""

Interval = tuple[float, float]


class Kernels:
    """A trace of the steps between `begin` and `end`."""

    def __init__(self, *, cuda: bool) -> None:
        wanted = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        self._profile = profile(activities=wanted, acc_events=True)
        self._cuda = cuda

    def begin(self) -> None:
        self._profile.start()

    def end(self, steps: int, trace: Path | None) -> dict[str, Any]:
        self._profile.stop()
        if trace is not None:
            self._profile.export_chrome_trace(str(trace))
        found: dict[str, Any] = {"steps": steps}
        if self._cuda:
            found |= _device(self._profile, steps)
        return found


def _device(traced: Any, steps: int) -> dict[str, Any]:
    """Busy and idle seconds a step, idle ones by cause."""
    kernels: list[Interval] = []
    copies: list[Interval] = []
    up = {"pinned": 0.0, "pageable": 0.0}
    host: dict[str, list[Interval]] = {"data": [], "copy": [], "optimizer": [], "sync": [], "torch": []}
    ends: list[float] = []
    events = traced.profiler.kineto_results.events()
    zero = min((event.start_ns() for event in events), default=0)  # since 1970: too many digits
    for event in events:
        start = (event.start_ns() - zero) * 1e-9
        span = (start, start + event.duration_ns() * 1e-9)
        name = event.name()
        if name.startswith("frostline:end") and event.device_type() != torch._C._autograd.DeviceType.CUDA:
            ends.append(span[0])
            continue
        if event.device_type() == torch._C._autograd.DeviceType.CUDA:
            if name.startswith("frostline:") or event.is_user_annotation():
                continue  # a label's shadow on the device
            (copies if name.startswith(("Memcpy HtoD", "Memcpy DtoH")) else kernels).append(span)
            for kind in up:
                up[kind] += span[1] - span[0] if name.startswith(f"Memcpy HtoD ({kind.capitalize()}") else 0.0
        elif name.startswith("frostline:"):
            kind = name.split(":")[1]
            if kind in host:
                host[kind].append(span)
        elif name.startswith(_WAITS) and not name.startswith("cudaMemcpyAsync"):
            host["sync"].append(span)
        elif not event.is_user_annotation():
            host["torch"].append(span)
    if not kernels:
        return {}
    began, ended = min(k[0] for k in kernels), max(k[1] for k in kernels)
    if ends:  # the first stands where the first step begins; the device may be done long after the last
        began, ended = min(ends), max(*ends, ended)
    kernels, copies = clip(kernels, began, ended), clip(copies, began, ended)
    busy = joined(union([*kernels, *copies]))
    host = {kind: union(spans) for kind, spans in host.items()}
    idle = dict.fromkeys(("data", "copy", "sync", "optimizer", "launch", "other"), 0.0)
    for gap in gaps(busy, began, ended):
        idle[_cause(gap, host)] += gap[1] - gap[0]
    exposed = sum(b - a for a, b in subtract(union(copies), union(kernels)))
    return {
        "busy_s": sum(b - a for a, b in busy) / steps, "idle_s": {n: s / steps for n, s in idle.items()},
        "copy_s": sum(b - a for a, b in union(copies)) / steps, "exposed_copy_s": exposed / steps,
        "kernels": len(kernels) / steps, "up_s": {kind: s / steps for kind, s in up.items()},
    }  # fmt: skip


def _cause(gap: Interval, host: dict[str, list[Interval]]) -> str:
    """What the host did while the device had nothing to do. A wait for the device ends where the gap begins:
    the queue has run dry, and filling it again is that wait's price."""
    length = gap[1] - gap[0]
    for cause in ("data", "copy"):
        if _common(gap, host[cause]) > length / 2:
            return cause
    waits = near(host["sync"], gap[0] - _NEAR, gap[1])
    if any(span[0] < gap[0] and gap[0] - _NEAR < span[1] <= gap[1] for span in waits):
        return "sync"
    if _common(gap, host["optimizer"]) > length / 2:
        return "optimizer"
    # launching is calling torch again and again; a long stretch without is the script's own code
    calls = clip(near(host["torch"], *gap), *gap)
    quiet = max((b - a for a, b in gaps(calls, *gap)), default=0.0)
    return "other" if quiet > max(length / 2, _QUIET) else "launch"


def _common(gap: Interval, spans: list[Interval]) -> float:
    """Seconds of a gap in which one of the spans, which lie apart, goes on."""
    return sum(b - a for a, b in clip(near(spans, *gap), *gap))


def near(spans: list[Interval], began: float, ended: float) -> list[Interval]:
    """Those of spans apart, in their order, that may touch an interval; there are many, so not all are seen.

    >>> near([(0, 1), (2, 3), (4, 5), (6, 7)], 2.5, 4.5)
    [(2, 3), (4, 5)]
    """
    first = bisect_left(spans, began, key=lambda span: span[1])
    return spans[first : bisect_right(spans, ended, key=lambda span: span[0])]


def joined(busy: list[Interval]) -> list[Interval]:
    """With gaps that are the device's own, between one kernel and the next, filled in.

    >>> joined([(0.0, 1.0), (1.000001, 2.0), (3.0, 4.0)])
    [(0.0, 2.0), (3.0, 4.0)]
    """
    found = busy[:1]
    for start, end in busy[1:]:
        if start - found[-1][1] < _NEAR:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return found


def union(spans: list[Interval]) -> list[Interval]:
    """
    >>> union([(0, 2), (1, 3), (5, 6)])
    [(0, 3), (5, 6)]
    """
    found: list[Interval] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def clip(spans: list[Interval], began: float, ended: float) -> list[Interval]:
    """
    >>> clip([(0, 2), (3, 6), (7, 8)], 1, 5)
    [(1, 2), (3, 5)]
    """
    return [(max(a, began), min(b, ended)) for a, b in spans if b > began and a < ended]


def gaps(busy: list[Interval], began: float, ended: float) -> list[Interval]:
    """
    >>> gaps([(1, 2), (3, 4)], 0, 5)
    [(0, 1), (2, 3), (4, 5)]
    """
    found, at = [], began
    for start, end in busy:
        if start > at and at < ended:
            found.append((at, min(start, ended)))
        at = max(at, end)
    return [*found, *([(at, ended)] if at < ended else [])]


def subtract(spans: list[Interval], others: list[Interval]) -> list[Interval]:
    """
    >>> subtract([(0, 4)], [(1, 2)])
    [(0, 1), (2, 4)]
    """
    return [gap for start, end in spans for gap in gaps([o for o in others if o[1] > start], start, end)]
