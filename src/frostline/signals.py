"""Being asked to stop: SIGTERM and Ctrl-C once set `why`; the second time stops at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class Signals:
    """As a context manager it takes the signals, if this is the main thread.

    told: called with the signal's name when it first comes.
    """

    def __init__(self, told: Callable[[str], None]) -> None:
        self.why: str | None = None
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
        if self.why is not None:
            raise KeyboardInterrupt
        self.why = signal.Signals(number).name
        self._told(self.why)
