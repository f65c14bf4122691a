"""What happens inside of steps: nested stretches of time, by the host's clock and by events on the device.

Nothing here waits for the device. Events are looked at when their block is over and the device has settled.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from . import cuda

_NONE = [(-1, None)]


@dataclass(slots=True)
class Span:
    kind: str
    name: str
    parent: int
    """Its place among the spans; -1: nothing of ours is around it."""
    thread: int
    step: int
    start: float
    end: float = -1.0
    first: Any = None
    last: Any = None
    beside: bool = False
    """Of another thread or stream: it runs beside the step's own work."""
    ours: float = 0.0
    """Seconds that entering and leaving it took the host: time of what is around it."""


class Spans:
    """Spans of one block of steps.

    >>> spans = Spans(cuda=False)
    >>> a = spans.enter("forward", "Model")
    >>> b = spans.enter("forward", "Model.head")
    >>> spans.leave(b); spans.leave(a)
    >>> [(s.name, s.parent) for s in spans.found]
    [('Model', -1), ('Model.head', 0)]
    """

    def __init__(self, *, cuda: bool, label: Callable[[str], Any] | None = None) -> None:
        self.found: list[Span] = []
        self.step = 0
        self.cuda, self._label = cuda, label
        self._owner = threading.get_ident()
        self._stacks: dict[int, list[tuple[int, Any]]] = {}
        self._lock = threading.Lock()
        self._base: Any = None
        self._began = time.perf_counter()
        self._stream = self._device = 0
        if cuda:
            self._device = torch.cuda.current_device()
            self._stream = torch.cuda.current_stream().cuda_stream
            self._base = self._event()
        self.marks: list[tuple[float, Any]] = []

    def restart(self) -> None:
        """The block's steps begin now: what came before was hooking up, and a step to get used to it."""
        with self._lock:
            self.found, self.marks, self.step, self._stacks = [], [], 0, {}
        self._began = time.perf_counter()
        if self.cuda:
            self._base = self._event()
        self._mark()

    def _mark(self) -> None:
        """The tracer sees where steps end, too."""
        if self._label is not None:
            with self._label("frostline:end:step"):
                pass

    def boundary(self) -> None:
        """A step ended here."""
        self._mark()
        self.marks.append((time.perf_counter(), self._event()))
        self.step += 1

    def enter(self, kind: str, name: str) -> int:
        began = time.perf_counter()
        thread = threading.get_ident()
        stack = self._stacks.setdefault(thread, [])
        stream = torch.cuda.current_stream().cuda_stream if self.cuda else 0
        beside = stream != self._stream if self.cuda else thread != self._owner
        around = self._stacks.get(self._owner, []) if self.cuda and not beside and not stack else []
        label = self._label(f"frostline:{kind}:{name}") if self._label is not None else None
        if label is not None:
            label.__enter__()
        span = Span(kind, name, (stack or around or _NONE)[-1][0], thread, self.step, 0.0, beside=beside)
        with self._lock:
            place = len(self.found)
            self.found.append(span)
        stack.append((place, label))
        span.first = self._event()
        span.start = time.perf_counter()
        span.ours = span.start - began
        return place

    def leave(self, place: int) -> None:
        """Ends a span, and those inside of it that an exception left open."""
        now = time.perf_counter()
        stack = self._stacks.get(threading.get_ident(), [])
        event = self._event()
        while stack and stack[-1][0] >= place:
            at, label = stack.pop()
            span = self.found[at]
            span.end, span.last = now, event
            if label is not None:
                label.__exit__(None, None, None)
            if at == place:
                span.ours += time.perf_counter() - now

    def within(self, thread: int) -> bool:
        """Whether a thread is inside of a span now."""
        return bool(self._stacks.get(thread))

    def _event(self) -> Any:
        if not self.cuda or torch.cuda.current_device() != self._device:
            return None
        if torch.cuda.is_current_stream_capturing():
            return None
        return cuda.event()

    # afterwards

    def lines(self) -> list[list[Any]]:
        """[kind, name, parent, step, start, end, device start, device end, beside, ours], in seconds since
        the block began; ask when the device has settled."""
        return [
            [
                s.kind, s.name, s.parent, s.step, s.start - self._began, s.end - self._began,
                *self._on_device(s.first, s.last), int(s.beside), s.ours,
            ]
            if s.end >= 0
            else [s.kind, s.name, s.parent, -1, 0.0, 0.0, 0.0, 0.0, 1, 0.0]
            for s in self.found
        ]  # fmt: skip

    def bounds(self) -> list[list[float]]:
        """The ends of steps: host, device."""
        return [[at - self._began, self._since(event)] for at, event in self.marks]

    def lag(self) -> float:
        """What the device's clock is behind the host's: the block began while it was still at work."""
        if not self.cuda:
            return 0.0
        last = self._event()
        if last is None:
            return 0.0
        last.synchronize()
        return max(0.0, time.perf_counter() - self._began - self._since(last))

    def _on_device(self, first: Any, last: Any) -> tuple[float, float]:
        return (
            (self._since(first), self._since(last)) if first is not None and last is not None else (0.0, 0.0)
        )

    def _since(self, event: Any) -> float:
        return 1e-3 * float(self._base.elapsed_time(event)) if self.cuda and event is not None else 0.0
