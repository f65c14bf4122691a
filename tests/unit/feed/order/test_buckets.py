"""Buckets: the budget holds, lengths are similar, epochs differ, what cannot fit is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frostline.errors import UsageError
from frostline.feed.order import Buckets


class Lengths:
    def __init__(self, values, *, ragged: bool = False) -> None:
        self.values = values
        self.ragged = ragged

    def __len__(self) -> int:
        return len(self.values)

    def is_ragged(self, field: str) -> bool:
        return self.ragged

    def column(self, field: str):
        assert not self.ragged
        return self.values

    def lengths(self, field: str):
        assert self.ragged
        return self.values


def batches(order: Buckets, lengths, batch_size: int = 10**6, epoch: int = 0) -> list[np.ndarray]:
    bound = order.over({"": Lengths(np.asarray(lengths))}, batch_size)
    return [bound.batch(epoch, i) for i in range(bound.n_batches(epoch))]


LENGTHS = np.random.default_rng(0).lognormal(4, 0.8, 5000).astype(np.int64).clip(1, 1000)


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 50), max_size=200),
    st.integers(50, 300),
    st.integers(1, 40),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_the_budget_holds(lengths, max_tokens, batch_size, padded, shuffle, drop_last) -> None:
    order = Buckets(max_tokens=max_tokens, padded=padded, shuffle=shuffle, drop_last=drop_last)
    made = batches(order, lengths, batch_size)
    for rows in made:
        of_rows = [lengths[row] for row in rows]
        cost = max(of_rows) * len(of_rows) if padded else sum(of_rows)
        assert cost <= max_tokens
        assert 1 <= len(rows) <= batch_size
    seen = [int(row) for rows in made for row in rows]
    assert len(seen) == len(set(seen))
    if not drop_last:
        assert len(seen) == len(lengths)


def padding(made: list[np.ndarray], lengths: np.ndarray) -> float:
    return 1 - lengths.sum() / sum(lengths[rows].max() * len(rows) for rows in made)


def test_padding_is_small_and_blurring_costs_little_of_it() -> None:
    """Sorted rows are the least that runs of similar length can waste; blur may add its own width to that."""
    at_random = np.array_split(np.random.default_rng(0).permutation(5000), 60)
    exact = padding(batches(Buckets(max_tokens=16_384, shuffle=False), LENGTHS), LENGTHS)
    blurred = padding(batches(Buckets(max_tokens=16_384, blur=0.1), LENGTHS), LENGTHS)
    assert padding(at_random, LENGTHS) > 0.8
    assert exact < 0.1
    assert exact < blurred < exact + 0.1


def test_epochs_mix_rows_and_batches() -> None:
    order = Buckets(max_tokens=4096)
    together = [
        {
            frozenset((int(rows[0]), int(row)))
            for rows in batches(order, LENGTHS, epoch=epoch)
            for row in rows[1:]
        }
        for epoch in (0, 1)
    ]
    assert len(together[0] & together[1]) < 0.3 * len(together[0])
    longest = [int(LENGTHS[rows].max()) for rows in batches(order, LENGTHS)]
    assert abs(np.corrcoef(longest, np.arange(len(longest)))[0, 1]) < 0.2


def test_without_shuffle_the_shortest_come_first_every_epoch() -> None:
    order = Buckets(max_tokens=10, shuffle=False)
    assert [rows.tolist() for rows in batches(order, [5, 1, 4, 1, 5], epoch=3)] == [[1, 3], [2, 0], [4]]
    assert [rows.tolist() for rows in batches(order, [5, 1, 4, 1, 5], 1)] == [[1], [3], [2], [0], [4]]


def test_equal_lengths_are_shuffled_too() -> None:
    first, second = (batches(Buckets(max_tokens=40), [10] * 100, epoch=epoch) for epoch in (0, 1))
    assert [len(rows) for rows in first] == [4] * 25
    assert {frozenset(rows.tolist()) for rows in first} != {frozenset(rows.tolist()) for rows in second}


def test_drop_last_drops_at_most_one_batch_and_not_always_the_longest() -> None:
    lengths = np.arange(1, 102)
    dropped = []
    for epoch in range(40):
        seen = np.concatenate(batches(Buckets(max_tokens=400, drop_last=True), lengths, epoch=epoch))
        dropped.append(set(range(101)) - set(seen.tolist()))
    assert any(dropped)
    assert not all(100 in rows for rows in dropped if rows)
    full = batches(Buckets(max_tokens=20, drop_last=True), [10] * 4)
    assert [len(rows) for rows in full] == [2, 2]


def test_ragged_fields_and_numbers_both_do() -> None:
    order = Buckets("tokens", max_tokens=10)
    for ragged in (True, False):
        bound = order.over({"": Lengths(np.array([4, 5, 6]), ragged=ragged)}, 8)
        assert sum(len(bound.batch(0, i)) for i in range(bound.n_batches(0))) == 3


def test_rows_past_the_budget_are_listed() -> None:
    with pytest.raises(UsageError, match="7 of 9 rows are longer than max_tokens=10") as caught:
        batches(Buckets("tokens", max_tokens=10), [5, 11, 12, 10, 13, 14, 15, 16, 17])
    assert caught.value.problems[0] == "row 1: tokens has length 11"
    assert len(caught.value.problems) == 5


@pytest.mark.parametrize("values", [["a", "b"], [1.5, 2.0], [-1, 3], [[1, 2], [3, 4]]])
def test_only_whole_numbers_are_lengths(values) -> None:
    with pytest.raises(UsageError, match="by='length'"):
        batches(Buckets(max_tokens=10), values)


@pytest.mark.parametrize("options", [{"max_tokens": 0}, {"max_tokens": "8"}, {"blur": -0.1}, {"by": 3}])
def test_impossible_options_are_refused(options) -> None:
    options = {"max_tokens": 8, **options}
    with pytest.raises(UsageError, match=r"Buckets\(...\) cannot work:\n  - \w+ is \S+; (a|the) [\w ]+$"):
        Buckets(**options)


def test_without_blur_only_equal_lengths_change_places() -> None:
    order = Buckets(max_tokens=10**9, blur=0)
    made = [batches(order, LENGTHS, 10**6, epoch)[0] for epoch in (0, 1)]
    for rows in made:
        np.testing.assert_array_equal(LENGTHS[rows], np.sort(LENGTHS))
    assert (made[0] != made[1]).mean() > 0.9
