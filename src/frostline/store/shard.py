"""One shard file: the rows of one field in one row range, with a checksum for each.

Tensors, in file order: `checksums` u64 [n], `rows` i64 [n] (place in the range), `offsets` i64 [n + 1]
(ragged fields only), `scales` (int8 codecs only), `pad` (4 bytes, where the scales would leave the
tensors before them off their alignment), `values` (starts on a page).
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from frostline.errors import StoreCorrupt
from frostline.store.container import DTYPES, PAGE, Entry, header, itemsize, parse
from frostline.store.disk import open_inside, reading, write_whole
from frostline.store.field import Field, Part
from frostline.store.manifest import Column
from frostline.store.runs import Array
from frostline.store.snapshot import FileTable
from frostline.store.verification import Verification, begin

FOLDER = "data"
_MAX_ITEMS = 1 << 48


def file_name(shard: int, commit: int) -> str:
    return f"{shard:08d}.{commit:08d}.safetensors"


def row_checksum(pieces: list[Any]) -> int:
    """xxh3-64 over a row's bytes: its scales, then its values."""
    if len(pieces) == 1:
        return xxhash.xxh3_64_intdigest(pieces[0])
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece)
    return digest.intdigest()


def layout(spec: Field, n: int, items: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The tensors that a file of n rows (with `items` ragged items) has, in file order."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {"checksums": ("uint64", (n,)), "rows": ("int64", (n,))}
    if spec.ragged:
        tensors["offsets"] = ("int64", (n + 1,))
    for part in spec.parts:
        lines = items if part.per_item else n
        tensors[part.name] = (part.dtype, (lines, *part.shape))
        if part.name == "scales" and lines * part.width % 8:
            tensors["pad"] = ("uint8", (4,))
    return tensors


def write(
    root: Path,
    column: Column,
    shard: int,
    commit: int,
    rows: Array,
    pieces: dict[str, list[Array]],
    checksums: Array,
    offsets: Array | None,
) -> tuple[int, int, int, int, bool, int, int]:
    """Write the file; `pieces` are bytes of each part, end to end. Returns its entry for the file table."""
    spec, n = column.field, len(rows)
    items = int(offsets[-1]) if offsets is not None else n
    tensors = layout(spec, n, items)
    metadata = {"field": column.name, "shard": str(shard), "codec": spec.codec}
    content: dict[str, list[Any]] = {
        "checksums": [checksums],
        "rows": [np.ascontiguousarray(rows, np.int64)],
        "offsets": [offsets],
        "pad": [np.zeros(4, np.uint8)],
        **pieces,
    }
    chunks = [header(tensors, metadata, on_page="values"), *(c for key in tensors for c in content[key])]
    place = root / FOLDER / column.folder / file_name(shard, commit)
    size, digest = write_whole(place, [chunk for chunk in chunks if memoryview(chunk).nbytes])
    dense = bool(np.array_equal(rows, np.arange(n)))
    return (column.number, shard, commit, n, dense, size, digest)


@dataclass
class Shard:
    """An open shard file: mapped, its header checked against what the store says of it."""

    name: str
    spec: Field
    entries: dict[str, Entry]
    map: mmap.mmap
    fd: int
    want: int
    offsets: Array | None
    _views: dict[str, Array]
    _sparse: Array | None
    verification: Verification | None = None

    def __len__(self) -> int:
        return self.entries["rows"].shape[0]

    @property
    def rows(self) -> Array:
        """Places in the range, ascending."""
        return np.arange(len(self)) if self._sparse is None else self._sparse

    def begin_verification(self) -> None:
        """Have the file compared with its checksum in the background, unless it was before."""
        self.verification = begin(self.fd, self.name, self.want)

    def verify_whole(self) -> None:
        """Compare the file with its checksum now, unless it was before."""
        self.verification = self.verification or begin(self.fd, self.name, self.want)
        if self.verification is not None:
            self.verification.settle()

    def view(self, part: Part) -> Array:
        """A part's bytes as [rows or items, width]."""
        return self._views[part.name]

    def bounds(self, part: Part, place: int) -> tuple[int, int]:
        """The row's first and last + 1 line in `view(part)`."""
        if part.per_item and self.offsets is not None:
            return int(self.offsets[place]), int(self.offsets[place + 1])
        return place, place + 1

    def checksums(self) -> Array:
        entry = self.entries["checksums"]
        return np.frombuffer(self.map, np.uint64, entry.shape[0], entry.start)

    def verify(self, place: int) -> None:
        """Compare a row with its checksum."""
        pieces = []
        for part in self.spec.parts:
            start, stop = self.bounds(part, place)
            pieces.append(np.ascontiguousarray(self.view(part)[start:stop]))
        want = int(self.checksums()[place])
        if row_checksum(pieces) != want:
            raise StoreCorrupt(
                f"{self.name}: row {int(self.rows[place])} of the shard does not have its checksum; its "
                f"bytes changed after "
                f"writing. `frostline store check` lists all that is damaged; write those keys again with "
                f"writer.replace."
            )

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


def open_shard(root: Path, column: Column, table: FileTable, shard: int, rows_per_shard: int) -> Shard:
    """Map a shard file. Its size, header, types, shapes and offsets are checked first, not trusted."""
    at = int(table.at(np.array([shard]))[0])
    if at < 0:
        raise StoreCorrupt(f"{root}: field {column.name!r} has no file for shard {shard}.")
    n, size = int(table.rows[at]), int(table.bytes[at])
    file = file_name(shard, int(table.commit[at]))
    name = f"{root}/{FOLDER}/{column.folder}/{file}"
    fd = open_inside(root, FOLDER, column.folder, file)
    try:
        with reading(name):
            entries = _checked_entries(fd, name, column.field, n, size)
            data = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
            # read, not mapped: a file that is cut short later would end the process where they are used
            rows = _read(fd, name, entries["rows"])
            offsets = _read(fd, name, entries["offsets"]) if "offsets" in entries else None
        problem = _disorder(rows, offsets, entries["values"].shape[0], rows_per_shard)
        dense = bool(table.dense[at])
        if not problem and dense != (int(rows[-1]) == n - 1):
            problem = "the index is wrong about which rows it holds"
        if problem:
            raise StoreCorrupt(f"{name}: {problem}.")
        views = {part.name: _lines(data, entries[part.name], part) for part in column.field.parts}
    except BaseException:
        os.close(fd)
        raise
    sparse = None if dense else rows
    return Shard(name, column.field, entries, data, fd, int(table.xxh3[at]), offsets, views, sparse)


def _checked_entries(fd: int, name: str, spec: Field, n: int, size: int) -> dict[str, Entry]:
    real = os.fstat(fd).st_size
    if real != size:
        raise StoreCorrupt(
            f"{name} has {real:,} bytes, the store's index says {size:,}; the file is cut short or damaged."
        )
    entries = parse(fd, name)
    items = entries["values"].shape[0] if "values" in entries and entries["values"].shape else 0
    want = layout(spec, n, items)
    got = {key: (entry.dtype, entry.shape) for key, entry in entries.items()}
    if got != want:
        raise StoreCorrupt(f"{name}: holds {got}, the store's index says {want}.")
    if items > _MAX_ITEMS:  # only items without bytes can claim this many
        raise StoreCorrupt(f"{name}: claims {items:,} items; a file holds at most {_MAX_ITEMS:,}.")
    odd = [key for key, entry in entries.items() if entry.start % itemsize(entry.dtype)]
    if odd or entries["values"].start % PAGE:
        raise StoreCorrupt(f"{name}: {(odd or ['values'])[0]!r} does not start where its type can be read.")
    return entries


def _disorder(rows: Array, offsets: Array | None, items: int, rows_per_shard: int) -> str | None:
    if np.any(rows[1:] <= rows[:-1]) or rows[0] < 0 or rows[-1] >= rows_per_shard:
        return f"its row numbers are not ascending within 0 … {rows_per_shard - 1}"
    if offsets is not None and (
        offsets[0] != 0 or offsets[-1] != items or np.any(offsets[1:] < offsets[:-1])
    ):
        return f"its offsets do not run from 0 to the {items} items there are"
    return None


def _read(fd: int, name: str, entry: Entry) -> Array:
    data = os.pread(fd, entry.stop - entry.start, entry.start)
    if len(data) < entry.stop - entry.start:
        raise StoreCorrupt(f"{name}: the file was cut short while it was being opened.")
    return np.frombuffer(data, np.dtype(DTYPES[entry.dtype][2]))


def _lines(data: mmap.mmap, entry: Entry, part: Part) -> Array:
    flat = np.frombuffer(data, np.uint8, entry.stop - entry.start, entry.start)
    return flat.reshape(entry.shape[0], part.width)
