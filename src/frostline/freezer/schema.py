"""How the fields to be stored look: as their stage declares them, or as the first samples show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from frostline.errors import FieldError, StageFailed, UsageError
from frostline.execution import Block
from frostline.execution.columns import Column, as_value, kind_of, numeric, unstorable
from frostline.pipeline import Pipeline
from frostline.store import Field
from frostline.store.codecs import to_tensor, torch_dtype
from frostline.store.field import TEXT_LIKE
from frostline.store.schema import with_codecs

_OTHERS: tuple[tuple[tuple[type, ...], str], ...] = (
    ((str,), "str"),
    ((bytes,), "bytes"),
    ((dict, list, tuple, str, int, float, NoneType), "json"),
)
_SCALARS = ((bool, "bool"), (int, "int64"), (float, "float64"))


def fields_of(
    pipeline: Pipeline, names: Sequence[str], keys: Sequence[str], columns: Mapping[str, Column]
) -> dict[str, Field]:
    """The fields called `names`, from what these samples gave."""
    problems, found = [], {}
    for name in names:
        stage = pipeline.writer_of(name)
        try:
            declared = stage.fields.get(name) if stage is not None else None
            found[name] = declared or field_of(name, keys, columns[name])
        except (UsageError, FieldError) as e:  # FieldError: a type that no field has
            problems.append(f"{name}: {e}" if isinstance(e, FieldError) else str(e))
    if problems:
        raise UsageError("These fields cannot be stored:", problems=problems)
    return found


def field_of(name: str, keys: Sequence[str], column: Column) -> Field:
    """
    >>> field_of("x", ["a", "b"], torch.zeros(2, 3, 4))
    Field(shape=(3, 4), dtype='float32', codec='raw', fingerprint=None, provenance=None)
    >>> field_of("ids", ["a", "b"], [torch.tensor([1, 2]), torch.tensor([3])]).shape
    (None,)
    """
    if isinstance(column, Tensor):
        return Field(tuple(column.shape[1:]), str(column.dtype))
    values = [torch.as_tensor(as_value(v)) if numeric(v) else v for v in column]
    if all(isinstance(v, Tensor) for v in values):
        return _tensors(name, keys, values)
    for kind, dtype in _SCALARS:
        if all(type(v) is kind for v in values):
            return Field((), dtype)
    if all(isinstance(v, bool | int | float) for v in values):
        return Field((), "float64")
    for kinds, dtype in _OTHERS:
        if all(isinstance(v, kinds) for v in values):
            return Field((), dtype)
    given = sorted({kind_of(v) for v in values})
    raise UsageError(
        f"{name!r} is {' or '.join(given)}, as for {keys[0]!r}: a store holds tensors, numbers, text, bytes "
        f"and JSON. Return one of these from its stage, or leave it out with --cut"
    )


def _tensors(name: str, keys: Sequence[str], rows: Sequence[Tensor]) -> Field:
    dtypes = {str(row.dtype).removeprefix("torch.") for row in rows}
    shapes = {tuple(row.shape) for row in rows}
    if len(dtypes) == 1 and len(shapes) == 1:
        return Field(shapes.pop(), dtypes.pop())
    if len(dtypes) == 1 and len({shape[1:] for shape in shapes}) == 1 and () not in shapes:
        return Field((None, *next(iter(shapes))[1:]), dtypes.pop())
    first = next(i for i, row in enumerate(rows) if kind_of(row) != kind_of(rows[0]))
    raise UsageError(
        f"{name!r} is {kind_of(rows[0])} for {keys[0]!r} but {kind_of(rows[first])} for {keys[first]!r}: "
        f"only the first dimension may differ between samples (a ragged field). Pad or resize it in its stage"
    )


def unstorable_in(block: Block) -> dict[str, StageFailed]:
    """The samples of a block that have such a value."""
    bad: dict[str, StageFailed] = {}
    for name, column in block.columns.items():
        same = unstorable(name, column)  # of all rows, where they are one tensor
        for i, key in enumerate(block.keys):
            why = same or (unstorable(name, column[i]) if isinstance(column, list) else None)
            if why is not None:
                bad.setdefault(key, StageFailed(name, [key], why))
    return bad


def misfit(name: str, spec: Field, key: str, value: Any) -> str | None:
    """Why a value cannot stand in this field, when its shape or type is another one's."""
    value = as_value(value)
    never = unstorable(name, value)
    if never is not None:
        return never
    if spec.dtype in TEXT_LIKE or not isinstance(value, Tensor):
        try:
            stored = to_tensor(value, spec, name, key)
        except FieldError as e:
            return str(e)
        whole = spec.dtype not in TEXT_LIKE and not stored.is_floating_point() and not stored.ndim
        return f"{name!r} is {value!r}, which is no {spec.dtype}" if whole and stored != value else None
    shape = tuple(value.shape)
    fits = len(shape) == len(spec.shape) and all(
        n in (None, m) for n, m in zip(spec.shape, shape, strict=True)
    )
    if fits:
        same = value.dtype == torch_dtype(spec.dtype)
        kinds = f"{name!r} is {kind_of(value)}, the first samples' is {spec.dtype}"
        return None if same else f"{kinds}. Convert it in its stage"
    wanted = [*spec.shape]
    hint = ""
    if shape[1:] == spec.shape[1:] and len(shape) == len(spec.shape) and shape:
        ragged = (None, *spec.shape[1:])
        hint = f", or store it ragged: writes={{{name!r}: fl.Field({ragged}, {spec.dtype!r})}}"
    return f"{name!r} is {list(shape)}, the first samples' is {wanted}. Pad or resize it in its stage{hint}"


def as_one(spec: Field, column: list[Any]) -> Column:
    """A column of a fixed field as one tensor, where every value is just what the field holds; else itself.

    >>> as_one(Field((), "int64"), [1, 2]), as_one(Field((), "int64"), [1, 2.0])
    (tensor([1, 2]), [1, 2.0])
    """
    kind = next((kind for kind, dtype in _SCALARS if (spec.shape, spec.dtype) == ((), dtype)), None)
    if kind is not None and all(type(value) is kind for value in column):
        try:
            return torch.tensor(column, dtype=torch_dtype(spec.dtype))
        except (RuntimeError, ValueError, OverflowError):  # a number beyond 64 bits: its sample is found
            return column
    if all(type(v) is Tensor and v.device.type == "cpu" and unstorable("", v) is None for v in column):
        kinds = {(value.shape, value.dtype) for value in column}
        if kinds == {(spec.shape, torch_dtype(spec.dtype))}:
            return torch.stack(column)
    return column


def with_marks(
    fields: Mapping[str, Field], codecs: Mapping[str, str], marks: Mapping[str, tuple[str, Any]]
) -> dict[str, Field]:
    """The fields with the codecs asked for, and what each is computed from (fingerprint, provenance)."""
    try:
        coded = with_codecs(dict(fields), codecs)
    except FieldError as e:
        raise UsageError(f"--codec: {e}") from e
    return {
        name: replace(spec, fingerprint=marks[name][0], provenance=marks[name][1])
        for name, spec in coded.items()
    }
