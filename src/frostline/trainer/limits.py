"""How long a training goes on: its steps, this call's hours, and somebody who asks it to stop."""

from __future__ import annotations

import time
from collections.abc import Callable

from frostline.signals import Signals

_MARGIN = 1.5
"""A save may take longer than the longest so far by this factor."""


class Limits(Signals):
    """Asked after every step. As a context manager it takes SIGTERM and Ctrl-C."""

    def __init__(
        self, max_hours: float | None, told: Callable[[str], None], began: float | None = None
    ) -> None:
        super().__init__(
            lambda name: told(f"{name}: finishing this step, saving, then stopping. Once more stops now.")
        )
        self.limit_s = None if max_hours is None else 3600 * max_hours
        self._began = time.monotonic() if began is None else began
        self._longest_save = 0.0
        self._longest_step = 0.0
        self._longest_look = 0.0
        self._late = False

    def __enter__(self) -> Limits:
        super().__enter__()
        return self

    @property
    def elapsed(self) -> float:
        """Seconds of this call."""
        return time.monotonic() - self._began

    def saved(self, seconds: float) -> None:
        self._longest_save = max(self._longest_save, seconds)

    def evaluated(self, seconds: float) -> None:
        self._longest_look = max(self._longest_look, seconds)

    def stepped(self, seconds: float) -> None:
        self._longest_step = max(self._longest_step, seconds)

    @property
    def margin(self) -> float:
        """Seconds that the rest of a call needs: a step, a save, and an evaluation if there are any."""
        return _MARGIN * self._longest_save + self._longest_step + self._longest_look

    @property
    def over(self) -> bool:
        """Whether there is no time left for a step and a save."""
        return self.limit_s is not None and self.elapsed + self.margin >= self.limit_s

    @property
    def reason(self) -> str | None:
        """Why to stop, if anything says so. A limit is no signal: the first one still only asks."""
        if self.why is None and (self._late or self.over):
            self._late = True
            return f"the time limit of {(self.limit_s or 0) / 3600:g} h"
        return self.why
