"""What an order is, and how a global batch is shared among ranks.

An `Order` is a description (`fl.Shuffle(seed=3)`); `over(tables, batch_size)` binds it to data and gives a
`BoundOrder`, whose two methods are pure: the same (epoch, i) gives the same rows in any process, at any
time. That is all that resuming needs.

**The short last batch.** batch_size is global. The last batch of an epoch may have fewer rows
(`drop_last=True` leaves it out). Every batch, short or not, is shared by one rule: rank r of W takes rows
[n·r // W, n·(r+1) // W) of its n rows. Shares differ by at most one row, and are empty for some ranks when
n < W; put together in rank order they are the global batch, so another number of ranks sees the same
batches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from frostline.errors import UsageError

Rows = NDArray[np.int64]


class Table(Protocol):
    """What an order may ask of a store. A row position is 0 … len(table) - 1."""

    def __len__(self) -> int: ...

    def is_ragged(self, field: str) -> bool: ...

    def column(self, field: str) -> NDArray[np.generic] | Sequence[str]:
        """All values of a small scalar field in row order; a string field gives a list."""
        ...

    def lengths(self, field: str) -> Rows:
        """The first-dimension lengths of a ragged field in row order."""
        ...


@runtime_checkable
class BoundOrder(Protocol):
    """An order over given tables. Both methods are pure."""

    def n_batches(self, epoch: int) -> int: ...

    def batch(self, epoch: int, i: int) -> Rows | Mapping[str, Rows]:
        """Row positions of global batch i, or {table: positions}. Axis 0 is what ranks share."""
        ...


@runtime_checkable
class Order(Protocol):
    def over(self, tables: Mapping[str, Table], batch_size: int) -> BoundOrder: ...


class RowSequence(ABC):
    """One long sequence of rows, cut every batch_size; `rows` spans several batches in one go."""

    def __init__(self, n_rows: int, batch_size: int, *, drop_last: bool) -> None:
        self.n_rows = n_rows
        self.batch_size = batch_size
        self.drop_last = drop_last

    @abstractmethod
    def _rows(self, epoch: int, start: int, stop: int) -> Rows: ...

    def n_batches(self, epoch: int) -> int:
        return count_batches(self.n_rows, self.batch_size, drop_last=self.drop_last)

    def batch(self, epoch: int, i: int) -> Rows:
        check_batch(i, self.n_batches(epoch), epoch)
        return self._rows(epoch, i * self.batch_size, min((i + 1) * self.batch_size, self.n_rows))

    def rows(self, epoch: int, start: int, stop: int) -> Rows:
        """Positions [start, stop) of the epoch's sequence, of which batch i is the i-th batch_size."""
        if not 0 <= start <= stop <= self.n_rows:
            raise UsageError(
                f"Rows {start} to {stop} of an epoch were asked for; an epoch has {self.n_rows}."
            )
        return self._rows(epoch, start, stop)


def share(rows: Rows, rank: int, world_size: int) -> Rows:
    """A rank's contiguous part of a global batch, along axis 0. See the top of this file.

    >>> [share(np.arange(5), rank, 3).tolist() for rank in range(3)]
    [[0], [1, 2], [3, 4]]
    """
    if not 0 <= rank < world_size:
        raise UsageError(f"Rank {rank} of world_size {world_size}: expected 0 to {world_size - 1}.")
    n = len(rows)
    return rows[n * rank // world_size : n * (rank + 1) // world_size]


def count_batches(n: int, batch_size: int, *, drop_last: bool) -> int:
    return n // batch_size if drop_last else -(-n // batch_size)


def not_whole(least: int | None = None, **given: Any) -> list[str]:
    """Of these arguments, those that are no whole numbers, or below the least; None is taken for not given.

    >>> not_whole(1, n_way=5, n_shot=0, n_query="15")
    ['n_shot is 0; a whole number from 1', "n_query is '15'; a whole number from 1"]
    """
    wanted = "a whole number" + ("" if least is None else f" from {least}")

    def fits(value: Any) -> bool:
        whole = isinstance(value, Integral) and not isinstance(value, bool)
        return whole and (least is None or int(value) >= least)

    given = {name: value for name, value in given.items() if value is not None}
    return [f"{name} is {value!r}; {wanted}" for name, value in given.items() if not fits(value)]


def not_named(**given: Any) -> list[str]:
    """Of these arguments, those that are no field's name."""
    return [f"{n} is {v!r}; the name of a field" for n, v in given.items() if not isinstance(v, str)]


def check_batch(i: int, n_batches: int, epoch: int) -> None:
    if not 0 <= i < n_batches:
        raise UsageError(f"Batch {i} of epoch {epoch} was asked for; it has batches 0 to {n_batches - 1}.")


def check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise UsageError(f"batch_size is {batch_size}; a global batch has at least one row.")


def only_table(tables: Mapping[str, Table], order: str) -> Table:
    """The one table of a feed over one store."""
    if len(tables) != 1:
        raise UsageError(
            f"{order} draws from one store; this feed has {', '.join(map(repr, tables)) or 'none'}. "
            "Use Episodes, or an order of your own whose batch(epoch, i) returns {name: rows}."
        )
    return next(iter(tables.values()))
