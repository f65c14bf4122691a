"""Values as a store would give them back, and columns as they stand in a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import frostline as fl
from frostline.batch import Ragged
from frostline.errors import StageFailed
from frostline.supply.values import as_stored, collated, column_as_stored, cut_to_none, kind_in_store

VALUES = [
    True, 3, -0.25, "text", b"bytes", {"a": (1, 2)}, [1, "b"], np.float32(0.5), np.arange(3), np.uint8(7),
    torch.arange(4).to(torch.bfloat16), np.zeros((2, 0)), np.bool_(True),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_a_value_is_what_a_frozen_store_gives_back(make: Any, value: Any) -> None:
    data = fl.Pipeline(fl.Source.dataset([{"x": value}] * 2, version="1"))
    stored = make.stores(make.workload(data))["data"]["00000000"]["x"]
    assert make.same(as_stored(value), stored)


def test_a_declared_field_decides() -> None:
    assert as_stored([1, 2], fl.Field((None,), "int16")).dtype == torch.int16
    assert as_stored(3, fl.Field((), "json")) == 3
    with pytest.raises(StageFailed, match=r"'x' failed for 'b'.*the store holds float32 \[2\]"):
        column_as_stored("x", ["a", "b"], [torch.zeros(2), torch.zeros(3)], fl.Field((2,), "float32"))


def test_a_few_samples_tell_how_a_store_would_hold_a_field() -> None:
    assert kind_in_store([torch.zeros(2), torch.zeros(3)]) == "ragged"
    assert kind_in_store([1, None]) == "list"
    assert kind_in_store(["a"]) == "list"
    assert kind_in_store([1, 2.5]) is None
    assert kind_in_store(torch.zeros(3)) is None


def put(column: Any, kind: Any = None) -> Any:
    return collated("x", "stage", [f"k{i}" for i in range(len(column))], column, kind, pin=False)


def test_columns_become_tensors_ragged_rows_or_lists() -> None:
    assert put([1, 2]).dtype == torch.int64
    assert put([1, 2.5]).tolist() == [1.0, 2.5]
    assert put([1, 2.5]).dtype == torch.float64
    assert put(["a", "b"]) == ["a", "b"]
    assert put([1, 2], "list") == [1, 2]
    found = put([torch.arange(2), torch.arange(0), torch.arange(3)], "ragged")
    assert [row.tolist() for row in found] == [[0, 1], [], [0, 1, 2]]
    assert isinstance(put(torch.zeros(2, 3), "ragged"), Ragged)


@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        ([torch.zeros(2), torch.zeros(2), torch.zeros(3)], None),
        ([torch.zeros(2), torch.zeros(2), torch.zeros(2).int()], None),
        ([torch.zeros(2, 2), torch.zeros(3, 2), torch.zeros(2, 3)], "ragged"),
        ([torch.zeros(2), torch.zeros(2), torch.zeros(())], "ragged"),
    ],
)
def test_rows_that_do_not_fit_together_are_named(rows: Any, kind: Any) -> None:
    with pytest.raises(StageFailed, match="'k2' is") as failure:
        put(rows, kind)
    assert failure.value.stage == "stage"
    assert "k2" in failure.value.keys


def test_fields_without_rows_keep_their_shapes() -> None:
    assert cut_to_none(torch.zeros(1, 3)).shape == (0, 3)
    assert cut_to_none(["a"]) == []
    none = cut_to_none(Ragged(torch.zeros(4, 2), torch.tensor([0, 4])))
    assert (len(none), none.values.shape) == (0, (0, 2))
