"""How a workload is trained: `Training`, settings that are checked when they are written down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from frostline.errors import UsageError
from frostline.tables import nearest

TrainPrecision = Literal["fp32", "tf32", "bf16", "fp16"]
ScheduleKind = Literal["constant", "cosine", "linear", "wsd"]


@dataclass(frozen=True)
class Training:
    """Settings of a training. A workload takes them as a dict: `training={"precision": "bf16", "clip": 1.0}`.

    >>> Training.of({"precision": "bf16", "microbatch": 16}).precision
    'bf16'
    >>> Training.of({"precison": "bf16"})
    Traceback (most recent call last):
    ...
    frostline.errors.UsageError: These settings of a training cannot work:
      - there is no setting 'precison' (did you mean 'precision'?)
    """

    precision: TrainPrecision = "fp32"
    """bf16 and fp16: weights stay in fp32, forward runs in autocast; fp16 with a scaler."""
    microbatch: int | None = None
    """The most rows of a forward and backward pass; a batch of more is split into parts of even size and its
    gradients added up. None: all."""
    clip: float | None = None
    """The largest norm of all gradients together."""
    schedule: ScheduleKind | None = None
    """None: constant where --steps or --epochs say how long, otherwise wsd."""
    warmup_steps: int = 0
    decay: float = 0.2
    """wsd: the last share of the run, in which the rate falls."""
    floor: float = 0.0
    """Where the rate ends, as a share of its peak."""
    compile: bool = False
    deterministic: bool = False
    """Refuse operations that may give other bits when they run again."""
    seed: int = 0
    log_every: int = 10
    eval_every: int | None = None
    """Steps between evaluations; None: only at the end."""
    eval_rows: int | None = None
    """The most samples that such an evaluation takes, always the same ones, chosen by a hash of their keys;
    None: all that are held out."""
    save_every: int | None = None
    """Steps between checkpoints, beside those every `save_minutes` and at the end."""
    save_minutes: float = 10.0
    keep: int = 3
    """Checkpoints that stay, beside the best one."""
    keep_every: int | None = None
    """Checkpoints of every so many steps stay for good."""
    max_bad_steps: int = 10
    """Updates skipped for a loss or gradient that is no number, within `bad_window` steps; more stop it."""
    bad_window: int = 100
    unused: tuple[str, ...] = ()
    """Parameters that may train without gradient, or be frozen and move (a teacher that follows its student):
    names, or patterns such as "head.*"."""

    def __post_init__(self) -> None:
        problems = [*self._problems()]
        if problems:
            raise UsageError("These settings of a training cannot work:", problems=problems)

    @classmethod
    def of(cls, settings: Training | Mapping[str, Any] | None) -> Training:
        """Settings from a dict, a Training, or nothing at all."""
        if settings is None:
            return cls()
        if isinstance(settings, Training):
            return settings
        return cls().but(settings)

    def but(self, changes: Mapping[str, Any]) -> Training:
        """The same with other values for some; those that are None stay as they are."""
        if not isinstance(changes, Mapping):
            raise UsageError(f"training is {changes!r}; expected a dict such as {{'precision': 'bf16'}}.")
        known = [one.name for one in fields(self)]
        changes = {str(name): value for name, value in changes.items()}
        unknown = [f"there is no setting {n!r}{nearest(n, known)}" for n in changes if n not in known]
        if unknown:
            raise UsageError("These settings of a training cannot work:", problems=unknown)
        given = {name: value for name, value in changes.items() if value is not None}
        if "unused" in given:
            names = given["unused"]
            given["unused"] = tuple(names) if isinstance(names, list | tuple) else (names,)
        return replace(self, **given)

    def _problems(self) -> list[str]:
        found = []
        choices = {"precision": get_args(TrainPrecision), "schedule": (None, *get_args(ScheduleKind))}
        for name, among in choices.items():
            if getattr(self, name) not in among:
                found.append(f"{name} is {getattr(self, name)!r}; one of {', '.join(map(repr, among))}")
        for name in ("log_every", "keep", "bad_window"):
            found += _whole(name, getattr(self, name), 1)
        for name in ("warmup_steps", "max_bad_steps", "seed"):
            found += _whole(name, getattr(self, name), 0)
        for name in ("microbatch", "eval_every", "eval_rows", "save_every", "keep_every"):
            if getattr(self, name) is not None:
                found += _whole(name, getattr(self, name), 1)
        if self.clip is not None and not (_number(self.clip) and self.clip > 0):
            found.append(f"clip is {self.clip!r}; a number above 0, or None for no clipping")
        if not (_number(self.save_minutes) and self.save_minutes > 0):
            found.append(f"save_minutes is {self.save_minutes!r}; a number above 0")
        for name in ("decay", "floor"):
            if not (_number(getattr(self, name)) and 0 <= getattr(self, name) <= 1):
                found.append(f"{name} is {getattr(self, name)!r}; a share from 0 to 1")
        if self.decay == 0:
            found.append("decay is 0; a share above 0, or schedule 'constant'")
        for name in ("compile", "deterministic"):
            if not isinstance(getattr(self, name), bool):
                found.append(f"{name} is {getattr(self, name)!r}; True or False")
        if not isinstance(self.unused, tuple) or not all(isinstance(name, str) for name in self.unused):
            found.append(f"unused is {self.unused!r}; names or patterns of parameters, as ('head.*',)")
        if type(self.seed) is int and self.seed >= 2**63:
            found.append(f"seed is {self.seed!r}; below 2**63")
        return found


def _whole(name: str, value: Any, least: int) -> list[str]:
    fine = type(value) is int and value >= least
    return [] if fine else [f"{name} is {value!r}; a whole number from {least}"]


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
