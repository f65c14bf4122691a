"""Batches of rows of similar length under a token budget, for ragged fields that are padded or packed.

A batch of rows padded to its longest costs longest × rows; rows of mixed lengths waste most of that. Here
rows are sorted by length, cut into batches that fill the budget, and the batches come in random order. So
that an epoch does not repeat the batches of the one before, lengths are blurred by up to `blur` before
sorting: rows of similar length change places, at the price of about that much padding.

Holds O(n) lengths, and the batches of two epochs (16 bytes a row).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache

import numpy as np

from frostline import keyed
from frostline.errors import UsageError
from frostline.feed.order.base import (
    Rows,
    Table,
    check_batch,
    check_batch_size,
    not_named,
    not_whole,
    only_table,
)


@dataclass(frozen=True)
class Buckets:
    """Every row once an epoch, in batches of similar length that hold at most max_tokens.

    `Buckets(by="tokens", max_tokens=16_384)`: by is a ragged field, or a field of whole numbers.
    The feed's batch_size is then the most rows a batch may have.
    """

    by: str = "length"
    _: KW_ONLY
    max_tokens: int
    """The budget of a global batch."""
    seed: int = 0
    shuffle: bool = True
    """False: shortest first, the same batches every epoch."""
    padded: bool = True
    """A batch costs its longest row × its rows; False: the sum of its lengths, for packed batches."""
    drop_last: bool = False
    """Leave out the one batch that is not full because the rows ran out."""
    blur: float = 0.1
    """How far lengths may differ and still count as similar, as a fraction."""

    def __post_init__(self) -> None:
        problems = [*not_whole(1, max_tokens=self.max_tokens), *not_whole(seed=self.seed)]
        problems += not_named(by=self.by)
        if not isinstance(self.blur, int | float) or not 0 <= self.blur <= 1:
            problems.append(f"blur is {self.blur!r}; a number from 0 to 1")
        if problems:
            raise UsageError("Buckets(...) cannot work:", problems=problems)

    def over(self, tables: Mapping[str, Table], batch_size: int) -> BoundBuckets:
        check_batch_size(batch_size)
        lengths = lengths_by(only_table(tables, "Buckets"), self.by)
        too_long = np.flatnonzero(lengths > self.max_tokens)
        if too_long.size:
            raise UsageError(
                f"{too_long.size} of {len(lengths)} rows are longer than max_tokens={self.max_tokens}; "
                "raise it, or leave them out. The first:",
                problems=[f"row {row}: {self.by} has length {lengths[row]}" for row in too_long[:5]],
            )
        return BoundBuckets(self, lengths, batch_size)


class BoundBuckets:
    def __init__(self, order: Buckets, lengths: Rows, batch_size: int) -> None:
        self._order = order
        self._lengths = lengths
        self._batch_size = batch_size
        # Kept for two epochs: a feed that reads ahead asks for the next one before the last is done.
        self._plan = lru_cache(maxsize=2)(self._make_plan)

    def n_batches(self, epoch: int) -> int:
        return len(self._plan(epoch)[1])

    def batch(self, epoch: int, i: int) -> Rows:
        rows, spans = self._plan(epoch)
        check_batch(i, len(spans), epoch)
        start, stop = spans[i]
        return rows[start:stop].copy()

    def _make_plan(self, epoch: int) -> tuple[Rows, Rows]:
        """The epoch's rows in the order they are cut, and the [start, stop) of batch after batch."""
        rows = self._sorted_rows(epoch)
        spans = self._cut(self._lengths[rows])
        if self._order.shuffle:
            key = keyed.derive(self._order.seed, epoch, "", "order/buckets/batches")
            spans = spans[keyed.permute(np.arange(len(spans)), len(spans), key)]
        return rows, spans

    def _sorted_rows(self, epoch: int) -> Rows:
        order, n = self._order, len(self._lengths)
        if not order.shuffle:
            return np.argsort(self._lengths, kind="stable").astype(np.int64)
        root = keyed.derive(order.seed, epoch, "", "order/buckets/rows")
        noise = keyed.children(np.array([root], np.uint64), n)[0]
        u = (noise >> np.uint64(11)) * 2.0**-53
        # The 1.0 shuffles rows of equal length; without blur, those of unequal length stay in order.
        rows = np.argsort(self._lengths + (self._lengths * order.blur + 1.0) * u).astype(np.int64)
        # drop_last leaves out what is cut last: start anywhere, or that would always be the longest rows.
        return np.roll(rows, -int(root % n)) if order.drop_last and n else rows

    def _cut(self, lengths: Rows) -> Rows:
        """Greedy: each batch takes the next rows until one more would pass the budget."""
        spans, start = [], 0
        while start < len(lengths):
            costs = self._costs(lengths[start : start + self._batch_size])
            stop = start + int(np.searchsorted(costs, self._order.max_tokens, side="right"))
            spans.append((start, stop))
            start = stop
        if self._order.drop_last and spans and not self._is_full(lengths[slice(*spans[-1])]):
            spans.pop()
        return np.array(spans, np.int64).reshape(-1, 2)

    def _costs(self, lengths: Rows) -> Rows:
        """The cost of the first 1, 2, … of these rows as one batch; never falls."""
        if not self._order.padded:
            return np.cumsum(lengths)
        return np.maximum.accumulate(lengths) * np.arange(1, len(lengths) + 1)

    def _is_full(self, lengths: Rows) -> bool:
        """Whether one more row like its longest would not fit."""
        one_more = self._costs(np.append(lengths, lengths.max()))
        return len(lengths) == self._batch_size or int(one_more[-1]) > self._order.max_tokens


def lengths_by(table: Table, field: str) -> Rows:
    """The lengths of a ragged field, or the values of a field of whole numbers."""
    values = np.asarray(table.lengths(field) if table.is_ragged(field) else table.column(field))
    if values.size and (values.ndim != 1 or values.dtype.kind not in "iu" or int(values.min()) < 0):
        raise UsageError(
            f"Buckets(by={field!r}) needs a ragged field or one of whole numbers ≥ 0 for each row; "
            f"{field!r} has {values.dtype} values of shape {list(values.shape)}."
        )
    return values.astype(np.int64)
