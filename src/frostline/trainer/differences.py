"""What does not fit between a checkpoint and what it is loaded into, all of it at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from frostline.errors import FrostlineError
from frostline.wording import size

_SHOWN = 60


class CheckpointError(FrostlineError):
    """A checkpoint that cannot be written, read, or loaded into this model; lists all that is wrong.

    >>> print(CheckpointError("The checkpoint does not fit:", problems=["head.weight: missing"]))
    The checkpoint does not fit:
      - head.weight: missing
    """

    def __init__(self, message: str, *, problems: Iterable[str] = ()) -> None:
        self.problems = tuple(problems)
        shown = [*self.problems[:_SHOWN]]
        if len(self.problems) > _SHOWN:
            shown.append(f"… and {len(self.problems) - _SHOWN:,} more (error.problems has all)")
        super().__init__("\n  - ".join([message, *shown]))


class CheckpointFull(CheckpointError):
    """The disk has no room for a checkpoint. Those written before are whole."""

    def __init__(self, place: str, *, needed: int, free: int, why: str) -> None:
        self.place, self.needed, self.free, self.why = place, needed, free, why
        self.missing = max(0, needed - free)
        super().__init__(
            f"No room for a checkpoint in {place}: it needs {needed:,} bytes ({size(needed)}), {free:,} are "
            f"free, {self.missing:,} are missing ({why}). The checkpoints written before are whole; free "
            f"some space, or keep fewer of them, and run the same command again."
        )

    def __reduce__(self) -> tuple[object, ...]:
        return (_full_again, (self.place, self.needed, self.free, self.why))


def _full_again(place: str, needed: int, free: int, why: str) -> CheckpointFull:
    return CheckpointFull(place, needed=needed, free=free, why=why)


def misfit(here: Tensor, there: Tensor, *, dtypes: bool = True) -> str | None:
    """How a checkpoint's tensor (`there`) differs in shape or type from the one it is for (`here`)."""
    wrong = []
    if here.shape != there.shape:
        wrong.append(f"{list(there.shape)} in the checkpoint, {list(here.shape)} here")
    if dtypes and here.dtype != there.dtype:
        wrong.append(f"{_short(there)} in the checkpoint, {_short(here)} here")
    return "; ".join(wrong) or None


def differences(here: Mapping[str, Tensor], there: Mapping[str, Tensor]) -> list[str]:
    """Every name, shape and type that differs, in one list.

    >>> import torch
    >>> differences({"a": torch.zeros(2), "b": torch.zeros(1)}, {"a": torch.zeros(3), "c": torch.zeros(1)})
    ['a: [3] in the checkpoint, [2] here', 'b: not in the checkpoint', 'c: in the checkpoint, but not here']
    """
    found = []
    for name, tensor in here.items():
        if name not in there:
            found.append(f"{name}: not in the checkpoint")
        elif wrong := misfit(tensor, there[name]):
            found.append(f"{name}: {wrong}")
    return found + unexpected(here, there)


def unexpected(here: Iterable[str], there: Iterable[str]) -> list[str]:
    known = set(here)
    return [f"{name}: in the checkpoint, but not here" for name in there if name not in known]


def some(names: Sequence[str], n: int = 5) -> str:
    """
    >>> some(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    return ", ".join(names[:n]) + (f" and {len(names) - n:,} more" if len(names) > n else "")


def _short(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
