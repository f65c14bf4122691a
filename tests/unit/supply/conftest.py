"""What the tests of the supply share: small workloads, their stores, batches compared bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import frostline as fl
from frostline.batch import Batch, Ragged
from frostline.supply import Supply, supply


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROSTLINE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """No test may leave a thread of the supply or of its feed behind."""
    yield
    left = [t.name for t in threading.enumerate() if "frostline" in t.name]
    assert not left, left


def same(a: Any, b: Any) -> bool:
    """Equal in type, shape and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Batch):
        return [*a] == [*b] and a.keys_of_rows == b.keys_of_rows and all(same(a[n], b[n]) for n in a)
    if isinstance(a, Ragged):
        return same(a.values, b.values) and same(a.offsets, b.offsets)
    if isinstance(a, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        flat = [x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b) if x.numel()]
        return not flat or torch.equal(*flat)
    return bool(a == b)


def same_batches(some: list[Batch], others: list[Batch]) -> bool:
    return len(some) == len(others) > 0 and all(same(a, b) for a, b in zip(some, others, strict=True))


class Maker:
    """Supplies of one workload: from its store, which is frozen once, or live."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._n = 0

    same = staticmethod(same)
    same_batches = staticmethod(same_batches)

    def workload(self, data: Any, **options: Any) -> fl.Workload:
        return fl.Workload(data, run=print, **options)

    def stores(self, workload: fl.Workload, **options: Any) -> dict[str, fl.Store]:
        self._n += 1
        return {
            name: fl.freeze(p, self._folder / f"{self._n}-{name}", quiet=True, device="cpu", **options)
            for name, p in workload.pipelines.items()
        }

    def supply(self, workload: fl.Workload, stores: Any, **options: Any) -> Supply:
        given = {"split": None, "batch_size": 4, "device": "cpu", **options}
        return supply(workload, stores, **given)


@pytest.fixture
def make(tmp_path: Path) -> Maker:
    return Maker(tmp_path / "stores")
