"""Which rows this rank reads, batch by batch: an order bound to the tables, checked, and cut into groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from frostline.errors import FeedError, UsageError
from frostline.feed.order import Buckets, Sequential, Shuffle
from frostline.feed.order.base import BoundOrder, RowSequence, share
from frostline.store import Table
from frostline.store.runs import Array
from frostline.store.table import common_positions

_MOST_BATCHES = 64
_OF_ONE_TABLE = (Shuffle, Sequential, Buckets)


@dataclass
class Group:
    """Neighbouring batches, fetched as one: for each part the positions, and where the batches begin."""

    n_batches: int
    rows: dict[str, Array]
    cuts: dict[str, list[int]]

    def halves(self) -> tuple[Group, Group]:
        middle = self.n_batches // 2
        return self._part(0, middle), self._part(middle, self.n_batches)

    def _part(self, first: int, last: int) -> Group:
        rows = {
            name: rows[self.cuts[name][first] : self.cuts[name][last]] for name, rows in self.rows.items()
        }
        cuts = {name: [c - cuts[first] for c in cuts[first : last + 1]] for name, cuts in self.cuts.items()}
        return Group(last - first, rows, cuts)


def group_of(rows: list[dict[str, Array]]) -> Group:
    """Batches (row positions by part) as one group."""
    names = list(rows[0])
    cuts = {
        name: np.concatenate([[0], np.cumsum([len(batch[name]) for batch in rows])]).tolist()
        for name in names
    }
    return Group(len(rows), {name: np.concatenate([batch[name] for batch in rows]) for name in names}, cuts)


class Schedule:
    """An order over tables, as one rank sees it. `parts`: the parts of a batch, and the table of each."""

    def __init__(
        self, order: Any, tables: dict[str, Table], batch_size: int, *, rank: int, world_size: int
    ) -> None:
        self._tables, self._batch_size = tables, batch_size
        self._rank, self._world_size = rank, world_size
        self._bound = self._bind(order)
        self.parts = self._find_parts()

    def _bind(self, order: Any) -> BoundOrder:
        """Bind the order; with several tables, one that draws from a single table sees the leading one."""
        tables = self._tables
        bound: BoundOrder
        if len(tables) > 1 and isinstance(order, _OF_ONE_TABLE):
            by = getattr(order, "by", None)
            leader = next((t for t in tables.values() if by in t.fields), next(iter(tables.values())))
            bound = order.over({"": leader}, self._batch_size)
            return bound
        bound = order.over(tables, self._batch_size) if hasattr(order, "over") else order
        if len(tables) > 1 and bound.n_batches(0) and not isinstance(bound.batch(0, 0), Mapping):
            self._refuse_unequal()
        return bound

    def _refuse_unequal(self) -> None:
        """Plain positions mean the same row in every table only where all have the same keys in order."""
        first, *others = self._tables.values()
        if any(len(t) != len(first) or list(t.keys) != list(first.keys) for t in others):
            raise UsageError(
                "Feed(…): the order gives plain row positions, but the stores do not have the same keys in "
                "the same order. Return {name: rows} for each store, or feed fl.Store.join(a, b)."
            )

    def _find_parts(self) -> dict[str, str]:
        if len(self._tables) == 1 and self._bound.n_batches(0):
            rows = self._bound.batch(0, 0)
            if isinstance(rows, Mapping):
                return dict.fromkeys(rows, next(iter(self._tables)))
        return {name: name for name in self._tables}

    def n_batches(self, epoch: int) -> int:
        return self._bound.n_batches(epoch)

    def groups(self, epoch: int, first: int, rows_at_once: float) -> Iterator[Group]:
        """The epoch's batches from `first` on, about so many rows (of all parts) at a time."""
        n = self.n_batches(epoch)
        if self._world_size > 1 or not isinstance(self._bound, RowSequence):
            yield from self._one_by_one(epoch, first, n, rows_at_once)
            return
        size = int(min(_MOST_BATCHES, max(1, rows_at_once / (self._batch_size * len(self.parts)))))
        for start in range(first, n, size):
            yield self._run_of(self._bound, epoch, start, min(n, start + size))

    def _run_of(self, sequence: RowSequence, epoch: int, start: int, stop: int) -> Group:
        """Several batches of one long sequence, worked out in one go."""
        size = self._batch_size
        first, last = start * size, min(stop * size, sequence.n_rows)
        rows = sequence.rows(epoch, first, last)
        cuts = [*range(0, last - first, size), last - first]
        return Group(stop - start, dict.fromkeys(self.parts, rows), dict.fromkeys(self.parts, cuts))

    def _one_by_one(self, epoch: int, start: int, stop: int, rows_at_once: float) -> Iterator[Group]:
        batches: list[dict[str, Array]] = []
        n_rows = 0
        try:
            for i in range(start, stop):
                batches.append(self._rows(epoch, i))
                n_rows += sum(map(len, batches[-1].values()))
                if n_rows >= rows_at_once or len(batches) == _MOST_BATCHES:
                    full, batches, n_rows = batches, [], 0
                    yield group_of(full)
        finally:  # also when the order fails: the batches before come first
            if batches:
                yield group_of(batches)

    def _rows(self, epoch: int, i: int) -> dict[str, Array]:
        """This rank's positions in global batch i, by part."""
        given = self._bound.batch(epoch, i)
        parts = given if isinstance(given, Mapping) else dict.fromkeys(self.parts, given)
        if set(parts) != set(self.parts):
            raise FeedError(
                f"The order gave rows for {sorted(parts)} in batch {i}; the feed has {sorted(self.parts)}."
            )
        return {name: self._share(name, rows, f"batch {i} of epoch {epoch}") for name, rows in parts.items()}

    def _share(self, part: str, given: Any, what: str) -> Array:
        rows = np.asarray(given)
        n = len(self._tables[self.parts[part]])
        whole = rows.ndim > 0 and (rows.dtype.kind in "iu" or not rows.size)
        if not whole or (rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < n):
            raise FeedError(f"The order's {what} holds rows that are not whole numbers in 0 … {n - 1}.")
        mine = share(rows.astype(np.int64), self._rank, self._world_size)
        return np.ascontiguousarray(mine.reshape(-1))


def aligned(order: Any, tables: dict[str, Table]) -> dict[str, Table]:
    """Several tables under an order for one: the rows whose key is in each, in the first one's order."""
    if len(tables) == 1 or not isinstance(order, _OF_ONE_TABLE):
        return tables
    places = common_positions([table.keys for table in tables.values()])
    if not len(places[0]):
        raise UsageError(f"Feed({{{', '.join(map(repr, tables))}}}, …): the stores have no key in common.")
    return {name: table.at(at) for (name, table), at in zip(tables.items(), places, strict=True)}
