"""A read: some fields of some rows, laid out in one buffer, filled in pieces, decoded on any device.

Everything that reads a store goes through here: `Store.rows` with a fresh buffer and one thread, the feed
with a ring of buffers and many. Encoded parts of all fields lie in one buffer (one copy to the device);
strings come last, so that they stay on the host.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from frostline.batch import Ragged
from frostline.errors import StoreCorrupt
from frostline.store.codecs import DamagedText, decode, text_values, torch_dtype
from frostline.store.column import ColumnReader, touched
from frostline.store.container import itemsize
from frostline.store.field import TEXT_LIKE, Field, Part
from frostline.store.runs import Array
from frostline.store.shard import Shard
from frostline.store.verification import Verification

_ALIGN = 64
_TASK_BYTES = 1 << 20


def _aligned(n: int) -> int:
    return -(-n // _ALIGN) * _ALIGN


@dataclass(frozen=True)
class Source:
    """Where one field of the read comes from."""

    reader: ColumnReader
    rows: Array
    chosen: Array | None = None  # [rows, k]: only these lines of the first dimension (fl.Pick)
    direct: bool = False  # preadv instead of the mapping


@dataclass(frozen=True)
class _Piece:
    """One part of one field: its lines, and its place in the buffer."""

    source: Source
    part: Part
    shards: Array
    places: Array
    starts: Array | None  # ragged: first line of every row, and the end
    n_lines: int
    line_shape: tuple[int, ...]
    line_bytes: int
    offset: int

    def fill(self, buffer: Array, lo: int, hi: int) -> None:
        out = buffer[self.offset : self.offset + self.n_lines * self.line_bytes].reshape(
            self.n_lines, self.line_bytes
        )
        chosen = self.source.chosen
        chosen = (
            chosen[lo:hi] if chosen is not None and (self.starts is not None or self._follows_pick) else None
        )
        options: dict[str, Any] = {"chosen": chosen, "direct": self.source.direct}
        reader, shards, places = self.source.reader, self.shards[lo:hi], self.places[lo:hi]
        if self.starts is not None:
            reader.copy_ragged(self.part, shards, places, out, self.starts[lo : hi + 1], **options)
        else:
            reader.copy(self.part, shards, places, out[lo:hi], **options)

    @property
    def _follows_pick(self) -> bool:
        return follows_pick(self.source.reader.spec, self.part)


def follows_pick(spec: Field, part: Part) -> bool:
    """Whether a part has the field's first dimension (scales per channel or of one vector have not)."""
    return part.name == "values" or (spec.codec == "int8/token" and part.shape != ())


def _refuse_cut(shard: Shard) -> None:
    """A mapped file that was cut short would end the process with SIGBUS where its end is read."""
    if isinstance(shard, Shard) and os.fstat(shard.fd).st_size < len(shard.map):
        raise StoreCorrupt(f"{shard.name}: the file was cut short while it was open.")


class Read:
    """Some fields of some rows. `n_bytes` of buffer; `tasks()` fill it; `finish()` gives the fields."""

    def __init__(self, sources: dict[str, Source], n_rows: int) -> None:
        self.n_rows = n_rows
        self._sources = sources
        self._pieces: dict[str, list[_Piece]] = {}
        self._offsets: dict[str, tuple[Array, int]] = {}
        self._end = 0
        self.verifications: set[Verification] = set()
        """Of the files that are read from, where they are under way."""
        texts = {name: s for name, s in sources.items() if s.reader.spec.dtype in TEXT_LIKE}
        for name, source in sources.items():
            if name not in texts:
                self._pieces[name] = self._lay_out(name, source)
        self.device_bytes = self._end
        for name, source in texts.items():
            self._pieces[name] = self._lay_out(name, source)
        self.n_bytes = self._end

    def _lay_out(self, name: str, source: Source) -> list[_Piece]:
        reader, spec = source.reader, source.reader.spec
        shards, places = reader.locate(source.rows)
        for shard in touched(shards):
            # opening checks claimed sizes against the file, before a buffer is sized by them
            opened = reader.shard(int(shard))
            _refuse_cut(opened)
            if opened.verification is not None:
                self.verifications.add(opened.verification)
        starts = None
        if spec.ragged and source.chosen is None:
            starts = np.zeros(self.n_rows + 1, np.int64)
            np.cumsum(reader.lengths(shards, places), out=starts[1:])
            if spec.dtype not in TEXT_LIKE:
                self._offsets[name] = (starts, self._take(starts.nbytes))
        elif spec.ragged and source.chosen is not None:
            starts = np.arange(self.n_rows + 1, dtype=np.int64) * source.chosen.shape[1]
        pieces = []
        for part in spec.parts:
            lines, shape = self._lines(part, source, starts)
            width = int(np.prod(shape, dtype=np.int64)) * itemsize(part.dtype)
            begins = starts if part.per_item else None
            pieces.append(
                _Piece(source, part, shards, places, begins, lines, shape, width, self._take(lines * width))
            )
        return pieces

    def _lines(self, part: Part, source: Source, starts: Array | None) -> tuple[int, tuple[int, ...]]:
        if part.per_item and starts is not None:
            return int(starts[-1]), part.shape
        if (
            source.chosen is not None
            and not source.reader.spec.ragged
            and follows_pick(source.reader.spec, part)
        ):
            return self.n_rows, (source.chosen.shape[1], *part.shape[1:])
        return self.n_rows, part.shape

    def _take(self, n: int) -> int:
        start = self._end
        self._end = _aligned(start + n)
        return start

    @property
    def decoded_bytes(self) -> int:
        """Room that decoding on the host takes beside the encoded bytes."""
        return sum(_aligned(self._decoded_size(name)) for name in self._pieces if self._is_coded(name))

    @property
    def coded_bytes(self) -> int:
        """What nobody needs once it is decoded."""
        return sum(
            p.n_lines * p.line_bytes for n, ps in self._pieces.items() if self._is_coded(n) for p in ps
        )

    def _is_coded(self, name: str) -> bool:
        return self._sources[name].reader.spec.codec != "raw"

    def _decoded_size(self, name: str) -> int:
        values = self._pieces[name][-1]
        return (
            values.n_lines
            * int(np.prod(values.line_shape, dtype=np.int64))
            * itemsize(values.source.reader.spec.dtype)
        )

    def tasks(self, buffer: Array, *, n_tasks: int = 1) -> Iterable[Callable[[], None]]:
        """About `n_tasks` steps that fill `buffer` (fewer where there is little to do), for any threads."""
        aim = max(_TASK_BYTES, self.n_bytes / n_tasks)
        for starts, offset in self._offsets.values():
            buffer[offset : offset + starts.nbytes].view(np.int64)[:] = starts
        for pieces in self._pieces.values():
            for piece in pieces:
                row_bytes = piece.n_lines * piece.line_bytes / max(1, self.n_rows)
                step = max(1, int(aim / max(1.0, row_bytes)))
                for lo in range(0, self.n_rows, step):
                    yield _Task(piece, buffer, lo, min(self.n_rows, lo + step))

    def finish(self, base: Tensor, host: Array, room: Tensor | None = None) -> dict[str, Any]:
        """The fields: views of `base` (the buffer's bytes, on any device), decoded; texts out of `host`.

        `room`: bytes to decode into, `decoded_bytes` of them; without it decoding allocates.
        """
        fields: dict[str, Any] = {}
        used = 0
        for name, source in self._sources.items():
            spec = source.reader.spec
            if spec.dtype in TEXT_LIKE:
                fields[name] = self._texts(name, host, spec)
                continue
            out = None
            if room is not None and self._is_coded(name):
                size = self._decoded_size(name)
                values = self._pieces[name][-1]
                out = _view(
                    room[used : used + size], torch_dtype(spec.dtype), (values.n_lines, *values.line_shape)
                )
                used += _aligned(size)
            fields[name] = self._field(name, base, spec, out)
        return fields

    def _field(self, name: str, base: Tensor, spec: Field, out: Tensor | None) -> Any:
        parts = {}
        for piece in self._pieces[name]:
            data = base[piece.offset : piece.offset + piece.n_lines * piece.line_bytes]
            parts[piece.part.name] = _view(
                data, torch_dtype(piece.part.dtype), (piece.n_lines, *piece.line_shape)
            )
        chosen = self._sources[name].chosen
        if name not in self._offsets:
            if not spec.ragged or chosen is None:
                return decode(parts, spec, out=out)
            lengths = torch.full((self.n_rows,), chosen.shape[1], device=base.device)
            flat = decode(parts, spec, lengths, out)
            return flat.view(self.n_rows, chosen.shape[1], *flat.shape[1:])
        starts, offset = self._offsets[name]
        offsets = _view(base[offset : offset + starts.nbytes], torch.int64, (self.n_rows + 1,))
        return Ragged(decode(parts, spec, offsets.diff(), out), offsets)

    def encoded(self, name: str, buffer: Array) -> dict[str, Array]:
        """A field's parts as flat bytes, not decoded."""
        return {
            p.part.name: buffer[p.offset : p.offset + p.n_lines * p.line_bytes] for p in self._pieces[name]
        }

    def split(self, fields: dict[str, Any], cuts: list[int]) -> list[dict[str, Any]]:
        """Fields of all rows → fields of rows cuts[i] … cuts[i + 1], without copying."""
        return [
            {name: self._slice(name, value, a, b) for name, value in fields.items()}
            for a, b in pairwise(cuts)
        ]

    def _slice(self, name: str, value: Any, start: int, stop: int) -> Any:
        if not isinstance(value, Ragged):
            return value[start:stop]
        starts = self._offsets[name][0]
        first, last = int(starts[start]), int(starts[stop])
        return Ragged(value.values[first:last], value.offsets[start : stop + 1] - first)

    def _texts(self, name: str, host: Array, spec: Field) -> list[Any]:
        piece = self._pieces[name][0]
        starts = piece.starts if piece.starts is not None else np.zeros(1, np.int64)
        data = host[piece.offset : piece.offset + piece.n_lines]
        try:
            return text_values(data.data, starts.tolist(), spec.dtype)
        except DamagedText as e:
            snapshot, rows = piece.source.reader.snapshot, piece.source.rows
            key = snapshot.keys(snapshot.positions_of_rows(rows[[e.place]]))[0]
            where = f"Key {key!r}, field {name!r}, shard {int(piece.shards[e.place])}"
            message = f"{where}: {e}; `frostline store check` shows all damage."
            raise DamagedText(e.place, message) from e


@dataclass(frozen=True)
class _Task:
    piece: _Piece
    buffer: Array
    lo: int
    hi: int

    def __call__(self) -> None:
        self.piece.fill(self.buffer, self.lo, self.hi)

    @property
    def where(self) -> str:
        """The field, shards and rows, for error messages."""
        shards = sorted(set(self.piece.shards[self.lo : self.hi].tolist()))
        return f"field {self.piece.source.reader.column.name!r}, shard{'s' * (len(shards) > 1)} {shards[:4]}"


def _view(data: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return (
        data.view(dtype).view(shape) if data.numel() else torch.empty(shape, dtype=dtype, device=data.device)
    )


def read_now(sources: dict[str, Source], n_rows: int, *, pinned: bool = False) -> dict[str, Any]:
    """The fields in fresh memory, read by this thread; pinned: in memory a GPU can copy from by itself."""
    read = Read(sources, n_rows)
    base = torch.empty(read.n_bytes, dtype=torch.uint8, pin_memory=pinned)
    buffer = base.numpy()
    for task in read.tasks(buffer):
        task()
    for verification in read.verifications:
        verification.settle()
    return read.finish(base, buffer)
