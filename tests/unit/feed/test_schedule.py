"""Groups of batches. What an order gives, and what is refused of it, is held in test_feed.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import frostline as fl
from frostline.feed.schedule import Schedule, group_of

Make = Callable[..., fl.Store]


def test_groups_and_their_halves() -> None:
    def rows(*values: int) -> dict[str, Any]:
        return {"a": np.array(values, np.int64), "b": np.array([9], np.int64)}

    group = group_of([rows(1, 2), rows(), rows(3)])
    assert group.cuts == {"a": [0, 2, 2, 3], "b": [0, 1, 2, 3]}
    first, second = group.halves()
    assert (first.n_batches, second.n_batches) == (1, 2)
    assert second.rows["a"].tolist() == [3]
    assert second.cuts == {"a": [0, 0, 1], "b": [0, 1, 2]}
    assert first.rows["a"].tolist() == [1, 2]


def test_groups_are_cut_by_rows_not_by_batch_size(make_store: Make) -> None:
    """batch_size counts episodes there: a batch of one episode has many rows."""
    store = make_store("s", 40, {"number": fl.Field((), "int64"), "kind": fl.Field((), "str")})

    class Own:
        def n_batches(self, epoch: int) -> int:
            return 6

        def batch(self, epoch: int, i: int) -> np.ndarray:
            return np.arange(10)

    schedule = Schedule(Own(), {"": store}, 1, rank=0, world_size=1)
    assert [group.n_batches for group in schedule.groups(0, 0, 20)] == [2, 2, 2]
    assert [group.n_batches for group in schedule.groups(0, 1, 1000)] == [5]
