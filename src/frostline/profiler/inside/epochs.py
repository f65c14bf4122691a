"""What stands between epochs: from the end of a step to the first batch of a loader that began anew.

Every beginning is seen, also in steps that only settle and in those that nothing else is seen of: an epoch
has one, and a run of a hundred steps may not have another.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any

_MOST = 1000
"""Beginnings that are kept, the newest: a script of tiny epochs has one every other step."""


class Epochs:
    """Tells a loader's record, under "starts": [when the last step had ended, seconds from there to the first
    batch, seconds of these that the loader took to end and to begin]."""

    def __init__(self) -> None:
        self._last: tuple[float, int] | None = None

    def step(self) -> None:
        """A step ended."""
        self._last = time.perf_counter(), threading.get_ident()

    @property
    def aside(self) -> bool:
        """Whether another thread is asking than the one that steps."""
        return self._last is not None and self._last[1] != threading.get_ident()

    def begins(self, iterator: Any, about: dict[str, Any]) -> None:
        """Its first batch is waited for in a way of its own, once; the iterator is not kept alive by that."""
        began = time.perf_counter()
        held: Any = weakref.ref(iterator)

        def _next_data() -> Any:
            iterator = held()
            del iterator._next_data
            batch = iterator._next_data()
            self.came(about, began)
            return batch

        iterator._next_data = _next_data

    def came(self, about: dict[str, Any], began: float | None = None) -> None:
        """The first batch. began: when its loader did; None: when the last step ended."""
        ending, about["ending"] = about["ending"], 0.0
        if self._last is None or self.aside:
            return
        now, last = time.perf_counter(), self._last[0]
        began = last if began is None else began
        if began >= last:  # not one that began ahead, while steps went on
            about["starts"].append([last, now - last, min(now - last, now - began + ending)])
            del about["starts"][:-_MOST]
