"""Which field lies where: chosen by free memory within the budget, said aloud, refused where it cannot be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import frostline as fl
from frostline.errors import UsageError
from frostline.feed import memory, tiers

Make = Callable[..., fl.Store]
FIELDS = {
    "small": fl.Field((10,), "float32"),
    "large": fl.Field((1000,), "float32"),
    "text": fl.Field((), "str"),
}
GPU = torch.device("cuda", 0)


@pytest.fixture
def store(make_store: Make) -> fl.Store:
    return make_store("s", 100, FIELDS)


@pytest.fixture
def choose(store: fl.Store, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, str]]:
    """Tiers by field for a machine with so much free memory."""

    def chosen(
        *, host: int, device: int = 0, on: torch.device = GPU, tier: Any = "auto", budget: int | None = None
    ) -> Any:
        monkeypatch.setattr(memory, "host_free_bytes", lambda: host)
        monkeypatch.setattr(memory, "device_free_bytes", lambda _: device)
        found = tiers.choose({"": store}, {"": list(store.fields)}, on, tier, budget)
        return {field: place for (_, field), place in found.items()}

    return chosen


def test_auto_fills_the_fastest_with_the_smallest(choose: Callable[..., Any]) -> None:
    roomy = {"small": "device", "large": "device", "text": "mmap"}
    assert choose(host=1 << 30, device=1 << 30) == roomy
    assert choose(host=1 << 30, device=100_000) == {**roomy, "large": "pinned"}
    assert choose(host=1 << 30, device=0) == {"small": "pinned", "large": "pinned", "text": "mmap"}
    assert choose(host=700_000, device=0) == {"small": "pinned", "large": "mmap", "text": "mmap"}
    assert choose(host=200_000, device=0) == {"small": "pinned", "large": "disk", "text": "mmap"}
    cpu = torch.device("cpu")
    assert set(choose(host=1 << 30, on=cpu).values()) == {"mmap"}
    assert set(choose(host=1000, on=cpu).values()) == {"disk", "mmap"}


def test_auto_stays_within_the_budget(choose: Callable[..., Any]) -> None:
    assert choose(host=1 << 30, device=1 << 30, budget=0)["small"] == "mmap"
    assert choose(host=1 << 30, device=1 << 30, budget=50_000) == {
        "small": "device",
        "large": "mmap",
        "text": "mmap",
    }
    assert choose(host=1 << 30, device=30_000, budget=404_000)["large"] == "pinned"


def test_by_field(choose: Callable[..., Any]) -> None:
    found = choose(host=1 << 30, device=1 << 30, tier={"large": "disk"})
    assert found == {"small": "device", "large": "disk", "text": "mmap"}
    found = choose(host=1 << 30, device=1 << 30, tier={"large": "pinned"}, budget=403_000)
    assert found["large"] == "pinned", "what is asked for by name comes before what is chosen"
    assert found["small"] == "mmap"


def test_refusals(choose: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match="'pinnd' is no tier"):
        choose(host=1 << 30, tier="pinnd")
    with pytest.raises(UsageError, match="'nix' is no field"):
        choose(host=1 << 30, tier={"nix": "mmap"})
    with pytest.raises(UsageError, match=r"'large' takes 400\.0 KB; tier 'pinned' has 1\.0 KB"):
        choose(host=1000, tier={"large": "pinned", "small": "mmap"})
    with pytest.raises(UsageError, match="raise budget_bytes"):
        choose(host=1 << 30, device=1 << 30, tier="device", budget=1000)
    with pytest.raises(UsageError, match="'large' takes"):
        choose(host=402_000, tier="pinned")  # either would fit, both do not


def test_the_choice_is_said(store: fl.Store, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "frostline"):
        feed = fl.Feed(store, 4, tier={"large": "disk", "small": "pinned"})
    assert "disk: large (4" in caplog.text
    assert "pinned: small (" in repr(feed)
    assert feed.stats()["tiers"] == {"large": "disk", "small": "pinned", "text": "mmap"}
    two = fl.Feed({"a": store, "b": store}, 4, fields={"a": ["small"], "b": ["text"]}, tier="disk")
    assert two.stats()["tiers"] == {"a.small": "disk", "b.text": "disk"}


def test_a_column_in_memory_is_the_tables_rows(all_kinds: fl.Store, is_same: Callable[..., bool]) -> None:
    """On the CPU the device's own code runs too; only Feed prefers host memory there."""
    table = all_kinds.at(np.array([5, 3, 39, 0, 21]))
    positions = np.array([4, 0, 0, 2])
    for name, spec in table.fields.items():
        if spec.dtype in ("str", "bytes", "json"):
            continue
        column = tiers.DeviceColumn(table, name, torch.device("cpu"), stopped=lambda: False)
        assert is_same(column.fetch(positions, None), table.rows(positions, [name])[name]), name


def test_picks_from_a_column_in_device_memory(long_rows: fl.Store, is_same: Callable[..., bool]) -> None:
    positions, chosen = np.array([4, 0, 0, 2]), np.array([[0, 2], [1, 3], [0, 1], [2, 3]])
    for name in ("half", "wide", "token", "vector", "channel", "ragged", "ragged_token", "ragged_channel"):
        column = tiers.DeviceColumn(long_rows, name, torch.device("cpu"), stopped=lambda: False)
        got = column.fetch(positions, chosen)
        for i, position in enumerate(positions):
            row = long_rows.rows([int(position)], [name])[name][0]
            assert is_same(got[i], row[torch.from_numpy(chosen[i])]), name


def test_loading_stops_when_nobody_waits(all_kinds: fl.Store) -> None:
    with pytest.raises(tiers.Stopped):
        tiers.HostColumn(all_kinds, "half", pinned=False, stopped=lambda: True)


def test_loading_says_how_long_it_takes(
    store: fl.Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tiers, "_LOAD_BYTES", 40_000)
    clock = iter(range(0, 10_000, 3))
    monkeypatch.setattr("frostline.feed.tiers.time.monotonic", lambda: float(next(clock)))
    with caplog.at_level("INFO", "frostline"):
        tiers.HostColumn(store, "large", pinned=False, stopped=lambda: False)
    assert "Loading large: 10 %" in caplog.text
    assert "Loading large: 100 %, 0 s left" in caplog.text
