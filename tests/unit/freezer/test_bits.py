"""Bit for bit: the live pipeline and stored rows, whatever the order, the block or the store's history."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import frostline as fl
from frostline.execution import Execution
from frostline.freezer.attempt import Attempt

PIXELS = 3 * 16 * 16


class Patches(nn.Module):
    """A small ViT: patches, a class token, positions, two layers of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 32, 4, stride=4)
        self.first = nn.Parameter(torch.randn(1, 1, 32))
        self.place = nn.Parameter(torch.randn(1, 17, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BLD = self.patch(x_BCHW).flatten(2).transpose(1, 2)
        x_BLD = torch.cat([self.first.expand(len(x_BLD), -1, -1), x_BLD], 1) + self.place
        return self.layers(x_BLD)


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.SiLU(), nn.Conv2d(16, 24, 3, stride=2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, 37))


NETWORKS = {"conv": conv, "vit": Patches, "linear": linear}


def network(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return NETWORKS[name]().requires_grad_(False).eval()


def decode(x: int) -> Tensor:
    return torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(x))


def pipeline(net: nn.Module, places: Any, *, chunk: int, extra: float = 0.0) -> fl.Pipeline:
    rows = [{"key": f"k{i}", "x": i} for i in places]
    return fl.Pipeline(
        fl.Source.table(rows),
        fl.Stage("pixels", decode, reads="x"),
        fl.Stage("features", net, reads="pixels", on="device", batch_size=chunk),
        fl.Stage(
            "sum", lambda features: features.flatten(1).sum(1) + extra, reads="features", batch_size=chunk
        ),
        outputs=["features", "sum"],
    )


def live(data: fl.Pipeline, places: Any = None) -> dict[str, dict[str, Tensor]]:
    block = Execution(data, ["features", "sum"]).compute(
        range(len(data.source)) if places is None else places
    )
    return {
        key: {name: block.columns[name][i] for name in ("features", "sum")}
        for i, key in enumerate(block.keys)
    }


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def check(store: fl.Store, expected: dict[str, dict[str, Tensor]]) -> None:
    assert sorted(store.keys) == sorted(expected)
    for key, fields in expected.items():
        row = store[key]
        for name, value in fields.items():
            assert same(row[name].reshape(-1), value.reshape(-1)), f"{name} of {key}"


def frozen(data: fl.Pipeline, root: Path, **options: Any) -> fl.Store:
    return fl.freeze(data, root, quiet=True, device="cpu", **options)


@contextmanager
def single() -> Iterator[None]:
    """One thread. Several share 5 to 11 rows so that a row's bits depend on its place (the audit says
    so), and small networks on shared cores spend their time on waiting for them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def one_thread() -> Iterator[None]:
    with single():
        yield


@pytest.mark.parametrize("name", NETWORKS)
def test_stored_rows_are_those_of_the_live_pipeline(tmp_path: Path, name: str) -> None:
    data = pipeline(network(name), range(11), chunk=4)
    check(frozen(data, tmp_path / "s"), live(data))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", NETWORKS)
def test_other_orders_blocks_and_batch_mates_give_the_same_bits(tmp_path: Path, name: str) -> None:
    net = network(name)
    data = pipeline(net, range(11), chunk=4)
    expected = live(data)
    shuffled = torch.randperm(11, generator=torch.Generator().manual_seed(3)).tolist()
    check(frozen(pipeline(net, shuffled, chunk=4), tmp_path / "s"), expected)
    for places in ([7], [10, 2, 5], shuffled):
        for key, fields in live(data, places).items():
            assert all(same(fields[n].reshape(-1), expected[key][n].reshape(-1)) for n in fields)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", NETWORKS)
def test_resumed_and_incremental_stores_hold_the_same_bits(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Attempt, "_rows_per_shard", lambda self: 4)
    net = network(name)
    whole = pipeline(net, range(13), chunk=4)
    frozen(pipeline(net, [0, 3, 5, 12, 20], chunk=4, extra=1.0), tmp_path / "s")  # 20 goes later, sum changes
    frozen(whole, tmp_path / "s", limit=6)
    check(frozen(whole, tmp_path / "s"), live(whole))


@pytest.mark.usefixtures("one_thread")
def test_cached_rows_are_those_of_the_pipeline(tmp_path: Path) -> None:
    net = network("vit")
    data = pipeline(net, range(9), chunk=4)
    expected = live(data)
    images = torch.stack([decode(i) for i in range(9)])
    with fl.cached(net, tmp_path / "c", batch_size=4) as fast:
        for some in ([8, 1], [0, 1, 2, 3, 4, 5, 6, 7, 8]):
            found = fast(images[some], keys=[f"k{i}" for i in some])
            for row, i in zip(found, some, strict=True):
                assert same(row.reshape(-1), expected[f"k{i}"]["features"].reshape(-1))


@settings(max_examples=6)
@given(st.permutations(range(9)), st.integers(1, 9), st.integers(1, 6))
def test_any_number_order_and_chunk(order: list[int], n: int, chunk: int) -> None:
    net, some = network("linear"), order[:n]
    with single(), tempfile.TemporaryDirectory() as folder:
        store = frozen(pipeline(net, some, chunk=chunk), Path(folder) / "s")
        check(store, live(pipeline(net, sorted(some), chunk=chunk)))
        more = frozen(pipeline(net, order, chunk=chunk), Path(folder) / "s")
        check(more, live(pipeline(net, range(9), chunk=chunk)))


@pytest.mark.usefixtures("one_thread")
def test_a_transformers_tower(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    shape = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 16,
        "patch_size": 4,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tower = transformers.Dinov2Model(transformers.Dinov2Config(**shape)).requires_grad_(False).eval()

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = tower

        def forward(self, x: Tensor) -> Tensor:
            return self.tower(pixel_values=x).last_hidden_state

    net = Tokens().eval()
    data = pipeline(net, range(7), chunk=4)
    check(frozen(pipeline(net, [6, 2, 0, 1, 3, 5, 4], chunk=4), tmp_path / "s"), live(data))
