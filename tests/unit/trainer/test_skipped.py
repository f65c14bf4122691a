"""Skipped updates: counted within a window, named, and remembered by a checkpoint."""

from __future__ import annotations

import json

import pytest
import torch

from frostline.batch import Batch
from frostline.trainer.skipped import Skipped
from frostline.training import Training


def made(told: list[str], most: int = 2, window: int = 10) -> Skipped:
    return Skipped(Training(max_bad_steps=most, bad_window=window), told.append)


def steps(skipped: Skipped, start: int, flags: str) -> int:
    for at, flag in enumerate(flags, start):
        skipped.add(at, Batch({}, [f"k{at}"]), torch.tensor(float(flag == "x")))
    skipped.look(start + len(flags) - 1, any_bad="x" in flags)
    return start + len(flags)


def said(skipped: Skipped) -> str:
    assert skipped.too_many
    return str(skipped.stopped(saved=None))


def test_the_first_of_a_look_is_named_and_a_look_forgets() -> None:
    told: list[str] = []
    skipped = made(told)
    assert not skipped
    steps(skipped, 1, "..x.x")
    assert told == ["2 updates skipped: loss or gradient is no number (step 3, keys 'k3')"]
    assert not skipped
    steps(skipped, 6, "....")
    assert len(told) == 1


def test_those_outside_the_window_do_not_count() -> None:
    skipped = made([])
    at = steps(skipped, 1, "xx...")
    at = steps(skipped, at, "..........")
    at = steps(skipped, at, "x....")
    assert not skipped.too_many
    steps(skipped, at, "xx")
    assert said(skipped).startswith("3 of the last 10 updates ")
    assert "First in this window: step 16, keys 'k16'. " in said(skipped)


def test_a_checkpoint_knows_those_that_nobody_has_looked_at() -> None:
    told: list[str] = []
    skipped, again = made([]), made(told)
    steps(skipped, 1, "x.")
    skipped.add(3, Batch({}, ["k3"]), torch.tensor(1.0))
    assert skipped
    assert skipped.state() == {"steps": [[1, ["k1"]], [3, ["k3"]]], "told": 2}
    again.load(json.loads(json.dumps(skipped.state())))
    steps(again, 4, "x")
    assert said(again).startswith("3 of the last 10 ")
    assert "window: step 1, keys 'k1'. " in said(again)
    assert told == ["2 updates skipped: loss or gradient is no number (step 3, keys 'k3')"]


def test_after_a_resume_those_that_were_not_told_of_are() -> None:
    told: list[str] = []
    skipped, again = made([]), made(told)
    for at in (1, 2):
        skipped.add(at, Batch({}, [f"k{at}"]), torch.tensor(float(at == 2)))
    again.load(skipped.state())
    again.add(3, Batch({}, ["k3"]), torch.tensor(0.0))
    again.look(3, any_bad=True)  # the count was in the meter, the step in the checkpoint
    assert told == ["1 update skipped: loss or gradient is no number (step 2, keys 'k2')"]


def test_a_checkpoint_of_before_has_numbers_alone() -> None:
    skipped = made([])
    skipped.load([1, 2])
    steps(skipped, 3, "x")
    assert "First in this window: step 1. " in said(skipped)


def test_all_keys_of_a_large_batch_are_there_until_they_were_told_and_a_few_are_said() -> None:
    told: list[str] = []
    skipped, again, keys = made([]), made(told, most=0), [f"k{i}" for i in range(100)]
    skipped.add(1, Batch({}, keys), torch.tensor(1.0))
    again.load(json.loads(json.dumps(skipped.state())))
    assert again.look(1, any_bad=True) == [(1, keys)]
    assert again.state()["steps"] == [[1, keys[:9]]]
    for text in (told[0], said(again)):
        assert "keys 'k0', " in text
        assert ", 'k7', …" in text
        assert "k8" not in text
    assert again.look(2, any_bad=True) == []


@pytest.mark.parametrize(
    ("saved", "told"),
    [(None, "No checkpoint was written yet"), (1200, "The checkpoint of step 1,200 is whole")],
)
def test_what_there_is_to_go_on_from_is_said(saved: int | None, told: str) -> None:
    skipped = made([], most=0)
    skipped.add(1201, Batch({}, ["a"]), torch.tensor(1.0))
    skipped.look(1201, any_bad=True)
    assert told in str(skipped.stopped(saved))
