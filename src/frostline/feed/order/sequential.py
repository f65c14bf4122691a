"""Rows as they lie in the store, every epoch the same: for evaluation and export."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass

import numpy as np

from frostline.feed.order.base import Rows, RowSequence, Table, check_batch_size, only_table


@dataclass(frozen=True)
class Sequential:
    """Every row once, in the order of the store.

    >>> Sequential().over({"": range(5)}, batch_size=2).batch(epoch=0, i=2)
    array([4])
    """

    _: KW_ONLY
    drop_last: bool = False
    """Leave out a last batch that is not full."""

    def over(self, tables: Mapping[str, Table], batch_size: int) -> BoundSequential:
        check_batch_size(batch_size)
        return BoundSequential(len(only_table(tables, "Sequential")), batch_size, drop_last=self.drop_last)


class BoundSequential(RowSequence):
    def _rows(self, epoch: int, start: int, stop: int) -> Rows:
        return np.arange(start, stop, dtype=np.int64)
