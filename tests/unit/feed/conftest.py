"""Stores for the feed's tests: one with every kind of field and codec, and small ones by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import frostline as fl
from frostline.batch import Ragged

FIELDS = {
    "number": fl.Field((), "int64"),
    "flag": fl.Field((2,), "bool"),
    "half": fl.Field((6, 4), "float16"),
    "brain": fl.Field((6, 3, 4), "bfloat16"),
    "double": fl.Field((5,), "float64"),
    "empty": fl.Field((0, 3), "float32"),
    "wide": fl.Field((6, 2000), "float32"),
    "cast": fl.Field((6, 3), "float32", codec="bfloat16"),
    "token": fl.Field((6, 3, 4), "float32", codec="int8/token"),
    "vector": fl.Field((8,), "float16", codec="int8/token"),
    "channel": fl.Field((6, 3, 4), "bfloat16", codec="int8/channel"),
    "ragged": fl.Field((None, 3), "float32"),
    "ragged_cast": fl.Field((None,), "float64", codec="float32"),
    "ragged_token": fl.Field((None, 3), "bfloat16", codec="int8/token"),
    "ragged_channel": fl.Field((None, 2, 3), "float32", codec="int8/channel"),
    "text": fl.Field((), "str"),
    "blob": fl.Field((), "bytes"),
    "tree": fl.Field((), "json"),
}


def value_of(spec: fl.Field, i: int, generator: torch.Generator, length: int) -> Any:
    """A value of row i; ragged fields of one row share their length."""
    if spec.dtype == "str":
        return "é" * (i % 4) + f"row {i}"
    if spec.dtype == "bytes":
        return bytes(range(i % 7))
    if spec.dtype == "json":
        return {"i": i, "list": [i] * (i % 3)}
    shape = (length, *spec.item_shape) if spec.ragged else spec.item_shape
    dtype = getattr(torch, spec.dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return (
        torch.randint(0, 2, shape, generator=generator).to(dtype) if spec.dtype == "bool" else torch.tensor(i)
    )


def write_store(
    path: Path, n: int, fields: dict[str, fl.Field], *, rows_per_shard: int = 7, shortest: int = 0
) -> fl.Store:
    """n rows called k0 … in several shards and two commits."""
    generator = torch.Generator().manual_seed(n)
    with fl.Store.create(path, fields=fields, rows_per_shard=rows_per_shard) as writer:
        for i in range(n):
            length = shortest + i % 5
            writer.append(
                f"k{i}", {name: value_of(spec, i, generator, length) for name, spec in fields.items()}
            )
            if i == n // 2:
                writer.commit()
    return fl.Store.open(path)


def same(a: Any, b: Any) -> bool:
    """Equal in type, shape and bits."""
    if isinstance(a, Ragged) or isinstance(b, Ragged):
        return (
            isinstance(a, Ragged)
            and isinstance(b, Ragged)
            and same(a.values, b.values)
            and same(a.offsets, b.offsets)
        )
    if isinstance(a, torch.Tensor):
        if not isinstance(b, torch.Tensor) or a.dtype != b.dtype or a.shape != b.shape:
            return False
        a, b = a.cpu().contiguous(), b.cpu().contiguous()
        return not a.numel() or torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    return bool(a == b)


@pytest.fixture
def make_store(tmp_path: Path) -> Callable[..., fl.Store]:
    """`make_store("name", n, fields)`: a small store in this test's folder."""

    def make(name: str, n: int, fields: dict[str, fl.Field] | None = None, **options: Any) -> fl.Store:
        return write_store(
            tmp_path / name, n, fields or {"number": FIELDS["number"], "half": FIELDS["half"]}, **options
        )

    return make


@pytest.fixture(scope="session")
def all_kinds(tmp_path_factory: pytest.TempPathFactory) -> fl.Store:
    """40 rows of every kind of field and codec, in shards of 7; ragged rows may be empty."""
    return write_store(tmp_path_factory.mktemp("all") / "store", 40, FIELDS)


@pytest.fixture(scope="session")
def long_rows(tmp_path_factory: pytest.TempPathFactory) -> fl.Store:
    """The same with ragged rows of at least 4."""
    return write_store(tmp_path_factory.mktemp("long") / "store", 40, FIELDS, shortest=4)


@pytest.fixture
def is_same() -> Callable[[Any, Any], bool]:
    return same


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """No test may leave a thread of the feed behind."""
    yield
    left = [t.name for t in threading.enumerate() if t.name.startswith("frostline")]
    assert not left, left
