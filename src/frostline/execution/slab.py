"""Memory that worker processes write rows into and this process reads blocks from, without a copy between.

A slab is cut into slots; a slot holds the rows of one block, field by field. Who has a lease on a slot may
use it until the last tensor made from it is gone.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch
from torch import Tensor

_LINE = 64
"""Columns begin at multiples of a cache line."""
LARGEST = 6 << 30
SLOTS = 10
"""As many as the stages of a stream can hold at once, and a few to work ahead in."""
_HELD = 6
"""Those of them that the stages of a stream can hold at once."""


@dataclass(frozen=True)
class Layout:
    """Where the columns of a block of `rows` samples lie in a slot: name → (dtype, shape of a row)."""

    rows: int
    columns: Mapping[str, tuple[str, tuple[int, ...]]]
    slots: int = SLOTS

    @staticmethod
    def of(rows: int, samples: Mapping[str, Any], *, ahead: int = 0) -> Layout | None:
        """For values like these, of one sample; None where all must go through pipes.

        ahead: samples that workers may prepare at once, where there is memory for them.

        That is where nothing has a fixed shape, it is too much for this machine, or the machine has no such
        memory (only Linux has).
        """
        found = {
            name: (str(value.dtype).removeprefix("torch."), tuple(value.shape))
            for name, value in samples.items()
            if isinstance(value, Tensor) and value.numel()
        }
        if not found or not hasattr(os, "memfd_create"):
            return None
        layout = Layout(rows, found)
        fit = most_bytes() // layout.slot_bytes
        return (
            replace(layout, slots=max(SLOTS, min(fit, _HELD + math.ceil(ahead / rows))))
            if fit >= SLOTS
            else None
        )

    def width(self, name: str) -> int:
        """Bytes of a row."""
        dtype, shape = self.columns[name]
        itemsize: int = getattr(torch, dtype).itemsize
        return itemsize * math.prod(shape)

    def start(self, name: str) -> int:
        """Where a column begins in a slot."""
        before = [*self.columns][: [*self.columns].index(name)]
        return sum(_lines(self.rows * self.width(other)) for other in before)

    @property
    def slot_bytes(self) -> int:
        return sum(_lines(self.rows * self.width(name)) for name in self.columns)

    def fits(self, name: str, value: Any) -> bool:
        if name not in self.columns or not isinstance(value, Tensor):
            return False
        return (str(value.dtype).removeprefix("torch."), tuple(value.shape)) == self.columns[name]

    def column(self, slot: Tensor, name: str) -> Tensor:
        """A column of a slot (its bytes as a tensor), for all of its rows."""
        dtype, shape = self.columns[name]
        start = self.start(name)
        part = slot[start : start + self.rows * self.width(name)]
        return part.view(getattr(torch, dtype)).reshape(self.rows, *shape)


def most_bytes() -> int:
    """A slab's bytes at most: never more than a quarter of the memory that is free now."""
    return min(LARGEST, int(psutil.virtual_memory().available) // 4)


def _lines(n: int) -> int:
    return -(-n // _LINE) * _LINE


class Mapped:
    """A slab in this process, by its file descriptor."""

    def __init__(self, fd: int, layout: Layout) -> None:
        self.layout = layout
        self._map = mmap.mmap(fd, layout.slots * layout.slot_bytes)
        self.whole = memoryview(self._map)

    def slot(self, number: int) -> Tensor:
        return torch.frombuffer(self.part(number), dtype=torch.uint8)

    def part(self, number: int) -> memoryview:
        size = self.layout.slot_bytes
        return self.whole[number * size : (number + 1) * size]


class Slab(Mapped):
    """The slab as its owner sees it: hands out slots, and takes them back by itself."""

    def __init__(self, layout: Layout) -> None:
        self.fd = os.memfd_create("frostline-slab", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, layout.slots * layout.slot_bytes)
        super().__init__(self.fd, layout)
        self._free = [*range(layout.slots)]
        self._changed = threading.Condition()
        self._pinned = False

    def pin(self) -> None:
        """Let a GPU read it by itself. Where that is refused, copies are slower, and that is all."""
        whole = torch.frombuffer(self.whole, dtype=torch.uint8)
        done = torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), whole.numel(), 0)  # type: ignore[no-untyped-call]
        self._pinned = int(done) == 0

    def lease(self, *, wait: bool) -> Lease | None:
        """A slot; None when all are in use and nobody wants to wait."""
        with self._changed:
            while not self._free:
                if not wait:
                    return None
                self._changed.wait(0.1)
            return Lease(self, self._free.pop())

    def give_back(self, number: int) -> None:
        with self._changed:
            self._free.append(number)
            self._changed.notify()

    def close(self) -> None:
        """No more workers: what was made from it stays readable as long as somebody has it."""
        if self._pinned:
            whole = torch.frombuffer(self.whole, dtype=torch.uint8)
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(whole.data_ptr())  # type: ignore[no-untyped-call]
            self._pinned = False
        os.close(self.fd)


class Lease:
    """The right to use a slot: as long as this, or a tensor made from it, is alive."""

    def __init__(self, slab: Slab, number: int) -> None:
        self.number, self._layout = number, slab.layout
        part = slab.part(number)
        weakref.finalize(part, slab.give_back, number)
        self._slot = torch.frombuffer(part, dtype=torch.uint8)  # holds `part`, and so do all of its views

    def rows(self, name: str, places: Sequence[int]) -> Tensor:
        """The rows at these places: the slot itself where they are the first ones, otherwise copies."""
        column = self._layout.column(self._slot, name)
        if [*places] == [*range(len(places))]:
            return column[: len(places)]
        return column[torch.tensor(places, dtype=torch.int64)]
