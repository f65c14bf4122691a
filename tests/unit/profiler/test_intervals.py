"""Intervals hold the truth about as often as they say."""

from __future__ import annotations

import math
import random
import statistics

from hypothesis import given
from hypothesis import strategies as st

from frostline.profiler import intervals

TIMES = st.lists(st.floats(0.001, 1000), min_size=1, max_size=40)


@given(TIMES)
def test_an_interval_of_rounds_lies_within_the_values(values: list[float]) -> None:
    for middle in (statistics.fmean, statistics.median):
        low, high = intervals.of_rounds(values, middle)
        assert min(values) * (1 - 1e-9) <= low <= high <= max(values) * (1 + 1e-9)


@given(TIMES)
def test_an_interval_of_steps_has_its_ends_in_order_and_holds_the_mean(times: list[float]) -> None:
    low, high = intervals.of_steps(times)
    mean = statistics.fmean(times)
    assert 0 <= low <= high < math.inf
    spread = max(times) - min(times) + 1e-9 * max(times)  # a mean of equal numbers is rounded, too
    assert low - spread <= mean <= high + spread


def held(correlated: float, steps: int, runs: int = 200) -> float:
    """The share of runs whose interval holds the truth."""
    draw, hits = random.Random(11), 0
    for _ in range(runs):
        times, last = [], draw.gauss(0, 1)
        for _ in range(steps):
            last = correlated * last + (1 - correlated**2) ** 0.5 * draw.gauss(0, 1)
            times.append(50 + 3 * last)
        low, high = intervals.of_steps(times)
        hits += low <= 50 <= high
    return hits / runs


def test_it_holds_the_truth_about_as_often_as_it_says() -> None:
    assert held(0.0, 30) >= 0.92
    assert held(0.5, 60) >= 0.84


def test_the_same_values_give_the_same_interval() -> None:
    values = [random.random() for _ in range(20)]
    assert intervals.of_steps(values) == intervals.of_steps(values)
    assert intervals.of_rounds(values) == intervals.of_rounds(values)


def test_a_ratio_of_two_runs_is_held() -> None:
    draw = random.Random(3)
    above, below = ([mean + draw.gauss(0, 0.5) for _ in range(60)] for mean in (13, 10))
    low, high = intervals.of_ratio(above, below)
    assert low < 1.3 < high
    assert high - low < 0.1


def test_few_steps_say_no_more_than_what_they_were() -> None:
    assert intervals.of_steps([3.0]) == (3.0, 3.0)
    assert intervals.of_steps([3.0, 1.0, 2.0]) == (1.0, 3.0)
