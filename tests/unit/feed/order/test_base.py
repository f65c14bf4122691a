"""Sharing a global batch, and what all orders promise: each row once, any world size, any resume point."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frostline.errors import UsageError
from frostline.feed.order import BoundOrder, Buckets, Order, Sequential, Shuffle, share


class FakeTable:
    """A table of given columns; a list of lists is a ragged field."""

    def __init__(self, n_rows: int, **columns) -> None:
        self.n_rows = n_rows
        self.columns = columns

    def __len__(self) -> int:
        return self.n_rows

    def is_ragged(self, field: str) -> bool:
        return isinstance(self.columns[field], list) and any(isinstance(v, list) for v in self.columns[field])

    def column(self, field: str):
        return self.columns[field]

    def lengths(self, field: str) -> np.ndarray:
        return np.array([len(v) for v in self.columns[field]], np.int64)


flat_orders = st.one_of(
    st.builds(Sequential),
    st.builds(Shuffle, seed=st.integers(0, 5)),
    st.builds(
        Shuffle, seed=st.integers(0, 5), block_rows=st.integers(1, 40), window_blocks=st.integers(1, 5)
    ),
)
orders = st.one_of(
    flat_orders,
    st.builds(
        Buckets,
        by=st.just("length"),
        max_tokens=st.integers(60, 500),
        seed=st.integers(0, 5),
        shuffle=st.booleans(),
        padded=st.booleans(),
    ),
)


def bind(order, n_rows: int, batch_size: int):
    lengths = np.random.default_rng(n_rows).integers(0, 60, n_rows)
    return order.over({"": FakeTable(n_rows, length=lengths)}, batch_size)


@settings(deadline=None)
@given(orders, st.integers(0, 400), st.integers(1, 50), st.integers(0, 9))
def test_each_row_comes_once_an_epoch(order, n_rows, batch_size, epoch) -> None:
    bound = bind(order, n_rows, batch_size)
    assert isinstance(order, Order)
    assert isinstance(bound, BoundOrder)
    batches = [bound.batch(epoch, i) for i in range(bound.n_batches(epoch))]
    assert all(1 <= len(rows) <= batch_size and rows.dtype == np.int64 for rows in batches)
    everything = np.concatenate([np.empty(0, np.int64), *batches])
    np.testing.assert_array_equal(np.sort(everything), np.arange(n_rows))


@settings(deadline=None)
@given(orders, st.integers(1, 300), st.integers(1, 50), st.data())
def test_any_batch_is_the_same_after_a_resume(order, n_rows, batch_size, data) -> None:
    """A fresh object, started in the middle and then run backwards, gives what a whole run gave."""
    epoch = data.draw(st.integers(0, 3))
    whole = bind(order, n_rows, batch_size)
    batches = [whole.batch(epoch, i) for i in range(whole.n_batches(epoch))]
    start = data.draw(st.integers(0, len(batches) - 1))
    resumed = bind(order, n_rows, batch_size)
    for i in [*range(start, len(batches)), *reversed(range(start))]:
        np.testing.assert_array_equal(resumed.batch(epoch, i), batches[i])


@settings(deadline=None)
@given(orders, st.integers(1, 300), st.integers(1, 50), st.integers(1, 9))
def test_ranks_together_see_the_global_batch(order, n_rows, batch_size, world_size) -> None:
    bound = bind(order, n_rows, batch_size)
    for i in range(bound.n_batches(0)):
        rows = bound.batch(0, i)
        shares = [share(rows, rank, world_size) for rank in range(world_size)]
        np.testing.assert_array_equal(np.concatenate(shares), rows)
        sizes = [len(part) for part in shares]
        assert max(sizes) - min(sizes) <= 1


@settings(deadline=None)
@given(flat_orders, st.integers(0, 300), st.integers(1, 50), st.data())
def test_rows_span_batches(order, n_rows, batch_size, data) -> None:
    bound = bind(order, n_rows, batch_size)
    whole = bound.rows(2, 0, n_rows)
    start = data.draw(st.integers(0, n_rows))
    stop = data.draw(st.integers(start, n_rows))
    np.testing.assert_array_equal(bound.rows(2, start, stop), whole[start:stop])
    for i in range(bound.n_batches(2)):
        np.testing.assert_array_equal(bound.batch(2, i), whole[i * batch_size : (i + 1) * batch_size])


def test_share_works_on_axis_0() -> None:
    episodes = np.arange(12).reshape(4, 3)
    assert share(episodes, 1, 2).tolist() == [[6, 7, 8], [9, 10, 11]]
    assert [len(share(np.arange(2), rank, 4)) for rank in range(4)] == [0, 1, 0, 1]


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_impossible_ranks_are_refused(rank, world_size) -> None:
    with pytest.raises(UsageError, match="world_size"):
        share(np.arange(4), rank, world_size)


@pytest.mark.parametrize("order", [Sequential(), Shuffle(), Shuffle(block_rows=2), Buckets(max_tokens=100)])
def test_misuse_is_refused(order) -> None:
    bound = bind(order, 10, 4)
    for i in (-1, bound.n_batches(0)):
        with pytest.raises(UsageError, match=f"Batch {i} of epoch 0"):
            bound.batch(0, i)
    with pytest.raises(UsageError, match="batch_size is 0"):
        bind(order, 10, 0)
    two = {"support": FakeTable(3), "frames": FakeTable(4)}
    with pytest.raises(UsageError, match="'support', 'frames'"):
        order.over(two, 4)


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 2), (0, 11)])
def test_rows_past_the_epoch_are_refused(start, stop) -> None:
    with pytest.raises(UsageError, match="an epoch has 10"):
        bind(Shuffle(), 10, 4).rows(0, start, stop)
