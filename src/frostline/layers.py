"""Where the boxes of a graph go: rows by depth, few crossings, lines that never run through a box.

A graph is drawn in rows; an arrow leads from a row to a higher one. Where it passes rows in between, a bend
keeps a place for it there as a narrow box would, so that nothing lies in its way. All arrows that leave one
box share their bends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_ORDERINGS, _MOVES = 8, 80  # rounds; the order settles after four or five, a long chain is straight after 80
Spot = tuple[str, int]
"""A node at a row: at its own a box, at higher ones a bend of the arrows that leave it."""


@dataclass(frozen=True)
class Layout:
    """Centres along x, of boxes and bends, and the steps between neighbouring rows that the arrows take."""

    x: dict[Spot, float]
    steps: list[tuple[Spot, Spot]]
    width: float

    def into(self, spot: Spot) -> list[Spot]:
        """What arrows come from, from left to right."""
        return sorted((a for a, b in self.steps if b == spot), key=lambda a: self.x[a])


def arrange(
    row_of: Mapping[str, int], arrows: Sequence[tuple[str, str]], *, box: float, bend: float, gap: float
) -> Layout:
    """
    >>> found = arrange({"a": 0, "b": 1, "c": 1}, [("a", "b"), ("a", "c")], box=100, bend=10, gap=20)
    >>> found.x, found.width
    ({('a', 0): 110.0, ('b', 1): 50.0, ('c', 1): 170.0}, 220.0)
    """
    steps = _steps(row_of, arrows)
    rows = _rows(row_of, steps)
    size = {spot: box if row_of[spot[0]] == spot[1] else bend for row in rows for spot in row}
    beside = _neighbours(rows, steps)
    for _ in range(_ORDERINGS):
        _order(rows, beside)
    x = {spot: 0.0 for row in rows for spot in row}
    for row in rows:
        x |= _place(row, x, size, gap)
    for n in range(_MOVES):
        for row in rows if n % 2 else rows[::-1]:
            x |= _place(row, {s: _mean([x[b] for b in beside[s]], x[s]) for s in row}, size, gap)
    left = min(x[spot] - size[spot] / 2 for spot in x)
    moved = {spot: at - left for spot, at in x.items()}
    return Layout(moved, steps, max(moved[spot] + size[spot] / 2 for spot in moved))


def _steps(row_of: Mapping[str, int], arrows: Sequence[tuple[str, str]]) -> list[tuple[Spot, Spot]]:
    found: dict[tuple[Spot, Spot], None] = {}
    for start, end in arrows:
        for row in range(row_of[start], row_of[end]):
            last = row + 1 == row_of[end]
            found[(start, row), ((end if last else start), row + 1)] = None
    return list(found)


def _rows(row_of: Mapping[str, int], steps: Sequence[tuple[Spot, Spot]]) -> list[list[Spot]]:
    spots = dict.fromkeys([*row_of.items(), *(spot for step in steps for spot in step)])
    return [[spot for spot in spots if spot[1] == row] for row in range(max(row_of.values()) + 1)]


def _neighbours(rows: list[list[Spot]], steps: Sequence[tuple[Spot, Spot]]) -> dict[Spot, list[Spot]]:
    beside: dict[Spot, list[Spot]] = {spot: [] for row in rows for spot in row}
    for a, b in steps:
        beside[a].append(b)
        beside[b].append(a)
    return beside


def _order(rows: list[list[Spot]], beside: Mapping[Spot, list[Spot]]) -> None:
    """Each row by the mean place of what its boxes hang on in the row below, then in the row above."""
    for way in (-1, 1):
        for row in rows if way < 0 else rows[::-1]:
            place = {spot: i / max(len(r), 1) for r in rows for i, spot in enumerate(r)}
            seen = {s: [place[b] for b in beside[s] if b[1] == s[1] + way] for s in row}
            row.sort(key=lambda s, seen=seen, place=place: _mean(seen[s], place[s]))  # type: ignore[misc]


def _place(
    row: Sequence[Spot], wanted: Mapping[Spot, float], size: Mapping[Spot, float], gap: float
) -> dict[Spot, float]:
    """As near to the wanted places as the order and the sizes allow.

    Half way between pushing everything to the right and everything to the left: both keep the distances,
    hence so does what lies between them.
    """
    right: list[float] = []
    for i, spot in enumerate(row):
        least = right[-1] + (size[row[i - 1]] + size[spot]) / 2 + gap if right else wanted[spot]
        right.append(max(wanted[spot], least))
    left: list[float] = []
    for i in range(len(row) - 1, -1, -1):
        most = left[-1] - (size[row[i + 1]] + size[row[i]]) / 2 - gap if left else wanted[row[i]]
        left.append(min(wanted[row[i]], most))
    return {spot: (r + le) / 2 for spot, r, le in zip(row, right, left[::-1], strict=True)}


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise
