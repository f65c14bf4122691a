"""Evaluation that training does not notice, and which samples it looks at."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import frostline as fl
from frostline.errors import UsageError
from frostline.step import Step
from frostline.supply import Supply, supply
from frostline.trainer import evaluate as evaluate_checkpoint
from frostline.trainer import restored
from frostline.trainer.evaluation import TESTED, VALIDATED, check, evaluate, split_for, splits_of, undisturbed
from frostline.training import Training

CPU = torch.device("cpu")
N = 11


def loss(model: nn.Module, batch: fl.Batch) -> dict[str, torch.Tensor]:
    x = torch.as_tensor(batch["x"]).float()
    return {"loss": model(x[:, None]).square().mean(), "x": x.mean()}


def work(**options: Any) -> fl.Workload:
    rows = [{"key": f"k{i:02d}", "x": float(i), "part": "test" if i % 3 else "train"} for i in range(N)]
    values: dict[str, Any] = {
        "model": fl.lazy(nn.Linear, 1, 1), "loss": loss, "batch_size": 4,
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), 0.1),
    }  # fmt: skip
    return fl.Workload(fl.Pipeline(fl.Source.table(rows), outputs=("x",)), **(values | options))


def stepped(model: nn.Module | None = None) -> Step:
    torch.manual_seed(1)
    model = model or nn.Linear(1, 1)
    return Step(model, loss, torch.optim.SGD(model.parameters(), 0.1), training=Training())


def supplied(workload: fl.Workload) -> Supply:
    return supply(workload, None, split=None, batch_size=4, device=CPU, seed=0, train=False)


def drawn() -> tuple[Any, ...]:
    return random.random(), random.gauss(0, 1), *np.random.rand(2), np.random.randn(), *torch.rand(2).tolist()


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


# undisturbed


@pytest.mark.parametrize(
    "disturb",
    [
        lambda: [drawn() for _ in range(3)],
        lambda: (random.seed(0), np.random.seed(0), torch.manual_seed(0)),
        lambda: random.gauss(0, 1),  # leaves a second number waiting
        lambda: np.random.randn(),
    ],
)
def test_every_generator_goes_on_as_if_nothing_had_been(disturb: Callable[[], Any]) -> None:
    with undisturbed(nn.Identity(), CPU):
        expected = drawn()
    with undisturbed(nn.Identity(), CPU):
        disturb()
    assert drawn() == expected


def test_single_modules_that_the_user_set_to_eval_stay_so() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 2)))
    model[0].eval()
    model[1][1].eval()
    modes = [module.training for module in model.modules()]
    assert modes == [True, False, True, True, False]
    with undisturbed(model, CPU):
        assert not any(module.training for module in model.modules())
        model.train()  # an evaluation that does as it likes
    assert [module.training for module in model.modules()] == modes


def test_without_eval_mode_modes_are_left_and_still_put_back() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 2))
    model[0].eval()
    with undisturbed(model, CPU, eval=False):
        assert [module.training for module in model.modules()] == [True, False, True]
        model.eval()
    assert [module.training for module in model.modules()] == [True, False, True]


def test_no_gradient_is_asked_for_and_it_is_again_afterwards() -> None:
    with undisturbed(nn.Identity(), CPU):
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()


def test_after_an_error_all_is_put_back_too() -> None:
    model = nn.Dropout(0.5)
    with undisturbed(model, CPU):
        expected = drawn()
    with pytest.raises(ZeroDivisionError), undisturbed(model, CPU):
        _ = drawn()[0] / 0
    assert model.training
    assert torch.is_grad_enabled()
    assert drawn() == expected


def test_gradients_are_as_they_were_whatever_was_done_within() -> None:
    model = nn.Linear(1, 1)
    model.weight.grad = held = torch.ones(1, 1)
    with undisturbed(model, CPU), torch.enable_grad():
        assert model.weight.grad is None
        model(torch.ones(2, 1)).sum().backward()
    assert model.weight.grad is held
    assert torch.equal(held, torch.ones(1, 1))
    assert model.bias.grad is None


# evaluate


class Counted(nn.Linear):
    """Counts its passes, which is its extra state."""

    passes = 0

    def get_extra_state(self) -> int:
        return self.passes

    def set_extra_state(self, state: int) -> None:
        self.passes = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return super().forward(x)


@pytest.mark.parametrize("eval", [True, False])
def test_buffers_extra_state_and_what_trains_are_as_they_were(eval: bool) -> None:
    model = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2), Counted(2, 1))
    model.register_buffer("mask", torch.ones(2))
    model[2].bias.requires_grad_(False)
    before = {name: value.clone() for name, value in model.named_buffers()}
    trains = [parameter.requires_grad for parameter in model.parameters()]
    version = model.mask._version
    with undisturbed(model, CPU, eval=eval):
        model.train()  # as for dropout that is left on
        model(torch.randn(4, 1))
        model[0].requires_grad_(False)
        model[2].requires_grad_(True)
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
    assert [parameter.requires_grad for parameter in model.parameters()] == trains
    assert model[2].passes == 0
    assert model.mask._version == version  # the next step does not take it for one that a pass wrote


def test_the_function_runs_in_the_steps_precision_with_the_weights_that_there_are() -> None:
    def swapped(model: nn.Module, feed: Any) -> dict[str, float]:
        x = torch.ones(1, 1)
        before = model(x)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        return {"half": float(before.dtype == torch.bfloat16), "after": float(model(x))}

    workload, model = work(evaluate=swapped), nn.Linear(1, 1)
    training = Training(precision="bf16")
    step = Step(model, loss, torch.optim.SGD(model.parameters(), 0.1), training=training)
    batches = supplied(workload)
    assert evaluate(workload, step, batches) == {"half": 1.0, "after": 0.0}  # autocast keeps no copy
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_autocast_cache_enabled()
    batches.close()


@pytest.mark.parametrize("wanted", ["step", "step, of a partial", "nothing"])
def test_a_function_that_asks_for_the_step_is_told_it(wanted: str) -> None:
    def by_name(model: nn.Module, feed: Any, *, step: int | None = None) -> dict[str, float]:
        return {"step": -1 if step is None else step}

    def without(model: nn.Module, feed: Any) -> dict[str, float]:
        return {"step": -2}

    functions = {"step": by_name, "step, of a partial": partial(by_name), "nothing": without}
    workload = work(evaluate=functions[wanted])
    batches = supplied(workload)
    assert evaluate(workload, stepped(), batches, at=7) == {"step": -2 if wanted == "nothing" else 7}
    batches.close()


def test_without_a_function_it_is_the_mean_over_all_rows_not_over_batches() -> None:
    step, workload = stepped(), work()
    batches = supplied(workload)
    found = evaluate(workload, step, batches)
    x = torch.arange(N).float()
    assert found["x"] == pytest.approx(5.0)  # 4 + 4 + 3 rows: the mean of the batches' means is another one
    assert found["loss"] == pytest.approx(step.model(x[:, None]).square().mean().item(), rel=1e-5)
    assert evaluate(workload, step, batches) == found  # from the beginning each time
    batches.close()


def test_a_figure_that_some_batches_lack_is_the_mean_of_those_that_have_it() -> None:
    def of_some(model: nn.Module, batch: fl.Batch) -> dict[str, Any]:
        first = {"first": 8.0} if "k00" in batch.keys_of_rows else {}
        return loss(model, batch) | first

    step, workload = stepped(), work()
    step.loss = of_some
    with closing(supplied(workload)) as batches:
        found = evaluate(workload, step, batches)
    assert (found["first"], found["x"]) == (8.0, pytest.approx(5.0))


@pytest.mark.parametrize("fresh", [True, False])
def test_a_check_is_told_whether_the_weights_are_new_if_it_asks(fresh: bool) -> None:
    told: list[Any] = []

    def asks(model: nn.Module, batch: fl.Batch, figures: Any, fresh: bool) -> None:
        told.append(fresh)

    def does_not(model: nn.Module, batch: fl.Batch, figures: Any) -> None:
        told.append("not asked")

    batch = fl.Batch({"x": torch.ones(3)}, ["a", "b", "c"])
    check(work(checks=[asks, does_not]), stepped(), batch, {}, fresh=fresh)
    assert told == [fresh, "not asked"]


def test_a_check_gets_a_batch_of_its_own() -> None:
    def changing(model: nn.Module, batch: fl.Batch, figures: Any) -> None:
        batch.pop("x").mul_(2)

    batch = fl.Batch({"x": torch.ones(3)}, ["a", "b", "c"])
    check(work(checks=[changing, changing]), stepped(), batch, {})
    assert batch["x"].tolist() == [1.0, 1.0, 1.0]


def test_one_that_was_left_in_the_middle_begins_at_the_first_row_again() -> None:
    seen: list[list[str]] = []

    def first_batch(model: nn.Module, feed: Any) -> dict[str, float]:
        seen.append(list(next(iter(feed)).keys_of_rows))
        return {"n": 1}

    workload = work(evaluate=first_batch)
    batches = supplied(workload)
    evaluate(workload, stepped(), batches)
    evaluate(workload, stepped(), batches)
    batches.close()
    assert seen[0] == seen[1] == ["k00", "k01", "k02", "k03"]


def test_the_function_gets_the_model_in_eval_mode_and_may_draw() -> None:
    seen: list[bool] = []

    def score(model: nn.Module, feed: Any) -> dict[str, Any]:
        seen.append(model.training or torch.is_grad_enabled())
        drawn()
        return {"rows": torch.tensor(sum(batch.n_rows for batch in feed)), "half": np.float32(0.5)}

    workload = work(evaluate=score)
    step, batches = stepped(nn.Sequential(nn.Dropout(0.5), nn.Linear(1, 1))), supplied(workload)
    with undisturbed(step.model, CPU):
        expected = drawn()
    found = evaluate(workload, step, batches)
    batches.close()
    assert seen == [False]
    assert found == {"rows": 11.0, "half": 0.5}
    assert {type(value) for value in found.values()} == {float}
    assert step.model.training
    assert drawn() == expected


@pytest.mark.parametrize("returned", [None, {}, 0.5, [("a", 1)], "good"])
def test_what_is_no_figures_by_name_is_refused(returned: Any) -> None:
    workload = work(evaluate=lambda model, feed: returned)
    batches = supplied(workload)
    with pytest.raises(UsageError, match=r"returned .*; expected \{name: number\}"):
        evaluate(workload, stepped(), batches)
    batches.close()


@pytest.mark.parametrize("value", ["good", None, torch.zeros(2)], ids=["text", "none", "two"])
def test_what_is_no_number_is_refused_with_its_name(value: Any) -> None:
    workload = work(evaluate=lambda model, feed: {"fine": 1.0, "odd": value})
    with closing(supplied(workload)) as batches, pytest.raises(UsageError, match="odd"):
        evaluate(workload, stepped(), batches)


def test_a_metric_that_is_not_among_the_figures_is_named() -> None:
    workload = work(evaluate=lambda model, feed: {"wrong": 1.0}, metric=fl.Metric("error"))
    batches = supplied(workload)
    with pytest.raises(UsageError, match=r"returned wrong; the workload's metric is 'error'"):
        evaluate(workload, stepped(), batches)
    batches.close()


def test_a_figure_that_is_no_finite_number_is_told_as_it_is() -> None:
    workload = work(evaluate=lambda model, feed: {"error": math.nan})
    batches = supplied(workload)
    assert math.isnan(evaluate(workload, stepped(), batches)["error"])
    batches.close()


# of a checkpoint


class Shifted(nn.Linear):
    """With a buffer that state_dict leaves out, and extra state that holds a tensor."""

    shift: torch.Tensor

    def __init__(self, buffer: bool) -> None:
        super().__init__(1, 1)
        self.register_buffer("shift", torch.zeros(1), persistent=False)
        self.buffer = buffer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.buffer:
            self.shift += 1
        return super().forward(x / 100) + self.shift

    def get_extra_state(self) -> dict[str, Any]:
        return {} if self.buffer else {"some": torch.ones(2)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.extra = state


@pytest.mark.parametrize("buffer", [True, False], ids=["buffer", "extra state"])
def test_a_checkpoints_figures_are_those_that_training_saw(buffer: bool, tmp_path: Path) -> None:
    workload = work(model=fl.lazy(Shifted, buffer), splits={"train": 0.5, "val": 0.5})
    trained = fl.train(workload, steps=2, out=tmp_path / "run", live=True, device="cpu", quiet=True)
    found = evaluate_checkpoint(workload, tmp_path / "run", live=True, device="cpu", quiet=True)
    assert found == pytest.approx(trained.evaluation)


# splits


@pytest.mark.parametrize(
    ("splits", "held_out", "tested"),
    [
        ({"train": 0.5, "val": 0.25, "test": 0.25}, "val", "test"),
        ({"train": 0.5, "dev": 0.5}, "dev", "dev"),
        ({"valid": 0.25, "train": 0.5, "validation": 0.25}, "validation", "validation"),
        ({"train": 0.5, "test": 0.5}, None, "test"),
        ({"train": 0.5, "rest": 0.5}, None, None),
        ("part", None, "test"),
        (None, None, None),
    ],
)
def test_which_split_is_looked_at(splits: Any, held_out: str | None, tested: str | None) -> None:
    workload = work(splits=splits)
    assert split_for(workload, VALIDATED) == held_out
    assert split_for(workload, TESTED) == tested


def test_the_one_asked_for_is_taken_or_refused_with_those_there_are() -> None:
    workload = work(splits={"train": 0.5, "rest": 0.5})
    assert split_for(workload, TESTED, "rest") == "rest"
    with pytest.raises(UsageError, match=r"no split 'test'; there are train, rest\."):
        split_for(workload, TESTED, "test")
    with pytest.raises(UsageError, match=r"no split 'test'; there are none: give the workload splits="):
        split_for(work(), TESTED, "test")


def test_splits_of_a_field_are_its_values() -> None:
    assert splits_of(work(splits="part")) == ["test", "train"]
    assert splits_of(work()) == []


@pytest.mark.parametrize("how", [{"store": "elsewhere"}, {"live": True}])
def test_a_checkpoint_is_evaluated_from_where_its_run_took_its_samples(
    how: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = fl.lazy(nn.Linear, 1, 1)
    workload = work(model=model, splits={"train": 0.5, "test": 0.5}, name="mine")
    fl.train(workload, steps=1, out="run", device="cpu", quiet=True, **how)
    evaluate_checkpoint(workload, "run", device="cpu", quiet=True)
    assert not Path("stores").exists()
    assert Path("elsewhere").exists() == ("store" in how)
    fl.train(workload, steps=2, out="run", device="cpu", quiet=True)  # from another place, and the same run
    assert Path("stores/mine").exists()


def test_a_module_that_is_there_already_keeps_its_weights_when_checkpoints_are_looked_at(
    tmp_path: Path,
) -> None:
    workload = work(model=nn.Linear(1, 1), training={"save_every": 2}, splits="part")
    options: dict[str, Any] = {"live": True, "quiet": True, "device": "cpu"}
    trained = fl.train(workload, steps=4, out=tmp_path / "run", **options).model
    weight = trained.weight.detach().clone()
    place = tmp_path / "run" / "checkpoints"
    early, late = (restored(workload, place / f"step-0000000{step}") for step in (2, 4))
    evaluate_checkpoint(workload, place / "step-00000002", **options)
    assert torch.equal(trained.weight, weight)
    assert torch.equal(late.weight, weight)  # type: ignore[arg-type]
    assert not torch.equal(early.weight, weight)  # type: ignore[arg-type]


def test_a_module_that_cannot_be_copied_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    workload = work(model=model)
    options: dict[str, Any] = {"live": True, "quiet": True, "device": "cpu"}
    fl.train(workload, steps=1, out=tmp_path / "run", **options)
    model.seen = model(torch.ones(1, 1))  # a graph hangs on it
    with pytest.raises(UsageError, match=r"a Linear that is there already, cannot be copied(.|\n)*fl.lazy"):
        restored(workload, tmp_path / "run")
