"""Rows beside and places: what depends on them is told, for numbers and for text."""

from __future__ import annotations

import pytest
import torch

from frostline.errors import StageFailed
from frostline.inspector.rows import Beside, beside_others, places_findings, row_findings

KEYS = ["a", "b", "c"]


def find(fn, *inputs):
    def call(given):
        return {"y": fn(*given)}

    return row_findings(call, inputs, KEYS, call(inputs))


def test_independent_rows_pass_also_for_ids_masks_pictures_and_text() -> None:
    table = torch.arange(10.0)
    assert find(lambda ids, mask: table[ids] * mask, torch.tensor([1, 9, 3]), torch.tensor([True] * 3)) == (
        [],
        [],
    )
    assert find(lambda x: x.float(), torch.arange(6, dtype=torch.uint8).view(3, 2)) == ([], [])
    assert find(lambda texts: [text.upper() for text in texts], ["x", "y", "z"]) == ([], [])


def test_each_kind_of_dependence_is_seen() -> None:
    x = torch.arange(6.0).view(3, 2) / 7
    for fn in (lambda x: x + x.sum(), lambda x: x / x.max(), lambda x: x * (x == 0).any()):
        reasons, _ = find(fn, x)
        assert reasons[0].startswith("a row depends on the rows beside it: with ")
    reasons, _ = find(lambda x: x + torch.tensor([[0.0], [1.0], [2.0]]), x)
    assert reasons[0].startswith("a row depends on its place in the chunk: 'y' differs by up to")


def test_values_it_cannot_take_are_noted_and_the_others_tried() -> None:
    def fussy(x):
        if not x.all():
            raise StageFailed("fussy", KEYS, "ValueError: zeros")
        return x / x.max()

    reasons, _ = find(fussy, torch.arange(1.0, 4.0))
    assert "with other samples there" in reasons[0] or "with other values there" in reasons[0]
    _, notes = find(lambda x: fussy(x) * 0 + x, torch.arange(1.0, 4.0))
    assert notes == ["its rows were not tried beside rows of zeros: ValueError: zeros"]


def test_a_result_without_rows_is_noted() -> None:
    assert find(torch.sum, torch.ones(3)) == (
        [],
        ["y: no row for each of the 3 given, so rows were not compared"],
    )


def test_fields_with_rows_are_compared_beside_one_without() -> None:
    def call(given):
        return {"all": given[0].sum(), "y": given[0] - given[0].mean()}

    inputs = [torch.arange(3.0)]
    reasons, notes = row_findings(call, inputs, KEYS, call(inputs))
    assert "'y' differs" in reasons[0]
    assert notes[0].startswith("all: no row")


def test_one_row_has_no_mates() -> None:
    assert find(lambda x: x - x.mean(0), torch.ones(1, 2)) == ([], [])


SEVEN = torch.arange(14.0).view(7, 2) / 15


def beside(fn, *inputs, calls=None):
    def call(given, seed):
        if calls is not None:
            calls.append((seed, [*given]))
        return {"y": fn(*given)}

    return beside_others(call, inputs, {"y": fn(*inputs)})


def test_two_calls_put_every_row_beside_others() -> None:
    calls: list = []
    ids = torch.arange(7)
    found = beside(lambda x, ids: x + ids[:, None], SEVEN, ids, calls=calls)
    assert found.well
    assert found.apart == ()
    assert [seed for seed, _ in calls] == [2, 3]
    for (_, (x, _)), kept in zip(calls, (range(0, 7, 2), range(1, 7, 2)), strict=True):
        same = [i for i in range(7) if torch.equal(x[i], SEVEN[i])]
        assert same == [*kept]
        assert [i for i in range(7) if not x[i].any() and i not in kept] == ([5] if 0 in kept else [4])


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x + x.sum(),
        lambda x: x / x.max(),
        lambda x: x - x.min(),
        lambda x: x * (x == 0).all(1).any(),  # a row of zeros, as padding is
        lambda x: x + x.roll(1, 0),
        lambda x: x + x.roll(-1, 0).round(),
        lambda x: x + (x.roll(1, 0) == 0).all(1, keepdim=True),
        lambda x: x + x[:1],
        lambda x: x.cumsum(0),
        lambda x: torch.cat([x[:-1], x[-1:] + x[1]]),  # one row only
    ],
)
def test_each_kind_of_dependence_is_seen_in_two_calls(fn) -> None:
    found = beside(fn, SEVEN)
    assert not found.well
    assert found.told([*"abcdefg"]).startswith("a row depends on the rows beside it: with other rows there")


def test_texts_and_objects_beside_others() -> None:
    texts = ["a", "bb", "ccc", "dddd", "e", "ff", "g"]
    assert beside(lambda given: [text.upper() for text in given], texts).well
    longest = beside(lambda given: [text.ljust(max(map(len, given))) for text in given], texts)
    assert [d.field for d in longest.apart] == ["y"]
    objects = [{"n": i} for i in range(7)]
    assert beside(lambda given: [o["n"] for o in given], objects).well
    assert not beside(lambda given: [o["n"] + sum(p["n"] for p in given) for o in given], objects).well


def test_two_calls_say_nothing_about_few_rows_values_not_taken_and_results_without_rows() -> None:
    def fussy(x):
        if not x.any(1).all():
            raise StageFailed("fussy", KEYS, "zeros")
        return x

    assert beside(lambda x: x, SEVEN[:5]) == Beside()
    assert beside(fussy, SEVEN[1:]) == Beside()
    assert beside(torch.sum, SEVEN) == Beside()


def test_a_place_is_compared_with_the_next() -> None:
    def find_places(fn):
        def call(given):
            return {"y": fn(*given)}

        return places_findings(call, [SEVEN], [*"abcdefg"], call([SEVEN]))

    assert find_places(lambda x: x * 2) == ([], [])
    for place in range(7):
        one = torch.zeros(7, 1)
        one[place] = 1
        reasons, _ = find_places(lambda x, one=one: x + one)
        assert reasons[0].startswith("a row depends on its place in the chunk: 'y' differs by up to 1")
