"""Shuffle: epochs and seeds differ, nothing O(n) is held, blocks stay together."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from frostline.errors import UsageError
from frostline.feed.order import Shuffle


def epoch_rows(order: Shuffle, n: int, epoch: int = 0) -> np.ndarray:
    return order.over({"": range(n)}, 64).rows(epoch, 0, n)


@pytest.mark.parametrize("order", [Shuffle(seed=1), Shuffle(seed=1, block_rows=64)])
def test_epochs_and_seeds_differ(order) -> None:
    n = 6000
    first = epoch_rows(order, n, 0)
    other_seed = Shuffle(seed=2, block_rows=order.block_rows)
    for other in (epoch_rows(order, n, 1), epoch_rows(other_seed, n, 0), np.arange(n)):
        assert (first == other).mean() < 0.01


def test_epochs_do_not_depend_on_the_batch_size() -> None:
    order, n = Shuffle(seed=3), 1000
    by_7, by_100 = order.over({"": range(n)}, 7), order.over({"": range(n)}, 100)
    np.testing.assert_array_equal(
        np.concatenate([by_7.batch(0, i) for i in range(by_7.n_batches(0))]),
        np.concatenate([by_100.batch(0, i) for i in range(by_100.n_batches(0))]),
    )


@pytest.mark.parametrize("order", [Shuffle(), Shuffle(block_rows=1000)])
def test_more_rows_than_could_be_gone_through_take_no_memory(order) -> None:
    order.over({"": range(10**12)}, 256).batch(0, 0)
    tracemalloc.start()
    rows = order.over({"": range(10**12)}, 256).batch(1, 12_345)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(set(rows.tolist())) == 256
    assert peak < 2**20


def test_drop_last_meets_other_rows_each_epoch() -> None:
    bound = Shuffle(drop_last=True).over({"": range(10)}, 4)
    assert bound.n_batches(0) == 2
    missing = [set(range(10)) - set(bound.rows(epoch, 0, 8).tolist()) for epoch in range(200)]
    assert set().union(*missing) == set(range(10))


@pytest.mark.parametrize("n", [4000, 4037])
def test_a_window_holds_whole_blocks(n) -> None:
    """Any window of the sequence is window_blocks blocks of consecutive rows, mixed."""
    order = Shuffle(seed=5, block_rows=100, window_blocks=4)
    rows, start, seen = epoch_rows(order, n), 0, []
    while start < n:
        size = 400
        while size and not whole_blocks(rows[start : start + size], n):
            size -= 1  # the window with the short block is shorter
        assert size
        window = rows[start : start + size]
        assert (np.diff(window) == 1).mean() < 0.1
        seen.append(frozenset((window // 100).tolist()))
        start += size
    assert max(map(len, seen)) == 4
    assert sum(map(len, seen)) == -(-n // 100)
    assert sorted(block for window in seen for block in window) == list(range(-(-n // 100)))


def whole_blocks(rows: np.ndarray, n: int) -> bool:
    blocks, counts = np.unique(rows // 100, return_counts=True)
    return bool((counts == np.minimum(100, n - blocks * 100)).all())


def test_the_short_block_may_come_anywhere() -> None:
    order = Shuffle(block_rows=10, window_blocks=1)
    slots = {int(np.flatnonzero(epoch_rows(order, 43, epoch) == 42)[0] // 10) for epoch in range(200)}
    assert slots == {0, 1, 2, 3, 4}


def test_every_order_of_blocks_comes() -> None:
    order = Shuffle(block_rows=2, window_blocks=1)
    seen = {tuple(dict.fromkeys((epoch_rows(order, 7, epoch) // 2).tolist())) for epoch in range(600)}
    assert len(seen) == 24


@pytest.mark.parametrize("options", [{"block_rows": 0}, {"window_blocks": 0}, {"seed": "a"}, {"seed": 1.5}])
def test_impossible_options_are_refused(options) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(options))} is .*; a whole number"):
        Shuffle(**options)
