"""`fl.train` as a user meets it: results, going on, evaluating, and everything that can be wrong."""

from __future__ import annotations

import gc
import json
import math
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import frostline as fl
from frostline.errors import (
    CheckpointError,
    FreezePaused,
    FreezeStopped,
    FrostlineError,
    NotFrozen,
    StageFailed,
    TrainStopped,
    UsageError,
)
from frostline.trainer import evaluate
from frostline.trainer.checkpoint import load
from frostline.trainer.recorder import read_metrics

N, BATCH = 40, 8


class Net(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, width), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).tanh())
        return out


def features(x: list[float]) -> Tensor:
    return torch.tensor(x).cos()


def loss(model: nn.Module, batch: fl.Batch) -> Tensor:
    return (model(batch["features"]).squeeze(1) - batch["y"]).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def score(model: nn.Module, feed: Any) -> dict[str, float]:
    return {"error": float(np.mean([float(loss(model, batch)) for batch in feed]))}


def work(*, rows: int = N, stage: Callable[..., Any] = features, **options: Any) -> fl.Workload:
    rng = np.random.default_rng(3)
    drawn = [rng.standard_normal(4) for _ in range(rows)]
    table = [{"key": f"k{i:03d}", "x": x.tolist(), "y": float(np.cos(x).sum())} for i, x in enumerate(drawn)]
    data = fl.Pipeline(
        fl.Source.table(table), fl.Stage("features", stage, reads="x"), outputs=("features", "y")
    )
    values = {
        "model": fl.lazy(Net), "loss": loss, "optimizer": sgd, "batch_size": BATCH, "name": "small",
        "training": {"log_every": 5},
    }  # fmt: skip
    return fl.Workload(data, **(values | options))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FROSTLINE_CACHE", str(tmp_path / "cache"))
    return tmp_path


def train(workload: fl.Workload, **options: Any) -> Any:
    return fl.train(workload, **({"device": "cpu", "quiet": True} | options))


def weights(result: Any) -> list[Tensor]:
    return [p.detach().clone() for p in result.model.parameters()]


def equal(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(weights(one), weights(other), strict=True))


# what comes out


def test_a_training_makes_its_store_its_folder_its_metrics_and_gets_better(here: Path) -> None:
    result = train(work(), steps=60)
    assert (result.step, result.stopped, result.epoch) == (60, None, 12.0)
    assert result.folder.parent == Path("runs/small")
    assert len(fl.Store.open("stores/small")) == N
    lines = read_metrics(result.folder)
    assert [line["step"] for line in lines] == [*range(5, 61, 5)]
    assert lines[-1]["loss"] < 0.7 * lines[0]["loss"]
    assert {"lr", "grad_norm", "bad", "time/samples_per_s", "time/data_wait", "time/rss_bytes"} <= {*lines[0]}


def test_the_gradient_norm_of_a_line_is_that_of_its_step(here: Path) -> None:
    each = train(work(training={"log_every": 1}), steps=13, out="each")
    some = train(work(training={"log_every": 5}), steps=13, out="some")
    norms = {line["step"]: line["grad_norm"] for line in read_metrics(each.folder)}
    lines = read_metrics(some.folder)
    assert [line["step"] for line in lines] == [5, 10, 13]
    assert all(line["grad_norm"] == norms[line["step"]] for line in lines)
    assert equal(each, some)


def test_from_a_store_and_live_the_bits_are_the_same(here: Path) -> None:
    assert equal(train(work(), steps=12, out="a"), train(work(), steps=12, out="b", live=True))
    assert not Path("stores/b").exists()


def test_epochs_are_an_end_too(here: Path) -> None:
    assert train(work(), epochs=2).step == 10
    assert train(work(rows=20), epochs=1.5, out="half", store="other").step == 5  # 3 batches, and half of 3


def test_accumulated_parts_train_as_the_whole_batch_does(here: Path) -> None:
    whole, parts = (
        train(work(), steps=10, out="a"),
        train(work(), steps=10, out="b", training={"microbatch": 3}),
    )
    for a, b in zip(weights(whole), weights(parts), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)  # sums in another order
    assert not equal(whole, parts)


# going on


def test_the_same_command_again_goes_on_and_a_finished_run_is_left_alone(here: Path) -> None:
    whole = train(work(), steps=20, out="whole")
    first = train(work(), steps=10)
    again = train(work(), steps=20)
    assert again.folder == first.folder
    assert equal(again, whole)
    assert read_metrics(again.folder)[-1]["loss"] == read_metrics(whole.folder)[-1]["loss"]
    assert train(work(), steps=20).step == 20
    fresh = train(work(), steps=20, resume="never")
    assert fresh.folder != first.folder
    assert equal(fresh, whole)


def test_other_settings_are_another_run(here: Path) -> None:
    first = train(work(), steps=5)
    other = train(work(), steps=5, training={"clip": 0.1})
    assert other.folder != first.folder
    told = train(work(), steps=6, out=str(first.folder), training={"clip": 0.1})
    assert told.step == 6


def test_a_checkpoint_by_name_goes_on_in_its_run(here: Path) -> None:
    first = train(work(), steps=10, training={"save_every": 5, "keep": 5})
    back = train(work(), steps=10, resume=str(first.folder / "checkpoints" / "step-00000005"))
    assert back.folder.resolve() == first.folder.resolve()
    assert equal(first, back)
    assert len(read_metrics(first.folder)) == 2  # what followed step 5 was written again, not twice


def test_weights_alone_from_another_training(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = train(work(), steps=20, out="first")
    begun = train(
        work(), steps=1, out="second", init_from="first", training={"warmup_steps": 1000}, quiet=False
    )
    assert "4 tensors taken" in capsys.readouterr().err
    moved = max(float((a - b).abs().max()) for a, b in zip(weights(first), weights(begun), strict=True))
    assert moved < 1e-3  # one step at a thousandth of the rate
    wider = work(model=fl.lazy(Net, 9))
    with pytest.raises(CheckpointError, match=r"body\.weight"):
        train(wider, steps=1, out="third", resume="first")


def test_a_larger_budget_says_what_it_does_to_the_rate(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(work(), steps=10, out="run", training={"schedule": "linear"})
    train(work(), steps=20, out="run", training={"schedule": "linear"}, quiet=False)
    assert "At step 10 the rate goes from 0 of its peak back up to 0.5" in capsys.readouterr().err


# evaluating


def test_evaluations_in_between_change_nothing(here: Path) -> None:
    options = {"evaluate": score, "splits": {"train": 0.7, "val": 0.3}, "metric": fl.Metric("error")}
    plain = train(work(**options), steps=20, out="a")
    looked = train(work(**options), steps=20, out="b", training={"eval_every": 3})
    assert equal(plain, looked)
    found = [line for line in read_metrics("b") if line["kind"] == "eval"]
    assert [line["step"] for line in found] == [3, 6, 9, 12, 15, 18, 20]
    assert looked.best == min(line["error"] for line in found)
    best = load(Path("b/checkpoints/best"))
    assert best.step == next(line["step"] for line in found if line["error"] == looked.best)


def test_a_workload_without_evaluate_gets_the_mean_of_its_loss(here: Path) -> None:
    result = train(work(splits={"train": 0.5, "val": 0.25, "test": 0.25}), steps=10, out="run")
    assert {*result.evaluation} == {"loss"}
    figures = evaluate(
        work(splits={"train": 0.5, "val": 0.25, "test": 0.25}), "run", quiet=True, device="cpu", split="val"
    )
    assert figures == pytest.approx(result.evaluation)
    with pytest.raises(UsageError, match=r"no split 'dev'; there are train, val, test"):
        evaluate(work(splits={"train": 0.5, "val": 0.25, "test": 0.25}), "run", split="dev", device="cpu")


def test_what_evaluate_must_return(here: Path) -> None:
    bad = work(evaluate=lambda model, feed: 3, splits={"train": 0.5, "val": 0.5})
    with pytest.raises(UsageError, match=r"returned 3; expected \{name: number\}"):
        train(bad, steps=1)
    other = work(evaluate=score, splits={"train": 0.5, "val": 0.5}, metric=fl.Metric("accuracy"))
    with pytest.raises(UsageError, match="returned error; the workload's metric is 'accuracy'"):
        train(other, steps=1, out="other")


@pytest.mark.parametrize("warn_only", [True, False])
def test_switches_of_torchs_are_as_they_were(here: Path, warn_only: bool) -> None:
    seen = []

    def looked(model: nn.Module, batch: fl.Batch) -> Tensor:
        seen.append(torch.is_deterministic_algorithms_warn_only_enabled())
        return loss(model, batch)

    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        train(work(loss=looked), steps=1, out="usual")
        train(work(loss=looked, training={"deterministic": True}), steps=1, out="strict")
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled() == warn_only
    finally:
        torch.use_deterministic_algorithms(False)
    assert (seen[0], seen[-1]) == (warn_only, False)


# before the first step


def test_checks_run_before_the_first_step_and_all_failures_are_told(here: Path) -> None:
    def near(model: nn.Module, batch: fl.Batch, figures: dict[str, float]) -> str | None:
        return None if figures["loss"] < 1e-6 else f"the first loss is {figures['loss']:.3f}, expected 0"

    def fine(model: nn.Module, batch: fl.Batch, figures: dict[str, float]) -> str | None:
        assert float(loss(model, batch)) == pytest.approx(figures["loss"])
        return None

    with pytest.raises(UsageError, match=r"near: the first loss is \d"):
        train(work(checks=[fine, near]), steps=3)
    assert train(work(checks=[fine]), steps=3, out="good").step == 3


def test_parameters_without_gradient_and_frozen_ones_that_move_are_errors(here: Path) -> None:
    class Forgetful(Net):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(2, 2)
            self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.frozen += 1
            return super().forward(x)

    with pytest.raises(UsageError) as caught:
        train(work(model=fl.lazy(Forgetful)), steps=5)
    told = str(caught.value)
    assert "unused.bias, unused.weight trains but got no gradient in 3 steps" in told
    assert "frozen is frozen (requires_grad=False) but moved" in told

    def only_head(model: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.head.parameters(), 0.1)

    with pytest.raises(
        UsageError, match=r"body.weight, body.bias requires gradients but is not in the optimiser"
    ):
        train(work(optimizer=only_head), steps=5, out="b")
    assert train(work(optimizer=only_head, training={"unused": ["body.*"]}), steps=5, out="c").step == 5


def test_the_forecast_says_steps_epochs_end_and_memory(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(work(), steps=10, quiet=False)
    told = capsys.readouterr().err
    line = next(line for line in told.splitlines() if line.startswith("10 steps (2"))
    assert all(part in line for part in ("steps/s", "until", "memory", "constant"))
    assert "\r" not in told


# numbers that are none


def test_too_many_bad_updates_stop_the_run_with_the_keys(here: Path) -> None:
    def broken(model: nn.Module, batch: fl.Batch) -> Tensor:
        wrong = math.nan if "k007" in batch.keys_of_rows else 1.0
        return loss(model, batch) * wrong

    settings = {"max_bad_steps": 2, "bad_window": 30, "log_every": 2, "save_every": 1}
    with pytest.raises(
        TrainStopped, match=r"3 of the last 30 updates were skipped.*step \d+, keys 'k"
    ) as caught:
        train(work(loss=broken, training=settings), steps=100, out="run")
    assert "max_bad_steps=2" in str(caught.value)
    assert load(Path("run")).step > 0
    few = train(work(loss=broken, training={**settings, "max_bad_steps": 50}), steps=20, out="few")
    assert sum(line.get("bad", 0) for line in read_metrics(few.folder)) == 4  # once an epoch


# what can be wrong


def test_an_experiment_is_not_trained(here: Path) -> None:
    with pytest.raises(UsageError, match=r"experiment.*`frostline run TARGET`"):
        train(fl.Workload(work().data, run=print), steps=1)
    with pytest.raises(UsageError, match="was given int; expected a Workload"):
        train(3, steps=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ({}, "say how long"),
        ({"steps": 3, "epochs": 2}, "steps and epochs are both given"),
        ({"steps": 0}, "steps is 0; a number above 0"),
        ({"max_hours": -1}, "max_hours is -1"),
    ],
)
def test_how_long_must_be_said(here: Path, budget: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        train(work(), **budget)


def test_settings_that_cannot_work_are_told_when_the_workload_is_written() -> None:
    with pytest.raises(UsageError) as caught:
        work(training={"precision": "fp8", "clip": -1, "log_every": 0})
    assert [text in str(caught.value) for text in ("precision is 'fp8'", "clip is -1", "log_every is 0")] == [
        True
    ] * 3
    with pytest.raises(UsageError, match="no setting 'precison' \\(did you mean 'precision'"):
        work(training={"precison": "bf16"})


def test_no_samples_and_batches_that_cannot_be_filled(here: Path) -> None:
    with pytest.raises(FrostlineError):
        train(work(rows=0), steps=1)
    full = work(rows=6, order=fl.Shuffle(drop_last=True))
    with pytest.raises(UsageError, match="drop_last"):
        train(full, steps=1, out="b", live=True)


def test_a_folder_that_cannot_be_written(here: Path) -> None:
    Path("file").write_text("")
    with pytest.raises(UsageError, match=r"A run cannot be written to file"):
        train(work(), steps=1, out="file")


def test_two_at_once_in_one_folder(here: Path) -> None:
    def nested(model: nn.Module, batch: fl.Batch, figures: dict[str, float]) -> str | None:
        with pytest.raises(UsageError, match="Another process is training in run"):
            train(work(), steps=1, out="run")
        return None

    assert train(work(checks=[nested]), steps=2, out="run").step == 2


def test_never_in_a_folder_that_holds_a_run(here: Path) -> None:
    train(work(), steps=2, out="run")
    with pytest.raises(UsageError, match=r"holds a training already \(step-00000002\)"):
        train(work(), steps=4, out="run", resume="never")


@pytest.mark.parametrize("damage", ["another model", "truncated", "missing shard", "no checkpoint"])
def test_checkpoints_that_cannot_be_loaded(here: Path, damage: str) -> None:
    train(work(), steps=4, out="run", training={"keep": 1})
    step = Path("run/checkpoints/step-00000004")
    workload, path = work(), str(step)
    if damage == "another model":
        workload = work(model=fl.lazy(Net, 7))
    elif damage == "truncated":
        file = step / "optimizer.safetensors"
        file.write_bytes(file.read_bytes()[:-9])
    elif damage == "missing shard":
        (step / "model.safetensors").unlink()
    else:
        path = "nowhere"
    with pytest.raises(CheckpointError) as caught:
        train(workload, steps=8, resume=path)
    told = {
        "another model": "body.weight",
        "truncated": "optimizer.safetensors",
        "missing shard": "model.safetensors",
        "no checkpoint": "holds no whole checkpoint",
    }[damage]
    assert told in str(caught.value)


def test_a_pickle_is_never_opened(here: Path) -> None:
    torch.save({"body.weight": torch.zeros(6, 4)}, "weights.pt")
    with pytest.raises(CheckpointError, match="is a pickle"):
        train(work(), steps=1, init_from="weights.pt")
    save_file({"body.weight": torch.zeros(6, 4)}, "weights.safetensors")
    assert train(work(), steps=1, init_from="weights.safetensors", out="b").step == 1


def test_a_store_that_does_not_fit_is_refused_and_left_as_it_is(here: Path) -> None:
    """Neither served stale nor thrown away: only a freeze by itself does that."""
    first = train(work(), steps=4, out="a")
    changed = work(stage=lambda x: torch.tensor(x).sin())
    (root,) = (here / "stores").iterdir()
    before = fl.Store.open(root)
    with pytest.raises(UsageError, match="left as it is") as told:
        train(changed, steps=4, out="b")
    assert "features: to be computed again" in str(told.value)
    with pytest.raises(UsageError, match="left as it is"):
        evaluate(changed, "a")
    after = fl.Store.open(root)
    assert [*after.keys] == [*before.keys]
    assert after.fields == before.fields
    assert not equal(first, train(changed, steps=4, out="b", store="another"))
    assert isinstance(changed.data, fl.Pipeline)
    fl.freeze(changed.data, root)
    assert not equal(first, train(changed, steps=4, out="c"))


def test_fewer_samples_than_the_store_has_do_not_delete_the_others(here: Path) -> None:
    train(work(), steps=4, out="a")
    (root,) = (here / "stores").iterdir()
    with pytest.raises(UsageError, match="35 rows no longer in the source"):
        train(work(rows=5), steps=4, out="b")
    assert len(fl.Store.open(root)) == N


def test_weights_to_begin_with_are_refused_where_a_run_goes_on(here: Path) -> None:
    train(work(), steps=4, out="a")
    train(work(), steps=2, out="b", init_from="a")
    assert train(work(), steps=4, out="b", init_from="a").step == 4
    with pytest.raises(UsageError, match="--init-from is what a run begins with"):
        train(work(), steps=6, out="a", init_from="b")
    with pytest.raises(UsageError, match="no such file or folder"):
        train(work(), steps=6, out="c", init_from="nowhere")


def test_weights_to_begin_with_may_be_a_named_checkpoint(here: Path) -> None:
    first = train(work(), steps=3, out="a")
    begun = train(
        work(), steps=1, out="b", init_from="a/checkpoints/latest", training={"warmup_steps": 10**6}
    )
    for one, other in zip(first.model.parameters(), begun.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_evaluating_says_on_what(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(work(), steps=2, out="a", quiet=True)
    evaluate(work(), "a")
    assert "on all samples, also those it was trained on" in capsys.readouterr().err
    halves = work(splits={"train": 0.5, "holdout": 0.5})
    with pytest.raises(UsageError, match="splits are train, holdout; none is called test or val"):
        evaluate(halves, "a")
    evaluate(halves, "a", split="holdout")
    assert "on the split 'holdout'" in capsys.readouterr().err


def test_a_model_that_is_there_already_is_said_not_to_be_seeded(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(replace(work(), model=Net()), steps=2, out="a", live=True, quiet=False)
    assert "begins with the weights it has, whatever the seed" in capsys.readouterr().err


def test_a_pipeline_that_never_stands_still_asks_for_live(here: Path) -> None:
    def noisy(x: list[float], rng: np.random.Generator) -> Tensor:
        return torch.tensor(x) + float(rng.random())

    rows = [{"key": str(i), "x": [float(i)] * 4, "y": 0.0} for i in range(9)]
    data = fl.Pipeline(
        fl.Source.table(rows), fl.Stage("features", noisy, reads="x", random=True), outputs=("features", "y")
    )
    assert train(replace(work(), data=data), steps=3).step == 3  # the raw fields are what is stored


def test_a_random_stage_needs_its_eval_before_anything_is_evaluated(here: Path) -> None:
    data = work().data
    assert isinstance(data, fl.Pipeline)
    random = fl.Stage("seen", lambda f, rng: f * float(rng.random()), reads="features", random=True)
    noisy = fl.Pipeline(data.source, *data.steps, random, outputs=("seen", "y"))
    unready = replace(
        work(splits={"train": 0.5, "val": 0.5}), data=noisy,
        loss=lambda model, batch: model(batch["seen"]).square().mean(),
    )  # fmt: skip
    with pytest.raises((UsageError, NotFrozen), match="seen"):
        train(unready, steps=2)


def test_a_sample_that_fails_live_is_named(here: Path) -> None:
    def fragile(x: list[float]) -> Tensor:
        if x[0] > 1.5:
            raise ValueError("too large")
        return torch.tensor(x)

    with pytest.raises((StageFailed, FrostlineError), match="too large"):
        train(work(stage=fragile), epochs=1, live=True, out="b")


def test_what_a_run_was_started_with_is_kept(here: Path) -> None:
    result = train(work(), steps=2, parameters={"n": 3})
    kept = json.loads((result.folder / "run.json").read_text())
    assert kept["config"]["parameters"] == {"n": 3}
    assert kept["config"]["training"]["log_every"] == 5


# what a review found


class Remembering(Net):
    """Puts another tensor under a buffer's name in each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return super().forward(x - self.mean)


def test_a_buffer_that_is_replaced_in_each_pass_goes_on_exactly(here: Path) -> None:
    whole = train(work(model=fl.lazy(Remembering)), steps=12, out="whole")
    train(work(model=fl.lazy(Remembering)), steps=5, out="parts")
    parts = train(work(model=fl.lazy(Remembering)), steps=12, out="parts")
    assert equal(whole, parts)
    assert torch.equal(whole.model.mean, parts.model.mean)


class Dropping(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.5, self.training))


class Encoder(nn.Module):
    """A frozen network whose weights are drawn when it is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        nn.init.eye_(self.layer.weight)
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x).detach()
        return out


def test_a_network_that_is_loaded_with_the_first_batch_does_not_move_the_models_dropout(here: Path) -> None:
    def seeded() -> Encoder:
        torch.rand(1000)  # loading draws
        return Encoder()

    def live() -> fl.Workload:
        base = work(model=fl.lazy(Dropping))
        assert isinstance(base.data, fl.Pipeline)
        torch.manual_seed(5)
        encoder = fl.Stage("seen", fl.lazy(seeded), reads="features", on="device", batch_size=8)
        data = fl.Pipeline(base.data.source, *base.data.steps, encoder, outputs=("seen", "y"))
        return replace(base, data=data, loss=lambda m, b: (m(b["seen"]).squeeze(1) - b["y"]).square().mean())

    whole = train(live(), steps=8, out="whole", live=True)
    train(live(), steps=3, out="parts", live=True)
    parts = train(live(), steps=8, out="parts", live=True)
    assert len(weights(whole)) == len(weights(parts))
    # the encoder itself is drawn anew in each call, so only the generators can be compared
    assert load(Path("whole")).state["supply"] == load(Path("parts")).state["supply"]
    one, other = (load(Path(name)).groups["generators-0"] for name in ("whole", "parts"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_an_evaluation_that_fails_at_the_end_costs_no_step(here: Path) -> None:
    def broken(model: nn.Module, feed: Any) -> dict[str, float]:
        raise ZeroDivisionError("an evaluation that was never tried")

    unready = work(evaluate=broken, splits={"train": 0.5, "val": 0.5})
    with pytest.raises(ZeroDivisionError):
        train(unready, steps=7, out="run")
    assert load(Path("run")).step == 7
    repaired = train(work(evaluate=score, splits={"train": 0.5, "val": 0.5}), steps=7, out="run")
    assert (repaired.step, {*repaired.evaluation}) == (7, {"error"})  # evaluated after all
    again = train(work(evaluate=score, splits={"train": 0.5, "val": 0.5}), steps=7, out="run")
    assert again.evaluation == {}  # once is enough
    assert [line["kind"] for line in read_metrics("run")].count("eval") == 1


def test_hours_of_a_schedule_alone_are_the_end(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = train(work(), schedule_hours=0.3 / 3600, out="run", training={"schedule": "linear"}, quiet=False)
    told = capsys.readouterr().err
    assert re.search(r"steps \(.* epochs\) at .*: .*until \d\d:\d\d.*; linear: down to 0 of it at", told)
    assert result.stopped is None
    assert result.step > 0
    again = train(work(), schedule_hours=0.3 / 3600, out="run", training={"schedule": "linear"})
    assert again.step == result.step


def test_weights_to_begin_with_are_part_of_a_runs_settings(here: Path) -> None:
    first = train(work(), steps=3)
    other = train(work(), steps=3, init_from=first.folder)
    assert other.folder != first.folder
    told = train(
        work(), steps=3, training={"log_every": 1, "save_every": 2}
    )  # changes nothing of the training
    assert told.folder == first.folder


def test_batches_are_not_kept_until_the_next_line_of_metrics(here: Path) -> None:
    alive: list[weakref.ref[Tensor]] = []

    def watched(model: nn.Module, batch: fl.Batch) -> Tensor:
        alive.append(weakref.ref(batch["features"]))
        gc.collect()
        assert sum(ref() is not None for ref in alive) <= 4
        return loss(model, batch)

    train(work(loss=watched, training={"log_every": 100}), steps=15)


def sometimes(x: list[float]) -> Tensor:
    if x[0] > 1:
        raise ValueError("no such thing")
    return features(x)


def test_samples_that_fail_while_the_store_is_made_are_allowed_for(here: Path) -> None:
    broken = work(stage=sometimes)
    with pytest.raises(FreezeStopped, match=r"samples failed, 1 may \(max_bad=1%\)") as stopped:
        train(broken, steps=2, out="refused")
    assert not isinstance(stopped.value, FreezePaused)
    result = train(broken, steps=2, out="taken", max_bad="50%")
    assert result.step == 2
    assert len(fl.Store.open("stores/small")) < N


def test_without_validation_samples_the_test_ones_do_not_choose_the_best_checkpoint(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = list[str]()

    def looked(model: nn.Module, feed: Any) -> dict[str, float]:
        seen.extend(key for batch in feed for key in batch.keys_of_rows)
        return {"error": 0.0}

    apart = work(evaluate=looked, splits={"train": 0.5, "test": 0.5}, metric=fl.Metric("error"))
    done = train(apart, steps=2, out="run", quiet=False)
    said = capsys.readouterr().err
    assert "no split called 'val': evaluation is on the samples trained on" in said
    assert "samples trained on: error 0" in said
    assert "held out" not in said
    assert done.evaluated_on == "samples trained on"
    assert [x["on"] for x in read_metrics("run") if x["kind"] == "eval"] == ["samples trained on"]
    assert 0 < len(set(seen)) < N
