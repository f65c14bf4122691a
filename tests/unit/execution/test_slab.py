"""Where rows lie in a slab, and when there is none: too much for the machine, or it has no such memory."""

from __future__ import annotations

import os
from types import SimpleNamespace

import psutil
import pytest
import torch

from frostline.execution import slab
from frostline.execution.slab import SLOTS, Layout, Slab

SAMPLE = {"a": torch.zeros(3, dtype=torch.uint8), "b": torch.zeros(2, 2), "text": "no tensor"}


def free(monkeypatch: pytest.MonkeyPatch, available: int) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available))


def test_columns_begin_at_cache_lines() -> None:
    layout = Layout.of(5, SAMPLE)
    assert layout is not None
    assert {name: layout.start(name) for name in layout.columns} == {"a": 0, "b": 64}
    assert layout.slot_bytes == 64 + 128
    assert layout.fits("b", torch.ones(2, 2))
    assert not layout.fits("b", torch.ones(2, 3))
    assert not layout.fits("text", "no tensor")


def test_rows_written_are_rows_read() -> None:
    layout = Layout.of(5, SAMPLE)
    assert layout is not None
    shared = Slab(layout)
    lease = shared.lease(wait=False)
    assert lease is not None
    layout.column(shared.slot(lease.number), "b")[3] = 7
    assert lease.rows("b", [3]).tolist() == [[[7, 7], [7, 7]]]
    shared.close()


def test_without_anything_of_a_fixed_shape_there_is_none() -> None:
    assert Layout.of(5, {"text": "a", "empty": torch.zeros(0)}) is None


def test_a_quarter_of_the_free_memory_is_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = SLOTS * (64 + 128)
    free(monkeypatch, 4 * needed)
    assert Layout.of(5, SAMPLE) is not None
    free(monkeypatch, 4 * needed - 4)
    assert Layout.of(5, SAMPLE) is None


def test_much_memory_makes_no_larger_slab_than_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 1 << 50)
    assert slab.most_bytes() == slab.LARGEST
    assert Layout.of(slab.LARGEST // SLOTS + 64, {"a": torch.zeros(1, dtype=torch.uint8)}) is None


def test_where_the_system_has_no_such_memory_rows_go_through_pipes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert Layout.of(5, SAMPLE) is None


def test_small_blocks_get_as_many_slots_as_keep_workers_busy_and_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 1 << 50)
    assert [Layout.of(5, SAMPLE, ahead=ahead).slots for ahead in (0, 20, 48)] == [SLOTS, SLOTS, 16]  # type: ignore[union-attr]
    free(monkeypatch, 4 * 12 * (64 + 128))
    few = Layout.of(5, SAMPLE, ahead=48)
    assert few is not None
    assert few.slots == 12
