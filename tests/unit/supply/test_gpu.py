"""On a GPU: batches lie there, live and stored are the same bits, and the step is not waited for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import frostline as fl
from frostline.supply import supply

pytestmark = pytest.mark.gpu


def pipeline() -> fl.Pipeline:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32)).requires_grad_(False).eval()
    rows = [{"key": f"k{i}", "x": i, "text": "a" * (i % 5)} for i in range(50)]

    def decode(x: int) -> torch.Tensor:
        return torch.randn(64, generator=torch.Generator().manual_seed(x))

    def noise(features: torch.Tensor, rng: Any) -> torch.Tensor:
        return features * rng.uniform(32) + rng.integers(0, 3, 1)

    return fl.Pipeline(
        fl.Source.table(rows),
        fl.Stage("pixels", decode, reads="x"),
        fl.Stage("features", net, reads="pixels", on="device", batch_size=16),
        fl.Stage("crop", lambda pixels, rng: pixels.roll(int(rng.integers(64))), reads="pixels", random=True),
        fl.Stage("noisy", noise, reads="features", on="device", batch_size=16, random=True),
        fl.Stage("flip", lambda f, rng: f.flip(0) if rng.random() < 0.5 else f, reads="noisy", random=True),
        fl.Stage("tokens", lambda text: torch.arange(len(text)), reads="text"),
        outputs=["features", "crop", "noisy", "flip", "tokens", "text", "x"],
    )


def test_live_batches_are_the_stored_ones_on_a_gpu(make: Any, tmp_path: Path) -> None:
    work = make.workload(pipeline())
    stores = {"data": fl.freeze(work.pipelines["data"], tmp_path / "s", quiet=True, device="cuda")}
    options: dict[str, Any] = {"split": None, "batch_size": 12, "device": "cuda"}
    stored, live = ([*supply(work, given, **options)] for given in (stores, None))
    assert make.same_batches(stored, live)
    for batch in stored:
        assert {v.device.type for v in batch.values() if isinstance(v, torch.Tensor)} == {"cuda"}
        assert batch["tokens"].values.device.type == "cuda"


def test_a_feed_that_delivers_to_the_device_makes_no_detour(make: Any, tmp_path: Path) -> None:
    data = fl.Pipeline(
        fl.Source.table([{"key": f"k{i}", "x": float(i)} for i in range(40)]),
        fl.Stage("y", lambda x, rng: x + rng.uniform(), reads="x", random=True, on="device", batch_size=8),
        outputs=["x", "y"],
    )
    work = make.workload(data)
    store = fl.freeze(data, tmp_path / "s", quiet=True, device="cuda")
    there = [*supply(work, {"data": store}, split=None, batch_size=8, device="cuda")]
    here = [*supply(work, {"data": store}, split=None, batch_size=8, device="cpu")]
    for a, b in zip(there, here, strict=True):
        assert a["y"].device.type == "cuda"
        assert all(torch.equal(a[name].cpu(), b[name]) for name in a)
