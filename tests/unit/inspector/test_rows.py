"""Rows beside and places: what depends on them is told, for numbers and for text."""

from __future__ import annotations

import torch

from frostline.errors import StageFailed
from frostline.inspector.rows import row_findings

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
