"""How the fields that may be stored look on disk, and what lossy codecs would do to them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from frostline.cut.costs import Offer
from frostline.cut.walk import Walk, on_cpu
from frostline.errors import FieldError, UsageError
from frostline.execution.columns import Column, as_value, row_bytes
from frostline.freezer import schema
from frostline.freezer.inputs import Inputs
from frostline.pipeline import Pipeline
from frostline.store import Field
from frostline.store.codecs import Error, decode, encode
from frostline.store.field import TEXT_LIKE

_LOSSY = {"bf16": "bfloat16", "fp16": "float16", "int8": "int8/token"}
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_LOOKED_AT = 32
"""Rows on which the error of a codec is measured."""
_ROW_EXTRA = 16
"""Bytes a row beside its values: a checksum, and where it begins."""
_SMALLER = 0.9
"""A codec that saves less is not worth an error."""


@dataclass(frozen=True)
class Fields:
    """How the fields that may be stored look; unstorable: why others cannot."""

    specs: Mapping[str, Field]
    bytes: Mapping[str, float]
    """A sample's, on disk."""
    source_bytes: float
    """What a freeze writes beside them: the text that says what a row was computed from, and its key."""
    unstorable: Mapping[str, str]


def look_at(pipeline: Pipeline, walk: Walk, names: Sequence[str]) -> Fields:
    """The fields called `names` as a freeze would store them."""
    specs, sizes, cannot = dict[str, Field](), dict[str, float](), dict[str, str]()
    for name in names:
        column = on_cpu(walk.values[name])
        try:
            spec = schema.fields_of(pipeline, [name], walk.keys, {name: column})[name]
        except UsageError as e:
            cannot[name] = e.problems[0] if e.problems else str(e)
            continue
        specs[name], sizes[name] = spec, _row_bytes(spec, column) + _ROW_EXTRA
    inputs = Inputs.of(pipeline, paranoid=False)
    texts = [inputs.text(i) for i in walk.places[:_LOOKED_AT]]
    source = sum(len(t.encode()) for t in texts) / len(texts) + 2 * _ROW_EXTRA
    key = sum(len(k.encode()) for k in walk.keys) / len(walk.keys)
    return Fields(specs, sizes, source + key, cannot)


def _row_bytes(spec: Field, column: Column) -> float:
    if not spec.ragged:
        return spec.row_bytes
    return sum(_ragged_bytes(spec, value) for value in column) / len(column)


def _ragged_bytes(spec: Field, value: object) -> int:
    if spec.dtype == "json":
        return len(json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode())
    if spec.dtype in TEXT_LIKE:
        return len(value.encode()) if isinstance(value, str) else len(bytes(value))  # type: ignore[call-overload]
    return row_bytes(as_value(value))


def offers(walk: Walk, fields: Fields) -> list[Offer]:
    """What lossy codecs would do to the fields that are numbers with a point."""
    found = []
    for name, spec in fields.specs.items():
        if spec.dtype not in _FLOATS or spec.codec != "raw":
            continue
        rows = [torch.as_tensor(as_value(v)) for v in on_cpu(walk.values[name])[:_LOOKED_AT]]
        for short, codec in _LOSSY.items():
            try:
                error, size = _error(name, replace(spec, codec=codec), rows)
            except (
                FieldError
            ):  # no dimension for scales, a type that is that small already, or out of its range
                continue
            if size < _SMALLER * fields.bytes[name]:
                found.append(Offer(name, short, size, fields.bytes[name], error.relative_l2))
    return found


def _error(name: str, spec: Field, rows: Sequence[Tensor]) -> tuple[Error, float]:
    """The error over these rows, and bytes a row."""
    whole, size = Error(), 0
    for row in rows:
        parts = encode(row if spec.ragged else row[None], spec, name)
        back = decode(parts, spec, torch.tensor([len(row)]) if spec.ragged else None)
        whole.merge(Error.of(row, back if spec.ragged else back[0]))
        size += sum(part.numel() * part.element_size() for part in parts.values())
    return whole, size / len(rows) + _ROW_EXTRA
