from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import frostline as fl
from frostline.cut import Budgets, plan
from frostline.cut.rehearsal import Freezing, Rehearsed, rehearsed, start_s
from frostline.cut.walk import Walk, chosen_places
from frostline.errors import FrostlineError

ROOM = Budgets(disk=10**12, ram=10**12, device=0)


@pytest.fixture(autouse=True)
def _briefly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("frostline.cut.walk._ROUND_S", 0.01)
    monkeypatch.setattr("frostline.cut.walk._LEAST_S", 0.005)
    monkeypatch.setattr("frostline.cut.trial._SUPPLY_S", 0.05)


def vector(x: float) -> torch.Tensor:
    return torch.full((8,), x)


class Unlike:
    """Gives something else each time it is called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: float) -> torch.Tensor:
        self.calls += 1
        return torch.full((8,), float(self.calls))


def pipeline(fn: Any = vector) -> fl.Pipeline:
    rows = [{"key": f"k{i}", "x": float(i)} for i in range(40)]
    return fl.Pipeline(fl.Source.table(rows), fl.Stage("y", fn, reads="x"))


def walked(data: fl.Pipeline) -> Walk:
    walk = Walk(data, chosen_places(data, 0.2), torch.device("cpu"), 2)
    walk.run()
    return walk


def test_a_freeze_of_cheap_stages_is_rehearsed_and_leaves_the_given_rows(tmp_path: Path) -> None:
    found = rehearsed(walked(pipeline()), ["y"], tmp_path, Freezing(1e-5, 1e-3, 40), 48.0)
    assert found is not None
    assert found.start >= 0
    assert found.each >= 0
    assert len(fl.Store.open(tmp_path / "many")) == 512


@pytest.mark.parametrize(
    ("few_s", "many_s", "start", "each"),
    [
        (1.0 + 64 * 0.01, 1.0 + 512 * 0.01, 1.0, 0.01),
        (0.5, 64.0, 0.0, 63.5 / 448),  # something else held the long one up: no start below none
        (2.0, 1.5, 2.0, 0.0),  # or the short one: no row below none
    ],
)
def test_what_two_freezes_took_is_a_start_and_so_much_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few_s: float, many_s: float, start: float, each: float
) -> None:
    took = {"few": few_s, "many": many_s}
    monkeypatch.setattr("frostline.cut.rehearsal._freeze_s", lambda data, cut, path, *_: took[path.name])
    found = rehearsed(walked(pipeline()), ["y"], tmp_path, Freezing(1e-5, 1e-3, 40), 48.0)
    assert found is not None
    assert (found.start, found.each) == pytest.approx((start, each), abs=1e-12)


@pytest.mark.parametrize(
    ("freezing", "row_bytes"),
    [
        (Freezing(0.01, 1e-3, 40), 48.0),  # a slow stage
        (Freezing(1e-5, 60.0, 40), 48.0),  # a long audit, as of large chunks
        (Freezing(1e-5, 1e-3, 40), 6e6),  # rows that would fill the disk
    ],
)
def test_what_would_take_too_much_is_not_rehearsed(
    tmp_path: Path, freezing: Freezing, row_bytes: float
) -> None:
    assert rehearsed(walked(pipeline()), ["y"], tmp_path, freezing, row_bytes) is None
    assert not [*tmp_path.iterdir()]


def test_seconds_grow_with_the_rows() -> None:
    assert Rehearsed(start=2.0, each=0.5).seconds(10) == 7.0


def test_any_freeze_takes_some_time_to_start(tmp_path: Path) -> None:
    assert start_s(tmp_path) > 0


def test_a_stage_that_no_freeze_would_take_is_not_chosen_and_the_reason_is_told(tmp_path: Path) -> None:
    data = pipeline(Unlike())
    with pytest.raises(FrostlineError):
        fl.freeze(data, tmp_path / "store", quiet=True)
    found = plan(data, epochs=1e6, budgets=ROOM)
    option = found.option(["y"])
    assert found.cut == ()
    assert option is not None
    assert option.why_not
    assert option.why_not in found.table()
