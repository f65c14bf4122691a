"""95 % intervals, by drawing again and again what was measured."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Sequence

_DRAWS = 2000
_SEED = 20240229
FEW = 5
"""Fewer steps than this scatter in ways that drawing them again cannot know."""


def of_rounds(
    values: Sequence[float], middle: Callable[[Sequence[float]], float] = statistics.fmean
) -> tuple[float, float]:
    """Of the mean (or another middle) of values that do not know of each other.

    >>> of_rounds([2.0, 2.0, 2.0])
    (2.0, 2.0)
    """
    draw = random.Random(_SEED)
    return inner(middle(draw.choices(values, k=len(values))) for _ in range(_DRAWS))


def of_steps(times: Sequence[float]) -> tuple[float, float]:
    """Of the mean of steps one after the other, of which slow ones come in groups.

    >>> of_steps([2.0] * 8), of_steps([1.0, 3.0])
    ((2.0, 2.0), (1.0, 3.0))
    """
    if len(times) < FEW:
        return min(times), max(times)
    low, high = inner(means(times, random.Random(_SEED)))
    return max(0.0, low), high


def of_ratio(above: Sequence[float], below: Sequence[float]) -> tuple[float, float]:
    """Of the ratio of two runs' mean steps.

    >>> of_ratio([3.0] * 8, [2.0] * 8)
    (1.5, 1.5)
    """
    draw = random.Random(_SEED)
    first, second = means(above, draw), means(below, draw)
    return inner(x / y for x, y in zip(first, second, strict=True) if y > 0)


def means(times: Sequence[float], draw: random.Random) -> list[float]:
    """Mean steps of resamples in runs of neighbours."""
    n = len(times)
    run = max(1, round(n ** (1 / 3)))  # the usual length; 1 would take slow neighbours for chance
    circle = [*times, *times[:run]]
    sums = [sum(circle[k : k + run]) for k in range(n)]
    mean = sum(times) / n
    drawn = max(1, round(n / run))
    wider = _wider(n, run)
    drawings = (sum(draw.choices(sums, k=drawn)) / (drawn * run) for _ in range(_DRAWS))
    return [mean + wider * (found - mean) for found in drawings]


def _wider(n: int, run: int) -> float:
    """What few steps scatter less than the run that they come from: runs' own bias, and Student's t over z.

    With it, intervals of 10 to 200 steps held a planted 1.3 in 96–98 % of 600 pairs of independent steps, and
    in 88–94 % where neighbours correlate by 0.5. Without: 89–95 % and 73–92 %; drawing single steps: 69–75 %
    of the latter.
    """
    groups = max(1.0, n / run - 1)
    return float((n / (n - run)) ** 0.5 * (1 + 1.21 / groups))


def inner(drawn: Iterable[float]) -> tuple[float, float]:
    """The ends of the inner 95 %.

    >>> inner(range(1000))
    (25, 975)
    """
    found = sorted(drawn)
    return found[int(0.025 * len(found))], found[int(0.975 * len(found))]
