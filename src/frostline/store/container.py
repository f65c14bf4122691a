"""The safetensors container, written so that a chosen tensor starts on a page, and parsed without trust.

A file is: u64 length of the header, the header (JSON, padded with spaces), the tensors' bytes end to
end. The library that bears the name reads these files; we write and map them ourselves because it can
neither align the data nor hand out offsets for `preadv`.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from frostline.errors import StoreCorrupt

PAGE = 4096
_MAX_HEADER = 1 << 20

# name → (safetensors code, bytes an element, numpy type that carries the bits)
DTYPES: dict[str, tuple[str, int, str]] = {
    "bool": ("BOOL", 1, "u1"),
    "uint8": ("U8", 1, "u1"),
    "int8": ("I8", 1, "i1"),
    "int16": ("I16", 2, "<i2"),
    "uint16": ("U16", 2, "<u2"),
    "int32": ("I32", 4, "<i4"),
    "uint32": ("U32", 4, "<u4"),
    "int64": ("I64", 8, "<i8"),
    "uint64": ("U64", 8, "<u8"),
    "float16": ("F16", 2, "<f2"),
    "bfloat16": ("BF16", 2, "<u2"),
    "float32": ("F32", 4, "<f4"),
    "float64": ("F64", 8, "<f8"),
}
Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""name → dtype, shape; in file order."""

_BY_CODE = {code: (name, size) for name, (code, size, _) in DTYPES.items()}


def itemsize(dtype: str) -> int:
    return DTYPES[dtype][1]


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    return np.dtype(DTYPES[dtype][2])


@dataclass(frozen=True)
class Entry:
    """One tensor in a file: its type, shape and place (absolute offsets)."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def header(tensors: Tensors, metadata: dict[str, str], *, on_page: str) -> bytes:
    """Length and header of tensors (name → dtype, shape) in order, padded to put `on_page` on a page."""
    table: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    place = anchor = 0
    for name, (dtype, shape) in tensors.items():
        code, size, _ = DTYPES[dtype]
        start = place
        place += math.prod(shape) * size
        table[name] = {"dtype": code, "shape": list(shape), "data_offsets": [start, place]}
        anchor = start if name == on_page else anchor
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * (-(8 + len(text) + anchor) % PAGE)
    return len(text).to_bytes(8, "little") + text


def parse(fd: int, name: str) -> dict[str, Entry]:
    """An open file's tensors, or StoreCorrupt; lengths, types and places are checked against it."""
    size = os.fstat(fd).st_size
    start = os.pread(fd, 8, 0)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > min(size - 8, _MAX_HEADER):
        raise StoreCorrupt(
            f"{name}: {size:,} bytes with a header that claims {length:,}; the file is cut short or damaged."
        )
    try:
        table = json.loads(os.pread(fd, length, 8), object_pairs_hook=_no_repeats)
        entries = {key: _entry(value, 8 + length) for key, value in table.items() if key != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise StoreCorrupt(f"{name}: the header is not a safetensors header ({e}).") from e
    place = 8 + length
    for key, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != place:
            raise StoreCorrupt(
                f"{name}: tensor {key!r} starts at byte {entry.start:,} where {place:,} was expected."
            )
        place = entry.stop
    if place != size:
        raise StoreCorrupt(f"{name}: the header describes {place:,} bytes, the file has {size:,}.")
    return entries


def _entry(value: dict[str, Any], base: int) -> Entry:
    dtype, width = _BY_CODE[value["dtype"]]
    shape = tuple(value["shape"])
    start, stop = value["data_offsets"]
    if not all(type(n) is int and n >= 0 for n in (*shape, start, stop)):
        raise ValueError(f"shape {shape} and offsets {start}, {stop} must be whole numbers, not negative")
    if stop - start != math.prod(shape) * width:
        raise ValueError(f"{value['dtype']} {list(shape)} does not take {stop - start} bytes")
    return Entry(dtype, shape, base + start, base + stop)


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("a name stands twice")
    return dict(pairs)
