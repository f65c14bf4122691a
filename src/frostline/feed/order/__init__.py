"""Which rows make which batch: pure functions of seed, epoch and position, one file for each order.

Anybody's own order is an object with `over(tables, batch_size)` that returns one with `n_batches(epoch)` and
`batch(epoch, i)`; see `base.py`.
"""

from __future__ import annotations

from frostline.feed.order.base import BoundOrder, Order, RowSequence, Table, share
from frostline.feed.order.buckets import Buckets
from frostline.feed.order.episodes import Episodes
from frostline.feed.order.sequential import Sequential
from frostline.feed.order.shuffle import Shuffle

__all__ = [
    "BoundOrder",
    "Buckets",
    "Episodes",
    "Order",
    "RowSequence",
    "Sequential",
    "Shuffle",
    "Table",
    "share",
]
