"""Where a field's bytes lie while it is read: on the device, in host memory, in the page cache, on disk.

| tier   | what it is                                                        | when it pays |
|--------|-------------------------------------------------------------------|--------------|
| device | the whole field in device memory; a batch is one index_select there | small enough for the card |
| pinned | the whole field in (pinned) host memory                           | fits in RAM, a GPU waits |
| mmap   | mapped files; rows come from the page cache                       | fits in RAM |
| disk   | many threads of `preadv`                                          | larger than RAM, or cold |
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from frostline.batch import Ragged
from frostline.errors import UsageError
from frostline.feed import blame, memory
from frostline.feed.ring import Slab
from frostline.store import Field, Table
from frostline.store.codecs import decode, torch_dtype
from frostline.store.column import Check, ColumnReader
from frostline.store.field import TEXT_LIKE, Part
from frostline.store.read import follows_pick
from frostline.store.runs import Array
from frostline.store.verification import Verification

log = logging.getLogger("frostline")

TIERS = ("device", "pinned", "mmap", "disk")
_LOAD_BYTES = 64 << 20


class Stopped(Exception):
    """The consumer has gone; nobody needs what is being read. Never leaves the feed's own threads."""


def field_bytes(table: Table, name: str) -> int:
    """Bytes of a field's rows, as far as this table has them (ragged: their share of the files)."""
    column = table.reader(name).column
    if not column.field.ragged:
        return len(table) * column.field.row_bytes
    return int(column.bytes * min(1.0, len(table) / max(1, column.rows)))


def choose(
    tables: Mapping[str, Table],
    names: Mapping[str, list[str]],
    device: torch.device,
    tier: str | Mapping[str, str],
    budget_bytes: int | None,
) -> dict[tuple[str, str], str]:
    """A tier for each (table, field). `auto` fills the fastest with the smallest first, within the budget."""
    fields = sorted(((t, n) for t in tables for n in names[t]), key=lambda f: field_bytes(tables[f[0]], f[1]))
    sizes = {f: field_bytes(tables[f[0]], f[1]) for f in fields}
    unknown = [] if isinstance(tier, str) else sorted(set(tier) - {name for _, name in fields})
    if unknown:
        raise UsageError(f"Feed(tier={tier!r}): {', '.join(map(repr, unknown))} is no field of this feed.")
    wanted = {f: tier if isinstance(tier, str) else tier.get(f[1], "auto") for f in fields}
    bad = sorted({w for w in wanted.values() if w not in (*TIERS, "auto")})
    if bad:
        raise UsageError(
            f"Feed(tier={tier!r}): {', '.join(map(repr, bad))} is no tier; "
            f"there are {', '.join(TIERS)} and 'auto'."
        )
    room = _Room(device, budget_bytes)
    total = sum(sizes.values())
    chosen = {}
    for key in sorted(fields, key=lambda f: wanted[f] == "auto"):  # what was asked for by name comes first
        spec = tables[key[0]].fields[key[1]]
        if spec.dtype in TEXT_LIKE:
            chosen[key] = "disk" if wanted[key] == "disk" else "mmap"
        elif wanted[key] != "auto":
            chosen[key] = room.insist(wanted[key], sizes[key], key[1])
        else:
            chosen[key] = room.place(sizes[key], total)
    return chosen


class _Room:
    """What may be taken: the budget, or a fifth of the device's and a third of the host's free memory."""

    def __init__(self, device: torch.device, budget_bytes: int | None) -> None:
        self.host_free = memory.host_free_bytes()
        self.device_free = memory.device_free_bytes(device) if device.type != "cpu" else 0
        self.on_device = device.type != "cpu"
        self.budget = budget_bytes
        self.device_left = self.device_free // 5
        self.host_left = self.host_free // 3 if device.type == "cuda" else 0

    def place(self, size: int, total: int) -> str:
        if self.on_device and size <= self.device_left and self._within(size):
            self._take(size, on_device=True)
            return "device"
        if size <= self.host_left and self._within(size):
            self._take(size, on_device=False)
            return "pinned"
        return "mmap" if total <= 0.7 * self.host_free else "disk"

    def insist(self, tier: str, size: int, name: str) -> str:
        on_device = tier == "device" and self.on_device
        free = self.device_free if on_device else self.host_free
        if tier in ("device", "pinned") and (size > free or not self._within(size)):
            limit = free if size > free else self.budget or 0
            raise UsageError(
                f"Field {name!r} takes {memory.in_words(size)}; "
                f"tier {tier!r} has {memory.in_words(limit)} for it. "
                "Use tier='auto', 'mmap' or 'disk', or raise budget_bytes."
            )
        if tier in ("device", "pinned"):
            self._take(size, on_device)
        return tier

    def _take(self, size: int, on_device: bool) -> None:
        if on_device:
            self.device_free, self.device_left = self.device_free - size, self.device_left - size
        else:
            self.host_free, self.host_left = self.host_free - size, self.host_left - size

    def _within(self, size: int) -> bool:
        if self.budget is None:
            return True
        if size > self.budget:
            return False
        self.budget -= size
        return True


@dataclass
class _Whole:
    """All rows of a field as if they were one shard."""

    name: str
    offsets: Array | None
    views: dict[str, Array]
    verification: None = None  # its files were compared when it was loaded

    def view(self, part: Part) -> Array:
        return self.views[part.name]

    def bounds(self, part: Part, place: int) -> tuple[int, int]:
        if part.per_item and self.offsets is not None:
            return int(self.offsets[place]), int(self.offsets[place + 1])
        return place, place + 1


class HostColumn(ColumnReader):
    """A field held in host memory: a reader whose rows are the table's positions."""

    def __init__(self, table: Table, name: str, *, pinned: bool, stopped: Callable[[], bool]) -> None:
        origin = table.reader(name)
        self.column, self.spec, self.snapshot = origin.column, origin.spec, origin.snapshot
        self.check: Check = "open"  # rows were compared when they were loaded, where that was asked for
        offsets = _offsets(table, name)
        lines = {
            p.name: int(offsets[-1]) if p.per_item and offsets is not None else len(table)
            for p in self.spec.parts
        }
        self.slabs = {p.name: Slab(max(1, lines[p.name] * p.width), pinned=pinned) for p in self.spec.parts}
        views = {
            p.name: self.slabs[p.name].array[: lines[p.name] * p.width].reshape(lines[p.name], p.width)
            for p in self.spec.parts
        }
        self._whole = _Whole(name, offsets, views)
        _load(table, name, self._take, stopped)

    def _take(self, start: int, stop: int, parts: dict[str, Array]) -> None:
        for part in self.spec.parts:
            view, offsets = self._whole.views[part.name], self._whole.offsets
            begin, end = (
                (int(offsets[start]), int(offsets[stop]))
                if part.per_item and offsets is not None
                else (start, stop)
            )
            view[begin:end] = parts[part.name].reshape(end - begin, part.width)

    def shard(self, number: int) -> Any:
        return self._whole

    def locate(self, rows: Array) -> tuple[Array, Array]:
        return np.zeros(len(rows), np.int64), rows

    def _copy_small(self, part: Part, shards: Array, places: Array, out: Array) -> None:
        np.take(self._whole.view(part), places, axis=0, out=out, mode="clip")

    def lengths(self, shards: Array, places: Array) -> Array:
        offsets = self._whole.offsets
        if offsets is None:
            raise UsageError(f"Field {self._whole.name!r} is not ragged.")
        return np.asarray(offsets[places + 1] - offsets[places])

    def rows_as(self, part: Part) -> torch.Tensor:
        """A part's rows as a tensor [rows, bytes], from which a GPU can copy by itself where it is pinned."""
        pinned, view = self.slabs[part.name].pinned, self._whole.views[part.name]
        return torch.from_numpy(view) if pinned is None else pinned[: view.size].view(view.shape)


def lines_at(source: torch.Tensor, lines: Array, width: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """Lines of `width` bytes out of a field's bytes, gathered where they lie: [lines, width] bytes."""
    if not width:
        return torch.empty((len(lines), 0), dtype=torch.uint8, device=source.device)
    # wide words: index_select then moves 8 bytes a step instead of 1
    words = ((torch.int64, 8), (torch.int32, 4), (torch.int16, 2), (torch.uint8, 1))
    word = next(dtype for dtype, size in words if width % size == 0)
    index = torch.from_numpy(lines).to(source.device, non_blocking=True)
    into = None if out is None else out.view(-1, width).view(word)
    return torch.index_select(source.view(-1, width).view(word), 0, index, out=into).view(torch.uint8)


class DeviceColumn:
    """A field held in device memory, as it is encoded; a batch is an index_select and a decode there."""

    def __init__(self, table: Table, name: str, device: torch.device, *, stopped: Callable[[], bool]) -> None:
        self.spec: Field = table.fields[name]
        self.offsets = _offsets(table, name)
        self._parts: dict[str, torch.Tensor] = {}
        for part in self.spec.parts:
            lines = int(self.offsets[-1]) if part.per_item and self.offsets is not None else len(table)
            self._parts[part.name] = torch.empty((lines, part.width), dtype=torch.uint8, device=device)
        _load(table, name, self._take, stopped)

    def _take(self, start: int, stop: int, parts: dict[str, Array]) -> None:
        for part in self.spec.parts:
            begin, end = start, stop
            if part.per_item and self.offsets is not None:
                begin, end = int(self.offsets[start]), int(self.offsets[stop])
            self._parts[part.name][begin:end].copy_(
                torch.from_numpy(parts[part.name]).view(end - begin, part.width)
            )

    def lengths(self, positions: Array) -> Array:
        if self.offsets is None:
            raise UsageError("a fixed field has no lengths")
        return np.asarray(self.offsets[positions + 1] - self.offsets[positions])

    def fetch(self, positions: Array, chosen: Array | None) -> Any:
        """The rows at these positions, decoded."""
        n = len(positions)
        if self.offsets is None:
            parts = {p.name: self._rows(p, positions, chosen) for p in self.spec.parts}
            return decode(parts, self.spec)
        starts = self.offsets[positions]
        if chosen is not None:
            items = (starts[:, None] + chosen).reshape(-1)
            bounds = np.arange(n + 1) * chosen.shape[1]
        else:
            bounds = np.zeros(n + 1, np.int64)
            np.cumsum(self.lengths(positions), out=bounds[1:])
            items = np.arange(bounds[-1]) + np.repeat(starts - bounds[:-1], np.diff(bounds))
        parts = {p.name: self._lines(p, items if p.per_item else positions, p.shape) for p in self.spec.parts}
        device = parts["values"].device
        offsets = torch.from_numpy(bounds).to(device)
        values = decode(parts, self.spec, offsets.diff())
        return (
            Ragged(values, offsets) if chosen is None else values.view(n, chosen.shape[1], *values.shape[1:])
        )

    def _rows(self, part: Part, positions: Array, chosen: Array | None) -> torch.Tensor:
        if chosen is None or not follows_pick(self.spec, part):
            return self._lines(part, positions, part.shape)
        length, k = part.shape[0], chosen.shape[1]
        lines = (positions[:, None] * length + chosen).reshape(-1)
        flat = self._lines(part, lines, part.shape[1:], split=length)
        return flat.view(len(positions), k, *part.shape[1:])

    def _lines(self, part: Part, lines: Array, shape: tuple[int, ...], split: int = 1) -> torch.Tensor:
        picked = lines_at(self._parts[part.name], lines, part.width // split)
        return picked.view(-1).view(torch_dtype(part.dtype)).view(len(lines), *shape)


def _offsets(table: Table, name: str) -> Array | None:
    """Where the rows of a ragged field begin when they are laid end to end."""
    if not table.fields[name].ragged:
        return None
    offsets = np.zeros(len(table) + 1, np.int64)
    np.cumsum(blame.lengths(table, name), out=offsets[1:])
    return offsets


def _load(
    table: Table, name: str, take: Callable[[int, int, dict[str, Array]], None], stopped: Callable[[], bool]
) -> None:
    """Read a whole field in blocks; `take(start, stop, {part: bytes})` puts each where it belongs."""
    n, size = len(table), field_bytes(table, name)
    verifications: set[Verification] = set()
    step = max(1, int(_LOAD_BYTES / max(1, size / max(1, n))))
    began = said = time.monotonic()
    for start in range(0, n, step):
        if stopped():
            raise Stopped
        stop = min(n, start + step)
        positions = np.arange(start, stop)
        read = blame.planned(table, positions, table.sources([name], positions))
        buffer = np.empty(read.n_bytes, np.uint8)
        for task in read.tasks(buffer):
            blame.guarded(table, positions, task)()
        take(start, stop, read.encoded(name, buffer))
        verifications |= read.verifications
        now = time.monotonic()
        if now - said > 2:
            said = now
            log.info(
                "Loading %s: %d %%, %.0f s left", name, 100 * stop // n, (now - began) * (n - stop) / stop
            )
    blame.settled(verifications)
