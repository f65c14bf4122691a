"""One table's share of every batch: which bytes to gather, and how they become fields on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from frostline.batch import Batch, Ragged
from frostline.errors import FeedError, UsageError
from frostline.feed import blame
from frostline.feed.ring import Ring, Slab
from frostline.feed.tiers import DeviceColumn, HostColumn, lines_at
from frostline.stage import Pick
from frostline.store import Field, Table
from frostline.store.codecs import decode, torch_dtype
from frostline.store.field import TEXT_LIKE
from frostline.store.read import Read, Source, follows_pick
from frostline.store.runs import Array

_STREAMED_BYTES = 64 << 10  # pinned rows from here on go to the GPU one by one, without being gathered first
_COPY_BYTES = 256 << 10  # about what the bus carries while one copy is asked for
_STAGED_BYTES = 256 << 20  # of whole rows on the device, out of which a Pick's lines are taken


@dataclass
class Planned:
    """Some rows of a portion on their way."""

    positions: Array
    chosen: dict[str, Array]
    read: Read
    slab: Slab


class Portion:
    """A table with the fields that are wanted of it."""

    def __init__(
        self,
        table: Table,
        fields: str | Pick | Sequence[str | Pick] | None,
        tiers: Mapping[str, str],
        device: torch.device,
        ring: Ring,
    ) -> None:
        self.table, self.device, self.ring = table, device, ring
        self.names, self.picks = split_fields(table, fields)
        self._tiers = tiers
        self._host: dict[str, HostColumn] = {}
        self._device: dict[str, DeviceColumn] = {}
        self._gathered: list[str] = []
        self._loaded = False

    def load(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Bring the fields of the device and pinned tiers where they belong (once)."""
        if self._loaded:
            return
        cuda = self.device.type == "cuda"
        for name in self.names:
            if name in self._device or name in self._host:
                continue  # an iteration was left while others were loading
            tier = self._tiers[name]
            if tier == "device" and self.device.type != "cpu":
                self._device[name] = DeviceColumn(self.table, name, self.device, stopped=stopped)
            elif tier in ("device", "pinned"):
                self._host[name] = HostColumn(self.table, name, pinned=cuda, stopped=stopped)
        self._gathered = [n for n in self.names if n not in self._device and not self._streams(n)]
        if cuda:
            torch.cuda.synchronize(self.device)  # loaded on this thread's stream, read on the feed's own
        self._loaded = True

    def _streams(self, name: str) -> bool:
        column = self._host.get(name)
        if column is None or self.device.type != "cuda" or column.spec.ragged:
            return False
        pick, width = next((p for p in self.picks if name in p.fields), None), column.spec.parts[-1].width
        if pick is not None and not _in_whole_rows(column.spec, pick.n):
            width //= column.spec.item_shape[0]
        return width >= _STREAMED_BYTES

    def row_bytes(self) -> float:
        """Bytes of a row, as they are gathered (an average where fields are ragged)."""
        total = 0.0
        for name in self.names:
            column = self.table.reader(name).column
            spec = column.field
            size = column.bytes / column.rows if spec.ragged and column.rows else spec.row_bytes
            pick = next((p for p in self.picks if name in p.fields), None)
            total += size * pick.n / spec.item_shape[0] if pick and not spec.ragged else size
        return max(1.0, total)

    def plan(self, positions: Array, *, seed: int, epoch: int, train: bool) -> Planned:
        """Work out what to read for these rows and take a buffer for it."""
        chosen = self._choose(positions, seed, epoch, train)
        sources = {}
        files = [n for n in self._gathered if n not in self._host]
        sources.update(
            self.table.sources(
                files, positions, chosen=chosen, direct=[n for n in files if self._tiers[n] == "disk"]
            )
        )
        for name in self._gathered:
            if name in self._host:
                sources[name] = Source(self._host[name], positions, chosen.get(name))
        read = blame.planned(self.table, positions, {n: sources[n] for n in self._gathered})
        room = read.decoded_bytes if self.device.type == "cpu" else 0
        return Planned(positions, chosen, read, self.ring.take(max(1, read.n_bytes + room)))

    def _choose(self, positions: Array, seed: int, epoch: int, train: bool) -> dict[str, Array]:
        chosen: dict[str, Array] = {}
        if not self.picks:
            return chosen
        keys = self.table.keys.at(positions)
        for pick in self.picks:
            lengths = [self._lengths(name, positions) for name in pick.fields]
            if any(not np.array_equal(lengths[0], other) for other in lengths[1:]):
                raise UsageError(
                    f"Pick{pick.fields}: these fields differ in length in some rows; pick them one by one."
                )
            indices = pick.indices(seed, epoch, keys, lengths[0], train)
            chosen.update(dict.fromkeys(pick.fields, indices))
        return chosen

    def _lengths(self, name: str, positions: Array) -> Array:
        spec = self.table.fields[name]
        if not spec.ragged:
            return np.full(len(positions), spec.item_shape[0], np.int64)
        if name in self._device:
            return self._device[name].lengths(positions)
        source = self.table.sources([name], positions)[name]
        return source.reader.lengths(*source.reader.locate(source.rows))

    def tasks(self, planned: Planned, n_tasks: int) -> list[Callable[[], None]]:
        """About `n_tasks` steps that fill the buffer, for any threads; a failure names the row."""
        tasks = planned.read.tasks(planned.slab.array, n_tasks=n_tasks)
        return [blame.guarded(self.table, planned.positions, task) for task in tasks]

    def finish(self, planned: Planned, cuts: list[int], stream: Any) -> list[Batch]:
        """The batches that lie between `cuts`, with their tensors on the device."""
        read, slab = planned.read, planned.slab
        if self.device.type == "cpu":
            base = self.ring.lend(slab)
            fields = read.finish(base[: read.n_bytes], slab.array, base[read.n_bytes :])
        else:
            fields = self._on_device(planned, stream)
        pieces = read.split({n: v for n, v in fields.items() if n in self._gathered}, cuts)
        others = {n: fields[n] for n in self.names if n not in self._gathered}
        return self._batches(pieces, others, planned.positions, cuts)

    @property
    def resident(self) -> bool:
        """Whether every field lies in device memory (other than the CPU's): nothing is left to gather."""
        return self.device.type != "cpu" and all(self._tiers[name] == "device" for name in self.names)

    def fetch(self, positions: Array, cuts: list[int], *, seed: int, epoch: int, train: bool) -> list[Batch]:
        """The batches of a resident portion, launched on the current stream."""
        chosen = self._choose(positions, seed, epoch, train)
        fields = {n: self._device[n].fetch(positions, chosen.get(n)) for n in self.names}
        return self._batches([{} for _ in cuts[1:]], fields, positions, cuts)

    def _batches(
        self, pieces: list[dict[str, Any]], whole: dict[str, Any], positions: Array, cuts: list[int]
    ) -> list[Batch]:
        """Batches of fields that are cut already (`pieces`) and of fields still in one (`whole`)."""
        out = []
        for piece, (a, b) in zip(pieces, pairwise(cuts), strict=True):
            piece.update({n: _slice(v, a, b, positions, self._device.get(n)) for n, v in whole.items()})
            mine = positions[a:b]
            out.append(Batch({n: piece[n] for n in self.names}, lambda mine=mine: self.table.keys.at(mine)))  # type: ignore[misc]
        return out

    def _on_device(self, planned: Planned, stream: Any) -> dict[str, Any]:
        read, slab = planned.read, planned.slab
        base = torch.empty(read.device_bytes, dtype=torch.uint8, device=self.device)
        if slab.pinned is not None:
            base.copy_(slab.pinned[: read.device_bytes], non_blocking=True)
        else:
            base.copy_(torch.from_numpy(slab.array[: read.device_bytes]))
        fields = read.finish(base, slab.array)
        if read.coded_bytes > read.device_bytes // 2:
            fields = {name: _apart(value, base) for name, value in fields.items()}
        for name in self.names:
            if name in self._device:
                fields[name] = self._device[name].fetch(planned.positions, planned.chosen.get(name))
            elif name not in self._gathered:
                fields[name] = self._stream(self._host[name], planned.positions, planned.chosen.get(name))
        if stream is not None:
            slab.copied = stream.record_event()
        self.ring.give_back(slab)
        return fields

    def _stream(self, column: HostColumn, positions: Array, chosen: Array | None) -> torch.Tensor:
        """Large pinned rows straight to the device: the copy engine gathers, no thread does."""
        spec, parts = column.spec, {}
        for part in spec.parts:
            rows, shape = column.rows_as(part), part.shape
            if chosen is None or not follows_pick(spec, part):
                data = _streamed(rows, positions, self.device)
            else:
                data = self._stream_lines(column, rows, positions, chosen)
                shape = (chosen.shape[1], *part.shape[1:])
            parts[part.name] = data.view(-1).view(torch_dtype(part.dtype)).view(len(positions), *shape)
        return decode(parts, spec)

    def _stream_lines(
        self, column: HostColumn, rows: torch.Tensor, positions: Array, chosen: Array
    ) -> torch.Tensor:
        """What a Pick chose of rows: by whole rows, out of which the device takes it, or line by line."""
        (n, k), length = chosen.shape, column.spec.item_shape[0]
        width = rows.shape[1] // length
        if not _in_whole_rows(column.spec, k):
            return _streamed(rows.view(-1, width), _lines(positions, chosen, length), self.device)
        out = torch.empty((n, k * width), dtype=torch.uint8, device=self.device)
        step = max(1, _STAGED_BYTES // rows.shape[1])
        for start in range(0, n, step):
            some = _streamed(rows, positions[start : start + step], self.device)
            lines = _lines(np.arange(len(some)), chosen[start : start + step], length)
            lines_at(some, lines, width, out[start : start + step])
        return out


def _apart(value: Any, base: torch.Tensor) -> Any:
    """A field that no longer lies in `base`: one of a few bytes would keep what is decoded in memory."""
    if isinstance(value, Ragged):
        return Ragged(_apart(value.values, base), _apart(value.offsets, base))
    inside = isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() == base.data_ptr()
    return value.clone() if inside else value


def _in_whole_rows(spec: Field, k: int) -> bool:
    """Whether k lines of a row come sooner with the rest of the row than in copies of their own."""
    values, length = spec.parts[-1], spec.item_shape[0]
    return (length - k) * (values.width // length) <= (k - 1) * _COPY_BYTES


def _lines(positions: Array, chosen: Array, length: int) -> Array:
    return np.asarray((positions[:, None] * length + chosen).reshape(-1))


def _streamed(rows: torch.Tensor, at: Array, device: torch.device) -> torch.Tensor:
    """Rows of bytes, each in a copy of its own, all asked for in one call.

    One call: the loop in Python gave up the interpreter with every copy, and a training thread that launches
    kernels all the while lost some of its time to taking it back.
    """
    out = torch.empty((len(at), rows.shape[1]), dtype=torch.uint8, device=device)
    if len(at):
        torch._foreach_copy_(list(out.unbind(0)), [rows[i] for i in at.tolist()], non_blocking=True)
    return out


def _slice(value: Any, start: int, stop: int, positions: Array, column: DeviceColumn | None) -> Any:
    if not isinstance(value, Ragged):
        return value[start:stop]
    if column is None:
        raise FeedError("a ragged field that is not on the device is gathered")
    ends = np.concatenate([[0], np.cumsum(column.lengths(positions))])
    first, last = int(ends[start]), int(ends[stop])
    return Ragged(value.values[first:last], value.offsets[start : stop + 1] - first)


def split_fields(
    table: Table, fields: str | Pick | Sequence[str | Pick] | None
) -> tuple[list[str], list[Pick]]:
    """Field names (in order) and picks out of what the caller gave; all that is wrong is said at once."""
    given = (
        list(table.fields) if fields is None else [fields] if isinstance(fields, str | Pick) else list(fields)
    )
    picks = [field for field in given if isinstance(field, Pick)]
    names = [n for field in given for n in (field.fields if isinstance(field, Pick) else (field,))]
    problems = [f"{n!r} is named twice" for n in dict.fromkeys(names) if names.count(n) > 1]
    problems += [
        f"there is no field {n!r}; the store has {', '.join(table.fields)}"
        for n in names
        if n not in table.fields
    ]
    for pick in picks:
        problems += [
            p for n in pick.fields if n in table.fields for p in _pick_problems(pick, n, table.fields[n])
        ]
    if problems:
        raise UsageError("Feed(fields=…) cannot work:", problems=problems)
    return names, picks


def _pick_problems(pick: Pick, name: str, spec: Field) -> list[str]:
    what = f"Pick({name!r}, n={pick.n}) of {spec.dtype} {list(spec.shape)}"
    if spec.dtype in TEXT_LIKE or not spec.shape:
        return [f"{what}: it has no first dimension to pick from"]
    if not spec.ragged and spec.item_shape[0] < pick.n:
        return [f"{what}: its first dimension is shorter"]
    return []
