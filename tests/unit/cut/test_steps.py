"""What a training step takes, measured: on a copy, on few samples, with what is wrong told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import frostline as fl
from frostline.cut import step_cost
from frostline.errors import UsageError


def source(n: int = 100) -> fl.Source:
    return fl.Source.table([{"key": f"k{i}", "x": float(i)} for i in range(n)])


def loss(model: torch.nn.Module, batch: Any) -> Any:
    return {"loss": model(batch["x"].float()[:, None]).square().mean()}


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def work(data: fl.Pipeline | None = None, **options: Any) -> fl.Workload:
    given = {"model": torch.nn.Linear(1, 1), "loss": loss, "optimizer": sgd, "batch_size": 24, **options}
    return fl.Workload(data or fl.Pipeline(source()), **given)


def test_a_step_has_the_workloads_batch_and_leaves_its_model_as_it_was() -> None:
    seen: list[int] = []

    def watched(model: torch.nn.Module, batch: Any) -> Any:
        seen.append(len(batch["x"]))
        return loss(model, batch)

    model = torch.nn.Linear(1, 1)
    before = [p.detach().clone() for p in model.parameters()]
    cost = step_cost(work(model=model, loss=watched))
    assert cost.samples == 24
    assert {*seen} == {24}
    assert cost.seconds > 0
    assert cost.cores is not None
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_eight_samples_are_enough_for_a_batch() -> None:
    seen: set[float] = set()

    def doubled(x: float) -> float:
        seen.add(x)
        return 2 * x

    data = fl.Pipeline(source(), fl.Stage("y", doubled, reads="x"))
    step_cost(work(data, loss=lambda model, batch: model(batch["y"].float()[:, None]).mean()))
    assert 0 < len(seen) <= 8


def test_a_source_smaller_than_a_batch_will_do() -> None:
    assert step_cost(work(fl.Pipeline(source(3)))).samples == 24


def test_a_loss_that_raises_is_told() -> None:
    def broken(model: torch.nn.Module, batch: Any) -> Any:
        raise ValueError("no loss today")

    with pytest.raises(UsageError, match="step could not be measured: ValueError: no loss today"):
        step_cost(work(loss=broken))


def test_an_experiment_has_no_step() -> None:
    with pytest.raises(UsageError, match="trains nothing"):
        step_cost(fl.Workload(fl.Pipeline(source()), run=print))


def test_several_pipelines_have_no_step_of_their_own() -> None:
    data = fl.Pipeline(source())
    with pytest.raises(UsageError, match="one pipeline"):
        step_cost(fl.Workload({"a": data, "b": data}, model=torch.nn.Linear(1, 1), loss=loss,
                              optimizer=sgd, batch_size=2))  # fmt: skip
