"""Groups of batches. What an order gives, and what is refused of it, is held in test_feed.py."""

from __future__ import annotations

from typing import Any

import numpy as np

from frostline.feed.schedule import group_of


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
