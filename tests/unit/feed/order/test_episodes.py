"""Episodes: shapes, distinct rows of the right classes, purity, all classes and rows reached, refusals."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frostline.errors import UsageError
from frostline.feed.order import Episodes, share


class Labels:
    def __init__(self, values) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def column(self, field: str):
        assert field == "class"
        return self.values


INTS = np.random.default_rng(0).permutation(np.repeat(np.arange(20), 12))
STRINGS = [f"class-{label}" for label in INTS]


@pytest.mark.parametrize("labels", [INTS, STRINGS])
def test_an_episode_is_class_by_class_with_distinct_rows(labels) -> None:
    bound = Episodes(n_way=5, n_shot=2, n_query=3, n_episodes=30).over({"": Labels(labels)}, 8)
    assert [len(bound.batch(0, i)["support"]) for i in range(bound.n_batches(0))] == [8, 8, 8, 6]
    names = np.asarray(labels)
    for i in range(bound.n_batches(0)):
        batch = bound.batch(0, i)
        assert {name: rows.dtype for name, rows in batch.items()} == {"support": np.int64, "query": np.int64}
        for support, query in zip(batch["support"], batch["query"], strict=True):
            assert len({*support.tolist(), *query.tolist()}) == 5 * (2 + 3)
            of_support, of_query = names[support].reshape(5, 2), names[query].reshape(5, 3)
            assert len(set(of_support[:, 0].tolist())) == 5
            assert (of_support == of_support[:, :1]).all()
            assert (of_query == of_support[:, :1]).all()


def test_two_stores_give_a_part_each() -> None:
    tables = {"support": Labels(INTS), "frames": Labels(np.array([*range(20)] * 3 + [99]))}
    order = Episodes(n_way=3, n_shot=12, n_query=2, n_episodes=4, query="frames", skip_small=True)
    batch = order.over(tables, 4).batch(0, 0)
    assert batch["support"].shape == (4, 36)
    assert batch["frames"].shape == (4, 6)
    of_support = INTS[batch["support"]].reshape(4, 3, 12)
    of_query = tables["frames"].values[batch["frames"]].reshape(4, 3, 2)
    assert (of_support[..., :1] == of_query).all()
    assert all(len(set(rows.tolist())) == len(rows) for rows in batch["frames"])


@settings(deadline=None)
@given(st.integers(0, 3), st.integers(0, 3), st.integers(1, 9), st.integers(1, 4))
def test_an_episode_does_not_depend_on_batches_ranks_or_what_came_before(seed, epoch, batch_size, world_size):
    order = Episodes(n_way=4, n_shot=1, n_query=2, n_episodes=11, seed=seed)
    alone = order.over({"": Labels(INTS)}, 1)
    bound = order.over({"": Labels(INTS)}, batch_size)
    seen = [
        share(bound.batch(epoch, i)["query"], rank, world_size)
        for i in range(bound.n_batches(epoch))
        for rank in range(world_size)
    ]
    expected = [alone.batch(epoch, j)["query"] for j in reversed(range(11))][::-1]
    np.testing.assert_array_equal(np.concatenate(seen), np.concatenate(expected))


def test_epochs_seeds_and_episodes_differ() -> None:
    def episode(seed: int, epoch: int, j: int) -> tuple[int, ...]:
        order = Episodes(n_way=5, n_shot=2, n_query=3, n_episodes=9, seed=seed)
        return tuple(order.over({"": Labels(INTS)}, 1).batch(epoch, j)["support"][0].tolist())

    assert len({episode(seed, epoch, j) for seed in range(2) for epoch in range(2) for j in range(9)}) == 36


def test_classes_and_rows_are_drawn_evenly() -> None:
    order = Episodes(n_way=5, n_shot=2, n_query=3, n_episodes=4000)
    batch = order.over({"": Labels(INTS)}, 4000).batch(0, 0)
    in_place = Counter(INTS[batch["support"][:, 0]].tolist())
    assert len(in_place) == 20
    assert (
        max(abs(count - 200) for count in in_place.values()) < 4 * 14
    )  # a class is as often the first as any
    for rows in batch.values():
        counts = np.bincount(rows.ravel(), minlength=240)
        expected = rows.size / 240
        assert np.abs(counts - expected).max() < 5 * np.sqrt(expected)


def test_by_default_an_epoch_uses_up_the_query_rows() -> None:
    order = Episodes(n_way=4, n_shot=1, n_query=3)
    assert order.over({"": Labels(INTS)}, 8).n_batches(0) == 3  # 240 rows / 12 = 20 episodes
    drops = Episodes(n_way=4, n_shot=1, n_query=3, drop_last=True)
    assert drops.over({"": Labels(INTS)}, 8).n_batches(0) == 2


def test_too_few_classes_are_refused() -> None:
    with pytest.raises(UsageError, match=r"n_way=21\) needs that many classes; 'class' has 20"):
        Episodes(n_way=21, n_shot=1, n_query=1).over({"": Labels(INTS)}, 1)
    with pytest.raises(UsageError, match="'class' has 0"):
        Episodes(n_way=2, n_shot=1, n_query=1).over({"": Labels([])}, 1)


def test_small_classes_are_listed_or_skipped() -> None:
    labels = Labels(["cat"] * 5 + ["dog"] * 2 + ["owl"] * 5 + ["ant"])
    with pytest.raises(UsageError, match="2 of 4 classes of 'class' have too few rows") as caught:
        Episodes(n_way=2, n_shot=1, n_query=3).over({"": labels}, 1)
    assert caught.value.problems == ("'ant' has 1 rows; 4 are needed", "'dog' has 2 rows; 4 are needed")
    skips = Episodes(n_way=2, n_shot=1, n_query=3, n_episodes=50, skip_small=True)
    rows = skips.over({"": labels}, 50).batch(0, 0)["query"]
    assert {labels.values[row] for row in rows.ravel()} == {"cat", "owl"}
    with pytest.raises(UsageError, match="2 have enough rows"):
        Episodes(n_way=3, n_shot=1, n_query=3, skip_small=True).over({"": labels}, 1)


@pytest.mark.parametrize("names", [["support", "frames"], ["a", "b"], ["support", "query", "more"], []])
def test_unknown_tables_are_refused(names) -> None:
    with pytest.raises(UsageError, match="two called 'support' and 'query'"):
        Episodes(n_way=2, n_shot=1, n_query=1).over({name: Labels(INTS) for name in names}, 1)


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        Episodes(n_way=0, n_shot=1, n_query=0, n_episodes=0, support="x", query="x")
    assert len(caught.value.problems) == 4


def test_fractions_are_not_classes() -> None:
    with pytest.raises(UsageError, match="whole number or string"):
        Episodes(n_way=2, n_shot=1, n_query=1).over({"": Labels(np.array([0.5, 1.5]))}, 1)
