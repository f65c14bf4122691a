"""What is said of a profile, beside its figures."""

from __future__ import annotations

from typing import Any

import pytest

from frostline.profiler import reading
from frostline.profiler.launch import Ran
from frostline.report import sections
from frostline.results import Row, Steps


def raw(**given: Any) -> dict[str, Any]:
    blocks = [{"phase": phase, "times": 4 * [0.1]} for phase in ("A", "bare", "B", "lines")]
    return {"steps": 90, "asked": 50, "warmup": 20, "left": [], "blocks": blocks, "loaders": []} | given


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"steps": 8, "warmup": 0}, "8 steps, all of them warm-up: none of the 50 asked for was measured"),
        ({"left": ["B", "A"]}, "90 steps, 20 of them warm-up: 12 of the 50 steps asked for were measured"),
        ({"asked": 12, "left": ["look", "half"]}, "left out: reads from the device and operations"),
        ({"asked": 12, "left": ["half"], "loaders": [{"calls": 3}]}, "left out: half a batch"),
        ({"asked": 12, "left": ["A"]}, "the 12 steps asked for were measured; left out: turns that"),
        ({"asked": 13, "left": ["look"]}, "the 13 steps asked for were measured; left out: reads"),
    ],
)  # fmt: skip
def test_a_script_that_ended_early_says_how_far_it_came(given: dict[str, Any], said: str) -> None:
    assert said in reading._seen(raw(**given))


def test_batches_are_not_missed_where_no_loader_gives_them() -> None:
    assert "half a batch" not in reading._seen(raw(left=["B", "half"]))


def test_what_other_processes_workers_prepared_is_not_this_ones() -> None:
    mine, other = ({"pid": pid, "of": of, "dataset": "D"} for pid, of in ((11, 1), (21, 2)))
    processes = ({"pid": 1, "prepared": [{"dataset": "E"}]}, {"pid": 2, "prepared": [{"dataset": "F"}]})
    ran = Ran(("bash", "run.sh"), 0, processes, (mine, other), 2, 2, (), ())
    assert reading._prepared(ran) == [mine, {"dataset": "E", "pid": 1}]


def loader(a_step: float, wait_s: float) -> dict[str, Any]:
    return {"dataset": "D", "a_step": a_step, "wait_s": wait_s, "calls": 9}


@pytest.mark.parametrize(
    ("batches", "each", "waits"), [(1, (1.0, 1.02), [2.0, 0.0]), (2, (1.0, 1.0), [2.0, 3.0])]
)
def test_an_evaluations_loader_is_not_what_steps_wait_for(
    batches: int, each: tuple[float, float], waits: list[float]
) -> None:
    """Unless a step reads from both."""
    block = {"phase": "A", "times": [0.1], "fresh": [0], "batches": [batches]}
    loaders = [loader(a, s) for a, s in zip(each, (2.0, 3.0), strict=True)]
    assert reading._waits_of({"blocks": [block], "loaders": loaders}, loaders) == waits


@pytest.mark.parametrize(
    ("ms", "said"), [(13.17, "31.7 % more than pass A"), (8.0, "20.0 % less than pass A"), (10.4, "")]
)
def test_rows_that_do_not_add_up_are_told_by_how_much(ms: float, said: str) -> None:
    notes = reading._unreconciled([Row("data", "data", ms, 1.0)], Steps(10.0, 9.0, 11.0, 50))
    assert [said in note for note in notes] == ([True] if said else [])


def test_a_trials_note_does_not_say_what_the_table_says() -> None:
    for _, name, note in reading._TRIALS:
        assert not {*note.split()} & {*sections._TRIALS[name].split()} - {"half", "batch"}
