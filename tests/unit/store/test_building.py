from __future__ import annotations

from typing import Any

import pytest
import torch

import frostline as fl
from frostline.errors import FieldError
from frostline.store.building import Block, checked, default_rows_per_shard, encode_rows
from frostline.store.shard import row_checksum


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


@pytest.mark.parametrize(
    ("dtype", "values", "stored"),
    [
        ("str", ["ü", "", "abc"], [b"\xc3\xbc", b"", b"abc"]),
        ("bytes", [b"\x00\xff", bytearray(b""), b"x"], [b"\x00\xff", b"", b"x"]),
        ("json", [{"a": [1, None]}, "", 2.5], [b'{"a":[1,null]}', b'""', b"2.5"]),
    ],
)
def test_texts_lie_end_to_end_each_with_its_checksum(dtype: str, values: list[Any], stored: Any) -> None:
    spec, keys = fl.Field((), dtype), ["a", "b", "c"]
    rows = encode_rows("t", spec, keys, checked("t", spec, keys, values), sample=4)
    assert rows.parts["values"].tobytes() == b"".join(stored)
    assert rows.lengths == [len(row) for row in stored]
    assert rows.checksums.tolist() == [row_checksum([row]) for row in stored]


@pytest.mark.parametrize("shape", [(3,), (), (0,), (2, 3)])
@pytest.mark.parametrize("codec", ["raw", "int8/token"])
def test_the_checksum_of_a_row_is_that_of_its_bytes(shape: tuple[int, ...], codec: str) -> None:
    if codec != "raw" and not shape:
        return
    spec, keys = fl.Field(shape, "float32", codec), ["a", "b"]
    x = torch.rand(2, *shape, generator=torch.Generator().manual_seed(0))
    rows = encode_rows("x", spec, keys, checked("x", spec, keys, x), sample=0)
    parts = [rows.parts[part.name].reshape(2, -1) for part in spec.parts]
    assert rows.checksums.tolist() == [row_checksum([part[i].copy() for part in parts]) for i in range(2)]
