"""Safetensors files, hashed in the same pass that writes or reads them.

The library of that name reads these files; it can neither hash on the way nor write from a device without
a whole copy in memory. The format: u64 length of the header, the header (JSON: type, shape and place of
each tensor), the tensors' bytes end to end. Nothing in it is ever run.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from frostline.errors import CheckpointError
from frostline.flat import flat_bytes
from frostline.store.disk import pour

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_MAX_HEADER = 100_000_000
_STEP = 256 << 10
"""Bytes handed on at once: what is written is hashed in the processor's cache (8 MiB took twice as long)."""
_STAGED = 32 << 20
_STRETCH = 4 << 20
"""Bytes that a thread reads before it is given more."""
THREADS = 4
"""That read a file; on two cores, two are as fast."""


@dataclass(frozen=True)
class Entry:
    """One tensor in a file; `start` is its first byte, counted from the beginning of the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int


def unfit(tensors: Mapping[str, Tensor]) -> list[str]:
    """Those that the format cannot hold, with the reason."""
    found = []
    for name, t in tensors.items():
        if t.layout is not torch.strided or t.is_quantized:
            kind = "quantized" if t.is_quantized else str(t.layout).removeprefix("torch.")
            found.append(f"{name}: a {kind} tensor (a buffer may be left out: persistent=False)")
        elif t.is_meta:
            found.append(f"{name}: on the meta device, it has no values")
        elif t.dtype not in _CODES:
            found.append(f"{name}: safetensors has no {t.dtype}")
    return found


def header(tensors: Mapping[str, Tensor]) -> tuple[bytes, list[str]]:
    """Length and header; the order of the tensors: widest types first, so that all are aligned."""
    order = sorted(tensors, key=lambda name: -tensors[name].itemsize)
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name in order:
        t = tensors[name]
        table[name] = {
            "dtype": _CODES[t.dtype],
            "shape": list(t.shape),
            "data_offsets": [place, place + t.nbytes],
        }
        place += t.nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, order


def write(path: Path, tensors: Mapping[str, Tensor]) -> tuple[int, str]:
    """Write a new file and sync it; → bytes, xxh3-64 in 16 digits."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        digest = pour(fd, _pieces(tensors))
        os.fsync(fd)
        size = os.fstat(fd).st_size
    finally:
        os.close(fd)
    return size, f"{digest:016x}"


def _pieces(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    head, order = header(tensors)
    yield memoryview(head)
    staging: list[Tensor] = []
    for name in order:
        flat = flat_bytes(tensors[name])
        if flat.device.type == "cpu":
            whole = flat.numpy().data
            yield from (whole[at : at + _STEP] for at in range(0, len(whole), _STEP))
        else:
            yield from _staged(flat, staging)


def _staged(flat: Tensor, staging: list[Tensor]) -> Iterator[memoryview]:
    """A device's bytes, through two pinned buffers: one is filled while the other is written."""
    cuda = flat.device.type == "cuda"
    if not staging:
        staging += [torch.empty(_STAGED, dtype=torch.uint8, pin_memory=cuda) for _ in range(2)]
    waiting: tuple[Tensor, Any] | None = None
    for i, at in enumerate(range(0, flat.numel(), _STAGED)):
        part = flat[at : at + _STAGED]
        filled = staging[i % 2][: part.numel()]
        filled.copy_(part, non_blocking=cuda)
        event = torch.cuda.current_stream(flat.device).record_event() if cuda else None
        if waiting is not None:
            yield from _arrived(*waiting)
        waiting = (filled, event)
    if waiting is not None:
        yield from _arrived(*waiting)


def _arrived(filled: Tensor, event: Any) -> Iterator[memoryview]:
    if event is not None:
        event.synchronize()
    whole = filled.numpy().data
    yield from (whole[at : at + _STEP] for at in range(0, len(whole), _STEP))


def read(path: Path, *, check: str | None = None) -> dict[str, Tensor]:
    """All tensors of a file, in memory of their own; `check` is the xxh3-64 that the file must have."""
    with ThreadPoolExecutor(THREADS) as pool:
        return Reading(path).finish(check, pool)


class Reading:
    """A file whose structure was checked and for whose tensors there is memory; `finish` reads it.

    Memory is taken in the thread that begins, where the C library may have some to give again. Taken by the
    threads that read, it is always fresh, and that doubled the time of a load. Most of the time is the
    kernel's, which clears pages that are touched first: so several threads read one file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        fd = _opened(path)
        try:
            self.entries = parse(fd, path)
            self._start = self.entries[0].start if self.entries else os.fstat(fd).st_size
        finally:
            os.close(fd)
        self._buffers = [torch.empty(entry.nbytes, dtype=torch.uint8) for entry in self.entries]

    def finish(self, check: str | None, pool: Executor) -> dict[str, Tensor]:
        """Read by the pool's threads; hashed here, in the order of the file."""
        digest = xxhash.xxh3_64()
        fd = _opened(self.path)
        begun = []
        try:
            digest.update(os.pread(fd, self._start, 0))
            begun += [(some, pool.submit(self._fill, fd, some)) for some in self._stretches()]
            for some, task in begun:
                task.result()
                for i in some if check is not None else ():
                    digest.update(self._buffers[i].numpy().data)
        finally:
            wait([task for _, task in begun])  # they read from the file
            os.close(fd)
        if check is not None and check != f"{digest.intdigest():016x}":
            raise CheckpointError(f"{self.path.name}: its bytes are not those that were written (checksum)")
        filled = zip(self.entries, self._buffers, strict=True)
        return {entry.name: buffer.view(entry.dtype).reshape(entry.shape) for entry, buffer in filled}

    def _stretches(self) -> list[range]:
        """Tensors that are read in one go: many small ones, or a large one."""
        bounds, size = [0], 0
        for i, entry in enumerate(self.entries):
            size += entry.nbytes
            if size >= _STRETCH:
                bounds.append(i + 1)
                size = 0
        return [range(*pair) for pair in pairwise([*bounds, len(self.entries)])]

    def _fill(self, fd: int, some: range) -> None:
        for i in some:
            entry, view = self.entries[i], self._buffers[i].numpy().data
            at = 0
            while at < entry.nbytes:
                got = os.preadv(fd, [view[at : at + _STEP]], entry.start + at)
                if not got:
                    raise CheckpointError(f"{self.path.name}: the file ends inside {entry.name}")
                at += got


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO must not hang us


def parse(fd: int, path: Path) -> list[Entry]:
    """The tensors of an open file in the order of their bytes; CheckpointError unless all fits the file."""
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        raise CheckpointError(f"{path.name}: not a regular file")
    start = os.pread(fd, 8, 0)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > min(info.st_size - 8, _MAX_HEADER):
        raise CheckpointError(f"{path.name}: no safetensors file, or one that is cut short")
    try:
        table = json.loads(os.pread(fd, length, 8))
        entries = [_entry(n, value, 8 + length) for n, value in table.items() if n != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise CheckpointError(f"{path.name}: its header is not one of safetensors ({e!r})") from e
    place = 8 + length
    entries.sort(key=lambda entry: (entry.start, entry.nbytes))
    for entry in entries:
        if entry.start != place:
            raise CheckpointError(f"{path.name}: {entry.name} starts at byte {entry.start:,}, not {place:,}")
        place += entry.nbytes
    if place != info.st_size:
        raise CheckpointError(f"{path.name}: {info.st_size:,} bytes where its header describes {place:,}")
    return entries


def _entry(name: str, value: dict[str, Any], base: int) -> Entry:
    dtype, shape = DTYPES[value["dtype"]], tuple(value["shape"])
    start, stop = value["data_offsets"]
    if not all(type(n) is int and n >= 0 for n in (*shape, start, stop)):
        raise ValueError(f"{name}: shape and places must be whole numbers, not negative")
    if stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name}: {value['dtype']} {list(shape)} does not take {stop - start} bytes")
    return Entry(name, dtype, shape, base + start, stop - start)
