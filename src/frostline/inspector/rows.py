"""Whether a row of a chunk depends on the rows beside it, or on its place among them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from frostline.errors import StageFailed
from frostline.execution.columns import Column, taken
from frostline.inspector.comparing import Difference, differences

Call = Callable[[Sequence[Column]], dict[str, Any]]
Seeded = Callable[[Sequence[Column], int], dict[str, Any]]
_ENOUGH = 6
"""Rows of which half can be replaced by several kinds of others."""


@dataclass(frozen=True)
class Beside:
    """Every row beside others, in two calls under other seeds. Where all agree, one look says it all: the
    same again, whatever the seed and whatever stands beside. Where they do not, it says nothing about why.
    """

    well: bool = False
    apart: tuple[Difference, ...] = ()
    result: dict[str, Any] | None = None
    """What one of the calls returned."""

    def told(self, keys: Sequence[str]) -> str:
        return _depends("other rows", self.apart, keys)


def beside_others(call: Seeded, inputs: Sequence[Column], base: dict[str, Any]) -> Beside:
    """Once the even rows stay and once the odd ones; between them stand rows of every other kind."""
    size = len(inputs[0])
    if size < _ENOUGH or not base or not all(_aligned(column, size) for column in base.values()):
        return Beside()
    others = [_assorted(column) for column in inputs]
    result: dict[str, Any] = {}
    for seed, kept in ((2, range(0, size, 2)), (3, range(1, size, 2))):
        try:
            result = call([_mixed(a, b, {*kept}) for a, b in zip(inputs, others, strict=True)], seed)
        except StageFailed:
            return Beside()  # row_findings tries one kind after the other, and notes which it cannot take
        found = differences(base, result, kept)
        if found:
            return Beside(apart=tuple(found))
    return Beside(True, result=result)


def _assorted(column: Column) -> Column:
    """Larger values, smaller ones, zeros and other samples in turn, between even rows as between odd ones.

    Smaller ones, because zeros beside values that are not negative would hide what depends on the least.
    """
    kinds = (_noise(column), _low(column), _zeros(column))
    out = _shifted(column)
    for n, kind in enumerate(kinds):
        out = _mixed(kind, out, {i for i in range(len(column)) if i // 2 % 4 == n})
    return out


def _low(column: Column) -> Column:
    below_zero = isinstance(column, Tensor) and (column.is_floating_point() or column.is_complex())
    return -_noise(column) if below_zero else _shifted(column)  # type: ignore[operator]


def _shifted(column: Column) -> Column:
    return taken(column, [(i + 1) % len(column) for i in range(len(column))])


def row_findings(
    call: Call, inputs: Sequence[Column], keys: Sequence[str], base: dict[str, Any]
) -> tuple[list[str], list[str]]:
    """(reasons, notes) of a function that takes chunks of `len(inputs[0])` rows; the first are of `keys`.

    base: what it returned for these inputs.
    """
    size = len(inputs[0])
    odd = [name for name, column in base.items() if not _aligned(column, size)]
    notes = (
        [f"{', '.join(odd)}: no row for each of the {size} given, so rows were not compared"] if odd else []
    )
    base = {name: column for name, column in base.items() if name not in odd}
    if size < 2 or not base:
        return [], notes
    reasons, said = _mates(call, inputs, keys, base)
    notes += said
    if not reasons:  # what depends on its mates also depends on where they stand: one reason is enough
        more, said = places_findings(call, inputs, keys, base, shifts=(1, size // 2))
        reasons, notes = more, notes + said
    return reasons, notes


def _aligned(column: Any, size: int) -> bool:
    has_rows = isinstance(column, list) or (isinstance(column, Tensor) and column.ndim > 0)
    return has_rows and len(column) == size


def _mates(
    call: Call, inputs: Sequence[Column], keys: Sequence[str], base: dict[str, Any]
) -> tuple[list[str], list[str]]:
    size = len(inputs[0])
    notes: dict[str, None] = {}
    even, odd = range(0, size, 2), range(1, size, 2)
    for (what, others), halves in zip(_other_rows(inputs), ([even], [odd], [even, odd]), strict=True):
        for kept in halves:
            changed = [_mixed(a, b, set(kept)) for a, b in zip(inputs, others, strict=True)]
            try:
                result = call(changed)
            except StageFailed as e:  # values that it cannot take say nothing about its rows
                notes[f"its rows were not tried beside {what}: {e.reason}"] = None
                continue
            found = differences(base, result, [row for row in kept if row < len(keys)] or kept)
            if found:
                return [_depends(what, found, keys)], []
    return [], [*notes]


def _depends(what: str, found: Sequence[Difference], keys: Sequence[str]) -> str:
    told = "; ".join(difference.told(keys) for difference in found)
    return (
        f"a row depends on the rows beside it: with {what} there, at the same place, {told}. "
        f"Compute each row by itself (batch statistics and padding to the longest do not)"
    )


def _other_rows(inputs: Sequence[Column]) -> Iterator[tuple[str, list[Column]]]:
    yield "other samples", [_shifted(column) for column in inputs]
    yield "rows of zeros", [_zeros(column) for column in inputs]
    yield "other values", [_noise(column) for column in inputs]


def _zeros(column: Column) -> Column:
    if isinstance(column, Tensor):
        return torch.zeros_like(column)
    return [value[:1] if isinstance(value, str | bytes) else value for value in column]


def _noise(column: Column) -> Column:
    """Other values of about the same kind: turned round and three times as large; whole numbers (ids) and
    objects only change rows, because any other could be out of range."""
    if isinstance(column, list):
        pairs = zip(column, _shifted(column), strict=True)
        return [value * 3 if isinstance(value, str | bytes) else other for value, other in pairs]
    turned = column.flip([*range(column.ndim)])
    if column.is_floating_point() or column.is_complex():
        return torch.nan_to_num(turned) * 3 + 0.25 if column.is_floating_point() else turned * 3
    if column.dtype is torch.uint8:
        return 255 - turned
    return ~turned if column.dtype is torch.bool else column.flip([0])


def _mixed(column: Column, other: Column, kept: set[int]) -> Column:
    if isinstance(column, Tensor) and isinstance(other, Tensor):
        mask = torch.tensor([i in kept for i in range(len(column))], device=column.device)
        return torch.where(mask.view(-1, *[1] * (column.ndim - 1)), column, other)
    return [mine if i in kept else theirs for i, (mine, theirs) in enumerate(zip(column, other, strict=True))]


def places_findings(
    call: Call,
    inputs: Sequence[Column],
    keys: Sequence[str],
    base: dict[str, Any],
    shifts: Sequence[int] = (1,),
) -> tuple[list[str], list[str]]:
    """(reasons, notes): whether a row depends on its place. Moved by one, each place is compared with the
    next: what is the same everywhere then is the same at all of them.
    """
    size = len(inputs[0])
    notes: list[str] = []
    for shift in sorted({*shifts}):
        order = [(i + shift) % size for i in range(size)]
        back = [(i - shift) % size for i in range(size)]
        turned = call([taken(column, order) for column in inputs])
        result = {name: taken(turned[name], back) for name in base if _aligned(turned.get(name), size)}
        found = differences(base, result)
        real = [difference for difference in found if not difference.round_off]
        if real:
            told = "; ".join(difference.told(keys) for difference in real)
            return [f"a row depends on its place in the chunk: {told}. Compute each row by itself"], []
        notes += [
            f"at another place in the chunk, {difference.told(keys)}: round-off, because another order of "
            f"sums is used there. Rows that keep their place keep their bits"
            for difference in found
        ]
    return [], list(dict.fromkeys(notes))[:1]
