"""How long a training goes on: its steps, this call's hours, and somebody who asks it to stop."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from frostline.signals import Signals
from frostline.wording import duration

DURATIONS = "durations.json"
"""In a run's folder: seconds that a save and an evaluation took, for the next call under a time limit.

Not in the checkpoint: it cannot know how long it takes to write, nor the evaluation that comes after it, and
a call may go on from one that was written before the first evaluation.
"""

_MARGIN, _LOOKS = 1.5, 1.1
"""A save, an evaluation may take longer than the longest so far by these factors."""

_UNTIMED, _SLACK = 0.1, 0.01
"""Shares of a call. An evaluation that nobody has timed is taken to fit where the first one is left, a guess;
the second is kept beside an evaluation for whatever comes between."""

_EARLY = 0.02
"""The share of a call after which a save is made only to learn how long one takes, where nobody knows."""

_TRIES = 2
"""So many calls may be killed while they find out how long an evaluation takes."""


class Limits(Signals):
    """Asked after every step. As a context manager it takes SIGTERM and Ctrl-C."""

    def __init__(
        self, max_hours: float | None, told: Callable[[str], None], began: float | None = None
    ) -> None:
        super().__init__(
            lambda name: told(f"{name}: finishing this step, saving, then stopping. Once more stops now.")
        )
        self.limit_s = None if max_hours is None else 3600 * max_hours
        self.looks_last = False
        """Whether every call ends with an evaluation, for which time has to be kept."""
        self._began = time.monotonic() if began is None else began
        self._longest_step = 0.0
        self._longest: dict[str, float] = {}
        """Of this call's saves and looks (evaluations)."""
        self._known: dict[str, float] = {}
        """Those of an earlier call; they count until this call has some of its own."""
        self._place: Path | None = None
        self._late = False

    def __enter__(self) -> Limits:
        super().__enter__()
        return self

    @property
    def elapsed(self) -> float:
        """Seconds of this call."""
        return time.monotonic() - self._began

    def saved(self, seconds: float) -> None:
        self._took("save", seconds)

    def evaluated(self, seconds: float) -> None:
        self._took("look", seconds)

    def stepped(self, seconds: float) -> None:
        self._longest_step = max(self._longest_step, seconds)

    # what earlier calls measured

    def remember(self, folder: Path) -> dict[str, float]:
        """What an earlier call wrote down in a run's folder; this one's go there as well. {}: nothing yet."""
        if self.limit_s is None:
            return {}
        self._place = folder / DURATIONS
        try:
            found = json.loads(self._place.read_text())
            self.know(found)
        except (OSError, ValueError, TypeError, AttributeError):  # none, or damaged: as in a first call
            self._known = {}
        return self._known

    def know(self, found: Mapping[str, float]) -> None:
        self._known = {name: float(found[name]) for name in ("save", "look", "tried") if name in found}

    def looking(self) -> None:
        """Before an evaluation: one that nobody has timed is counted, in case that it is killed."""
        if self.look_s is None:
            self._known["tried"] = self._known.get("tried", 0) + 1
            self._write()

    def _took(self, what: str, seconds: float) -> None:
        if seconds > self._longest.get(what, -1.0):
            self._longest[what] = seconds
            self._write()

    def _write(self) -> None:
        if self._place is not None:
            aside = self._place.with_name(f".{DURATIONS}.{os.getpid()}")
            with suppress(OSError):  # a full disk: the next call knows less
                aside.write_text(json.dumps(self._known | self._longest) + "\n")
                os.replace(aside, self._place)

    @property
    def look_s(self) -> float | None:
        """Seconds that an evaluation takes; None: nobody has timed one."""
        return (self._known | self._longest).get("look")

    @property
    def _save_s(self) -> float:
        return (self._known | self._longest).get("save", 0.0)

    @property
    def wants_save(self) -> bool:
        """Whether to save only to learn how long it takes: the end of this call has to leave room for it."""
        unknown = "save" not in self._known | self._longest
        return unknown and self.limit_s is not None and self.elapsed >= _EARLY * self.limit_s

    # the end

    @property
    def left_s(self) -> float | None:
        """Seconds of this call that are left for steps; None: there is no limit."""
        return None if self.limit_s is None else max(0.0, self.limit_s - self.elapsed - self.margin)

    @property
    def margin(self) -> float:
        """Seconds that the rest of a call needs: a step, a save, and an evaluation if it ends with one."""
        return _MARGIN * self._save_s + self._longest_step + self._kept_for_look

    @property
    def _kept_for_look(self) -> float:
        """And for a save of the best. One that takes most of a call gets none: nothing would be trained."""
        look = self.look_s
        if not self.looks_last or look is None or self.limit_s is None or look > self.limit_s / 2:
            return 0.0
        return _LOOKS * look + _MARGIN * self._save_s + _SLACK * self.limit_s

    @property
    def over(self) -> bool:
        """Whether there is no time left for a step and a save."""
        return self.limit_s is not None and self.elapsed + self.margin >= self.limit_s

    @property
    def may_look(self) -> bool:
        """Whether an evaluation fits into the time that is left, and a save of the best after it."""
        if self.limit_s is None:
            return True
        needed = _UNTIMED * self.limit_s if self.look_s is None else self.look_s
        return self.elapsed + self._save_s + needed <= self.limit_s

    @property
    def may_time_look(self) -> bool:
        """Whether to find out how long an evaluation takes; not again where calls were killed in it."""
        return self.look_s is None and self.may_look and self._known.get("tried", 0) < _TRIES

    def why_not_look(self) -> str:
        """For people."""
        left = duration(max(0.0, (self.limit_s or 0.0) - self.elapsed))
        if self.look_s is None:
            return f"how long it takes is not known yet, and {left} of this call are left"
        return f"it takes {duration(self.look_s)}, and {left} of this call are left"

    @property
    def reason(self) -> str | None:
        """Why to stop, if anything says so. A limit is no signal: the first one still only asks."""
        if self.why is None and (self._late or self.over):
            self._late = True
            return f"the time limit of {(self.limit_s or 0) / 3600:g} h"
        return self.why
