"""How fields look: as declared, or as the first samples show; and values that do not fit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import frostline as fl
from frostline.errors import UsageError
from frostline.execution import Block
from frostline.freezer.schema import (
    as_one,
    field_of,
    fields_of,
    misfit,
    unstorable,
    unstorable_in,
    with_marks,
)
from frostline.store.codecs import to_tensor

KEYS = ["a", "b"]
RAGGED = [torch.zeros(2, 3), torch.zeros(0, 3)]


@pytest.mark.parametrize(
    ("column", "shape", "dtype"),
    [
        (torch.zeros(2, 4, dtype=torch.bfloat16), (4,), "bfloat16"),
        ([torch.zeros(3), torch.ones(3)], (3,), "float32"),
        (RAGGED, (None, 3), "float32"),
        ([np.zeros(2, np.int16), np.zeros(5, np.int16)], (None,), "int16"),
        ([np.float32(1), np.float32(2)], (), "float32"),
        ([1, 2], (), "int64"),
        ([1.5, 2.5], (), "float64"),
        ([1, 2.5], (), "float64"),
        ([True, False], (), "bool"),
        ([True, 2], (), "float64"),
        (["p", ""], (), "str"),
        ([np.str_("p"), "q"], (), "str"),
        ([b"p", b""], (), "bytes"),
        ([{"a": 1}, [1, None]], (), "json"),
        (["p", None], (), "json"),
        ([(1, 2), (3,)], (), "json"),
    ],
)
def test_a_field_looks_like_its_first_samples(column: Any, shape: Any, dtype: str) -> None:
    assert field_of("x", KEYS, column) == fl.Field(shape, dtype)


@pytest.mark.parametrize(
    ("column", "told"),
    [
        (
            [torch.zeros(2, 3), torch.zeros(2, 4)],
            r"'x' is float32 \[2, 3\] for 'a' but float32 \[2, 4\] for 'b'",
        ),
        ([torch.zeros(2), torch.zeros(2, dtype=torch.int8)], r"float32 \[2\] for 'a' but int8 \[2\] for 'b'"),
        ([torch.zeros(()), torch.zeros(2)], "only the first dimension may differ"),
        ([{1}, {2}], "'x' is set, as for 'a': a store holds tensors, numbers, text, bytes and JSON"),
        ([b"a", "a"], "'x' is bytes or str"),
        ([np.array(["t"])] * 2, "a store holds tensors"),
    ],
)
def test_what_cannot_be_a_field_is_told(column: Any, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        field_of("x", KEYS, column)


def test_a_declared_field_is_taken_as_it_is_and_all_problems_are_told() -> None:
    declared = fl.Field((None, 3), "float32")
    data = fl.Pipeline(
        fl.Source.table([{"key": "a", "raw": 1}]),
        fl.Stage("one", lambda raw: raw, reads="raw", writes={"r": declared}),
        fl.Stage("two", lambda raw: raw, reads="raw", writes=["s", "t"]),
    )
    columns = {"r": [torch.zeros(2, 3)] * 2, "s": [1, 2], "raw": [1, 2]}
    assert fields_of(data, ["r", "s", "raw"], KEYS, columns) == {
        "r": declared,
        "s": fl.Field((), "int64"),
        "raw": fl.Field((), "int64"),
    }
    with pytest.raises(UsageError) as caught:
        fields_of(data, ["s", "t"], KEYS, {"s": [{1}, {2}], "t": [object(), object()]})
    assert [text[:3] for text in caught.value.problems] == ["'s'", "'t'"]


FIXED = fl.Field((2, 3), "float32")


@pytest.mark.parametrize(
    ("spec", "value"),
    [
        (FIXED, torch.zeros(2, 3)),
        (FIXED, np.zeros((2, 3), np.float32)),
        (fl.Field((None, 3), "float32"), torch.zeros(0, 3)),
        (fl.Field((), "float64"), 3),
        (fl.Field((), "float32"), 0.1),
        (fl.Field((), "int64"), 2.0),
        (fl.Field((), "str"), "text"),
        (fl.Field((), "json"), {"a": [1]}),
    ],
)
def test_what_fits(spec: fl.Field, value: Any) -> None:
    assert misfit("x", spec, "a", value) is None


@pytest.mark.parametrize(
    ("spec", "value", "told"),
    [
        (
            FIXED,
            torch.zeros(5, 3),
            "is [5, 3], the first samples' is [2, 3]. Pad or resize it in its stage, or st",
        ),
        (FIXED, torch.zeros(2, 4), "is [2, 4], the first samples' is [2, 3]. Pad or resize it in its stage"),
        (FIXED, torch.zeros(3), "is [3], the first samples' is [2, 3]"),
        (FIXED, torch.zeros(2, 3).double(), "is float64 [2, 3], the first samples' is float32. Convert it"),
        (fl.Field((), "int64"), None, "expected a tensor, array or number, got NoneType"),
        (fl.Field((), "int64"), "text", "got str"),
        (fl.Field((), "int64"), 2.5, "2.5"),
        (fl.Field((), "bool"), 2, " 2"),
        (fl.Field((), "str"), 3, "field 'x'"),
        (fl.Field((), "bytes"), "text", "field 'x'"),
        (fl.Field((), "json"), math.nan, "not a JSON value"),
        (fl.Field((), "str"), torch.zeros(2), "field 'x'"),
    ],
)
def test_what_does_not_fit_is_told(spec: fl.Field, value: Any, told: str) -> None:
    assert told in str(misfit("x", spec, "a", value))


def test_only_another_length_offers_a_ragged_field() -> None:
    assert "writes={'x': fl.Field((None, 3), 'float32')}" in str(misfit("x", FIXED, "a", torch.zeros(5, 3)))
    assert "ragged" not in str(misfit("x", FIXED, "a", torch.zeros(2, 4)))


def test_codecs_and_marks() -> None:
    fields = {"x": fl.Field((8,), "float32"), "n": fl.Field((), "int64"), "y": fl.Field((8,), "float16")}
    marks = {name: (f"mark of {name}", {"field": name}) for name in fields}
    found = with_marks(fields, {"*": "int8/token", "y": "raw"}, marks)
    assert [spec.codec for spec in found.values()] == ["int8/token", "raw", "raw"]
    assert found["n"].fingerprint == "mark of n"
    assert found["n"].provenance == {"field": "n"}
    with pytest.raises(UsageError, match="--codec: "):
        with_marks(fields, {"n": "int8/token"}, marks)


def test_tensors_whose_values_do_not_lie_one_after_the_other_are_told() -> None:
    odd = {
        "sparse": torch.eye(2).to_sparse(),
        "meta": torch.eye(2, device="meta"),
        "nested": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
    }
    for kind, value in odd.items():
        told = unstorable("x", value)
        assert told is not None
        assert kind in told
        assert misfit("x", fl.Field((2, 2), "float32"), "a", value) == told
    for value in (torch.eye(2), torch.eye(2).t(), torch.zeros(0), "text", 3, np.zeros(2)):
        assert unstorable("x", value) is None


def test_which_samples_of_a_block_have_such_a_value() -> None:
    sparse = torch.eye(2).to_sparse()
    block = Block(["a", "b"], {"x": [torch.eye(2), sparse], "y": torch.zeros(2, 3), "z": ["t", "u"]})
    assert list(unstorable_in(block)) == ["b"]
    assert unstorable_in(block)["b"].stage == "x"
    whole = Block(["a", "b"], {"x": torch.zeros(2, 3, device="meta")})
    assert list(unstorable_in(whole)) == ["a", "b"]


def test_a_type_that_no_field_has_is_told_with_the_other_problems() -> None:
    data = fl.Pipeline(fl.Source.table([{"key": "a", "x": 1, "y": 2}]), outputs=["x", "y"])
    columns = {"x": torch.zeros(1, 2, dtype=torch.complex64), "y": [object()]}
    with pytest.raises(UsageError, match="complex64") as caught:
        fields_of(data, ["x", "y"], ["a"], columns)
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize(
    ("spec", "column"),
    [
        (fl.Field((2,), "float32"), [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]),
        (fl.Field((), "float64"), [0.1, float("inf")]),
        (fl.Field((), "int64"), [2**62, -1]),
        (fl.Field((), "bool"), [True, False]),
    ],
)
def test_values_that_fit_become_one_tensor_of_the_same_rows(spec: fl.Field, column: list[Any]) -> None:
    whole = as_one(spec, column)
    assert isinstance(whole, torch.Tensor)
    assert str(whole.dtype) == f"torch.{spec.dtype}"
    assert all(torch.equal(whole[i], to_tensor(v, spec, "x", "a")) for i, v in enumerate(column))


@pytest.mark.parametrize(
    ("spec", "column"),
    [
        (fl.Field((2,), "float32"), [torch.zeros(2), torch.zeros(3)]),
        (fl.Field((2,), "float32"), [torch.zeros(2).double()] * 2),
        (fl.Field((2,), "float32"), [torch.zeros(2), torch.zeros(2).to_sparse()]),
        (fl.Field((2,), "float32"), [torch.zeros(2), None]),
        (fl.Field((), "int64"), [1, 2**70]),
        (fl.Field((), "int64"), [1, True]),
        (fl.Field((), "float64"), [1.0, 1]),
    ],
)
def test_a_column_with_another_value_stays_as_it_is(spec: fl.Field, column: list[Any]) -> None:
    assert as_one(spec, column) is column
