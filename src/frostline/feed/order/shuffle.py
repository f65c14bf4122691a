"""Every row once an epoch in random order, without ever holding a permutation.

10⁸ rows would be 800 MB of permutation in every rank; `keyed.permute` gives the rows of a batch from their
positions alone (measured: 50 µs for 256 rows).

A global shuffle reads single rows from everywhere. That is right for memory and for solid-state disks; a
cold hard disk or a network file system wants long reads. `block_rows` shuffles for those: blocks of
consecutive rows come in random order, and rows are mixed over windows of `window_blocks` blocks. Rows that
are neighbours in the store then stay near each other in time: shuffle once when writing if that matters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass

import numpy as np

from frostline import keyed
from frostline.errors import UsageError
from frostline.feed.order.base import Rows, RowSequence, Table, check_batch_size, not_whole, only_table


@dataclass(frozen=True)
class Shuffle:
    """Every row once an epoch, in an order made from seed and epoch.

    >>> bound = Shuffle(seed=1).over({"": range(6)}, batch_size=4)
    >>> sorted([*bound.batch(0, 0), *bound.batch(0, 1)]) == list(range(6))
    True
    """

    seed: int = 0
    _: KW_ONLY
    block_rows: int | None = None
    """Rows of a block that is read in one go; None shuffles globally."""
    window_blocks: int = 4
    """With block_rows: over how many blocks rows are mixed."""
    drop_last: bool = False
    """Leave out a last batch that is not full; which rows that meets changes from epoch to epoch."""

    def __post_init__(self) -> None:
        problems = not_whole(seed=self.seed)
        problems += not_whole(1, block_rows=self.block_rows, window_blocks=self.window_blocks)
        if problems:
            raise UsageError("Shuffle(...) cannot work:", problems=problems)

    def over(self, tables: Mapping[str, Table], batch_size: int) -> BoundShuffle | BoundBlockShuffle:
        check_batch_size(batch_size)
        n_rows = len(only_table(tables, "Shuffle"))
        if self.block_rows is None:
            return BoundShuffle(self, n_rows, batch_size)
        return BoundBlockShuffle(self, n_rows, batch_size, self.block_rows)


class BoundShuffle(RowSequence):
    def __init__(self, order: Shuffle, n_rows: int, batch_size: int) -> None:
        super().__init__(n_rows, batch_size, drop_last=order.drop_last)
        self._seed = order.seed

    def _rows(self, epoch: int, start: int, stop: int) -> Rows:
        key = keyed.derive(self._seed, epoch, "", "order/shuffle")
        return keyed.permute(np.arange(start, stop, dtype=np.int64), self.n_rows, key)


class BoundBlockShuffle(RowSequence):
    """Blocks in random order, rows mixed within windows of blocks; O(rows asked for) memory.

    The store ends with a short block when block_rows does not divide it. It gets a random slot of its own,
    and only the whole blocks are permuted: so the row of a position stays arithmetic, with one gap to step
    over.
    """

    def __init__(self, order: Shuffle, n_rows: int, batch_size: int, block_rows: int) -> None:
        super().__init__(n_rows, batch_size, drop_last=order.drop_last)
        self._seed = order.seed
        self._block = block_rows
        self._window_blocks = order.window_blocks
        self._n_whole, self._n_short = divmod(n_rows, block_rows)
        self._gap = block_rows - self._n_short if self._n_short else 0

    def _rows(self, epoch: int, start: int, stop: int) -> Rows:
        short_slot = self._short_slot(epoch)
        parts, position = [np.empty(0, np.int64)], start
        while position < stop:
            window = self._window_at(position, short_slot)
            first, end = self._bounds(window, short_slot)
            upto = min(stop, end)
            key = keyed.derive(self._seed, epoch, str(window), "order/shuffle/window")
            mixed = keyed.permute(np.arange(position - first, upto - first, dtype=np.int64), end - first, key)
            parts.append(self._to_rows(mixed + first, epoch, short_slot))
            position = upto
        return np.concatenate(parts)

    def _short_slot(self, epoch: int) -> int:
        """Which slot of the epoch the short block takes; past the end when there is none."""
        if not self._n_short:
            return self._n_whole
        return keyed.derive(self._seed, epoch, "", "order/shuffle/short") % (self._n_whole + 1)

    def _bounds(self, window: int, short_slot: int) -> tuple[int, int]:
        """The positions [first, end) of the epoch's sequence that a window covers."""
        first, end = (
            slot * self._block - (self._gap if slot > short_slot else 0)
            for slot in (window * self._window_blocks, (window + 1) * self._window_blocks)
        )
        return first, min(end, self.n_rows)

    def _window_at(self, position: int, short_slot: int) -> int:
        window = position // (self._window_blocks * self._block)
        return window + (position >= self._bounds(window, short_slot)[1])  # the gap is less than a window

    def _to_rows(self, positions: Rows, epoch: int, short_slot: int) -> Rows:
        """Positions in the sequence of slots → rows of the store."""
        after = positions >= short_slot * self._block + self._n_short
        slot, offset = np.divmod(positions + self._gap * after, self._block)
        key = keyed.derive(self._seed, epoch, "", "order/shuffle/blocks")
        is_whole = slot != short_slot
        whole = (slot - (slot > short_slot))[is_whole]
        block = np.full(len(slot), self._n_whole, np.int64)
        block[is_whole] = keyed.permute(whole, self._n_whole, key)
        return block * self._block + offset
