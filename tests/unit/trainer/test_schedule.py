from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frostline.errors import UsageError
from frostline.trainer.schedule import Schedule, changed

FALLING = ("cosine", "linear", "wsd")


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    total = draw(st.integers(2, 500))
    return Schedule(
        draw(st.sampled_from(FALLING)),
        warmup_steps=draw(st.integers(0, total - 1)),
        total_steps=total,
        decay=draw(st.floats(0.01, 1.0)),
        floor=draw(st.floats(0.0, 1.0)),
    )


@settings(max_examples=60, deadline=None)
@given(schedules())
def test_the_rate_rises_to_its_peak_falls_to_the_floor_and_never_comes_back(schedule: Schedule) -> None:
    end = schedule.total_steps or 0
    rates = [schedule.factor(step) for step in range(3 * end)]
    assert all(0 < r <= 1 or r == schedule.floor for r in rates)
    up, down = rates[: schedule.warmup_steps + 1], rates[schedule.warmup_steps : end + 1]
    assert up == sorted(up)
    assert rates[schedule.warmup_steps] == 1.0
    assert down == sorted(down, reverse=True)
    assert set(rates[end:]) == {schedule.floor}


@settings(max_examples=60, deadline=None)
@given(schedules())
def test_no_step_jumps_further_than_its_line_is_steep(schedule: Schedule) -> None:
    end = schedule.total_steps or 0
    begins = schedule.decay_begins()
    start = schedule.warmup_steps if begins is None else begins
    steepest = max(1 / (schedule.warmup_steps + 1), math.pi / 2 / max(1, end - start))
    rates = [schedule.factor(step) for step in range(end + 2)]
    assert all(abs(b - a) <= steepest + 1e-9 for a, b in itertools.pairwise(rates))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(FALLING), st.floats(0.1, 1e6), st.floats(0, 1), st.integers(0, 50))
def test_an_end_in_seconds_is_kept_and_kept_to(kind: str, total: float, floor: float, warmup: int) -> None:
    schedule = Schedule(kind, warmup_steps=warmup, total_s=total, floor=floor)  # type: ignore[arg-type]
    times = [total * i / 50 for i in range(150)]
    rates = [schedule.factor(warmup + i, t) for i, t in enumerate(times)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == 1.0
    assert {r for r, t in zip(rates, times, strict=True) if t >= total} == {floor}


def test_known_points() -> None:
    cosine = Schedule("cosine", warmup_steps=3, total_steps=103, floor=0.1)
    assert [cosine.factor(s) for s in (0, 1, 2, 3)] == [0.25, 0.5, 0.75, 1.0]
    assert cosine.factor(53) == pytest.approx(0.55)
    assert cosine.factor(28) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    linear = Schedule("linear", total_steps=100)
    assert [linear.factor(s) for s in (0, 25, 50, 75, 100)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    wsd = Schedule("wsd", warmup_steps=9, total_steps=100, decay=0.2)
    assert [wsd.factor(s) for s in (0, 9, 80, 90, 100)] == [0.1, 1.0, 1.0, 0.5, 0.0]
    timed = Schedule("wsd", total_s=1000.0, decay=0.1, floor=0.5)
    assert [timed.factor(7, t) for t in (0.0, 900.0, 950.0, 1000.0)] == [1.0, 1.0, 0.75, 0.5]


def test_constant_and_open_wsd_stay_at_the_peak() -> None:
    for schedule in (Schedule("constant", warmup_steps=1), Schedule("wsd", warmup_steps=1)):
        assert [schedule.factor(s, 1e9) for s in (0, 1, 10**9)] == [0.5, 1.0, 1.0]
        assert schedule.decay_begins() is None


def test_the_fall_of_wsd_begins_where_it_says() -> None:
    schedule = Schedule("wsd", total_steps=50, decay=0.5)
    begins = schedule.decay_begins()
    assert begins == 25
    assert schedule.factor(25) == 1.0 > schedule.factor(26)
    assert Schedule("wsd", total_s=100.0, decay=0.25).decay_begins() == 75.0
    late = Schedule("wsd", warmup_steps=90, total_steps=100, decay=0.5)
    assert late.decay_begins() == 90
    assert Schedule("cosine", total_steps=5).decay_begins() is None


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_a_fall_without_an_end_is_refused(kind: str) -> None:
    with pytest.raises(UsageError, match=r"has to know its end: give steps, epochs or .*--schedule-hours"):
        Schedule(kind)  # type: ignore[arg-type]


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        Schedule("cosin", warmup_steps=-1, total_steps=0, total_s=math.nan, decay=0.0, floor=2)  # type: ignore[arg-type]
    for part in (
        "kind is 'cosin'",
        "warmup_steps",
        "total_steps is 0",
        "both given",
        "total_s",
        "decay",
        "floor",
    ):
        assert part in str(caught.value)


def test_a_warm_up_that_takes_all_is_refused() -> None:
    with pytest.raises(UsageError, match="warmup_steps is 10 of 10 in all"):
        Schedule("linear", warmup_steps=10, total_steps=10)


def test_times_before_the_beginning_are_refused() -> None:
    with pytest.raises(UsageError, match="both start at 0"):
        Schedule("constant").factor(-1)
    with pytest.raises(UsageError, match="both start at 0"):
        Schedule("constant").factor(0, math.nan)


def test_a_larger_budget_says_both_rates() -> None:
    old, new = Schedule("linear", total_steps=100), Schedule("linear", total_steps=200)
    said = changed(old, new, 90)
    assert said is not None
    assert "from 0.1 of its peak back up to 0.55" in said
    assert "end at step 100" in said
    assert "ends at step 200" in said
    assert changed(new, old, 90) == (
        "At step 90 the rate goes from 0.55 of its peak down to 0.1: "
        "it was to end at step 200, it now ends at step 100."
    )


def test_what_does_not_move_the_rate_now_is_said_too_and_nothing_is_said_of_nothing() -> None:
    old, new = Schedule("wsd", total_s=3600.0), Schedule("wsd", total_s=7200.0)
    said = changed(old, new, 10, 100.0)
    assert said is not None
    assert "stays at 1 of its peak" in said
    assert "falling from 48 min" in said
    assert changed(old, Schedule("wsd", total_s=3600.0), 10) is None
    other = changed(Schedule("wsd"), Schedule("constant"), 10)
    assert other is not None
    assert "wsd before, constant now" in other


def test_told_is_one_line_with_kind_and_end() -> None:
    assert (
        Schedule("wsd", total_s=3600.0).told() == "wsd: the peak until 48 min, then down to 0 of it at 60 min"
    )
    assert Schedule("wsd").told() == "wsd: the peak throughout, with no end set: it does not fall"
    assert (
        Schedule("constant", warmup_steps=5).told()
        == "constant: 5 steps up to the peak, then the peak throughout"
    )
