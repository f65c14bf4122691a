"""Values as a feed delivers them, also where they were never stored: numbers, ragged rows, text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from frostline.batch import Ragged
from frostline.errors import FieldError, StageFailed
from frostline.execution.columns import Column, as_value, kind_of, numeric, stack, stackable
from frostline.store import Field
from frostline.store.codecs import to_tensor
from frostline.store.field import TEXT_LIKE

Kind = Literal["ragged", "list"]
"""How a store would hold a field, where one batch of it does not tell."""
_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}


def as_stored(value: Any, spec: Field | None = None, name: str = "", key: str = "") -> Any:
    """A value as it comes back from a store; spec: how its stage declares it.

    >>> as_stored(3), as_stored(0.5).dtype, as_stored("text"), as_stored((1, "a"))
    (tensor(3), torch.float64, 'text', [1, 'a'])
    """
    if spec is not None and spec.dtype not in TEXT_LIKE:
        return to_tensor(value, spec, name, key)
    if isinstance(value, Tensor) or (spec is not None and spec.dtype != "json"):
        return value
    if spec is None and type(value) in _NUMBERS:
        return torch.tensor(value, dtype=_NUMBERS[type(value)])
    if numeric(value):
        return torch.as_tensor(as_value(value))
    if isinstance(value, dict | list | tuple):
        try:
            return json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError):
            return value  # a store would refuse it; here it may go to a stage that can use it
    return value


def column_as_stored(name: str, keys: Sequence[str], column: Column, spec: Field | None) -> Column:
    """`as_stored` for every sample; what cannot stand in a declared field fails with its key."""
    if isinstance(column, Tensor):
        return column
    out = []
    for key, value in zip(keys, column, strict=True):
        try:
            out.append(as_stored(value, spec, name, key))
        except FieldError as e:
            raise StageFailed(name, [key], str(e)) from e
    return out


def kind_in_store(column: Column) -> Kind | None:
    """What these samples of a field say about how a store would hold it (one batch may look simpler)."""
    if isinstance(column, Tensor):
        return None
    if not stackable(column):
        return "list"
    rows = [as_stored(value) for value in column]
    return "ragged" if len({row.shape for row in rows}) > 1 else None


def rows_of(column: Any) -> Column:
    """What can be cut and indexed by rows: a Ragged is taken apart."""
    return list(column) if isinstance(column, Ragged) else column


def collated(name: str, stage: str, keys: Sequence[str], column: Any, kind: Kind | None, *, pin: bool) -> Any:
    """A column as it stands in a batch: one tensor, a Ragged, or a list. pin: in page-locked memory."""
    if isinstance(column, Ragged) or (isinstance(column, Tensor) and kind != "ragged"):
        return pinned(column) if pin else column
    if kind == "list" or not len(column) or not stackable(column):
        return column
    rows = [as_stored(value) for value in column]
    if kind == "ragged":
        return _ragged(name, stage, keys, rows, pin=pin)
    if len({(row.shape, row.dtype) for row in rows}) > 1:
        if all(isinstance(value, bool | int | float) for value in column):
            rows = [row.to(torch.float64) for row in rows]  # as a store holds whole and other numbers
        else:
            raise _uneven(name, stage, keys, rows)
    return stacked(rows, pin=pin)


def stacked(rows: Sequence[Tensor], *, pin: bool) -> Tensor:
    if not pin or rows[0].device.type != "cpu":
        return torch.stack([*rows])
    out = torch.empty((len(rows), *rows[0].shape), dtype=rows[0].dtype, pin_memory=True)
    return torch.stack([*rows], out=out)


def pinned(column: Any) -> Any:
    """The same in page-locked memory, which a GPU copies from by itself; lists stay as they are."""
    if isinstance(column, Ragged):
        return Ragged(pinned(column.values), pinned(column.offsets))
    here = isinstance(column, Tensor) and column.device.type == "cpu"
    return column.pin_memory() if here and not column.is_pinned() else column


def _ragged(name: str, stage: str, keys: Sequence[str], rows: list[Tensor], *, pin: bool) -> Ragged:
    if any(not row.ndim for row in rows) or len({(row.shape[1:], row.dtype) for row in rows}) > 1:
        raise _uneven(name, stage, keys, rows)
    offsets = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0).to(rows[0].device)
    found = Ragged(torch.cat(rows), offsets)
    return pinned(found) if pin else found


def _uneven(name: str, stage: str, keys: Sequence[str], rows: Sequence[Tensor]) -> StageFailed:
    kinds = [kind_of(row) for row in rows]
    usual = max(set(kinds), key=lambda kind: (kinds.count(kind), -kinds.index(kind)))
    odd = {key: kind for key, kind in zip(keys, kinds, strict=True) if kind != usual}
    told = "; ".join(f"{key!r} is {kind}" for key, kind in [*odd.items()][:5])
    like = rows[kinds.index(usual)]
    dtype = str(like.dtype).removeprefix("torch.")
    ragged = f"fl.Field({(None, *like.shape[1:])}, {dtype!r})"
    return StageFailed(
        stage,
        [*odd],
        f"{name!r} is {usual} for the others of the batch, but {told}. A batch is one tensor: give back one "
        f"shape and type for every sample, or, where only the length differs, say so: "
        f"writes={{{name!r}: {ragged}}}",
    )


def moved(value: Any, device: torch.device) -> Any:
    """A collated field on the device; pinned memory goes there beside the kernels that are queued."""
    if isinstance(value, Tensor):
        return stack("", "", (), value, device)
    if isinstance(value, Ragged):
        return Ragged(moved(value.values, device), moved(value.offsets, device))
    return value


def cut_to_none(value: Any) -> Any:
    """The same field of no rows."""
    if isinstance(value, Ragged):
        return Ragged(value.values[:0], value.offsets[:1])
    return value[:0]
