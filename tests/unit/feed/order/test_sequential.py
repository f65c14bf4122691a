from __future__ import annotations

from frostline.feed.order import Sequential


def test_rows_come_as_they_lie() -> None:
    bound = Sequential().over({"": range(5)}, 2)
    assert [bound.batch(7, i).tolist() for i in range(bound.n_batches(7))] == [[0, 1], [2, 3], [4]]


def test_drop_last_leaves_out_a_batch_that_is_not_full() -> None:
    assert Sequential(drop_last=True).over({"": range(5)}, 2).n_batches(0) == 2
    assert Sequential(drop_last=True).over({"": range(4)}, 2).n_batches(0) == 2
    assert Sequential(drop_last=True).over({"": range(1)}, 2).n_batches(0) == 0
    assert Sequential().over({"": range(0)}, 2).n_batches(0) == 0
