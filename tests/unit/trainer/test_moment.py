"""A training's state into a checkpoint on disk and back: what follows has the same bits."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import frostline as fl
from frostline.errors import CheckpointError
from frostline.step import Step
from frostline.trainer import moment
from frostline.trainer.checkpoint import Checkpoints, Loaded, load
from frostline.trainer.distributed import Single
from frostline.training import Training


class Net(nn.Module):
    """Dropout, batch norm, and a buffer that state_dict leaves out."""

    calls: Tensor

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.3))
        self.head = nn.Linear(width, 1)
        self.register_buffer("calls", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        out: Tensor = self.head(self.body(x))
        return out


def loss(model: nn.Module, batch: fl.Batch) -> Tensor:
    noise = 1 + 0.1 * random.random() + 0.1 * float(np.random.rand())
    out: Tensor = (model(batch["x"]).float() * noise - 1).square().mean()
    return out


def made(*, seed: int = 0, width: int = 8, **settings: Any) -> Step:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    model = Net(width)
    groups = [{"params": model.body.parameters(), "lr": 1e-2}, {"params": model.head.parameters()}]
    return Step(model, loss, torch.optim.AdamW(groups, 1e-3), training=Training(**settings), note=print)


def batch(i: int) -> fl.Batch:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(i))
    return fl.Batch({"x": x}, [f"{i}-{j}" for j in range(6)])


def trained(step: Step, start: int, end: int) -> list[dict[str, float]]:
    return [{name: value.item() for name, value in step(batch(i)).items()} for i in range(start, end)]


def saved(step: Step, folder: Path, ranks: Single | None = None, at: int = 5) -> Loaded:
    groups, state = moment.take(step, ranks or Single())
    return load(Checkpoints(folder / "checkpoints").save(at, groups, state))


def bits(step: Step) -> dict[str, tuple[str, bytes]]:
    groups, _ = moment.take(step, Single())
    return {
        f"{group}/{name}": (str(t.dtype), t.detach().contiguous().reshape(-1).numpy().tobytes())
        for group, some in groups.items()
        for name, t in some.items()
    }


@pytest.mark.parametrize(
    "settings", [{}, {"precision": "fp16", "microbatch": 4}], ids=["fp32", "fp16 in parts"]
)
def test_what_follows_is_bit_for_bit_what_would_have_followed(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    step = made(**settings)
    trained(step, 0, 5)
    loaded = saved(step, tmp_path)
    followed, whole = trained(step, 5, 10), bits(step)
    other = made(seed=9, **settings)
    assert moment.restore(other, loaded, Single()) is None
    assert repr(trained(other, 5, 10)) == repr(followed)  # the norm of an overflow is nan
    assert any(figures.get("overflow", 0.0) == 0 for figures in followed)
    assert bits(other) == whole
    assert {name.split("/")[0] for name in whole} >= {"model", "buffers", "optimizer", "generators-0"}
    assert ("scaler/scale" in whole) == ("precision" in settings)


def test_the_scale_and_how_long_it_has_been_good_come_back(tmp_path: Path) -> None:
    step = made(precision="fp16")
    trained(step, 0, 3)
    assert step.scaler is not None
    step.scaler.update(torch.tensor(1.0))
    step.scaler.update(torch.tensor(0.0))
    kept = {name: t.item() for name, t in step.scaler.state_tensors().items()}
    assert kept["growth_tracker"] == 1
    loaded = saved(step, tmp_path)
    other = made(precision="fp16")
    assert other.scaler is not None
    assert other.scaler.scale.item() != kept["scale"]
    moment.restore(other, loaded, Single())
    assert {name: t.item() for name, t in other.scaler.state_tensors().items()} == kept


@pytest.mark.parametrize(("wrote", "reads"), [("fp16", "fp32"), ("fp32", "fp16")])
def test_another_precision_goes_on_with_or_without_a_scaler(wrote: str, reads: str, tmp_path: Path) -> None:
    step = made(precision=wrote)
    trained(step, 0, 2)
    other = made(precision=reads)
    assert moment.restore(other, saved(step, tmp_path), Single()) is None
    assert (other.scaler is None) == (reads == "fp32")
    trained(other, 2, 3)


@pytest.mark.parametrize(
    ("was", "asked", "then"), [(None, None, None), (2, None, 2), (2, 4, 2), (4, 2, 2), (None, 3, 3)]
)
def test_rows_a_pass_that_had_to_become_fewer_stay_fewer(
    was: int | None, asked: int | None, then: int | None, tmp_path: Path
) -> None:
    step = made()
    trained(step, 0, 1)
    step.microbatch = was
    other = made(microbatch=asked)
    moment.restore(other, saved(step, tmp_path), Single())
    assert other.microbatch == then


def test_which_kernel_updates_is_this_machines_choice(tmp_path: Path) -> None:
    step = made()
    trained(step, 0, 2)
    for group in step.optimizer.param_groups:
        group["fused"] = True
    loaded = saved(step, tmp_path)
    other = made()
    for group in other.optimizer.param_groups:
        group["fused"] = False
    moment.restore(other, loaded, Single())
    assert [group["fused"] for group in other.optimizer.param_groups] == [False, False]
    assert [group["lr"] for group in other.optimizer.param_groups] == [1e-2, 1e-3]


# other numbers of processes


class Of(Single):
    """One of several processes, as far as a state is concerned."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.world


def test_onto_another_number_of_processes_it_is_said_that_dropout_is_not_exact(tmp_path: Path) -> None:
    step = made()
    trained(step, 0, 2)
    loaded = saved(step, tmp_path)
    other = made(seed=4)
    told = moment.restore(other, loaded, Of(1, 2))
    assert told is not None
    assert "written by 1 processes, this is one of 2" in told
    assert torch.equal(other.model.head.weight, step.model.head.weight)
    drawn = torch.rand(4)
    moment.restore(made(seed=5), loaded, Of(1, 2))
    assert torch.equal(torch.rand(4), drawn)  # the same each time
    moment.restore(made(seed=5), loaded, Of(2, 3))
    assert not torch.equal(torch.rand(4), drawn)  # and another on each rank


def test_generators_of_every_process_are_kept(tmp_path: Path) -> None:
    step = made()
    trained(step, 0, 1)
    groups, state = moment.take(step, Of(1, 3))  # as rank 1 sees it: its tensors travel as numbers
    assert [name for name in groups if name.startswith("generators-")] == [
        f"generators-{i}" for i in range(3)
    ]
    expected = torch.rand(3), random.random(), np.random.rand()
    loaded = load(Checkpoints(tmp_path).save(1, groups, state))
    assert moment.restore(made(seed=8), loaded, Of(2, 3)) is None
    assert torch.equal(torch.rand(3), expected[0])
    assert (random.random(), np.random.rand()) == expected[1:]


# what is no state of this training


@pytest.mark.parametrize(
    ("without", "told"),
    [(["optimizer"], "optimizer"), (["model"], "model"), (["model", "optimizer"], "model, ")],
)
def test_a_checkpoint_that_is_none_of_a_training_is_refused(
    without: list[str], told: str, tmp_path: Path
) -> None:
    step = made()
    trained(step, 0, 1)
    groups, state = moment.take(step, Single())
    for name in without:
        del groups[name]
    loaded = load(Checkpoints(tmp_path).save(1, groups, state))
    before = bits(step)
    with pytest.raises(CheckpointError, match=rf"is no checkpoint of a training: it has no {told}"):
        moment.restore(step, loaded, Single())
    assert bits(step) == before


@pytest.mark.parametrize("without", ["generators", "world"])
def test_one_without_its_generators_or_its_number_of_processes_is_refused(
    without: str, tmp_path: Path
) -> None:
    step = made()
    trained(step, 0, 1)
    groups, state = moment.take(step, Single())
    del state[without]
    groups.pop(f"{without}-0", None)
    with pytest.raises(CheckpointError, match=without):
        moment.restore(step, load(Checkpoints(tmp_path).save(1, groups, state)), Single())


def test_that_of_another_model_lists_what_does_not_fit_and_changes_nothing(tmp_path: Path) -> None:
    step, other = made(), made(width=9)
    trained(step, 0, 1)
    trained(other, 0, 1)
    before = {name: value for name, value in bits(other).items() if not name.startswith("generators")}
    with pytest.raises(CheckpointError, match="does not fit this model") as caught:
        moment.restore(other, saved(step, tmp_path), Single())
    names = {problem.split(":")[0] for problem in caught.value.problems}
    assert {"body.0.weight", "body.0.bias", "body.1.running_mean", "head.weight"} <= names
    assert "head.bias" not in names
    after = {name: value for name, value in bits(other).items() if not name.startswith("generators")}
    assert after == before


def test_parameters_that_were_frozen_or_began_to_train_on_the_way_stay_so(tmp_path: Path) -> None:
    step = made()
    step.model.get_submodule("body").requires_grad_(False)
    trained(step, 0, 5)
    loaded = saved(step, tmp_path)
    body = {name for name, _ in step.model.named_parameters() if name.startswith("body")}
    assert loaded.state["switched"] == dict.fromkeys(body, False)
    followed, whole = trained(step, 5, 8), bits(step)
    other = made(seed=9)
    moment.restore(other, loaded, Single())
    assert repr(trained(other, 5, 8)) == repr(followed)
    assert bits(other) == whole
    assert moment.take(other, Single())[1]["switched"] == loaded.state["switched"]


def test_what_was_not_switched_on_the_way_is_as_the_model_is_made_now(tmp_path: Path) -> None:
    loaded, other = saved(made(), tmp_path), made()
    other.model.requires_grad_(False)
    moment.restore(other, loaded, Single())
    assert not any(parameter.requires_grad for parameter in other.model.parameters())
