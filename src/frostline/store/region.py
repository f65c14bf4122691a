"""All shards of a field under one run of addresses, so that a batch of small rows is one `np.take`.

Address space is reserved once (it costs nothing), and a shard's file is mapped into its slot when first
touched. Rows of many shards then lie at `slot * R + place` of a single array (gain: docs/log.md).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from typing import Any

import numpy as np

from frostline.store.container import PAGE
from frostline.store.runs import Array

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_FAILED = ctypes.c_void_p(-1).value
_MOST_BYTES = 1 << 45


def possible(slots: int, slot_bytes: int) -> bool:
    """Linux, whole pages a slot, few enough mappings, and addresses to spare."""
    whole_pages = slot_bytes % PAGE == 0 and mmap.PAGESIZE <= PAGE
    return (
        sys.platform == "linux"
        and whole_pages
        and 0 < slots <= 4096
        and 0 < slots * slot_bytes <= _MOST_BYTES
    )


class Region:
    """Reserved addresses for `slots` files, seen by `array` as one. Freed with the last array over it."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self._bytes = slots * slot_bytes
        self._slot_bytes = slot_bytes
        self._address = 0
        libc = ctypes.CDLL(None, use_errno=True)
        self._mmap, self._munmap = libc.mmap, libc.munmap
        self._mmap.restype = ctypes.c_void_p
        self._mmap.argtypes = [
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_long,
        ]
        self._munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._address = self._call(
            None, self._bytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0
        )

    def _call(self, *arguments: Any) -> int:
        address = self._mmap(*arguments)
        if address == _FAILED:
            code = ctypes.get_errno()
            raise OSError(code, f"mmap: {os.strerror(code)}")
        return int(address)

    def place(self, slot: int, fd: int, offset: int, n_bytes: int) -> None:
        """Map n_bytes of a file into a slot, read-only."""
        if n_bytes > self._slot_bytes or offset % PAGE:
            raise ValueError(f"{n_bytes} bytes at {offset} do not fit a slot of {self._slot_bytes}")
        if n_bytes:
            at = self._address + slot * self._slot_bytes
            self._call(at, n_bytes, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, fd, offset)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "shape": (self._bytes,), "typestr": "|u1", "data": (self._address, True)}

    def array(self, width: int) -> Array:
        """The whole region as lines of `width` bytes; only slots that were placed may be read."""
        return np.asarray(self).reshape(-1, width)  # the array keeps the region alive

    def __del__(self) -> None:
        if self._address:
            self._munmap(self._address, self._bytes)
