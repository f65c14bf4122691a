"""Where boxes go: none overlaps another, and no line runs through one."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from frostline.layers import arrange

BOX, BEND, GAP = 100.0, 10.0, 20.0


@st.composite
def graphs(draw) -> tuple[dict[str, int], list[tuple[str, str]]]:
    n = draw(st.integers(1, 17))
    rows, arrows = {"0": 0}, []
    for i in range(1, n):
        below = draw(st.lists(st.integers(0, i - 1), min_size=1, max_size=4, unique=True))
        arrows += [(str(b), str(i)) for b in below]
        rows[str(i)] = 1 + max(rows[str(b)] for b in below)
    return rows, arrows


@settings(max_examples=60)
@given(graphs())
def test_nothing_overlaps(graph) -> None:
    rows, arrows = graph
    found = arrange(rows, arrows, box=BOX, bend=BEND, gap=GAP)
    size = {spot: BOX if rows[spot[0]] == spot[1] else BEND for spot in found.x}
    for row in range(max(rows.values()) + 1):
        spots = sorted((s for s in found.x if s[1] == row), key=found.x.__getitem__)
        for a, b in pairwise(spots):
            assert found.x[b] - found.x[a] >= (size[a] + size[b]) / 2 + GAP - 1e-6
    assert min(found.x[s] - size[s] / 2 for s in found.x) >= -1e-6
    assert max(found.x[s] + size[s] / 2 for s in found.x) <= found.width + 1e-6
    assert all(b[1] == a[1] + 1 for a, b in found.steps)


def test_an_arrow_past_a_row_has_a_place_there() -> None:
    rows = {"a": 0, "b": 1, "c": 2}
    found = arrange(rows, [("a", "b"), ("b", "c"), ("a", "c")], box=BOX, bend=BEND, gap=GAP)
    assert abs(found.x["a", 1] - found.x["b", 1]) >= BOX / 2 + BEND / 2 + GAP - 1e-6
    assert {*found.into(("c", 2))} == {("a", 1), ("b", 1)}


def test_a_chain_is_straight() -> None:
    rows = {str(i): i for i in range(16)}
    found = arrange(rows, [*pairwise(rows)], box=BOX, bend=BEND, gap=GAP)
    assert {*found.x.values()} == {BOX / 2}
