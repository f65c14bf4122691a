"""A cut tried out with the samples: a store of its own, a feed, and the batches that a training would get.

The samples are repeated until the rows no longer fit the processor's caches. They come from the page cache:
what a disk takes that has to be read is not measured, and said.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from frostline.cut.costs import Cost
from frostline.cut.fields import Fields
from frostline.cut.rehearsal import Freezing, Rehearsed, rehearsed, start_s
from frostline.cut.sampled import key_of, sampled
from frostline.cut.walk import Walk, clocked, on_cpu
from frostline.errors import FrostlineError
from frostline.execution.columns import taken
from frostline.feed import Feed
from frostline.store import Store, Table
from frostline.supply import supply
from frostline.supply.layout import Layout

_STORE_BYTES, _MOST_BYTES = 64 << 20, 1 << 30
"""What the rows of a trial take, and may take where a few batches need more."""
_MOST_ROWS = 4096
_FEWEST_BATCHES = 4
"""Batches of an epoch that is tried: starting and ending it must not be all there is."""
_APPENDED = 64
_ROUNDS = 3
_SUPPLY_S = 0.4
_MOST_SUPPLY_S = 10.0
"""An epoch of the fewest batches that would take longer is not tried: then the stages are all that counts."""


@dataclass(frozen=True)
class Tried:
    """A cut's costs, measured with rows of the samples."""

    frozen: Rehearsed | None
    """None: the stages take so long that they alone count, beside `start` and `write`."""
    start: float
    """Seconds that any freeze takes."""
    write: Cost
    """A byte's, into the store."""
    read: Cost
    """A sample's, through a feed."""
    supplied: Cost | None
    """A sample's, with all that runs in every epoch before the step; None where the stages alone count."""


class Trial:
    """Tries cuts."""

    def __init__(self, walk: Walk, batch_size: int, beside: Path) -> None:
        self._walk, self._batch, self._beside = walk, batch_size, beside
        self.refused: dict[tuple[str, ...], str] = {}
        """Cuts that cannot be frozen, and why."""

    def nothing(self, expected: float) -> Cost | None:
        """What comes before the step, without a store; expected: seconds a sample."""
        return self._supplied(None, expected, _MOST_ROWS, "auto")

    def stored(
        self, cut: Sequence[str], fields: Fields, tier: str, expected: float, freezing: Freezing
    ) -> Tried:
        """A store of the cut, made and read; expected: what its stages take in an epoch, seconds a sample."""
        size = sum(fields.bytes[name] for name in cut)
        few = min(_FEWEST_BATCHES * self._batch, max(1, int(_MOST_BYTES / size)))
        rows = max(few, min(_MOST_ROWS, int(_STORE_BYTES / size)))
        with tempfile.TemporaryDirectory(prefix=".frostline-cut-", dir=self._beside) as folder:
            path = Path(folder) / "store"
            frozen, start = self._frozen(cut, Path(folder), freezing, size)
            write = self._write(path, cut, fields, rows)
            store = Store.open(path)
            read = self._read(store, cut, tier)
            supplied = self._supplied(store, expected, rows, tier)
        return Tried(frozen, start, Cost(write.wall / size, write.cores / size), read, supplied)

    def _frozen(
        self, cut: Sequence[str], folder: Path, freezing: Freezing, size: float
    ) -> tuple[Rehearsed | None, float]:
        """(a freeze of the cut, where it can be rehearsed; what any freeze takes)."""
        try:
            found = rehearsed(self._walk, cut, folder, freezing, size)
        except FrostlineError as e:  # a real one would end in the same way, for example at its audit
            self.refused[(*cut,)] = str(e).splitlines()[0]
            return None, 0.0
        return found, found.start if found is not None else start_s(folder)

    def _write(self, path: Path, cut: Sequence[str], fields: Fields, rows: int) -> Cost:
        """The samples into a store, over and over; seconds a row."""
        n, step = len(self._walk.places), max(1, min(_APPENDED, rows // 8))
        columns = {name: on_cpu(self._walk.values[name]) for name in cut}
        began, spent = time.perf_counter(), time.process_time()
        with Store.create(path, {name: fields.specs[name] for name in cut}) as writer:
            for start in range(0, rows, step):
                some = range(start, min(rows, start + step))
                index = [i % n for i in some]
                values = {name: taken(column, index) for name, column in columns.items()}
                writer.append_batch([key_of(i) for i in some], values)
        return Cost((time.perf_counter() - began) / rows, (time.process_time() - spent) / rows)

    def _read(self, store: Store, cut: Sequence[str], tier: str) -> Cost:
        """As the supply asks for it: of a picked field only what is picked."""
        layout = Layout(self._walk.pipeline, cut)
        device = self._walk.device if layout.direct else torch.device("cpu")
        asked = layout.read_from_feed()
        feed = Feed(store, self._batch, device=device, fields=asked, tier=_possible(tier, device))

        def epoch() -> None:
            for _ in feed:
                pass

        return clocked(epoch, len(store), device, rounds=_ROUNDS)

    def _supplied(self, store: Table | None, expected: float, rows: int, tier: str) -> Cost | None:
        """An epoch of batches, with nothing done to them."""
        fewest = min(rows, _FEWEST_BATCHES * self._batch)
        if fewest * expected > _MOST_SUPPLY_S:
            return None
        rows = max(fewest, min(rows, int(_SUPPLY_S / max(expected, 1e-7))) // self._batch * self._batch)
        work = sampled(self._walk.pipeline, self._walk.places, rows)
        device, layout = self._walk.device, Layout(self._walk.pipeline, store.fields if store else None)
        stores = {"data": store.at(torch.arange(rows).numpy())} if store is not None else None
        held = _possible(tier, device if layout.direct else torch.device("cpu"))
        batches = supply(work, stores, split=None, batch_size=self._batch, device=device, tier=held)

        def epoch() -> None:
            for _ in batches:
                pass

        with closing(batches):
            return clocked(epoch, rows, device, rounds=_ROUNDS)


def _possible(tier: str, device: torch.device) -> str:
    """The tier of a feed on this device: one that feeds stages on the CPU holds nothing on a GPU."""
    return tier if device.type != "cpu" or tier in ("mmap", "disk") else "mmap"
