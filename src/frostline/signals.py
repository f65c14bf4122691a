"""Being asked to stop: SIGTERM and Ctrl-C once set `why`; being asked again stops at once."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_SAME_S = {signal.SIGTERM: 2.0, signal.SIGINT: 0.2}
"""Seconds after the first signal in which one of these is the same request once more, delivered twice: GNU
`timeout` signals its child and then the group, torchrun passes on what the terminal sent to all. Nobody is so
quick with a second Ctrl-C."""


class Signals:
    """As a context manager it takes the signals, if this is the main thread.

    told: called with the signal's name when it first comes.
    """

    def __init__(self, told: Callable[[str], None]) -> None:
        self.why: str | None = None
        self._asked_when = 0.0
        self._told = told
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._asked)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _asked(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.why is None:
            self.why, self._asked_when = signal.Signals(number).name, now
            self._told(self.why)
        elif now - self._asked_when >= _SAME_S[signal.Signals(number)]:
            raise KeyboardInterrupt
