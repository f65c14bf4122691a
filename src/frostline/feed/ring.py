"""Buffers that are used again, and only when nobody holds what lies in them.

A fresh buffer costs a page fault every 4 KB (measured: 3–5× the copy itself), so buffers come back. On the
CPU a batch's tensors lie in the buffer: it comes back when the last of them is gone, however long that takes,
and `list(feed)` simply makes the ring grow. For a GPU the buffer is pinned and comes back when its copy was
made.
"""

from __future__ import annotations

import logging
import mmap
import threading
import weakref
from collections import deque
from typing import Any

import numpy as np
import torch

from frostline.errors import FeedError
from frostline.feed import memory
from frostline.store.runs import Array

log = logging.getLogger("frostline")

_HUGE = 2 << 20


class Slab:
    """One buffer: flat bytes for numpy, and for torch where it is pinned."""

    def __init__(self, n_bytes: int, *, pinned: bool) -> None:
        self.n_bytes = n_bytes
        self.pinned: torch.Tensor | None = None
        self.copied: Any = None  # the event after which a pinned slab may be filled again
        if pinned:
            self.pinned = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)
            self.array: Array = self.pinned.numpy()
            return
        # private: a forked child must not see its batches change, and only private memory gets huge pages
        room = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            room.madvise(mmap.MADV_HUGEPAGE)
        self.array = np.frombuffer(room, np.uint8)

    def ready(self) -> bool:
        return self.copied is None or bool(self.copied.query())


class NoRoom(FeedError):
    """No memory for a buffer. The feed waits for buffers to come back before it lets this out."""


class Ring:
    """Hands out slabs. `depth`: how many groups may lie ready; it shrinks when host memory runs short."""

    def __init__(self, *, depth: int, pinned: bool, reserve_bytes: int = 512 << 20) -> None:
        self.depth = depth
        self.pinned = pinned
        self.reserve_bytes = reserve_bytes
        self.made = 0
        self._free: deque[Slab] = deque()
        self._alive: weakref.WeakSet[Slab] = weakref.WeakSet()
        self._lock = threading.Lock()

    def take(self, n_bytes: int) -> Slab:
        """A slab of at least n_bytes that nobody holds."""
        with self._lock:
            slab = self._reuse(n_bytes)
        return slab if slab is not None else self._make(n_bytes)

    def _reuse(self, n_bytes: int) -> Slab | None:
        for _ in range(len(self._free)):
            slab = self._free.popleft()
            if slab.n_bytes < n_bytes:
                continue  # outgrown: let it go
            if slab.ready():
                return slab
            self._free.append(slab)
        if len(self._free) > self.depth + 1:  # all still being copied to the device: wait for the first
            slab = self._free.popleft()
            slab.copied.synchronize()
            return slab
        return None

    def _make(self, n_bytes: int) -> Slab:
        size = -(-max(n_bytes + n_bytes // 8, 1) // _HUGE) * _HUGE
        free = memory.host_free_bytes()
        if free < size + self.reserve_bytes:
            self._shrink(f"{memory.in_words(free)} of host memory left")
        try:
            if free < size and len(self._alive):  # the kernel would promise it, and end a process later
                raise MemoryError("the host has too little left, and buffers are still to come back")
            slab = Slab(size, pinned=self.pinned)
        except (MemoryError, OSError, RuntimeError) as e:
            self._shrink(str(e) or type(e).__name__)
            raise NoRoom(
                f"No memory for a batch: it takes {memory.in_words(size)}, "
                f"the host has {memory.in_words(free)} free. "
                "Use a smaller batch, fewer fields, fl.Pick, or free some memory."
            ) from e
        self.made += 1
        self._alive.add(slab)
        return slab

    def _shrink(self, why: str) -> None:
        with self._lock:
            self._free.clear()
            if self.depth > 1:
                self.depth -= 1
                log.warning(
                    "Memory is short (%s): the feed now keeps %d batch(es) ready instead of %d.",
                    why,
                    self.depth,
                    self.depth + 1,
                )

    def lend(self, slab: Slab) -> torch.Tensor:
        """The slab's bytes as a tensor; when it and every view of it are gone, the slab comes back."""
        view = slab.array[:]
        # deque.append takes no lock: a finaliser may run inside any other code of this thread
        weakref.finalize(view, _give_back, weakref.ref(self), slab).atexit = False
        return torch.from_numpy(view)

    def give_back(self, slab: Slab) -> None:
        if len(self._free) < self.depth + 3:
            self._free.append(slab)


def _give_back(ring: weakref.ref[Ring], slab: Slab) -> None:
    home = ring()
    if home is not None:
        home.give_back(slab)
