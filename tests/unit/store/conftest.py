"""What the store's tests share: a small store, and its files as bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import frostline as fl

FIELDS = {
    "x": fl.Field((3,), "float32"),
    "caption": fl.Field((), "str"),
    "tokens": fl.Field((None, 2), "int16"),
}


def row(i: int) -> dict[str, Any]:
    """The values of row `i`: different for every i, ragged lengths 0 … 3."""
    return {
        "x": torch.tensor([i, i + 0.5, -i], dtype=torch.float32),
        "caption": f"caption {i}",
        "tokens": torch.full((i % 4, 2), i, dtype=torch.int16),
    }


def make(path: Path, n: int, *, rows_per_shard: int = 4) -> Path:
    with fl.Store.create(path, FIELDS, rows_per_shard=rows_per_shard) as writer:
        for i in range(n):
            writer.append(f"k{i}", row(i))
    return path


def files_of(root: Path) -> dict[str, bytes]:
    """Every file of a store but the log and the lock, which hold times and hosts."""
    return {
        p.relative_to(root).as_posix(): p.read_bytes()
        for p in sorted(root.rglob("*"))
        if p.is_file() and p.name not in ("log.txt", ".lock")
    }


@pytest.fixture(name="row")
def _row() -> Callable[[int], dict[str, Any]]:
    return row


@pytest.fixture(name="make")
def _make() -> Callable[..., Path]:
    return make


@pytest.fixture(name="files_of")
def _files_of() -> Callable[[Path], dict[str, bytes]]:
    return files_of


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Ten rows in shards of four: two whole ones and a short one."""
    return make(tmp_path / "store", 10)
