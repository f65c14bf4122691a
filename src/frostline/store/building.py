"""Rows on their way into one shard: encoded as they come, written when the shard is whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from frostline.errors import FieldError
from frostline.store.codecs import (
    Error,
    array_to_tensor,
    as_bytes,
    decode,
    encode,
    text_bytes,
    to_tensor,
    torch_dtype,
)
from frostline.store.field import TEXT_LIKE, Field
from frostline.store.runs import Array
from frostline.store.shard import row_checksum

SAMPLED_ROWS = 4  # rows a shard (the first) on which a lossy codec's error is measured


@dataclass
class Encoded:
    """Rows of one field as bytes, not yet part of a shard."""

    n: int
    parts: dict[str, Array]
    checksums: Array
    lengths: list[int] = field(default_factory=list)
    errors: list[Error] = field(default_factory=list)

    def rows(self, start: int, stop: int) -> Encoded:
        """Some of the rows of a field that is not ragged; the errors go with the first."""
        if (start, stop) == (0, self.n):
            return self
        parts = {name: part.reshape(self.n, -1)[start:stop].reshape(-1) for name, part in self.parts.items()}
        errors = [] if start else self.errors
        return Encoded(stop - start, parts, self.checksums[start:stop], errors=errors)


def checked(name: str, spec: Field, keys: Sequence[str], values: Any) -> Any:
    """`values` as one tensor [rows, …] for a fixed field that came as one, else a list of tensors; of texts
    and the like, their bytes."""
    if not spec.ragged and isinstance(values, torch.Tensor | np.ndarray):
        first = keys[0] if keys else ""
        x = (
            values.detach().cpu()
            if isinstance(values, torch.Tensor)
            else array_to_tensor(values, name, first)
        )
        if tuple(x.shape) == (len(keys), *spec.shape) and x.dtype == torch_dtype(spec.dtype):
            return x.contiguous()
    try:
        n = len(values)
    except TypeError:
        raise FieldError(
            f"Field {name!r}: expected a value for each key, got {type(values).__name__}."
        ) from None
    if n != len(keys) or isinstance(values, str | bytes):
        raise FieldError(f"Field {name!r}: {len(keys)} keys, but {n} values in a {type(values).__name__}.")
    made: Any = text_bytes if spec.dtype in TEXT_LIKE else to_tensor
    return [made(value, spec, name, key) for key, value in zip(keys, values, strict=True)]


def encode_rows(
    name: str, spec: Field, keys: Sequence[str], rows: Any, *, sample: int, take: bool = False
) -> Encoded:
    """Encode checked rows, in memory of their own: the caller may overwrite its tensors afterwards.

    take: the caller gives its tensors away, and nothing is copied that needs no encoding. The error is
    measured on the first `sample` rows. Nothing is kept when a row cannot be encoded.
    """
    if spec.dtype in TEXT_LIKE:
        sums = np.fromiter((row_checksum([row]) for row in rows), np.uint64, len(rows))
        whole = np.frombuffer(b"".join(rows), np.uint8)
        return Encoded(len(rows), {"values": whole}, sums, [*map(len, rows)])
    if spec.ragged:
        one = [
            _encode_ragged(name, spec, key, row, i < sample)
            for i, (key, row) in enumerate(zip(keys, rows, strict=True))
        ]
        parts = {p.name: _joined([e.parts[p.name] for e in one]) for p in spec.parts}
        checksums = np.array([int(e.checksums[0]) for e in one], np.uint64)
        lengths = [n for e in one for n in e.lengths]
        return Encoded(len(one), parts, checksums, lengths, [x for e in one for x in e.errors])
    if not len(keys):
        return Encoded(0, {p.name: np.empty(0, np.uint8) for p in spec.parts}, np.empty(0, np.uint64))
    x = rows if isinstance(rows, torch.Tensor) else torch.stack(list(rows))
    coded = encode(x, spec, name, keys[0] if len(keys) == 1 else f"{keys[0]} … {keys[-1]}")
    parts = {part: as_bytes(value) if take else as_bytes(value).copy() for part, value in coded.items()}
    lines = [parts[p.name].reshape(len(x), -1) for p in spec.parts]
    out = Encoded(len(x), parts, _checksums(lines))
    for i in range(min(len(x), sample if spec.codec != "raw" else 0)):
        out.errors.append(Error.of(x[i], decode({k: v[i : i + 1] for k, v in coded.items()}, spec)[0]))
    return out


def _checksums(lines: list[Array]) -> Array:
    """Of rows whose parts are these, [rows, bytes] each."""
    views = [line.data for line in lines if line.size]  # its slices take a tenth of an array's time
    n = len(lines[0])
    if not views:
        return np.fromiter((row_checksum([b""]) for _ in range(n)), np.uint64, n)
    return np.fromiter((row_checksum([view[i : i + 1] for view in views]) for i in range(n)), np.uint64, n)


def _encode_ragged(name: str, spec: Field, key: str, row: torch.Tensor, sample: bool) -> Encoded:
    coded = encode(row, spec, name, key)
    parts = {part: as_bytes(value).copy() for part, value in coded.items()}
    checksum = np.array([row_checksum([parts[p.name] for p in spec.parts])], np.uint64)
    out = Encoded(1, parts, checksum, [len(row)])
    if sample and spec.codec != "raw":
        if spec.codec == "int8/channel":
            coded = {**coded, "scales": coded["scales"][None]}
        out.errors.append(Error.of(row, decode(coded, spec, torch.tensor([len(row)]))))
    return out


def _joined(pieces: list[Array]) -> Array:
    return pieces[0] if len(pieces) == 1 else np.concatenate([*pieces, np.empty(0, np.uint8)])


class Block:
    """Encoded rows of one field, a list of byte pieces a part; pieces may hold many rows."""

    def __init__(self, name: str, spec: Field) -> None:
        self.name, self.spec = name, spec
        self._errors: list[Error] = []
        self._pieces: dict[str, list[Array]] = {part.name: [] for part in spec.parts}
        self._checksums: list[Array] = []
        self._lengths: list[int] = []

    def add(self, rows: Encoded) -> None:
        for name, piece in rows.parts.items():
            self._pieces[name].append(piece)
        self._checksums.append(rows.checksums)
        self._lengths += rows.lengths
        self._errors += rows.errors

    def mark(self) -> tuple[int, int, int]:
        """How much is here; `cut` goes back to it, also from the middle of an `add`."""
        return len(self._checksums), len(self._lengths), len(self._errors)

    def cut(self, mark: tuple[int, int, int]) -> None:
        added, lengths, errors = mark
        for pieces in (*self._pieces.values(), self._checksums):
            del pieces[added:]
        del self._lengths[lengths:]
        del self._errors[errors:]

    @property
    def error(self) -> Error:
        total = Error()
        for error in self._errors:
            total.merge(error)
        return total

    @property
    def pieces(self) -> dict[str, list[Array]]:
        """The bytes of each part, end to end."""
        return self._pieces

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(piece.nbytes for pieces in self._pieces.values() for piece in pieces)

    @property
    def checksums(self) -> Array:
        return np.concatenate([np.empty(0, np.uint64), *self._checksums])

    def offsets(self) -> Array | None:
        if not self.spec.ragged:
            return None
        offsets = np.zeros(len(self._lengths) + 1, np.int64)
        np.cumsum(self._lengths, out=offsets[1:])
        return offsets


def default_rows_per_shard(fields: dict[str, Field]) -> int:
    """A power of two that makes a shard of about 64 MB: a kill costs little, a file is worth an fsync."""
    per_row = sum(1024 if f.ragged else max(f.row_bytes, 1) for f in fields.values())
    rows = 1 << max(0, round((64 << 20) / per_row).bit_length() - 1)
    return min(65536, max(1, rows))
