"""The feed onto a GPU: every tier and codec gives the CPU's bits; no buffer is written before it was read.

Needs a CUDA device, and nothing but torch and pytest beside frostline.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import frostline as fl
from frostline.batch import Ragged
from frostline.feed import portion, ring

pytestmark = pytest.mark.gpu
Make = Callable[..., fl.Store]
Same = Callable[[Any, Any], bool]
TIERS = ["device", "pinned", "mmap", "disk", "auto"]


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.synchronize()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> fl.Store:
    """300 rows of which the large ones are streamed from pinned memory and the small ones gathered."""
    fields = {
        "number": fl.Field((), "int64"),
        "big": fl.Field((12, 64, 96), "bfloat16"),
        "token": fl.Field((12, 64, 96), "bfloat16", codec="int8/token"),
        "channel": fl.Field((12, 64, 96), "float16", codec="int8/channel"),
        "small": fl.Field((16,), "float32"),
    }
    path: Path = tmp_path_factory.mktemp("large") / "store"
    generator = torch.Generator().manual_seed(0)
    with fl.Store.create(path, fields=fields, rows_per_shard=32) as writer:
        for i in range(300):
            x = torch.randn(12, 64, 96, generator=generator)
            row = {
                "number": i,
                "big": x.bfloat16(),
                "token": x.bfloat16(),
                "channel": x.half(),
                "small": x[0, 0, :16],
            }
            writer.append(f"k{i}", row)
    return fl.Store.open(path)


def on_gpu(value: Any) -> bool:
    tensors = [value.values, value.offsets] if isinstance(value, Ragged) else [value]
    return all(t.is_cuda for t in tensors if isinstance(t, torch.Tensor))


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("batch_size", [1, 7, 100])
def test_every_field_is_what_the_cpu_gives(
    all_kinds: fl.Store, is_same: Same, tier: str, batch_size: int
) -> None:
    """Decoding on the device included: the same bits."""
    feed = fl.Feed(all_kinds, batch_size, tier=tier, device="cuda")
    seen = []
    for batch in feed:
        seen += batch.keys_of_rows
        want = all_kinds.rows(batch.keys_of_rows)
        for name, value in batch.items():
            assert on_gpu(value), name
            got = value.to("cpu") if isinstance(value, Ragged) else value
            assert is_same(got, want[name]), name
    assert sorted(seen) == sorted(all_kinds.keys)


@pytest.mark.parametrize("tier", TIERS)
def test_picks_are_what_the_cpu_gives(long_rows: fl.Store, is_same: Same, tier: str) -> None:
    names = ("half", "brain", "cast", "token", "channel", "wide")
    fields = [
        fl.Pick(names, n=3),
        fl.Pick(("ragged", "ragged_token", "ragged_channel"), n=2),
        fl.Pick("vector", n=3),
    ]
    options: dict[str, Any] = {"fields": fields, "order": fl.Shuffle(seed=2)}
    for want, got in zip(
        fl.Feed(long_rows, 6, **options),
        fl.Feed(long_rows, 6, device="cuda", tier=tier, **options),
        strict=True,
    ):
        assert want.keys_of_rows == got.keys_of_rows
        assert all(is_same(want[name], got[name]) for name in want)


@pytest.mark.parametrize("tier", TIERS)
def test_large_rows(large: fl.Store, is_same: Same, tier: str) -> None:
    for _ in range(2):
        for batch in fl.Feed(large, 16, device="cuda", tier=tier):
            want = large.rows(batch.keys_of_rows)
            for name, value in batch.items():
                assert is_same(value, want[name]), name


@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("n", [1, 5, 12])
def test_picks_of_large_rows(
    large: fl.Store, is_same: Same, by_rows: bool, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From pinned memory, as whole rows (a few at a time) or line by line."""
    monkeypatch.setattr(portion, "_STREAMED_BYTES", 1)
    monkeypatch.setattr(portion, "_COPY_BYTES", 1 << 30 if by_rows else 0)
    monkeypatch.setattr(portion, "_STAGED_BYTES", 1 << 20)
    fields = ["number", fl.Pick(("big", "token", "channel"), n=n), "small"]
    for _ in range(2):
        for want, got in zip(
            fl.Feed(large, 16, fields=fields),
            fl.Feed(large, 16, fields=fields, device="cuda", tier="pinned"),
            strict=True,
        ):
            assert want.keys_of_rows == got.keys_of_rows
            assert all(is_same(want[name], got[name]) for name in want)


def test_empty_shares(all_kinds: fl.Store, is_same: Same) -> None:
    want = all_kinds.rows([])
    for tier in TIERS:
        feed = fl.Feed(all_kinds, 3, device="cuda", tier=tier, rank=0, world_size=8)
        batch = next(iter(feed))
        for name, value in batch.items():
            got = value.to("cpu") if isinstance(value, Ragged) else value
            assert is_same(got, want[name]), (tier, name)
        del feed, batch, value, got


def busy(x: torch.Tensor) -> torch.Tensor:
    """Keep the stream busy for a while, so that what follows runs long after it was asked for."""
    m = torch.ones(2048, 2048, device=x.device)
    for _ in range(4):
        m = (m @ m).clamp(0, 1)
    return m.flatten()[0] * 0


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("batch_size", [2, 32])
def test_batches_used_late_and_changed_in_place(large: fl.Store, tier: str, batch_size: int) -> None:
    """The consumer's work waits behind slow kernels while later batches come: nothing is overwritten."""
    sums = {int(n): float(x) for n, x in zip(large.column("number"), _sums(large), strict=True)}
    feed = fl.Feed(large, batch_size, device="cuda", tier=tier)
    for _ in range(3):
        found = []
        for batch in feed:
            x = batch["big"]
            zero = busy(x)
            found.append((batch["number"].clone(), x.double().sum((1, 2, 3)) + zero))
            x.zero_()  # the consumer's to change
            batch["number"].fill_(-1)
            del batch, x
        got = {int(n): float(s) for ns, ss in found for n, s in zip(ns, ss, strict=True)}
        assert got == pytest.approx(sums, rel=1e-9, abs=1e-6)


def _sums(store: fl.Store) -> Iterator[torch.Tensor]:
    for start in range(0, len(store), 50):
        yield from (
            store.rows(range(start, min(len(store), start + 50)), ["big"])["big"].double().sum((1, 2, 3))
        )


@pytest.mark.parametrize("tier", TIERS)
def test_kept_batches_stay_right(large: fl.Store, is_same: Same, tier: str) -> None:
    feed = fl.Feed(large, 8, device="cuda", tier=tier, fields=["number", "token", "small"])
    kept = list(feed)
    for _ in feed:
        pass
    for batch in kept:
        want = large.rows(batch.keys_of_rows, ["number", "token", "small"])
        assert all(is_same(batch[name], want[name]) for name in batch)


def test_a_stream_of_the_consumers_own(large: fl.Store) -> None:
    want = sum(_sums(large))
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        total = torch.zeros((), dtype=torch.float64, device="cuda")
        for batch in fl.Feed(large, 8, device="cuda", fields=["big"]):
            total += batch["big"].double().sum() + busy(batch["big"])
    stream.synchronize()
    assert float(total) == pytest.approx(float(want), rel=1e-9, abs=1e-6)


def test_pinned_buffers_are_few(large: fl.Store) -> None:
    feed = fl.Feed(large, 16, device="cuda", tier="mmap", fields=["big"])
    for _ in range(4):
        for _ in feed:
            pass
    assert feed.stats()["buffers_made"] <= 8


def test_memory_is_given_back(large: fl.Store) -> None:
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    feed = fl.Feed(large, 16, device="cuda", tier="device", fields=["big"])
    for batch in feed:
        del batch
        break
    assert torch.cuda.memory_allocated() - before >= 300 * 12 * 64 * 96 * 2
    del feed
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    assert not [s for s in gc.get_objects() if type(s) is ring.Slab]


def test_auto_says_what_it_chose(large: fl.Store) -> None:
    feed = fl.Feed(large, 16, device="cuda")
    assert set(feed.stats()["tiers"].values()) == {"device"}
    assert "device: " in repr(feed)
    none = fl.Feed(large, 16, device="cuda", budget_bytes=0)
    assert set(none.stats()["tiers"].values()) == {"mmap"}
