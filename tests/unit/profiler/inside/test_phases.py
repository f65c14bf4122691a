"""Which steps are watched how."""

from __future__ import annotations

from collections import Counter
from itertools import groupby, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.profiler.inside.phases import PHASES, more, plan, steady, total
from frostline.profiler.verdict import FEWEST

Steps = st.integers(6, 400)
Seconds = st.floats(1e-4, 5.0)
TURNS = ("A", "B", "bare")


@given(Steps, Seconds, st.booleans())
def test_passes_take_turns_and_come_equally_often(steps: int, step_s: float, cuda: bool) -> None:
    blocks = [b for b in plan(steps, step_s, cuda=cuda, replay=False, trace=False) if b.phase in TURNS]
    counts = Counter(block.phase for block in blocks)
    assert len({*counts.values()}) == 1
    assert counts["A"] >= 2  # with one round the cost of profiling cannot be told
    rounds = [{b.phase for b in blocks[i : i + 3]} for i in range(0, len(blocks), 3)]
    assert all(phases == {*TURNS} for phases in rounds)
    assert len({b.steps for b in blocks}) == 1


@given(st.integers(30, 400), Seconds)
def test_no_pass_always_follows_the_same(steps: int, step_s: float) -> None:
    """What a pass leaves behind (a warm cache, a drained queue) would be the next one's every time."""
    found = plan(max(steps, 30), step_s, cuda=False, replay=False, trace=False)
    phases = [b.phase for b in found if b.phase in TURNS]
    assert {a for a, b in pairwise(phases) if b == "A"} == {"B", "bare"}


@given(Steps, Seconds, st.booleans(), st.booleans())
def test_what_counts_comes_first_and_half_a_batch_last(
    steps: int, step_s: float, replay: bool, trace: bool
) -> None:
    blocks = plan(steps, step_s, cuda=True, replay=replay, trace=trace)
    phases = [key for key, _ in groupby(b.phase for b in blocks)]
    last = max(i for i, phase in enumerate(phases) if phase in TURNS)
    assert not {*phases[: last + 1]} - {*TURNS}
    assert phases[-1] == ("half" if replay else "look")  # what is compiled for half may stay
    assert ("replay" in phases, "half" in phases, "trace" in phases) == (replay, replay, trace)
    assert {*phases} <= {*PHASES}


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("steps", [6, 12, 15])
def test_a_verdict_can_be_made_of_the_fewest_steps_that_may_be_asked_for(steps: int, cuda: bool) -> None:
    blocks = plan(steps, 0.05, cuda=cuda, replay=False, trace=False)
    assert sum(b.steps for b in blocks if b.phase == "A") >= FEWEST


@given(st.integers(30, 400), st.floats(0.05, 5.0))
def test_about_as_many_steps_are_measured_as_were_asked_for(steps: int, step_s: float) -> None:
    """Quick steps are measured more often: a clock needs some time."""
    blocks = plan(steps, step_s, cuda=False, replay=False, trace=False)
    assert abs(sum(b.steps for b in blocks if b.phase in TURNS) - steps) <= 6


@given(Seconds, st.booleans(), st.booleans(), st.booleans())
def test_a_script_runs_as_many_steps_as_the_docs_say(
    step_s: float, cuda: bool, workers: bool, trace: bool
) -> None:
    """docs/profiling.md: so many after the warm-up, with a loader and without; more that are quick."""
    told = {True: (120, 230, 700), False: (65, 115, 460)}
    for replay, (least, most, quick) in told.items():
        blocks = plan(50, step_s, cuda=cuda, replay=replay, trace=trace, workers=workers)
        assert least <= total(blocks) <= (most if step_s >= 0.03 else quick)


@given(Seconds)
def test_blocks_of_quick_steps_are_longer_but_not_without_end(step_s: float) -> None:
    sizes = {b.steps for b in plan(12, step_s, cuda=False, replay=False, trace=False) if b.phase in TURNS}
    (size,) = sizes
    assert size <= 16
    assert size == 16 or size * step_s >= 0.03 or size == round(0.04 / step_s)


def test_all_steps_are_counted_also_those_that_settle() -> None:
    blocks = plan(12, 0.05, cuda=True, replay=True, trace=True)
    assert total(blocks) == sum(b.steps for b in blocks) + sum(b.settle for b in blocks)
    assert all(b.settle for b in blocks if b.phase in (*TURNS, "replay", "half"))


@pytest.mark.parametrize(
    ("times", "is_steady"),
    [
        ([1.0] * 9, False),
        ([1.0] * 10, True),
        ([50.0, 20.0, *[1.0] * 10], True),
        ([1.0] * 5 + [1.0, 1.0, 9.0, 9.0, 1.0], True),
        ([1.0] * 5 + [1.2] * 5, False),
        ([1.2] * 5 + [1.0] * 5, False),
        ([], False),
    ],
)
def test_steady_is_when_the_median_stays(times: list[float], is_steady: bool) -> None:
    """A single slow step does not matter, a slow half does."""
    assert steady(times) == is_steady


def measured(*pairs: tuple[float, float]) -> list[dict[str, object]]:
    return [{"phase": p, "times": [t, t]} for a, b in pairs for p, t in (("A", a), ("bare", 1.0), ("B", b))]


def test_turns_come_again_while_passes_cannot_be_told_apart() -> None:
    blocks = plan(24, 0.02, cuda=False, replay=True, trace=False)
    unsure = measured((1.0, 1.0), (1.0, 1.4), (1.3, 1.0), (1.0, 1.1))
    again = more(blocks, unsure, 0.02, 0)
    assert again == [b for b in blocks if b.phase in TURNS]
    assert more(blocks, measured(*[(1.0, 1.01), (2.0, 2.02)] * 3), 0.02, 0) == []  # sure, at any pace
    assert more(blocks, unsure, 0.02, 3) == []
    assert more(blocks, unsure, 2.0, 0) == []  # that would take long
    assert more([], unsure, 0.02, 0) == []
    assert more(blocks, measured((1.0, 1.4)), 0.02, 0) == []


def test_what_is_done_again_takes_some_seconds_in_all() -> None:
    """12 blocks of 6 + 2 steps at 90 ms take 6.5 s: twice, not three times."""
    blocks = plan(50, 0.09, cuda=True, replay=True, trace=False, workers=True)
    unsure = measured((1.0, 1.0), (1.0, 1.4), (1.3, 1.0), (1.0, 1.1))
    assert [bool(more(blocks, unsure, 0.09, before)) for before in range(4)] == [True, True, False, False]


@pytest.mark.parametrize(("step_s", "turns"), [(0.01, 4), (0.1, 3), (1.0, 1)])
def test_on_a_gpu_the_whole_batch_and_half_of_it_take_turns(step_s: float, turns: int) -> None:
    """A host that slowed down after the one would make the other look slower by itself."""
    found = plan(50, step_s, cuda=True, replay=True, trace=True)
    last = [b.phase for b in found if b.phase in ("compute", "half")]
    assert last == ["compute", "half"] * turns
    assert [b.phase for b in found[-len(last) :]] == last
