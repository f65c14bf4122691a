"""Index runs: which rows there are, what they are called, which files hold them.

A run is a safetensors file that covers one or more commits: its rows in ascending order with their keys,
the same rows sorted by key hash, tombstones of rows that died, and the shard files that were written.
Eight neighbouring runs of a level become one of the next, so a store of n commits has O(log n) runs and
a row is rewritten O(log n) times.
"""

from __future__ import annotations

import mmap
import os
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from frostline.errors import StoreCorrupt
from frostline.store.container import DTYPES, Entry, Tensors, header, itemsize, numpy_dtype, parse
from frostline.store.disk import open_inside, reading
from frostline.store.manifest import RunRef

FOLDER = "runs"
FANOUT = 8
MAX_MERGED_ROWS = 1 << 24  # larger runs are left alone, so that no commit waits for gigabytes of index

Array = np.ndarray[Any, np.dtype[Any]]

# Widest types first, bytes last: every tensor is aligned to its own size.
_LAYOUT: dict[str, str] = {
    "rows": "int64",
    "hashes": "uint64",
    "hash_order": "int64",
    "key_offsets": "int64",
    "tombstones": "int64",
    "file_column": "int64",
    "file_shard": "int64",
    "file_commit": "int64",
    "file_rows": "int64",
    "file_dense": "int64",
    "file_bytes": "int64",
    "file_xxh3": "uint64",
    "key_bytes": "uint8",
    "quarantine": "uint8",
}
FILE_TABLE = tuple(name for name in _LAYOUT if name.startswith("file_"))


def key_hash(key: bytes) -> int:
    return xxhash.xxh3_64_intdigest(key)


class File:
    """An open file, by which a mapping can be asked whether it still has its bytes."""

    def __init__(self, fd: int, name: str, size: int) -> None:
        self._fd, self._name, self._size = fd, name, size

    def refuse_cut(self) -> None:
        if os.fstat(self._fd).st_size < self._size:
            raise StoreCorrupt(f"{self._name}: the file was cut short while it was open.")

    def __del__(self) -> None:
        os.close(self._fd)


@dataclass
class Run:
    """The arrays of one run, in memory or mapped from its file."""

    arrays: dict[str, Array]
    file: File | None = None

    def refuse_cut(self) -> None:
        """StoreCorrupt where the mapped file is shorter than it was: reading past its end is a SIGBUS."""
        if self.file is not None:
            self.file.refuse_cut()

    def __getattr__(self, name: str) -> Array:
        try:
            return self.__dict__["arrays"][name]  # type: ignore[no-any-return]
        except KeyError:
            raise AttributeError(name) from None

    def __len__(self) -> int:
        return len(self.arrays["rows"])

    def key(self, place: int) -> bytes:
        # Checked here and not at opening, which would have to read the whole index.
        if not 0 <= place < len(self):
            raise StoreCorrupt(
                f"An index run of {len(self)} rows points to row {place}; `store check` says more."
            )
        start, stop = int(self.key_offsets[place]), int(self.key_offsets[place + 1])
        if not 0 <= start <= stop <= len(self.key_bytes):
            raise StoreCorrupt(
                f"An index run has a key from byte {start} to {stop}; `store check` says more."
            )
        return self.key_bytes[start:stop].tobytes()

    def text(self, place: int) -> str:
        try:
            return self.key(place).decode()
        except UnicodeDecodeError as e:
            raise StoreCorrupt(
                f"An index run has a key that is not UTF-8 ({e}); `store check` says more."
            ) from e

    def find(self, hashed: int, key: bytes) -> list[int]:
        """Rows that bear this key (more than one after a replacement), oldest first."""
        hashes = self.hashes
        found = []
        # bisect over the buffer: 1 µs, where np.searchsorted for one value costs several
        place = bisect_left(hashes.data, hashed)
        while place < len(hashes) and int(hashes[place]) == hashed:
            row_place = int(self.hash_order[place])
            if self.key(row_place) == key:
                found.append(int(self.rows[row_place]))
            place += 1
        return found

    def has_hashes(self, hashed: Array) -> Array:
        """Of each hash, whether a key here has it."""
        if not len(self):
            return np.zeros(len(hashed), np.bool_)
        places = np.searchsorted(self.hashes, hashed)
        return np.asarray(self.hashes[np.minimum(places, len(self) - 1)] == hashed)

    def chunks(self) -> list[Any]:
        """The file's content."""
        tensors: Tensors = {name: (dtype, (len(self.arrays[name]),)) for name, dtype in _LAYOUT.items()}
        return [
            header(tensors, {}, on_page="rows"),
            *(np.ascontiguousarray(self.arrays[name]) for name in _LAYOUT if len(self.arrays[name])),
        ]


def build(
    rows: Array, keys: Sequence[bytes], tombstones: Array, files: dict[str, Array], quarantine: bytes
) -> Run:
    """A run from rows in ascending order and their keys."""
    hashes = np.fromiter((key_hash(k) for k in keys), np.uint64, len(keys))
    order = np.argsort(hashes, kind="stable").astype(np.int64)
    offsets = np.zeros(len(keys) + 1, np.int64)
    np.cumsum(np.fromiter((len(k) for k in keys), np.int64, len(keys)), out=offsets[1:])
    return Run(
        {
            "rows": np.asarray(rows, np.int64),
            "hashes": hashes[order],
            "hash_order": order,
            "key_offsets": offsets,
            "key_bytes": np.frombuffer(b"".join(keys), np.uint8),
            "tombstones": np.sort(np.asarray(tombstones, np.int64)),
            "quarantine": np.frombuffer(quarantine, np.uint8),
            **files,
        }
    )


def file_table(entries: list[tuple[int, int, int, int, bool, int, int]]) -> dict[str, Array]:
    """(column, shard, commit, rows, dense, bytes, xxh3) of each file → the columns of a run."""
    columns = list(zip(*entries, strict=True)) if entries else [()] * len(FILE_TABLE)
    return {
        name: np.array(list(values), numpy_dtype(_LAYOUT[name]))
        for name, values in zip(FILE_TABLE, columns, strict=True)
    }


def merge(runs: Sequence[Run], *, keep_columns: set[int] | None = None) -> Run:
    """Neighbouring runs as one: rows their tombstones kill are dropped, newer files replace older."""
    rows = np.concatenate([r.rows for r in runs])
    dead = np.concatenate([r.tombstones for r in runs])
    alive = ~np.isin(rows, dead)
    # a tombstone for a row of an older run has to stay
    left = dead[~np.isin(dead, rows)]
    lengths = np.concatenate([np.diff(r.key_offsets) for r in runs])
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]) if len(lengths) else np.zeros(0, np.int64)
    data = np.concatenate([r.key_bytes for r in runs])
    hashes = np.empty(len(rows), np.uint64)
    place = 0
    for r in runs:
        hashes[place : place + len(r)][r.hash_order] = r.hashes
        place += len(r)
    keep = np.flatnonzero(alive)
    if len(keep) != len(rows):
        index = _ranges(starts[keep], lengths[keep])
        rows, lengths, hashes, data = rows[keep], lengths[keep], hashes[keep], data[index]
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    order = np.argsort(hashes, kind="stable").astype(np.int64)
    return Run(
        {
            "rows": rows,
            "hashes": hashes[order],
            "hash_order": order,
            "key_offsets": offsets,
            "key_bytes": data,
            "tombstones": np.sort(left),
            "quarantine": np.concatenate([r.quarantine for r in runs]),
            **_merge_files(runs, keep_columns),
        }
    )


def _merge_files(runs: Sequence[Run], keep_columns: set[int] | None) -> dict[str, Array]:
    table = {name: np.concatenate([r.arrays[name] for r in runs]) for name in FILE_TABLE}
    newest = {
        (int(c), int(s)): i
        for i, (c, s) in enumerate(zip(table["file_column"], table["file_shard"], strict=True))
        if keep_columns is None or int(c) in keep_columns
    }
    keep = np.sort(np.fromiter(newest.values(), np.int64, len(newest)))
    return {name: values[keep] for name, values in table.items()}


def _ranges(starts: Array, lengths: Array) -> Array:
    """Indices of several ranges, end to end."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    out: Array = np.arange(total) + np.repeat(starts - (ends - lengths), lengths)
    return out


def open_run(root: Path, ref: RunRef) -> Run:
    """Map a run's file; sizes, types and the places of keys are checked before anything is believed."""
    name = f"{root}/{FOLDER}/{ref.file}"
    fd = open_inside(root, FOLDER, ref.file)
    try:
        size = os.fstat(fd).st_size
        if size != ref.bytes:
            raise StoreCorrupt(
                f"{name} has {size:,} bytes, its commit says {ref.bytes:,}; the file is cut short or damaged."
            )
        with reading(name):
            entries = parse(fd, name)
            data = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    except BaseException:
        os.close(fd)
        raise
    file = File(fd, name, size)
    if set(entries) != set(_LAYOUT):
        raise StoreCorrupt(f"{name}: expected the tensors {sorted(_LAYOUT)}, found {sorted(entries)}.")
    run = Run({key: _mapped(data, entries[key], dtype, name, key) for key, dtype in _LAYOUT.items()}, file)
    _check_run(run, ref, name)
    return run


def _mapped(data: mmap.mmap, entry: Entry, dtype: str, name: str, key: str) -> Array:
    if entry.dtype != dtype or len(entry.shape) != 1:
        raise StoreCorrupt(
            f"{name}: {key} is {entry.dtype} {list(entry.shape)}, expected one dimension of {dtype}."
        )
    if entry.start % itemsize(dtype):
        raise StoreCorrupt(f"{name}: {key!r} does not start where its type can be read.")
    return np.frombuffer(data, np.dtype(DTYPES[dtype][2]), entry.shape[0], entry.start)


def _check_run(run: Run, ref: RunRef, name: str) -> None:
    n = len(run)
    lengths = {key: len(run.arrays[key]) for key in _LAYOUT}
    same = lengths["hashes"] == lengths["hash_order"] == n == ref.rows and lengths["key_offsets"] == n + 1
    if not same or len({lengths[key] for key in FILE_TABLE}) != 1:
        raise StoreCorrupt(f"{name}: its tensors do not have the same number of rows: {lengths}.")
    if int(run.key_offsets[0]) != 0 or int(run.key_offsets[-1]) != lengths["key_bytes"]:
        raise StoreCorrupt(f"{name}: the keys do not fill their bytes.")


def order_problems(run: Run) -> list[str]:
    """What is wrong with the order and ranges inside a run; reads all of it, at the speed of memory."""
    problems = []
    if np.any(run.rows[1:] <= run.rows[:-1]) or (len(run) and int(run.rows[0]) < 0):
        problems.append("rows are not ascending from 0")
    if np.any(run.key_offsets[1:] < run.key_offsets[:-1]):
        problems.append("key offsets run backwards")
    if np.any(run.hashes[1:] < run.hashes[:-1]):
        problems.append("hashes are not sorted")
    if not np.array_equal(np.sort(run.hash_order), np.arange(len(run))):
        problems.append("the hash order is not an order of the rows")
    return problems


def run_problems(run: Run) -> list[str]:
    """What a deep check finds inside a run: its order, and hashes that are not those of the keys."""
    problems = order_problems(run)
    if problems:
        return problems
    wrong = sum(key_hash(run.key(int(p))) != int(h) for p, h in zip(run.hash_order, run.hashes, strict=True))
    return [f"{wrong} hashes do not belong to their keys"] if wrong else []
