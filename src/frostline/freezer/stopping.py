"""When to stop: on SIGTERM, Ctrl-C or a time limit, after the shard under way; at once on a second signal."""

from __future__ import annotations

import time

from frostline.freezer.progress import Reporter
from frostline.signals import Signals


class Stop(Signals):
    """Asked between shards. As a context manager it takes the signals, if this is the main thread."""

    def __init__(self, max_hours: float | None, reporter: Reporter) -> None:
        super().__init__(
            lambda name: reporter.note(f"{name}: finishing this shard, then stopping. Once more stops now.")
        )
        self._limit = None if max_hours is None else 3600 * max_hours
        self._began = self._shard_began = time.monotonic()
        self._longest = 0.0
        self._asked_before = False

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

    def __enter__(self) -> Stop:
        super().__enter__()
        return self

    def start(self) -> None:
        """The first shard begins now."""
        self._shard_began = time.monotonic()
