"""Skipped updates: counted within a window, named, and remembered by a checkpoint."""

from __future__ import annotations

import pytest
import torch

from frostline.batch import Batch
from frostline.errors import TrainStopped
from frostline.trainer.skipped import Skipped
from frostline.training import Training


def made(told: list[str], most: int = 2, window: int = 10) -> Skipped:
    return Skipped(Training(max_bad_steps=most, bad_window=window), told.append)


def steps(skipped: Skipped, start: int, flags: str) -> int:
    for at, flag in enumerate(flags, start):
        skipped.add(at, Batch({}, [f"k{at}"]), torch.tensor(float(flag == "x")))
    skipped.look(start + len(flags) - 1, any_bad="x" in flags)
    return start + len(flags)


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
    with pytest.raises(TrainStopped, match=r"3 of the last 10 updates .* step 21, keys 'k21'"):
        steps(skipped, at, "xx")


def test_a_checkpoint_knows_those_that_nobody_has_looked_at() -> None:
    skipped, again = made([]), made([])
    steps(skipped, 1, "x.")
    skipped.add(3, Batch({}, ["k3"]), torch.tensor(1.0))
    assert skipped
    assert skipped.steps() == [1, 3]
    again.load(skipped.steps())
    with pytest.raises(TrainStopped, match="3 of the last 10"):
        steps(again, 4, "x")
