"""Differences name the field, the rows and the size, and tell round-off from another result."""

from __future__ import annotations

import torch

from frostline.inspector.comparing import differences


def test_equal_bits_are_equal_also_for_nan() -> None:
    x = torch.tensor([float("nan"), 1.0])
    assert differences({"x": x, "t": ["a"]}, {"x": x.clone(), "t": ["a"]}) == []


def test_rows_and_sizes_are_told() -> None:
    a, b = torch.zeros(4, 2), torch.zeros(4, 2)
    b[2, 1] = 0.25
    found = differences({"x": a}, {"x": b})[0]
    assert (found.rows, found.by, found.round_off) == ((2,), 0.25, False)
    assert differences({"x": a}, {"x": b}, rows=[0, 1]) == []
    assert differences({"x": a.half()}, {"x": a})[0].rows == (0, 1, 2, 3)


def test_text_shapes_and_missing_fields_differ_without_a_number() -> None:
    for a, b in ((["a"], ["b"]), (torch.zeros(2, 3), torch.zeros(2, 4)), (torch.zeros(2), None)):
        found = differences({"x": a}, {"x": b})[0]
        assert found.by is None
        assert "'x' differs" in found.told(["k"])


def test_round_off_depends_on_dtype_and_size() -> None:
    x = torch.full((1, 3), 100.0)
    for factor, dtype, expected in (
        (1 + 1e-6, torch.float32, True),
        (1.01, torch.float32, False),
        (1.01, torch.bfloat16, True),
        (1.2, torch.bfloat16, False),
    ):
        a, b = x.to(dtype), (x * factor).to(dtype)
        assert differences({"x": a}, {"x": b})[0].round_off is expected


def test_nested_rows_are_compared() -> None:
    a = {"x": [{"boxes": torch.zeros(2), "names": ("a",)}]}
    b = {"x": [{"boxes": torch.zeros(2), "names": ("b",)}]}
    assert differences(a, a) == []
    assert differences(a, b)[0].rows == (0,)
