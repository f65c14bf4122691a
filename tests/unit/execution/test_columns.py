"""Columns: values of samples become one tensor, tails are filled up, rows are taken and put together."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from frostline.errors import StageFailed
from frostline.execution.columns import (
    Uneven,
    as_value,
    joined,
    kind_of,
    numeric,
    padded,
    row_bytes,
    stack,
    stackable,
    taken,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1.5, 2.5], torch.float32),
        ([1, 2], torch.int64),
        ([True, False], torch.bool),
        ([np.float64(1), np.float64(2)], torch.float64),
        ([np.ones(3, np.uint8), np.zeros(3, np.uint8)], torch.uint8),
        ([torch.ones(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16)], torch.bfloat16),
    ],
)
def test_numbers_arrays_and_tensors_become_one_tensor(values: list[object], dtype: torch.dtype) -> None:
    found = stack("net", "x", ["a", "b"], values, CPU)
    assert isinstance(found, torch.Tensor)
    assert found.dtype == dtype
    assert len(found) == 2


@pytest.mark.parametrize(
    "values", [["one", "two"], [b"1"], [{"a": 1}], [None, 1.0], [np.array(["text"])], []]
)
def test_what_is_no_number_stays_a_list(values: list[object]) -> None:
    assert stack("net", "x", ["a"] * len(values), values, CPU) is values


def test_a_tensor_stays_the_same_tensor() -> None:
    x = torch.arange(3)
    assert stack("net", "x", list("abc"), x, CPU) is x


@pytest.mark.parametrize(("device", "behind"), [("cpu", False), ("meta", False), ("cuda", True)])
def test_only_a_gpu_is_copied_to_without_waiting(
    monkeypatch: pytest.MonkeyPatch, device: str, behind: bool
) -> None:
    """Elsewhere, what reads the copy next could read it before it is whole."""
    asked: list[bool] = []
    monkeypatch.setattr(torch.Tensor, "to", lambda x, device, non_blocking=False: asked.append(non_blocking))
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda x: False)
    stack("net", "x", ["a"], torch.zeros(1), torch.device(device))
    assert asked == [behind]


def test_samples_of_another_shape_are_named_with_what_to_do() -> None:
    rows = [torch.zeros(3), torch.zeros(4), torch.zeros(3), torch.zeros(3, dtype=torch.int64)]
    with pytest.raises(Uneven) as caught:
        stack("net", "x", list("abcd"), rows, CPU)
    assert isinstance(caught.value, StageFailed)
    assert caught.value.keys == ("b", "d")
    assert "'x' is float32 [3] for the others of the call, but 'b' is float32 [4]; 'd' is int64 [3]" in str(
        caught.value
    )
    assert "batch_size=1" in str(caught.value)


def test_of_two_equally_common_shapes_the_first_is_the_usual_one() -> None:
    with pytest.raises(Uneven) as caught:
        stack("net", "x", ["a", "b"], [np.zeros(2), np.zeros(5)], CPU)
    assert caught.value.keys == ("b",)


def test_an_array_becomes_a_tensor_whatever_its_memory_is_like() -> None:
    """Read-only (as Pillow's pictures), reversed, big-endian, 0-d: and pytest fails on a warning."""
    read_only = np.arange(4, dtype=np.float32)
    read_only.flags.writeable = False
    assert as_value(read_only).tolist() == [0, 1, 2, 3]
    assert as_value(np.arange(4)[::-1]).tolist() == [3, 2, 1, 0]
    assert as_value(np.arange(3, dtype=">i4")).tolist() == [0, 1, 2]
    assert as_value(np.array(2.5)).shape == ()
    assert stack("net", "x", ["a"], [read_only], CPU).shape == (1, 4)


@pytest.mark.parametrize(
    "value", ["text", 3, 2.5, None, np.array(["a"]), np.array([{}]), np.array("2026-11-15", "datetime64[s]")]
)
def test_other_values_travel_as_they_are(value: object) -> None:
    assert as_value(value) is value


def test_what_numpy_holds_is_numeric_when_torch_has_a_type_for_it() -> None:
    yes = [np.float16(1), np.bool_(True), np.zeros(2, np.uint16), np.zeros(2, np.complex64)]
    no = [1.0, torch.zeros(1), np.str_("a"), np.array(["a"]), np.zeros(1, np.longdouble), np.array([{}])]
    assert all(map(numeric, yes))
    assert not any(map(numeric, no))


def test_one_text_keeps_a_column_from_being_stacked() -> None:
    assert stackable([1, 2.0, torch.zeros(1), np.zeros(2)])
    assert stackable(torch.zeros(2))
    assert not stackable([1, "a"])


def test_a_tail_is_filled_with_its_last_row() -> None:
    assert padded(torch.tensor([[1, 2], [3, 4]]), 4).tolist() == [[1, 2], [3, 4], [3, 4], [3, 4]]
    assert padded(["a", "b"], 3) == ["a", "b", "b"]
    assert padded(torch.tensor([1.5]), 2).tolist() == [1.5, 1.5]


@pytest.mark.parametrize("column", [torch.arange(4), ["a", "b", "c", "d"]])
def test_a_whole_chunk_is_not_copied(column: object) -> None:
    assert padded(column, 4) is column
    assert padded(column, 2) is column


def test_pieces_are_put_together() -> None:
    assert joined([torch.tensor([1]), torch.tensor([2, 3])]).tolist() == [1, 2, 3]
    assert joined([["a"], ["b", "c"]]) == ["a", "b", "c"]
    one = torch.zeros(2)
    assert joined([one]) is one
    assert joined([]) == []


def test_pieces_of_different_shapes_or_kinds_become_a_list_of_rows() -> None:
    rows = joined([torch.zeros(1, 2), torch.zeros(2, 3)])
    assert [tuple(row.shape) for row in rows] == [(2,), (3,), (3,)]
    assert [row.dtype for row in joined([torch.zeros(1), torch.zeros(1, dtype=torch.int32)])] == [
        torch.float32,
        torch.int32,
    ]
    assert joined([torch.tensor([1]), ["a"]]) == [torch.tensor(1), "a"]


def test_rows_are_taken_in_the_order_asked_for() -> None:
    assert taken(torch.tensor([[0], [1], [2]]), [2, 0]).tolist() == [[2], [0]]
    assert taken(["a", "b", "c"], [2, 0]) == ["c", "a"]
    assert taken(torch.zeros(3, 4), []).shape == (0, 4)


def test_kinds_tell_type_and_shape_of_arrays_and_tensors_alike() -> None:
    assert kind_of(np.zeros((2, 3), np.float32)) == kind_of(torch.zeros(2, 3)) == "float32 [2, 3]"
    assert (kind_of("a"), kind_of(1), kind_of(None)) == ("str", "int", "NoneType")


@pytest.mark.parametrize(
    ("value", "size"), [(torch.zeros(3, 2), 24), (np.zeros(3, np.uint8), 3), ("abc", 3), (b"ab", 2), (1, 8)]
)
def test_bytes_of_a_row(value: object, size: int) -> None:
    assert row_bytes(value) == size
