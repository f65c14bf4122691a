"""What does not fit between a checkpoint and what it is loaded into, all of it at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor


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
