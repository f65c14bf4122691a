"""Blocks through a pipe: every kind of value arrives as it was sent, and what cannot travel is refused."""

from __future__ import annotations

import math
from multiprocessing.connection import Pipe
from typing import Any

import numpy as np
import pytest
import torch

from frostline.errors import StageFailed, UsageError
from frostline.execution import Block
from frostline.execution.wire import receive, refuse_untransportable, send

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.complex64,
]  # fmt: skip


def through(block: Block) -> Block:
    ours, theirs = Pipe()
    with ours, theirs:
        send(ours, [*block.keys, *block.failed], block)
        return receive(theirs)


def value(x: Any) -> Any:
    return through(Block(["a"], {"x": [x]})).columns["x"][0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 2), (), (0,), (2, 0, 3), (1,)], ids=str)
def test_tensors_of_every_type_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 50
    x = numbers.to(dtype) if dtype.is_floating_point or dtype.is_complex else numbers.abs().to(dtype)
    y = value(x)
    assert (y.dtype, y.shape) == (x.dtype, x.shape)
    assert torch.equal(y, x)


def test_one_number_with_a_stride_of_its_own() -> None:
    x = torch.arange(6.0).as_strided((1, 1), (5, 3))
    assert x.is_contiguous()
    assert torch.equal(value(x), torch.zeros(1, 1))


def test_the_bits_of_a_tensor_are_kept_and_its_memory_is_its_own() -> None:
    x = torch.tensor([math.nan, -0.0, math.inf, 1e-45])
    y = value(x)
    assert torch.equal(x.view(torch.int32), y.view(torch.int32))
    y += 1  # a buffer of the pipe would not be writable
    assert value(torch.arange(6).reshape(2, 3).T).tolist() == [[0, 3], [1, 4], [2, 5]]
    with torch.inference_mode():
        inferred = torch.ones(2)
    assert value(inferred).tolist() == [1, 1]


@pytest.mark.parametrize(
    "x",
    ["text ü\0\ud800", "", b"\0bytes", b"", 3, -2.5, True, None, {"a": [1, {"b": None}]}, [1, "a"], 2**70],
)
def test_text_bytes_numbers_and_json(x: object) -> None:
    found = value(x)
    assert found == x
    assert type(found) is type(x)


def test_a_number_that_is_none_arrives_as_such() -> None:
    assert math.isnan(value(math.nan))
    assert value(-math.inf) == -math.inf


@pytest.mark.parametrize(
    "x",
    [
        np.float64(1.5),
        np.float32(0.1),
        np.int64(7),
        np.bool_(True),
        np.arange(6.0).reshape(2, 3),
        np.array(3),
    ],
    ids=lambda x: f"{type(x).__name__} {x.dtype}",
)
def test_what_numpy_made_stays_numpys(x: Any) -> None:
    """np.float64 must not become a float: stacked, one is float64 and the other float32."""
    found = value(x)
    assert type(found) is type(x)
    assert (found.dtype, found.shape) == (x.dtype, x.shape)
    assert np.array_equal(found, x)


def test_a_block_with_its_failures() -> None:
    bad = StageFailed("decode", ["b"], "truncated")
    block = Block(["a", "c"], {"x": [torch.ones(2), torch.zeros(3)], "t": ["p", b"q"]}, {"b": bad})
    found = through(block)
    assert found.keys == ["a", "c"]
    assert [x.tolist() for x in found.columns["x"]] == [[1, 1], [0, 0, 0]]
    assert found.columns["t"] == ["p", b"q"]
    assert str(found.failed["b"]) == str(bad)
    assert through(Block([], {}, {})) == Block([], {}, {})


@pytest.mark.parametrize("x", [(1, 2), {1, 2}, {1: 2}, object(), [(1,)], [math.nan], np.array(["a"])])
def test_what_json_would_change_is_refused_at_both_ends(x: object) -> None:
    with pytest.raises(UsageError, match=r"'x' is a \w+: only tensors, numbers, text, bytes and JSON"):
        value(x)
    with pytest.raises(UsageError, match="Use threads"):
        refuse_untransportable("x", x)
