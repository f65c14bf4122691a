"""Two profiles side by side."""

from __future__ import annotations

import dataclasses

import pytest
from rich.cells import cell_len

from frostline.profiler.compare import compare, headline, lines
from frostline.results import Profile, Remedy, Row, Steps, Verdict

from .conftest import MACHINE, ROWS, steps


def text(a: Profile, b: Profile, width: int = 100) -> str:
    return "\n".join(lines(compare(a, b), width))


def test_a_against_itself_shows_no_difference(make):
    found = compare(make(), make())
    assert found.differs is False
    assert found.low < 1 < found.high
    assert headline(found).startswith("no difference that these steps can show: 0.9")
    assert not found.warnings
    assert all(change.difference == 0 for change in found.rows)


def test_another_run_of_the_same_shows_no_difference(make):
    """The interval must hold 1 about 19 times of 20: here in at least 35 of 40."""
    runs = [compare(make(wall=steps(60, seed=k)), make(wall=steps(60, seed=100 + k))) for k in range(40)]
    assert sum(not run.differs for run in runs) >= 35


def test_a_planted_gain_is_found_within_its_interval(make):
    """Each time it is seen; the interval holds it as often as a 95 % interval should (38 of 40, here 35)."""
    runs = [compare(make(wall=steps(78, seed=k)), make(wall=steps(60, seed=100 + k))) for k in range(40)]
    assert all(run.differs and run.high - run.low < 0.1 for run in runs)
    assert sum(run.low < 1.3 < run.high for run in runs) >= 35
    assert "× as fast (1.2" in headline(runs[0])


def test_slower_is_said(make):
    assert headline(compare(make(wall=steps(60)), make(wall=steps(78)))).endswith("so slower")


def test_the_same_input_gives_the_same_interval(make):
    a, b = make(), make(wall=steps(50, seed=3))
    assert compare(a, b) == compare(a, b)


def test_slow_steps_that_come_in_groups_widen_the_interval(make):
    """One epoch's start in fifty steps is no steadier for having ten slow steps in a row."""
    times = (90.0,) * 10 + (60.0,) * 40
    mixed = tuple(times[(k * 7) % 50] for k in range(50))
    grouped, spread = (make(wall=Steps(66, 64, 68, 50, order)) for order in (times, mixed))
    wide, narrow = compare(grouped, make()), compare(spread, make())
    assert wide.high - wide.low > 1.3 * (narrow.high - narrow.low)


def test_other_batches_are_compared_in_samples(make):
    """Document 002: 3.5× in steps was 5.8× in samples/s, as the batch went from 6 to 10."""
    found = compare(make(wall=steps(350), samples=6), make(wall=steps(100, seed=5), samples=10))
    assert found.by_sample
    assert found.ratio == pytest.approx(5.83, rel=0.03)
    assert found.low < 5.83 < found.high
    assert "in samples/s" in headline(found)
    said = "\n".join(lines(found))
    assert "Different batches: 6 and 10 samples a step" in said
    assert "ms a sample" in said


def test_unlike_runs_are_warned_about_and_compared(make):
    other = dataclasses.replace(MACHINE, device="cpu", torch="2.12.0", ranks=2)
    found = compare(make(), make(machine=other, boundary="call of Model", samples=None))
    said = " ".join(found.warnings)
    assert found.ratio is not None
    for what in ("NVIDIA H200 and cpu", "2.11.0 and 2.12.0", "1 and 2", "AdamW.step and call of Model"):
        assert what in said
    assert "32 and unknown samples a step" in said


def test_rows_remedies_and_verdict_that_changed(make):
    faster = (
        Row("data", "waiting for the loader", 1.1, 0.02),
        *ROWS[2:],
        Row("decode", "decoding", 4.0, 0.1),
    )
    verdict = Verdict("compute-bound", "")
    after = make(rows=faster, verdict=verdict, wall=steps(41.5), remedies=(Remedy("compile", 1.2, ""),))
    found = compare(make(), after)
    assert found.rows[0].name == "waiting for the loader"
    assert found.rows[0].difference == pytest.approx(-19.3)
    said = "\n".join(lines(found))
    assert "verdict: input-bound → compute-bound" in said
    assert "−19.3" in said
    assert [
        line for line in said.splitlines() if line.startswith("forward") and line.endswith("within noise")
    ]
    assert [line.split()[-3:] for line in said.splitlines() if line.startswith("copies")] == [
        ["3.10", "–", "−3.10"]
    ]
    assert [line for line in said.splitlines() if line.startswith("compile") and "1.20×" in line]


def test_without_the_steps_times_the_intervals_of_both_are_used(make):
    found = compare(make(wall=Steps(60, 59, 61, 50)), make(wall=Steps(50, 49, 51, 50)))
    assert (found.low, found.high) == (pytest.approx(59 / 51), pytest.approx(61 / 49))


def test_too_few_steps_have_no_interval(make):
    found = compare(make(wall=steps(60, 3)), make())
    assert found.differs is None
    assert "too few steps" in headline(found)


def test_a_profile_without_steps(make, empty):
    said = text(make(), empty)
    assert said.startswith("Nothing to compare")
    assert "none timed" in said


@pytest.mark.parametrize("width", [80, 120])
def test_nothing_is_wider_than_asked(make, width):
    long = make(rows=(Row("data", "漢字\x1b" * 60, 3.0, 1.0),), command="x" * 300, boundary="y " * 200)
    found = lines(compare(make(), long), width)
    assert max(map(cell_len, found)) <= width
    assert "\x1b" not in "".join(found)
