"""Ragged and Batch: what reading gives back."""

from __future__ import annotations

import copy
from multiprocessing.reduction import ForkingPickler

import pytest
import torch

import frostline as fl
from frostline.errors import UsageError


def ragged(*rows: list[int]) -> fl.Ragged:
    lengths = torch.tensor([0, *map(len, rows)])
    return fl.Ragged(torch.tensor([x for row in rows for x in row]), lengths.cumsum(0))


def test_rows() -> None:
    r = ragged([1, 2], [], [3, 4, 5])
    assert len(r) == 3
    assert [row.tolist() for row in r] == [[1, 2], [], [3, 4, 5]]
    assert r[-1].tolist() == [3, 4, 5]
    assert r.lengths.tolist() == [2, 0, 3]
    for i in (3, -4):
        with pytest.raises(IndexError, match="3 rows"):
            r[i]
    assert list(ragged()) == []


def test_padded() -> None:
    r = ragged([1, 2], [], [3, 4, 5])
    assert r.padded().tolist() == [[1, 2, 0], [0, 0, 0], [3, 4, 5]]
    assert r.padded(-1, side="left").tolist() == [[-1, 1, 2], [-1, -1, -1], [3, 4, 5]]
    assert r.padded(multiple=4).shape == (3, 4)
    assert ragged().padded().shape == (0, 0)
    assert ragged([], []).padded(multiple=8).shape == (2, 0)
    items = fl.Ragged(torch.arange(12.0).view(6, 2), torch.tensor([0, 1, 6]))
    assert items.padded().shape == (2, 5, 2)
    with pytest.raises(ValueError, match="multiple"):
        r.padded(multiple=0)
    with pytest.raises(ValueError, match="side"):
        r.padded(side="middle")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*nested.*:UserWarning")
def test_nested_shares_the_values() -> None:
    r = fl.Ragged(torch.arange(10.0).view(5, 2), torch.tensor([0, 2, 5]))
    nested = r.nested()
    assert [row.tolist() for row in nested.unbind()] == [row.tolist() for row in r]
    assert nested.values().data_ptr() == r.values.data_ptr()


def test_to_moves_both() -> None:
    moved = ragged([1], [2, 3]).to("cpu")
    assert [row.tolist() for row in moved] == [[1], [2, 3]]


def test_keys_are_worked_out_once() -> None:
    asked = []

    def keys() -> list[str]:
        asked.append(1)
        return ["a", "b"]

    batch = fl.Batch({"x": torch.zeros(2)}, keys)
    assert list(batch.keys()) == ["x"]
    assert not asked
    assert batch.keys_of_rows == batch.keys_of_rows == ["a", "b"]
    assert len(asked) == 1
    batch.keys_of_rows.append("c")
    assert batch.keys_of_rows == ["a", "b"]


def test_a_batch_travels() -> None:
    batch = fl.Batch({"x": torch.arange(2), "t": ["u", "v"]}, lambda: ["a", "b"])
    assert bytes(ForkingPickler.dumps(batch))  # what worker processes send
    other = copy.deepcopy(batch)
    assert isinstance(other, fl.Batch)
    assert other.keys_of_rows == ["a", "b"]
    assert other["x"].tolist() == [0, 1]


def test_a_batch_moves_with_its_keys_and_is_taken_in_part() -> None:
    inner = fl.Batch({"y": torch.arange(3)}, ["a", "b", "c"])
    ragged = fl.Ragged(torch.arange(6), torch.tensor([0, 1, 3, 6]))
    batch = fl.Batch({"x": torch.arange(3), "t": ["p", "q", "r"], "r": ragged}, ["a", "b", "c"])
    moved = batch.to("cpu")
    assert (moved.keys_of_rows, moved["t"], moved.n_rows) == (["a", "b", "c"], ["p", "q", "r"], 3)
    part = batch.part(1, 3)
    assert (part["x"].tolist(), part["t"], part.keys_of_rows) == ([1, 2], ["q", "r"], ["b", "c"])
    assert [row.tolist() for row in part["r"]] == [[1, 2], [3, 4, 5]]
    several = fl.Batch({"inner": inner}, ["a", "b", "c"])
    assert several.n_rows == 3
    assert several.to("cpu")["inner"].keys_of_rows == ["a", "b", "c"]
    with pytest.raises(TypeError, match="several parts"):
        several.part(0, 1)


def test_a_batch_made_anew_from_its_fields_says_that_its_keys_are_lost() -> None:
    with pytest.raises(UsageError, match="its keys are lost"):
        _ = fl.Batch({"x": torch.zeros(2)}).keys_of_rows
