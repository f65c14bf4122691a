"""How long a training goes on, and the schedule that is bound to it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from frostline.errors import UsageError
from frostline.supply import Supply
from frostline.trainer.schedule import Schedule
from frostline.training import Training

_RESERVED = 0.03
"""wsd by the clock: the rate has fallen this share of a call before its end, so that the end is reached."""


@dataclass(frozen=True)
class Budget:
    """How long: in steps or epochs in all, hours of this call, hours that the schedule is bound to."""

    steps: int | None = None
    epochs: float | None = None
    max_hours: float | None = None
    schedule_hours: float | None = None

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {value!r}; a number above 0"
            for name, value in asdict(self).items()
            if value is not None and not (isinstance(value, int | float) and 0 < value < math.inf)
        ]
        if self.steps is not None and self.epochs is not None:
            problems.append("steps and epochs are both given; one of them is the end")
        if self.steps is None and self.epochs is None and self.max_hours is None and not self.schedule_hours:
            problems.append("say how long: steps=, epochs=, max_hours= or schedule_hours=")
        if problems:
            raise UsageError("fl.train(…) cannot start:", problems=problems)

    def total_steps(self, batches: Supply) -> int | None:
        """The end in steps; None where it is given in hours."""
        if self.steps is not None or self.epochs is None:
            return self.steps
        whole = int(self.epochs)
        part = self.epochs - whole
        steps = sum(batches.n_batches(epoch) for epoch in range(whole))
        return max(1, steps + round(part * batches.n_batches(whole)))

    def schedule(
        self, s: Training, total: int | None, *, before: float, spent: float
    ) -> tuple[Schedule, bool]:
        """The schedule, and whether it is bound to this call only.

        before: seconds of training in earlier calls. spent: seconds of this call so far.
        """
        hours = self.max_hours
        kind = s.schedule or ("constant" if total is not None else "wsd")
        options: dict[str, Any] = {"warmup_steps": s.warmup_steps, "floor": s.floor, "decay": s.decay}
        if self.schedule_hours:
            return Schedule(kind, total_s=3600 * self.schedule_hours, **options), False
        if total is not None:
            return Schedule(kind, total_steps=total, **options), False
        if kind != "wsd" or hours is None:
            return Schedule(kind, **options), False
        call = max(1.0, 3600 * hours - spent) * (1 - _RESERVED)
        options["decay"] = s.decay * call / (before + call)
        return Schedule(kind, total_s=before + call, **options), True
