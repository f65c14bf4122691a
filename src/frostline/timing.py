"""Measuring: contestants take turns, so that a machine that slows down slows all of them.

>>> rates = {"ours": [10.0, 12.0, 11.0], "theirs": [5.0, 4.0, 5.5]}
>>> ratio(rates["ours"], rates["theirs"])
Spread(median=2.0, low=2.0, high=3.0)
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """The middle of some measurements, and their ends."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.low:.3g}–{self.high:.3g})"


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


def ratio(a: Sequence[float], b: Sequence[float]) -> Spread:
    """a over b, round by round: what both rounds shared (load, clocks, cache) cancels."""
    return spread([x / y for x, y in zip(a, b, strict=True)])


def interleave(contestants: Mapping[str, Callable[[], float]], *, rounds: int) -> dict[str, list[float]]:
    """Each contestant once a round, in turned order; what they return, by name."""
    names = list(contestants)
    results: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        turn = i % len(names)
        for name in names[turn:] + names[:turn]:
            results[name].append(contestants[name]())
    return results


def rate(items: Iterable[float], *, seconds: float) -> float:
    """How much `items` (amounts, as they come) adds up to a second, over at least `seconds`."""
    total = 0.0
    began = time.perf_counter()
    took = 0.0
    for amount in items:
        total += amount
        took = time.perf_counter() - began
        if took >= seconds:
            break
    return total / took if took else 0.0
