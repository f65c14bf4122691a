"""Where two results differ, and by how much."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from frostline.execution.columns import as_value
from frostline.inspector.report import listed
from frostline.inspector.snapshot import content

_ROUND_OFF = 1000
"""Units in the last place that a deep network may pile up when the order of its sums changes."""


@dataclass(frozen=True)
class Difference:
    """A field whose rows differ. by: the largest difference; None when it is not one of numbers."""

    field: str
    rows: tuple[int, ...]
    by: float | None
    round_off: bool

    def told(self, keys: Sequence[str]) -> str:
        known = [keys[row] for row in self.rows if row < len(keys)]
        whom = f" for {listed(dict.fromkeys(known))}" if known else ""
        how = "" if self.by is None else f" by up to {self.by:.3g}"
        return f"{self.field!r} differs{how}{whom}"


def differences(a: Mapping[str, Any], b: Mapping[str, Any], rows: Iterable[int] = ()) -> list[Difference]:
    """The fields whose rows (all, unless some are named) differ in any bit.

    >>> one, other = {"x": torch.zeros(3)}, {"x": torch.tensor([0.0, 0.5, 0.0])}
    >>> differences(one, other)[0].told(["a", "b", "c"])
    "'x' differs by up to 0.5 for 'b'"
    """
    wanted = list(rows)
    found = (_column(name, a[name], b.get(name), wanted) for name in a)
    return [difference for difference in found if difference is not None]


def _column(name: str, a: Any, b: Any, wanted: list[int]) -> Difference | None:
    if not _has_rows(a) or not _has_rows(b) or len(a) != len(b):
        return None if _same(a, b) else Difference(name, (), _by(a, b), False)
    rows = [i for i in (wanted or range(len(a))) if i < len(a) and not _same(a[i], b[i])]
    if not rows:
        return None
    steps = [_by(a[i], b[i]) for i in rows]
    by = None if None in steps else max(step for step in steps if step is not None)
    return Difference(name, tuple(rows), by, all(_is_round_off(a[i], b[i]) for i in rows))


def _has_rows(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, Tensor | np.ndarray) and value.ndim > 0)


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(content(a) == content(b))


def _numbers(value: Any) -> Tensor | None:
    if isinstance(value, Tensor | np.ndarray | bool | int | float | np.number):
        numbers = torch.as_tensor(as_value(value)).detach().cpu()  # not every device has doubles
        return numbers.to(torch.complex128 if numbers.is_complex() else torch.double)
    return None


def _by(a: Any, b: Any) -> float | None:
    x, y = _numbers(a), _numbers(b)
    if x is None or y is None or x.shape != y.shape or not x.numel():
        return None
    return float((x - y).abs().nan_to_num(nan=float("inf")).max())


def _is_round_off(a: Any, b: Any) -> bool:
    """Small beside the row's own size: another order of sums, and not another result."""
    by = _by(a, b)
    if by is None or not isinstance(a, Tensor) or not a.is_floating_point():
        return False
    eps = torch.finfo(a.dtype).eps
    limit = min(_ROUND_OFF * eps, max(0.02, 4 * eps))
    return by <= limit * max(float(a.abs().max()), eps)
