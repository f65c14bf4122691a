"""Reading one field: from row numbers to bytes in a buffer, by the mapped file or by `preadv`."""

from __future__ import annotations

import os
import resource
import stat
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from frostline.errors import FieldError, StoreCorrupt
from frostline.store import region
from frostline.store.disk import reading
from frostline.store.field import Part
from frostline.store.manifest import Column
from frostline.store.pin import Pin
from frostline.store.runs import Array
from frostline.store.shard import FOLDER, Shard, file_name, open_shard
from frostline.store.snapshot import Snapshot

# Rows from here on are copied one by one; smaller ones in one go, as a Python step a row would cost more
# than its bytes.
_BIG_ROW = 16 << 10
_SKIPPED_BYTES = 16 << 10  # between two lines are read as well: that takes less time than another call
_MOST_VIEWS = 512  # of the 1,024 that one call of preadv takes
_COUNTED_SHARDS = 1 << 20
_MOST_MAPPINGS = 30_000  # of the 65,530 that Linux gives a process


Check = Literal["open", "files", "read"]
"""What is compared beside structure: nothing, each file's checksum once in this process (in the background,
from its first use), or the checksum of each row whenever it is read."""


def touched(shards: Array) -> Array:
    """Which shards occur, ascending. Counting is quicker than np.unique, and takes memory by the largest."""
    if not len(shards) or int(shards.max()) > _COUNTED_SHARDS:
        return np.unique(shards)
    return np.flatnonzero(np.bincount(shards))


def by_value(values: Array) -> list[Array]:
    """The places of each value that occurs, one array a value."""
    order = np.argsort(values, kind="stable")
    groups: list[Array] = np.split(order, np.flatnonzero(np.diff(values[order])) + 1)
    return groups if len(order) else []


@cache
def _descriptor_limit() -> int:
    """Open files allowed, raised as far as the system lets us: 1,024 would be 256 shards of one field."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1 << 20 if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(ValueError, OSError):  # the system's own maximum lies lower: what there is has to do
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    return most if soft == resource.RLIM_INFINITY else soft


_alive: weakref.WeakSet[ColumnReader] = weakref.WeakSet()


class ColumnReader:
    """The rows of one field in one snapshot. Safe to use from many threads and after a fork."""

    def __init__(self, snapshot: Snapshot, column: Column, *, check: Check = "files") -> None:
        self.snapshot = snapshot
        self.column = column
        self.spec = column.field
        self.table = snapshot.files(column)
        self.check = check
        self._open: OrderedDict[int, Shard] = OrderedDict()
        self._lock = threading.Lock()
        _alive.add(self)
        self._pid = os.getpid()
        self._flat: Array | None = None
        self._region: region.Region | None = None
        self._placed = np.zeros(len(self.table.rows), bool)

    def shard(self, number: int) -> Shard:
        if self._pid != os.getpid():  # forked: the parent's threads may have held the lock
            self._lock, self._pid = threading.Lock(), os.getpid()
        with self._lock:
            found = self._open.get(number)
            if found is not None:
                self._open.move_to_end(number)
                return found
        snapshot = self.snapshot
        try:
            opened = open_shard(snapshot.root, self.column, self.table, number, snapshot.rows_per_shard)
        finally:
            if isinstance(snapshot.pin, Pin):
                snapshot.pin.refuse_other()
        if self.check == "files":
            opened.begin_verification()
        with self._lock:
            self._open[number] = opened
            while len(self._open) > self.most_open:
                self._open.popitem(last=False)  # views keep their mapping alive; the last one closes it
        return opened

    def missing_files(self) -> list[str]:
        """The files of this field that are not there, or not of the size that the index says."""
        folder = self.snapshot.root / FOLDER / self.column.folder
        names = (self.table.shard.tolist(), self.table.commit.tolist(), self.table.bytes.tolist())
        problems = []
        for shard, commit, size in zip(*names, strict=True):
            path = f"{folder}/{file_name(shard, commit)}"
            place = f"{FOLDER}/{self.column.folder}/{file_name(shard, commit)}"
            try:
                found = os.lstat(path)
            except (FileNotFoundError, NotADirectoryError):
                problems.append(f"{place} is missing")
                continue
            except OSError as e:
                problems.append(f"{place} cannot be read ({e.strerror})")
                continue
            if not stat.S_ISREG(found.st_mode):
                problems.append(f"{place} is a link, or no file")
            elif found.st_size != size:
                problems.append(f"{place} has {found.st_size:,} bytes instead of {size:,}")
        return problems

    @property
    def most_open(self) -> int:
        """Shards kept open.

        Each takes two descriptors (its own and the mapping's); all readers share half the limit.
        """
        return max(1, min(_descriptor_limit() // 4, _MOST_MAPPINGS) // max(1, len(_alive)))

    def present(self, rows: Array) -> Array:
        """Which of these rows this field has (an extension may be under way, or have failed on some)."""
        return self._places(rows)[1] >= 0

    def locate(self, rows: Array) -> tuple[Array, Array]:
        """(shard, place in its file) of each row; FieldError when one is not there."""
        shards, places = self._places(rows)
        if len(places) and int(places.min()) < 0:
            missing = rows[places < 0]
            keys = self.snapshot.keys(self.snapshot.positions_of_rows(missing[:3]))
            raise FieldError(
                f"Field {self.column.name!r} is missing in {len(missing):,} of the rows asked for, among "
                f"them {keys}. "
                f"Complete it with fl.Store.extend, or leave the field out."
            )
        return shards, places

    def _places(self, rows: Array) -> tuple[Array, Array]:
        size = self.snapshot.rows_per_shard
        shards, places = rows // size, rows % size
        files = self.table.at(shards)
        if not len(self.table.shard):
            return shards, files
        # −1 picks the last file here; those rows are −1 in the end all the same
        places = np.where((files >= 0) & (places < self.table.rows[files]), places, -1)
        sparse = np.flatnonzero((files >= 0) & (self.table.dense[files] == 0))
        for group in by_value(files[sparse]):
            mine = sparse[group]
            held = self.shard(int(shards[mine[0]])).rows
            local = rows[mine] % size
            found = np.minimum(np.searchsorted(held, local), len(held) - 1)
            places[mine] = np.where(held[found] == local, found, -1)
        return shards, places

    def lengths(self, shards: Array, places: Array) -> Array:
        """Ragged rows' lengths."""
        out = np.empty(len(shards), np.int64)
        for mine in by_value(shards):
            offsets = self.shard(int(shards[mine[0]])).offsets
            if offsets is None:
                raise StoreCorrupt(f"Field {self.column.name!r}: shard {shards[mine[0]]} has no offsets.")
            at = places[mine]
            out[mine] = offsets[at + 1] - offsets[at]
        return out

    # copying into a buffer. `out` is [rows, width] bytes for fixed parts, [items, width] for ragged ones

    def copy(
        self,
        part: Part,
        shards: Array,
        places: Array,
        out: Array,
        *,
        chosen: Array | None = None,
        direct: bool = False,
    ) -> None:
        """Rows of a fixed part. `chosen` [rows, k]: only these lines of axis 0. `direct`: preadv."""
        if chosen is None and not direct and part.width < _BIG_ROW:
            self._copy_small(part, shards, places, out)
        else:
            length = self.spec.item_shape[0] if chosen is not None else 1
            for start, stop in _runs(shards, places) if chosen is None else _singles(len(shards)):
                source, place = self.shard(int(shards[start])), int(places[start])
                if chosen is not None:
                    self._copy_lines(
                        source, part, place * length, part.width // length, chosen[start], out[start], direct
                    )
                elif direct:
                    _pread(source, part, place, out[start:stop])
                else:
                    out[start:stop] = source.view(part)[place : place + stop - start]
        if self.check == "read" and part.name == "values":
            self._verify(shards, places)

    def _copy_small(self, part: Part, shards: Array, places: Array, out: Array) -> None:
        slot_bytes = self.snapshot.rows_per_shard * part.width
        if part.name == "values" and region.possible(len(self._placed), slot_bytes):
            slots = self.table.at(shards)
            flat = self._map_shards(part, slots, slot_bytes)
            np.take(flat, slots * self.snapshot.rows_per_shard + places, axis=0, out=out, mode="clip")
            return
        for mine in by_value(shards):
            out[mine] = self.shard(int(shards[mine[0]])).view(part)[places[mine]]

    def _map_shards(self, part: Part, slots: Array, slot_bytes: int) -> Array:
        """The field's values as one array, one slot a file, with at least these files in it."""
        if self._flat is None or not self._placed[slots].all():
            missing = touched(slots[~self._placed[slots]])
            fresh = {int(slot): self.shard(int(self.table.shard[slot])) for slot in missing}
            with self._lock:
                if self._flat is None:
                    self._region = region.Region(len(self._placed), slot_bytes)
                    self._flat = self._region.array(part.width)
                for slot, source in fresh.items():
                    entry = source.entries[part.name]
                    if self._region is not None and not self._placed[slot]:
                        self._region.place(slot, source.fd, entry.start, entry.stop - entry.start)
                        self._placed[slot] = True
        return self._flat

    def _copy_lines(
        self, source: Shard, part: Part, start: int, width: int, chosen: Array, out: Array, direct: bool
    ) -> None:
        if not out.size:
            return
        lines = source.view(part).reshape(-1, width)
        target = out.reshape(len(chosen), width)
        if not direct:
            np.take(lines, chosen + start, axis=0, out=target, mode="clip")
            return
        base = source.entries[part.name].start + start * width
        for offset, views in _stretches(chosen.tolist(), target):
            _read_exactly(source, views, base + offset)

    def copy_ragged(
        self,
        part: Part,
        shards: Array,
        places: Array,
        out: Array,
        starts: Array,
        *,
        chosen: Array | None = None,
        direct: bool = False,
    ) -> None:
        """Rows of a ragged part, row i to `out[starts[i]:starts[i + 1]]`; `chosen`: only those items."""
        for i, (shard, place) in enumerate(zip(shards.tolist(), places.tolist(), strict=True)):
            source = self.shard(shard)
            begin, end = source.bounds(part, place)
            target = out[starts[i] : starts[i + 1]]
            if chosen is not None:
                self._copy_lines(source, part, begin, part.width, chosen[i], target, direct)
            elif direct:
                _pread(source, part, begin, target)
            else:
                target[:] = source.view(part)[begin:end]
        if self.check == "read" and part.name == "values":
            self._verify(shards, places)

    def _verify(self, shards: Array, places: Array) -> None:
        for shard, place in zip(shards.tolist(), places.tolist(), strict=True):
            self.shard(shard).verify(place)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a ColumnReader holds open files; send the Store instead, it opens itself anew")


def _runs(shards: Array, places: Array) -> Iterator[tuple[int, int]]:
    """[start, stop) of rows that lie one after the other in one file: copied in one go."""
    breaks = np.flatnonzero((np.diff(shards) != 0) | (np.diff(places) != 1)) + 1
    yield from pairwise([0, *breaks.tolist(), len(shards)]) if len(shards) else ()


def _singles(n: int) -> Iterator[tuple[int, int]]:
    return ((i, i + 1) for i in range(n))


def _stretches(lines: list[int], out: Array) -> Iterator[tuple[int, list[memoryview]]]:
    """What to read for lines of a file: (offset, where its bytes go), one call each.

    Each call lets go of the interpreter and takes it back, beside a thread that launches kernels all the
    while; so neighbours come in one, and what little lies between two lines goes where nobody looks.
    """
    if not out.size:
        return
    width, flat = out.shape[1], out.reshape(-1).data
    first = end = 0
    views: list[memoryview] = []
    for i, line in enumerate(lines):
        between = (line - end) * width
        if views and (not 0 <= between <= _SKIPPED_BYTES or len(views) >= _MOST_VIEWS):
            yield first * width, views
            views = []
        if not views:
            first = line
        elif between:
            views.append(_skipped[:between])
        views.append(flat[i * width : (i + 1) * width])
        end = line + 1
    yield first * width, views


_skipped = memoryview(bytearray(_SKIPPED_BYTES))  # all threads write here, and nobody reads


def _pread(source: Shard, part: Part, place: int, out: Array) -> None:
    views = [out.reshape(-1).data] if out.size else []
    _read_exactly(source, views, source.entries[part.name].start + place * part.width)


def _read_exactly(source: Shard, views: list[memoryview], offset: int) -> None:
    while views:
        with reading(source.name):
            got = os.preadv(source.fd, views, offset)
        if not got:
            left = sum(view.nbytes for view in views)
            raise StoreCorrupt(
                f"{source.name}: ended {left:,} bytes early; the file was cut short while open."
            )
        offset += got
        while views and got >= views[0].nbytes:
            got -= views.pop(0).nbytes
        if got:
            views[0] = views[0][got:]
