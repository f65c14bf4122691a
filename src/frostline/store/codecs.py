"""How values become the tensors of a field's parts and come back, and how large the error is.

Encoding works on whole rows and each row's bytes depend on that row alone: the same input gives the same
bytes however it is batched. Decoding runs on any device; int8 is one multiplication there.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from frostline.errors import FieldError, StoreCorrupt
from frostline.flat import flat_bytes
from frostline.store.container import numpy_dtype
from frostline.store.field import TEXT_LIKE, Field

_BINS_PER_DECADE = 8
_DECADES = 12
_BLOCK = 1 << 19  # elements decoded at a time: 2 MB as float32
_MOST_SCALE = torch.finfo(torch.float32).max / 127 * (1 - 2**-23)  # the largest of which 127 are finite
_BINS = _BINS_PER_DECADE * (_DECADES + 1) + 1


def torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def as_bytes(x: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A contiguous CPU tensor's memory as flat bytes (no copy)."""
    return flat_bytes(x).numpy()


def from_bytes(data: np.ndarray[Any, Any], dtype: str, shape: tuple[int, ...]) -> Tensor:
    """The tensor that lies in `data` (flat bytes, writable), without a copy."""
    if not data.size:
        return torch.empty(shape, dtype=torch_dtype(dtype))
    return torch.from_numpy(data.view(numpy_dtype(dtype))).view(torch_dtype(dtype)).view(shape)


def to_tensor(value: Any, spec: Field, name: str, key: str) -> Tensor:
    """One value as a tensor of exactly the field's type and shape, or FieldError that says what came."""
    if spec.dtype in TEXT_LIKE:
        data = bytearray(text_bytes(value, spec, name, key))
        return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    x = _any_to_tensor(value, spec, name, key)
    want, got = spec.shape, tuple(x.shape)
    fits = got[1:] == want[1:] and len(got) == len(want) if spec.ragged else got == want
    if not fits or x.dtype != torch_dtype(spec.dtype):
        raise FieldError(
            f"Row {key!r}, field {name!r}: got {str(x.dtype).removeprefix('torch.')} {list(got)}, "
            f"the store holds {spec.dtype} {list(want)}. Convert the value, or use fl.Field((None, …), …) "
            f"for rows of different lengths."
        )
    return x


def _any_to_tensor(value: Any, spec: Field, name: str, key: str) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().cpu().contiguous()
    if isinstance(value, np.ndarray | np.generic):
        return array_to_tensor(value, name, key)
    if isinstance(value, bool | int | float | list | tuple):
        try:
            made = torch.tensor(value, dtype=torch_dtype(spec.dtype))
            given = torch.tensor(value, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError, OverflowError) as e:
            raise FieldError(
                f"Row {key!r}, field {name!r}: {type(value).__name__} cannot be a {spec.dtype} tensor ({e})."
            ) from e
        _refuse_changed(made, given, f"Row {key!r}, field {name!r}")
        return made
    raise FieldError(
        f"Row {key!r}, field {name!r}: expected a tensor, array or number, got {type(value).__name__}."
    )


def _refuse_changed(made: Tensor, given: Tensor, where: str) -> None:
    """torch makes 3 of 3.7, 255 of -1, True of 0.5 and infinity of 1e40 where the type says so."""
    got = made.to(torch.float64)
    wrong = got.isinf() & given.isfinite() if made.is_floating_point() else got != given
    if bool(wrong.any()):
        dtype = str(made.dtype).removeprefix("torch.")
        raise FieldError(f"{where}: {dtype} cannot hold {float(given[wrong][0]):g}. Use another dtype.")


def array_to_tensor(value: Any, name: str, key: str) -> Tensor:
    """A numpy array as a tensor with its own memory (arrays may be read-only, reversed, big-endian)."""
    array = np.array(value, order="C")
    try:
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))
    except TypeError as e:
        raise FieldError(
            f"Row {key!r}, field {name!r}: numpy's {array.dtype} has no torch type ({e})."
        ) from e


def text_bytes(value: Any, spec: Field, name: str, key: str) -> bytes:
    """A text, bytes or a JSON value as it is stored, or FieldError that says what came."""
    if spec.dtype == "json":
        try:
            return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError) as e:
            raise FieldError(f"Row {key!r}, field {name!r}: not a JSON value ({e}).") from e
    if spec.dtype == "bytes" and isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if spec.dtype == "str" and isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError as e:
            raise FieldError(f"Row {key!r}, field {name!r}: the string is not valid Unicode ({e}).") from e
    raise FieldError(f"Row {key!r}, field {name!r}: expected {spec.dtype}, got {type(value).__name__}.")


class DamagedText(StoreCorrupt):
    """A text that does not decode; `place` is its row in the read."""

    def __init__(self, place: int, message: str) -> None:
        super().__init__(message)
        self.place = place


def text_values(data: memoryview, offsets: list[int], dtype: str) -> list[Any]:
    """Strings, bytes or JSON values out of bytes laid end to end."""
    pieces = [bytes(data[a:b]) for a, b in pairwise(offsets)]
    if dtype == "bytes":
        return pieces
    out: list[Any] = []
    try:
        for piece in pieces:
            out.append(piece.decode() if dtype == "str" else json.loads(piece))
    except (ValueError, RecursionError) as e:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise DamagedText(len(out), f"its bytes are not a {dtype} value ({e})") from e
    return out


def encode(x: Tensor, spec: Field, name: str, key: str = "") -> dict[str, Tensor]:
    """Values → the tensors of `spec.parts`. Fixed: x is [n, *shape]; ragged: one row [length, *item]."""
    if spec.codec == "raw" or spec.dtype in TEXT_LIKE:
        return {"values": x}
    if not spec.codec.startswith("int8"):
        values = x.to(torch_dtype(spec.codec))
        back = values.to(x.dtype)  # bfloat16 rounds float16's largest values up, beyond what float16 holds
        if bool((torch.isfinite(x) & ~torch.isfinite(back)).any()):
            raise FieldError(
                f"Field {name!r}, codec {spec.codec!r}: row {key!r} holds values beyond that type's range "
                f"(largest {float(x.abs().nan_to_num().max()):.3g}). Use another codec, or 'raw'."
            )
        return {"values": values}
    wide = x.to(torch.float32)
    if not bool(torch.isfinite(wide).all()):
        raise FieldError(
            f"Field {name!r}, codec {spec.codec!r}: row {key!r} holds NaN or infinity, which int8 cannot. "
            f"Use 'raw'."
        )
    scales = (_absmax(wide, spec) / 127).clamp_max_(_MOST_SCALE)
    spread = _spread(scales, spec, wide)
    values = torch.where(spread > 0, wide / spread, 0.0).round_().clamp_(-127, 127).to(torch.int8)
    return {"scales": scales, "values": values}


def _absmax(x: Tensor, spec: Field) -> Tensor:
    if spec.codec == "int8/token":
        return x.abs().amax(-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])
    # per channel: over every dimension of the row but the last; a ragged row [length, …, C] is one row
    lead = x.shape[:0] if spec.ragged else x.shape[:1]
    if not x.numel():
        return x.new_zeros(*lead, x.shape[-1])
    return x.abs().amax(tuple(range(len(lead), x.dim() - 1)))


def _spread(scales: Tensor, spec: Field, x: Tensor) -> Tensor:
    """Scales shaped to multiply `x` ([n, *shape], or one ragged row)."""
    if spec.codec == "int8/token":
        return scales.unsqueeze(-1)
    if spec.ragged:
        return scales
    return scales.view(scales.shape[0], *[1] * (x.dim() - 2), scales.shape[-1])


def decode(
    parts: dict[str, Tensor], spec: Field, lengths: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """The tensors of `spec.parts` → values in `spec.dtype`, on their device.

    Ragged: rows end to end, with `lengths`.
    """
    values = parts["values"]
    if spec.codec == "raw":
        return values
    if not spec.codec.startswith("int8"):
        return out.copy_(values) if out is not None else values.to(torch_dtype(spec.dtype))
    scales = parts["scales"]
    if spec.codec == "int8/channel" and spec.ragged:
        if lengths is None:
            raise FieldError("decoding a ragged int8/channel field needs the rows' lengths")
        spread = torch.repeat_interleave(scales, lengths.to(scales.device), 0)
        spread = spread.view(spread.shape[0], *[1] * (values.dim() - 2), spread.shape[-1])
    else:
        spread = _spread(scales, spec, values)
    if out is None:
        out = torch.empty(values.shape, dtype=torch_dtype(spec.dtype), device=values.device)
    if values.device.type == "cpu" and values.numel():
        _multiply_in_blocks(values, spread, out, per_channel=spec.codec == "int8/channel")
        return out
    return torch.mul(values, spread, out=out)


def _multiply_in_blocks(values: Tensor, spread: Tensor, out: Tensor, *, per_channel: bool) -> None:
    """`torch.mul` of mixed types, the same bits: converted, multiplied and stored while still in the cache.

    Six times as fast on the CPU as one call, which converts whole operands first (docs/log.md).
    """
    width = values.shape[-1]
    pairs = [(values, spread, out)]
    if per_channel and values.dim() > 2:  # one set of scales for a row's many vectors: row by row
        pairs = list(zip(values, spread, out, strict=True))
    step = max(1, _BLOCK // width)
    block = torch.empty((step, width), dtype=torch.float32)
    for v, s, o in pairs:
        v, o = v.reshape(-1, width), o.view(-1, width)
        s = s.reshape(-1, s.shape[-1])
        for start in range(0, len(v), step):
            part = block[: min(step, len(v) - start)]
            part.copy_(v[start : start + step])
            part.mul_(s if len(s) == 1 else s[start : start + step])
            o[start : start + step].copy_(part)


def _steady(x: Tensor) -> float:
    """Nine digits: the last bits of a sum depend on threads and vector width, and the manifest must not."""
    return float(f"{float(x):.9g}")


@dataclass
class Error:
    """Encoding error over the rows sampled so far; adds up over shards and commits.

    Cosines per token go into a histogram of 1 − cos on a log scale (8 bins a decade), so that quantiles can
    be kept without keeping tokens; a quantile is therefore good to a bin, the minimum is exact.
    """

    rows: int = 0
    max_abs: float = 0.0
    sum_error2: float = 0.0
    sum_value2: float = 0.0
    min_cosine: float = 1.0
    bins: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, value: Tensor, decoded: Tensor) -> Error:
        """The error of one row, given what decoding gives back.

        NaN and infinity come through a cast as they are.
        """
        x, y = value.to(torch.float64), decoded.to(torch.float64)
        finite = torch.isfinite(x) & torch.isfinite(y)
        x, y = torch.where(finite, x, 0.0), torch.where(finite, y, 0.0)
        difference = x - y
        error = cls(rows=1)
        error.max_abs = float(difference.abs().max()) if x.numel() else 0.0
        error.sum_error2 = _steady(difference.square().sum())
        error.sum_value2 = _steady(x.square().sum())
        if x.dim() and x.shape[-1] > 1 and x.numel():
            error._add_cosines(x.reshape(-1, x.shape[-1]), y.reshape(-1, x.shape[-1]))
        return error

    def _add_cosines(self, x: Tensor, y: Tensor) -> None:
        norms = x.norm(dim=-1) * y.norm(dim=-1)
        some = norms > 0
        if not bool(some.any()):
            return
        # 1 − cos from the difference of unit vectors: exact near 1, where x·y/|x||y| would cancel
        unit = x[some] / x[some].norm(dim=-1, keepdim=True) - y[some] / y[some].norm(dim=-1, keepdim=True)
        distance = unit.square().sum(-1) / 2
        self.min_cosine = min(self.min_cosine, 1.0 - _steady(distance.max()))
        place = ((distance.clamp_min(1e-30).log10() + _DECADES) * _BINS_PER_DECADE).ceil().clamp(0, _BINS - 1)
        counts = torch.bincount(place.to(torch.int64), minlength=_BINS)
        old = self.bins or [0] * len(counts)
        self.bins = [a + b for a, b in zip(old, counts.tolist(), strict=True)]

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Error:
        """What a commit says, or ValueError: these figures come from a file."""
        error = cls(**values)
        figures = (error.max_abs, error.sum_error2, error.sum_value2, error.min_cosine)
        whole = [error.rows, *error.bins]
        if not all(type(n) is int and n >= 0 for n in whole) or len(error.bins) not in (0, _BINS):
            raise ValueError("the counts of the encoding error are not what is written")
        if not all(type(x) in (int, float) and math.isfinite(x) for x in figures):
            raise ValueError("the figures of the encoding error are not numbers")
        return error

    def merge(self, other: Error) -> None:
        self.rows += other.rows
        self.max_abs = max(self.max_abs, other.max_abs)
        self.sum_error2 += other.sum_error2
        self.sum_value2 += other.sum_value2
        self.min_cosine = min(self.min_cosine, other.min_cosine)
        if other.bins:
            self.bins = [a + b for a, b in zip(self.bins or [0] * len(other.bins), other.bins, strict=True)]

    @property
    def relative_l2(self) -> float:
        return math.sqrt(self.sum_error2 / self.sum_value2) if self.sum_value2 else 0.0

    def cosine(self, quantile: float) -> float | None:
        """The cosine that a share `quantile` of tokens lies below (0 = the smallest)."""
        total = sum(self.bins)
        if not total:
            return None
        if quantile == 0:
            return self.min_cosine
        above = 0
        for place in range(len(self.bins) - 1, -1, -1):
            above += self.bins[place]
            if above >= quantile * total:
                return max(self.min_cosine, 1.0 - 10 ** (place / _BINS_PER_DECADE - _DECADES))
        return 1.0

    def summary(self) -> dict[str, Any]:
        return {
            "rows_sampled": self.rows,
            "max_abs": self.max_abs,
            "relative_l2": self.relative_l2,
            "cosine_min": self.cosine(0),
            "cosine_p01": self.cosine(0.01),
            "cosine_median": self.cosine(0.5),
        }
