from __future__ import annotations

from typing import Any

import pytest
import torch

import frostline as fl
from frostline.errors import FieldError
from frostline.store.field import check_fields


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (((3,), "float33"), "dtype must be one of"),
        (((3,), "float32", "zip"), "codec must be one of"),
        (((3, None), "float32"), "only the first dimension"),
        (((-1,), "float32"), "only the first dimension"),
        (((3.5,), "float32"), "tuple of whole numbers"),
        (("3", "float32"), "tuple of whole numbers"),
        ((3, "float32"), "tuple of whole numbers"),
        (((3,), "str"), "takes shape"),
        (((), "json", "float16"), "takes shape"),
        (((3,), "int64", "float16"), "floating-point"),
        (((3,), "float16", "float32"), "larger"),
        (((3,), "float32", "int8/channel"), "two dimensions"),
        (((), "float32", "int8/token"), "needs a dimension"),
        (((None,), "float32", "int8/token"), "needs a dimension"),
        (((1 << 30, 1 << 30), "uint8"), "1 TiB"),
        (((3,), "float32", "raw", 7), "fingerprint"),
        (((3,), "float32", "raw", None, {"f": len}), "provenance must be JSON"),
        (((3,), "float32", "raw", None, "x" * 70_000), "64 KiB"),
    ],
)
def test_a_field_that_cannot_be_says_why(args: Any, says: str) -> None:
    with pytest.raises(FieldError, match=says):
        fl.Field(*args)


def test_names_of_torch_and_short_names() -> None:
    assert fl.Field((3,), str(torch.bfloat16)).dtype == "bfloat16"
    assert fl.Field((3,), "float32", codec="bf16").codec == "bfloat16"
    assert fl.Field((3,), "float32", codec="int8").codec == "int8/token"


@pytest.mark.parametrize(
    ("field", "parts"),
    [
        (fl.Field((2, 3), "bfloat16"), {"values": ("bfloat16", (2, 3), False)}),
        (fl.Field((None, 3), "float32", "float16"), {"values": ("float16", (3,), True)}),
        (fl.Field((), "str"), {"values": ("uint8", (), True)}),
        (
            fl.Field((2, 3), "float32", "int8/token"),
            {"scales": ("float32", (2,), False), "values": ("int8", (2, 3), False)},
        ),
        (
            fl.Field((2, 3), "float32", "int8/channel"),
            {"scales": ("float32", (3,), False), "values": ("int8", (2, 3), False)},
        ),
        (
            fl.Field((None, 3), "float32", "int8/token"),
            {"scales": ("float32", (), True), "values": ("int8", (3,), True)},
        ),
        (
            fl.Field((None, 3), "float32", "int8/channel"),
            {"scales": ("float32", (3,), False), "values": ("int8", (3,), True)},
        ),
    ],
)
def test_parts_on_disk(field: fl.Field, parts: dict[str, Any]) -> None:
    assert {p.name: (p.dtype, p.shape, p.per_item) for p in field.parts} == parts


@pytest.mark.parametrize("name", ["", "a/b", "../x", "a..b", ".hidden", "1a", "a b", "ä", "x" * 65, 7])
def test_names_that_could_leave_the_folder_are_refused(name: Any) -> None:
    with pytest.raises(FieldError, match="a name is a letter"):
        check_fields({name: fl.Field((), "int64")})


def test_no_field_and_no_field_object() -> None:
    with pytest.raises(FieldError, match="at least one field"):
        check_fields({})
    with pytest.raises(FieldError, match=r"expected fl\.Field, got str"):
        check_fields({"x": "float32"})  # type: ignore[dict-item]
