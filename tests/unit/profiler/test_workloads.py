"""`fl.profile(workload)`: what it sees live and stored, and that nothing of it is left behind."""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks
from torch.utils.data import dataloader
from torch.utils.data._utils import fetch

import frostline as fl
from frostline.errors import ProfileFailed, UsageError
from frostline.profiler.differential import Cold, Prepared
from frostline.profiler.inside import looks, modules
from frostline.profiler.workloads import profile
from frostline.results import Profile
from frostline.supply import supply

ROWS, BATCH, WIDTH = 96, 8, 64


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3)])
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class Head(nn.Module):
    """Dropout draws random numbers, batch norm writes buffers: both would be noticed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.out = nn.BatchNorm1d(WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.drop(self.norm(x)))
        return out


def seeded(kind: Callable[[], nn.Module], seed: int = 5) -> nn.Module:
    torch.manual_seed(seed)
    return kind()


def signal(seed: int) -> Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(seed))


def loss(model: nn.Module, batch: fl.Batch) -> Tensor:
    return (model(batch["features"].mean(1)).squeeze(1) - batch["y"]).square().mean()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 1e-2)


def work(*, encoder: Callable[[], nn.Module] = Encoder, **options: Any) -> fl.Workload:
    table = [{"key": f"k{i:03d}", "seed": i, "y": float(i % 3)} for i in range(ROWS)]
    data = fl.Pipeline(
        fl.Source.table(table),
        fl.Stage("x", signal, reads="seed"),
        fl.Stage("features", fl.lazy(seeded, encoder), reads="x", on="device", batch_size=BATCH),
        outputs=("features", "y"),
    )
    values = {
        "model": fl.lazy(Head), "loss": loss, "optimizer": adam, "batch_size": BATCH, "name": "small",
    }  # fmt: skip
    return fl.Workload(data, **(values | options))


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another test of this process has compiled is not looked into here."""
    monkeypatch.setattr(looks, "_compiled", lambda: False)
    monkeypatch.setattr(modules, "_compiled_in_place", list)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FROSTLINE_CACHE", str(tmp_path / "cache"))
    return tmp_path


def profiled(workload: fl.Workload, **options: Any) -> Profile:
    usual = {"steps": 24, "warmup": 4, "device": "cpu", "quiet": True, "out": "profiled"}
    return profile(workload, **(usual | options))


def trained(workload: fl.Workload, **options: Any) -> Any:
    return fl.train(workload, **({"steps": 12, "device": "cpu", "quiet": True, "resume": "never"} | options))


def tensors(model: nn.Module) -> list[Tensor]:
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers())]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def losses(into: list[float]) -> Callable[..., Tensor]:
    def told(model: nn.Module, batch: fl.Batch) -> Tensor:
        found = loss(model, batch)
        into.append(float(found.detach()))
        return found

    return told


# what it sees


def test_live_the_frozen_encoder_is_seen(here: Path) -> None:
    found = profiled(work(), live=True, steps=36)
    assert found.verdict.kind != "unclear"
    assert found.boundary == "Adam.step"
    assert found.command == "fl.profile(small, live=True)"
    encoder = next(m for m in found.modules if m.kind == "Encoder")
    assert encoder.frozen
    assert (encoder.calls, encoder.rows, encoder.trainable) == (1, (BATCH,), 0)
    again = next(r for r in found.repeats if r.what == "module Encoder")
    assert again.repeats > 0
    items = next(r for r in found.repeats if r.what.startswith("items of"))
    assert items.seen - items.repeats == ROWS
    assert {t.name for t in found.trials} == {"compute", "replayed", "real", "half"}


def test_stored_the_encoder_does_not_run(here: Path) -> None:
    found = profiled(work())
    assert len(fl.Store.open("stores/small")) == ROWS
    assert [m for m in found.modules if m.kind == "Encoder"] == []
    assert [r for r in found.repeats if r.what.startswith("module")] == []
    assert {m.kind for m in found.modules if m.depth == 0} == {"Head"}
    assert found.command == "fl.profile(small)"


def test_loader_and_epoch_are_the_supplys(here: Path) -> None:
    found = profiled(work(splits={"train": 0.75, "test": 0.25}), live=True)
    (loader,) = found.loaders
    assert (loader.batch_size, loader.calls, found.samples is not None) == (BATCH, 1.0, True)
    assert found.epoch is not None
    assert found.epoch.steps == loader.batches
    assert loader.batches is not None
    assert loader.batches < ROWS // BATCH


def test_stages_on_the_device_are_no_wait_for_data(here: Path) -> None:
    """Live, the encoder runs where batches are consumed: forward has it, and so has a replayed batch."""
    called, steps = [], []

    class Counted(Encoder):
        def forward(self, x: Tensor) -> Tensor:
            called.append(x)
            return super().forward(x)

    found = profiled(work(encoder=Counted, loss=losses(steps)), live=True)
    encoder = next(m for m in found.modules if m.kind == "Counted")
    forward = sum(row.ms for row in found.rows if row.kind == "forward")
    assert 0 < encoder.ms <= forward
    assert len(called) < len(steps)  # "compute" and "half" do without


def test_trials_are_told_with_their_stalls(here: Path) -> None:
    found = profiled(work())
    trials = {t.name: t for t in found.trials}
    assert {"compute", "replayed", "real", "half"} <= {*trials}
    assert all(0 < t.low <= t.ms <= t.high for t in trials.values())
    assert trials["half"].note == f"{BATCH // 2} of its {BATCH} rows"
    assert any(note.startswith("preparation stall: ") for note in found.notes)
    cold = "cold" in trials
    assert any(
        note.startswith("fetch stall: " if cold else "cold data were not tried") for note in found.notes
    )


def test_a_batch_that_cannot_be_halved_is_said(here: Path) -> None:
    found = profiled(work(batch_size=2, model=fl.lazy(nn.Linear, WIDTH, 1)), live=True)
    assert "half" not in {t.name for t in found.trials}
    assert "half a batch was not tried: it has 2 rows" in found.notes


def test_several_pipelines(here: Path) -> None:
    def one(scale: float) -> fl.Pipeline:
        rows = [{"key": f"k{i:02d}", "x": scale * i} for i in range(64)]
        return fl.Pipeline(fl.Source.table(rows), fl.Stage("v", lambda x: torch.full((4,), x), reads="x"))

    def both(model: nn.Module, batch: fl.Batch) -> Tensor:
        return model(batch["a"].pop("v") + batch["b"].pop("v")).square().mean()  # batches are its own

    workload = fl.Workload(
        {"a": one(0.01), "b": one(0.02)}, model=fl.lazy(nn.Linear, 4, 1), loss=both, optimizer=adam,
        batch_size=BATCH, name="two",
    )  # fmt: skip
    for live in (True, False):
        found = profiled(workload, live=live)
        assert {"compute", "replayed", "real"} <= {t.name for t in found.trials}
        assert "half a batch was not tried: it is made of several" in found.notes
        assert (found.samples, found.loaders[0].batches) == (BATCH, 64 // BATCH)


@pytest.mark.parametrize("live", [True, False])
def test_replayed_batches_are_the_supplys(here: Path, live: bool) -> None:
    workload = work()
    stores = None if live else {"data": fl.freeze(workload, "stores/small", device="cpu", quiet=True)}
    options: dict[str, Any] = {"split": None, "batch_size": BATCH, "device": "cpu"}
    with closing(supply(workload, stores, **options)) as batches:
        expected = [*islice(batches, 3)]
    with closing(supply(workload, stores, **options)) as batches, closing(Prepared(batches, 3)) as prepared:
        for found in (prepared.batches, [*islice(prepared.again(), 3)], [*islice(prepared.again(), 3)]):
            for one, other in zip(found, expected, strict=True):
                assert one.keys_of_rows == other.keys_of_rows
                assert torch.equal(one["features"], other["features"])
                assert torch.equal(one["y"], other["y"])


def test_fewer_batches_than_steps(here: Path) -> None:
    found = profiled(work(batch_size=40), live=True)
    assert found.wall.count > 0
    assert found.loaders[0].batches == 3


def test_everything_is_kept(here: Path) -> None:
    found = profiled(work(), live=True, out="kept", trace=True)
    assert Profile.read(Path("kept/profile.json")) == found
    assert "<html" in Path("kept/report.html").read_text(encoding="utf-8")
    assert Path("kept/trace.json").stat().st_size > 0
    assert profiled(work(), live=True, out=None).boundary == found.boundary
    assert len([*Path("runs/profile").glob("*/profile.json")]) == 1


def test_the_page_cache_lets_go_also_of_what_is_mapped(here: Path) -> None:
    path = here / "data"
    path.write_bytes(os.urandom(1 << 20))
    mapped = np.memmap(path, np.uint8, mode="r")
    before = int(mapped.sum(dtype=np.int64))
    notes: list[str] = []
    cold = Cold([path], notes)
    assert cold.possible or notes  # not everywhere, and then it is said
    assert int(mapped.sum(dtype=np.int64)) == before


# nothing is left behind


def test_losses_are_those_of_a_training_and_the_same_each_time(here: Path) -> None:
    first, second, training = [], [], []
    profiled(work(loss=losses(first)), live=True)
    profiled(work(loss=losses(second)))
    trained(work(loss=losses(training)), live=True)
    assert first[:12] == second[:12] == training[2:14]  # a training rehearses its first batch twice


@pytest.mark.parametrize("live", [True, False])
def test_a_training_afterwards_has_the_same_bits(here: Path, live: bool) -> None:
    without = trained(work(), live=live)
    profiled(work(), live=live)
    assert equal(tensors(trained(work(), live=live).model), tensors(without.model))


def test_a_model_that_was_given_is_as_it_was(here: Path) -> None:
    model = seeded(Head)
    model.out.bias.grad = torch.ones(1)
    model.eval()
    before = tensors(model)
    profiled(work(model=model), live=True)
    assert equal(tensors(model), before)
    assert torch.equal(model.out.bias.grad, torch.ones(1))
    assert model.out.weight.grad is None
    assert not any(module.training for module in model.modules())


def test_random_numbers_and_switches_are_as_they_were(here: Path) -> None:
    def drawn() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(3)
    expected = drawn()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(3)
    profiled(work(training={"deterministic": True}), live=True)
    assert drawn() == expected
    assert not torch.are_deterministic_algorithms_enabled()


def patched() -> list[Any]:
    """What an agent replaces or hooks while it watches."""
    owners = {
        dataloader._BaseDataLoaderIter: ("__init__", "__next__", "_next_index"),
        fetch._MapDatasetFetcher: ("fetch",),
        torch.autograd: ("_engine_run_backward",),
        torch.optim.Optimizer: ("zero_grad",),
        nn.Module: ("zero_grad", "__call__"),
        torch: ("save",),
        torch.nn.utils: ("clip_grad_norm_", "clip_grad_value_"),
        torch.Tensor: ("to", "cuda", "cpu", "copy_", "item", "numpy", "tolist", "__bool__", "__float__"),
        os: ("_exit",),
        sys: ("excepthook",),
    }
    found: list[Any] = [vars(owner).get(name) for owner, names in owners.items() for name in names]
    hooks = [
        module_hooks._global_forward_hooks, module_hooks._global_forward_pre_hooks,
        optimizer_hooks._global_optimizer_pre_hooks, optimizer_hooks._global_optimizer_post_hooks,
    ]  # fmt: skip
    return [*found, *map(len, hooks), torch._C._len_torch_dispatch_stack(), threading.active_count()]


class Planted(Exception):
    """Raised inside of a loss."""


_AT_START = torch.autograd._engine_run_backward
_EXIT = os._exit
PLACES: dict[str, Callable[[int], bool]] = {
    "the first step": lambda n: n == 1,
    "the warm-up": lambda n: n == 3,
    "pass B": lambda n: torch.autograd._engine_run_backward is not _AT_START,
    "looking at lines": lambda n: any(t.name == "frostline-samples" for t in threading.enumerate()),
    "looking": lambda n: torch._C._len_torch_dispatch_stack() > 0,
    "the differential runs": lambda n: os._exit is _EXIT,
}


@pytest.mark.parametrize("place", PLACES)
def test_an_error_comes_through_and_nothing_stays(here: Path, place: str) -> None:
    calls = []

    def failing(model: nn.Module, batch: fl.Batch) -> Tensor:
        calls.append(1)
        if PLACES[place](len(calls)):
            raise Planted
        return loss(model, batch)

    encoders: list[nn.Module] = []

    def kept_encoder() -> nn.Module:
        encoders.append(Encoder())
        return encoders[-1]

    model = seeded(Head)
    before, values = patched(), tensors(model)
    with pytest.raises(Planted):
        profiled(work(encoder=kept_encoder, model=model, loss=failing), live=True)
    assert all(now is then or now == then for now, then in zip(patched(), before, strict=True))
    assert equal(tensors(model), values)
    for module in (*model.modules(), *encoders[0].modules()):
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_nothing_is_left_when_all_goes_well(here: Path) -> None:
    before = patched()
    profiled(work(), live=True)
    assert all(now is then or now == then for now, then in zip(patched(), before, strict=True))


# what is refused


def test_what_is_no_workload_is_refused(here: Path) -> None:
    with pytest.raises(UsageError, match=r"fl\.profile\(…\) was given int; expected a Workload"):
        profile(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="experiment, it has no model"):
        profile(fl.Workload(None, run=print))
    with pytest.raises(UsageError, match="steps is 2; expected at least 6"):
        profiled(work(), steps=2)
    with pytest.raises(UsageError, match="needs a folder for the store"):
        profiled(work(name=None))


def test_several_processes_are_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="one process"):
        profiled(work(), live=True)


def test_a_loss_that_is_no_number_ends_it(here: Path) -> None:
    def nan(model: nn.Module, batch: fl.Batch) -> Tensor:
        return loss(model, batch) * float("nan")

    with pytest.raises(ProfileFailed, match="has taken 0 steps"):
        profiled(work(loss=nan), live=True, steps=6, warmup=2)
