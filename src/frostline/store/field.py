"""`Field`: what one named value of every row is, and how it lies on disk."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from operator import index
from types import NoneType
from typing import Any

from frostline.errors import FieldError
from frostline.store.container import DTYPES, itemsize

TEXT_LIKE = ("str", "bytes", "json")
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "int8": "int8/token"}
CODECS = ("raw", "float16", "bfloat16", "float32", "int8/token", "int8/channel")
KNOWN_DTYPES = (*DTYPES, *TEXT_LIKE)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_MAX_ROW_BYTES = 1 << 40


@dataclass(frozen=True)
class Part:
    """One tensor a codec stores for a field. `per_item`: it follows a ragged field's first dimension."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    per_item: bool

    @property
    def width(self) -> int:
        """Bytes of one row (or of one item of a ragged row)."""
        return math.prod(self.shape) * itemsize(self.dtype)


@dataclass(frozen=True)
class Field:
    """The shape and type of one row's value, and its codec on disk.

    >>> Field((24, 325, 384), "bfloat16").row_bytes
    5990400
    >>> Field((None, 384), "float16", codec="int8/token").ragged
    True

    shape:  of one row; `None` first = ragged (rows of different lengths). `()` for a number.
    dtype:  torch's name, or "str", "bytes", "json" (with shape `()`). What you give is what you get back.
    codec:  how it is stored: "raw"; "float16", "bfloat16", "float32" (a cast); "int8/token", "int8/channel"
            (absmax scales per vector of the last dimension, or per index of the last dimension).
    fingerprint: what it was computed from, in one string.  provenance: the same in detail (JSON).
    """

    shape: tuple[int | None, ...]
    dtype: str
    codec: str = "raw"
    fingerprint: str | None = None
    provenance: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))
        object.__setattr__(self, "codec", _SHORT.get(self.codec, self.codec))
        try:
            object.__setattr__(self, "shape", tuple(None if n is None else index(n) for n in self.shape))
        except (TypeError, ValueError):
            raise FieldError(
                f"Field(shape={self.shape!r}): a shape is a tuple of whole numbers, e.g. (24, 384) or "
                f"(None, 384)."
            ) from None
        problems = list(self._problems())
        if not problems:
            # as it will be read back: tuples are lists in JSON, number keys are strings
            object.__setattr__(self, "provenance", json.loads(json.dumps(self.provenance, allow_nan=False)))
        if problems:
            raise FieldError(
                f"Field({self.shape}, {self.dtype!r}, codec={self.codec!r}): " + "; ".join(problems) + "."
            )

    def _problems(self) -> Any:
        if self.dtype not in KNOWN_DTYPES:
            yield f"dtype must be one of {', '.join(KNOWN_DTYPES)}"
            return
        if self.codec not in CODECS:
            yield f"codec must be one of {', '.join(CODECS)}"
            return
        if any(n is None for n in self.shape[1:]) or any(n is not None and n < 0 for n in self.shape):
            yield "only the first dimension may be None, and none negative"
            return
        if self.dtype in TEXT_LIKE and (self.shape != () or self.codec != "raw"):
            yield f"{self.dtype} takes shape () and codec 'raw'"
            return
        yield from self._codec_problems()
        if math.prod(n for n in self.shape if n is not None) * 8 > _MAX_ROW_BYTES:
            yield "a row of over 1 TiB is refused"
        if type(self.fingerprint) not in (str, NoneType):
            yield "fingerprint must be a string"
        try:
            if len(json.dumps(self.provenance, allow_nan=False)) > 1 << 16:
                yield "provenance takes at most 64 KiB of JSON"
        except (TypeError, ValueError) as e:
            yield f"provenance must be JSON ({e})"

    def _codec_problems(self) -> Any:
        if self.codec == "raw" or self.dtype in TEXT_LIKE:
            return
        if self.dtype not in _FLOATS:
            yield f"codec {self.codec!r} is for floating-point fields"
        elif self.codec in _FLOATS and itemsize(self.codec) > itemsize(self.dtype):
            yield f"casting {self.dtype} to {self.codec} makes it larger"
        elif self.codec == "int8/channel" and len(self.shape) < 2:
            yield "int8/channel needs at least two dimensions (tokens, channels)"
        elif self.codec == "int8/token" and len(self.shape) < (2 if self.ragged else 1):
            yield "int8/token needs a dimension to take the scale over"

    @property
    def ragged(self) -> bool:
        return self.dtype in TEXT_LIKE or self.shape[:1] == (None,)

    @property
    def item_shape(self) -> tuple[int, ...]:
        """Shape of a row, or of one item of a ragged row."""
        return tuple(n for n in self.shape if n is not None)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The tensors stored for this field; the values come last, so that they start on a page."""
        shape, ragged = self.item_shape, self.ragged
        if self.dtype in TEXT_LIKE:
            return (Part("values", "uint8", (), True),)
        if self.codec == "int8/token":
            return (Part("scales", "float32", shape[:-1], ragged), Part("values", "int8", shape, ragged))
        if self.codec == "int8/channel":
            return (Part("scales", "float32", shape[-1:], False), Part("values", "int8", shape, ragged))
        return (Part("values", self.dtype if self.codec == "raw" else self.codec, shape, ragged),)

    @property
    def row_bytes(self) -> int:
        """Bytes on disk of a row (of one item, when ragged)."""
        return sum(part.width for part in self.parts)

    def same_data(self, other: Field) -> bool:
        """Whether rows written for `other` can be read as this field."""
        return (self.shape, self.dtype, self.codec) == (other.shape, other.dtype, other.codec)


def check_fields(fields: dict[str, Field]) -> None:
    """Refuse a set of fields that a store cannot hold, naming everything wrong."""
    if not isinstance(fields, dict) or not fields:
        raise FieldError("A store needs at least one field, e.g. fields={'x': fl.Field((768,), 'float16')}.")
    problems = [
        f"{name!r}: a name is a letter or _, then up to 63 letters, digits, '_', '.', '-'"
        for name in fields
        if not isinstance(name, str) or not _NAME.fullmatch(name) or ".." in name
    ]
    problems += [
        f"{name!r}: expected fl.Field, got {type(f).__name__}"
        for name, f in fields.items()
        if not isinstance(f, Field)
    ]
    if problems:
        raise FieldError("These fields cannot be stored: " + "; ".join(problems) + ".")
