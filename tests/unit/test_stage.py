"""Pick: which parts of a row are read."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frostline.errors import UsageError
from frostline.stage import Pick


def test_one_field_or_several() -> None:
    assert Pick("features", 4).fields == ("features",)
    assert Pick(("features", "boxes"), n=4) == Pick(["features", "boxes"], 4)
    assert dataclasses.replace(Pick("features", 4), n=2) == Pick("features", 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Pick("features", 4).n = 3


@settings(deadline=None)
@given(st.data(), st.booleans(), st.sampled_from(["spread", "first", "random"]))
def test_indices_are_distinct_ascending_and_inside(data, train, how) -> None:
    lengths = np.array(data.draw(st.lists(st.integers(1, 400), min_size=1, max_size=8)))
    n = data.draw(st.integers(1, int(lengths.min())))
    keys = [f"clip-{i}" for i in range(len(lengths))]
    out = Pick("x", n, eval=how).indices(0, 0, keys, lengths, train)
    assert out.shape == (len(lengths), n)
    assert out.dtype == np.int64
    assert (np.diff(out, axis=1) > 0).all()
    assert ((out >= 0) & (out < lengths[:, None])).all()


def test_training_draws_hang_on_seed_epoch_key_and_fields_only() -> None:
    keys = [f"clip-{i}" for i in range(50)]
    pick = Pick("x", 8)
    whole = pick.indices(0, 0, keys, 24, train=True)
    np.testing.assert_array_equal(pick.indices(0, 0, keys[20:25], [24] * 5, train=True), whole[20:25])
    np.testing.assert_array_equal(pick.indices(0, 0, keys[::-1], 24, train=True), whole[::-1])
    for other in (
        pick.indices(1, 0, keys, 24, train=True),
        pick.indices(0, 1, keys, 24, train=True),
        Pick("y", 8).indices(0, 0, keys, 24, train=True),
    ):
        assert (other != whole).any(axis=1).mean() > 0.9


def test_what_evaluation_sees() -> None:
    def seen(how, n, length):
        return Pick("x", n, eval=how).indices(3, 5, ["a"], [length], train=False)[0].tolist()

    assert seen("spread", 4, 24) == [0, 8, 15, 23]
    assert seen("spread", 2, 24) == [0, 23]
    assert seen("spread", 5, 5) == [0, 1, 2, 3, 4]
    assert seen("spread", 1, 5) == [2]
    assert seen("spread", 1, 1) == [0]
    assert seen("first", 3, 24) == [0, 1, 2]
    assert seen("random", 3, 24) == Pick("x", 3).indices(3, 5, ["a"], [24], train=True)[0].tolist()


def test_rows_that_are_too_short_are_named() -> None:
    with pytest.raises(UsageError, match=r"n=8\).*2 of these 3 are shorter") as caught:
        Pick(("x", "y"), 8).indices(0, 0, ["a", "b", "c"], [4, 8, 7], train=True)
    assert caught.value.problems == ("'a' has length 4", "'c' has length 7")


def test_no_rows_are_no_problem() -> None:
    assert Pick("x", 3).indices(0, 0, [], [], train=True).shape == (0, 3)


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(UsageError, match="only axis=0") as caught:
        Pick((), 0, axis=1, eval="last")
    assert len(caught.value.problems) == 4
    with pytest.raises(UsageError, match="each once"):
        Pick(("x", "x"), 1)
