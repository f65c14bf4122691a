"""When to stop: on SIGTERM, Ctrl-C or a time limit, after the shard under way; at once on a second signal."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from frostline.freezer.progress import Reporter


class Stop:
    """Asked between shards. As a context manager it takes the signals, if this is the main thread."""

    def __init__(self, max_hours: float | None, reporter: Reporter) -> None:
        self._limit = None if max_hours is None else 3600 * max_hours
        self._reporter = reporter
        self._began = self._shard_began = time.monotonic()
        self._longest = 0.0
        self._asked_before = False
        self.why: str | None = None
        self._before: dict[int, Any] = {}

    def __call__(self) -> bool:
        """Whether to stop before the next shard: asked to, or it would not be done in time.

        The time limit lets one shard pass in any case, or the same call again would never get further.
        """
        now = time.monotonic()
        first, self._asked_before = not self._asked_before, True
        self._longest = max(self._longest, now - self._shard_began)
        self._shard_began = now
        late = self._limit is not None and now - self._began + self._longest > self._limit
        if self.why is None and self._limit is not None and late and not first:
            self.why = f"the time limit of {self._limit / 3600:g} h"
        return self.why is not None

    def start(self) -> None:
        """The first shard begins now."""
        self._shard_began = time.monotonic()

    def __enter__(self) -> Stop:
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
        self._reporter.note(f"{self.why}: finishing this shard, then stopping. Once more stops now.")
