"""Stores that others want made first: what is left out is said, though nobody asked for a store."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import frostline as fl
from frostline.freezer.options import Options
from frostline.freezer.stores import complete, places_of


def squared(x: float) -> torch.Tensor:
    if x < 0:
        raise ValueError("less than nothing\x1b[2J")
    return torch.tensor(x * x)


def work(bad: int) -> fl.Workload:
    rows = [{"key": f"k{i:02d}", "x": float(i - bad)} for i in range(40)]
    data = fl.Pipeline(fl.Source.table(rows), fl.Stage("y", squared, reads="x"), outputs=("y",))
    return fl.Workload(data, run=print, name="work")


@pytest.mark.parametrize(
    ("bad", "first"), [(1, "1 sample failed and is left out:"), (12, "12 samples failed and are")]
)
def test_samples_that_fail_are_named(
    bad: int, first: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = work(bad)
    places = places_of(workload, tmp_path / "store", asked="a test")
    complete(workload, places, Options(device="cpu", max_bad="50%"), quiet=False)
    said = capsys.readouterr().err
    assert first in said
    assert "  - 'k00': " in said
    assert "less than nothing" in said
    assert "\x1b" not in said
    assert ("… and 2 more" in said) == (bad == 12)
    complete(workload, places, Options(device="cpu", max_bad="50%"), quiet=False)
    assert first not in capsys.readouterr().err  # that they failed before is said instead


def test_nothing_is_said_where_nothing_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload = work(0)
    complete(workload, places_of(workload, tmp_path, asked="a test"), Options(device="cpu"), quiet=False)
    assert "left out" not in capsys.readouterr().err
