from __future__ import annotations

from typing import Any

import pytest
import torch

import frostline as fl
from frostline.errors import FieldError
from frostline.store.building import Block, checked, default_rows_per_shard, encode_rows


def test_what_was_given_may_be_overwritten_afterwards() -> None:
    spec, x = fl.Field((2,), "float32"), torch.ones(1, 2)
    block = Block("x", spec)
    block.add(encode_rows("x", spec, ["a"], checked("x", spec, ["a"], x), sample=0))
    x.zero_()
    assert block.pieces["values"][0].view("f4").tolist() == [1, 1]


def test_what_is_given_away_is_not_copied() -> None:
    spec, x = fl.Field((2,), "float32"), torch.ones(1, 2)
    rows = encode_rows("x", spec, ["a"], checked("x", spec, ["a"], x), sample=0, take=True)
    assert rows.parts["values"].ctypes.data == x.data_ptr()


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (torch.zeros(3, 2), "2 keys, but 3 values in a Tensor"),
        (torch.zeros(2, 5), r"Row 'a', field 'x': got float32 \[5\]"),
        (7, "expected a value for each key, got int"),
        ([torch.zeros(2)], "2 keys, but 1 values"),
    ],
)
def test_a_batch_that_does_not_fit(values: Any, says: str) -> None:
    with pytest.raises(FieldError, match=says):
        checked("x", fl.Field((2,), "float32"), ["a", "b"], values)


def test_a_string_is_not_a_batch_of_strings() -> None:
    with pytest.raises(FieldError, match="2 values in a str"):
        checked("t", fl.Field((), "str"), ["a", "b"], "xy")


def test_a_ragged_batch_as_ragged_or_as_list() -> None:
    spec = fl.Field((None,), "int64")
    rows = fl.Ragged(torch.arange(5), torch.tensor([0, 2, 5]))
    for given in (rows, list(rows)):
        found = encode_rows("r", spec, ["a", "b"], checked("r", spec, ["a", "b"], given), sample=0)
        assert (found.n, found.lengths) == (2, [2, 3])


def test_the_error_is_measured_on_as_many_rows_as_asked() -> None:
    spec = fl.Field((4, 2), "float32", "int8/token")
    x = torch.randn(6, 4, 2)
    assert len(encode_rows("x", spec, list("abcdef"), x, sample=4).errors) == 4
    assert len(encode_rows("x", spec, list("abcdef"), x, sample=0).errors) == 0
    assert len(encode_rows("x", fl.Field((4, 2), "float32"), list("abcdef"), x, sample=4).errors) == 0


def test_no_rows_at_all() -> None:
    for spec in (
        fl.Field((3,), "float32", "int8/token"),
        fl.Field((None, 3), "float32"),
        fl.Field((), "str"),
    ):
        found = encode_rows("x", spec, [], checked("x", spec, [], []), sample=4)
        assert (found.n, sum(len(p) for p in found.parts.values())) == (0, 0)


@pytest.mark.parametrize(
    ("field", "rows"),
    [
        (fl.Field((24, 325, 384), "bfloat16"), 8),
        (fl.Field((), "bool"), 65536),
        (fl.Field((1 << 36,), "uint8"), 1),
    ],
)
def test_a_shard_is_about_64_mb(field: fl.Field, rows: int) -> None:
    assert default_rows_per_shard({"x": field}) == rows
