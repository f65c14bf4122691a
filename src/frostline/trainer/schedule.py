"""The learning rate as a share of its peak: a pure function of the step and the seconds trained.

Nothing is counted here, so there is nothing to restore and nothing that can run past its end: whoever asks
for a step beyond it gets the floor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from frostline.errors import UsageError
from frostline.wording import duration

Kind = Literal["constant", "cosine", "linear", "wsd"]


@dataclass(frozen=True)
class Schedule:
    """
    >>> schedule = Schedule("cosine", warmup_steps=9, total_steps=109, floor=0.1)
    >>> [round(schedule.factor(step), 3) for step in (0, 9, 59, 109, 1000)]
    [0.1, 1.0, 0.55, 0.1, 0.1]
    >>> schedule.told()
    'cosine: 9 steps up to the peak, then down to 0.1 of it at step 109'
    """

    kind: Kind
    """constant; cosine or linear from the peak to the floor; wsd: constant, then linear at the end."""
    warmup_steps: int = 0
    """Steps before the peak; the rate of step 0 is already above zero."""
    total_steps: int | None = None
    """The end, in optimiser steps: step number `total_steps` would have the floor's rate."""
    total_s: float | None = None
    """The end in seconds of training, instead."""
    decay: float = 0.2
    """wsd: the last share of the whole in which the rate falls."""
    floor: float = 0.0
    """The share of the peak at the end, and ever after."""

    def __post_init__(self) -> None:
        problems = [*_of_kind(self), *_of_numbers(self)]
        if problems:
            raise UsageError(f"Schedule({self.kind!r}, …) cannot work:", problems=problems)

    def factor(self, step: int, elapsed_s: float = 0.0) -> float:
        """The rate of this step (the first is 0) over the peak: from 0 to 1, the floor from the end on."""
        if step < 0 or not elapsed_s >= 0:
            raise UsageError(f"Schedule.factor(step={step}, elapsed_s={elapsed_s}): both start at 0.")
        end = self._end()
        now = step if self.total_steps is not None else elapsed_s
        if self.kind == "constant" or end is None:
            return self._rising(step)
        if now >= end:
            return self.floor
        start = self._falls_from(end)
        through = max(0.0, (now - start) / (end - start))
        return self._rising(step) * max(self.floor, 1 - (1 - self.floor) * (1 - self._shape(through)))

    def _end(self) -> float | None:
        return self.total_steps if self.total_steps is not None else self.total_s

    def _rising(self, step: int) -> float:
        return min(1.0, (step + 1) / (self.warmup_steps + 1))

    def _falls_from(self, end: float) -> float:
        """Where the fall begins. In seconds, how long the warm-up takes is not known: both are multiplied."""
        risen = self.warmup_steps if self.total_steps is not None else 0
        if self.kind != "wsd":
            return risen
        falls = end * (1 - self.decay)
        return min(max(risen, math.floor(falls) if self.total_steps is not None else falls), end)

    def _shape(self, through: float) -> float:
        return 0.5 * (1 + math.cos(math.pi * through)) if self.kind == "cosine" else 1 - through

    def decay_begins(self) -> float | None:
        """wsd: the step (or second) that is the last at the peak; None for the others and for an open end.

        A state taken before it is one that no smaller rate has touched.
        """
        end = self._end()
        return self._falls_from(end) if self.kind == "wsd" and end is not None else None

    def told(self) -> str:
        """One line for people."""
        up = f"{self.warmup_steps:,} steps up to the peak, then " if self.warmup_steps else ""
        end = self._end()
        if self.kind == "constant" or end is None:
            open_end = "" if self.kind == "constant" else ", with no end set: it does not fall"
            return f"{self.kind}: {up}the peak throughout{open_end}"
        begins = self.decay_begins()
        stays = f"the peak until {self._at(begins)}, then " if begins is not None else ""
        return f"{self.kind}: {up}{stays}down to {self.floor:g} of it at {self._at(end)}"

    def _at(self, when: float) -> str:
        return f"step {when:,.0f}" if self.total_steps is not None else duration(when)


def peaks(optimizer: Any) -> list[float]:
    """The learning rate of each of an optimiser's groups, as it was given: what a schedule scales."""
    given = [group.get("lr") for group in optimizer.param_groups]
    problems = [f"group {i}: lr is {rate!r}" for i, rate in enumerate(given) if rate is None]
    if problems:
        raise UsageError(
            f"{type(optimizer).__qualname__} has no learning rate for the schedule to scale; expected a "
            f"number in each group. Give it lr=… (and switch off a rate that it finds by itself):",
            problems=problems,
        )
    return [float(rate) for rate in given]


def _of_kind(schedule: Schedule) -> list[str]:
    end = (schedule.total_steps, schedule.total_s)
    problems = []
    if schedule.kind not in get_args(Kind):
        problems.append(f"kind is {schedule.kind!r}; one of {', '.join(get_args(Kind))}")
    elif schedule.kind in ("cosine", "linear") and end == (None, None):
        problems.append(
            f"{schedule.kind} has to know its end: give steps, epochs or schedule_hours (--schedule-hours); "
            f"max_hours ends a call, and not the schedule"
        )
    if None not in end:
        problems.append("total_steps and total_s are both given; an end is one of them")
    return problems


def _of_numbers(schedule: Schedule) -> list[str]:
    warmup, steps, seconds = schedule.warmup_steps, schedule.total_steps, schedule.total_s
    problems = []
    if not _whole(warmup) or warmup < 0:
        problems.append(f"warmup_steps is {warmup!r}; a whole number from 0")
    if steps is not None and (not _whole(steps) or steps < 1):
        problems.append(f"total_steps is {steps!r}; a whole number from 1")
    elif steps is not None and _whole(warmup) and warmup >= steps and schedule.kind != "constant":
        problems.append(f"warmup_steps is {warmup} of {steps} in all; no step is left at the peak")
    if seconds is not None and (not _number(seconds) or not 0 < seconds < math.inf):
        problems.append(f"total_s is {seconds!r}; seconds above 0")
    for name, least in (("decay", "above 0"), ("floor", "from 0")):
        value = getattr(schedule, name)
        if not _number(value) or not 0 <= value <= 1 or (name == "decay" and value == 0):
            problems.append(f"{name} is {value!r}; a share {least} to 1")
    return problems


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def changed(old: Schedule, new: Schedule, step: int, elapsed_s: float = 0.0) -> str | None:
    """What going on under `new` does to the rate, in a sentence with both rates; None when they are equal.

    >>> changed(Schedule("linear", total_steps=100), Schedule("linear", total_steps=200), 80)
    'At step 80 the rate goes from 0.2 of its peak back up to 0.6: it was to end at step 100, it now ends at
    step 200.'
    """
    if old == new:
        return None
    was, now = old.factor(step, elapsed_s), new.factor(step, elapsed_s)
    if math.isclose(was, now, rel_tol=1e-9, abs_tol=1e-12):
        moves = f"stays at {now:.3g} of its peak"
    else:
        moves = f"goes from {was:.3g} of its peak {'back up' if now > was else 'down'} to {now:.3g}"
    kinds = f" ({old.kind} before, {new.kind} now)" if old.kind != new.kind else ""
    return f"At step {step:,} the rate {moves}: {_ends(old, 'was to', '')}, {_ends(new, 'now', 's')}{kinds}."


def _ends(schedule: Schedule, when: str, s: str) -> str:
    end = schedule._end()
    if schedule.kind == "constant" or end is None:
        return "it was to stay there" if not s else "it now stays there"
    begins = schedule.decay_begins()
    falls = f" (falling from {schedule._at(begins)})" if begins is not None else ""
    return f"it {when} end{s} at {schedule._at(end)}{falls}"
