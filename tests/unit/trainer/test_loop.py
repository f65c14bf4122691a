"""The loop: what an evaluation leaves, what a line's figures are made of, and evaluations that were left."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import frostline as fl
from frostline.errors import CheckpointError, TrainStopped
from frostline.trainer import loop, meter
from frostline.trainer.checkpoint import Checkpoints, load
from frostline.trainer.limits import DURATIONS, Limits
from frostline.trainer.recorder import read_metrics
from frostline.trainer.run import evaluate

from .conftest import Clock

N = 20


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The loop's clock. A pass takes 2 s, an evaluation 100 s, a save 30 s."""
    made = Clock()
    times = SimpleNamespace(monotonic=made.monotonic, perf_counter=made.monotonic)
    for module in (loop, meter):
        monkeypatch.setattr(module, "time", times)
    write = Checkpoints.save

    def save(self: Checkpoints, *given: Any, **options: Any) -> Path:
        made.now += 30
        return write(self, *given, **options)

    monkeypatch.setattr(Checkpoints, "save", save)
    return made


def loss(model: nn.Module, batch: fl.Batch) -> Tensor:
    out: Tensor = model(batch["x"].float()[:, None]).square().mean()
    return out


def work(**options: Any) -> fl.Workload:
    rows = [{"key": f"k{i:02d}", "x": float(i) / N} for i in range(N)]
    values: dict[str, Any] = {
        "model": fl.lazy(nn.Linear, 1, 1), "loss": loss, "batch_size": 4, "name": "small",
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
        "splits": {"train": 0.8, "val": 0.2},
    }  # fmt: skip
    return fl.Workload(fl.Pipeline(fl.Source.table(rows), outputs=("x",)), **(values | options))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(workload: fl.Workload, **options: Any) -> Any:
    return fl.train(workload, **({"device": "cpu", "quiet": True, "live": True, "out": "run"} | options))


def evaluations(folder: Any = "run") -> list[dict[str, Any]]:
    return [line for line in read_metrics(folder) if line["kind"] == "eval"]


def equal(one: Any, other: Any) -> bool:
    mine, theirs = one.model.state_dict(), other.model.state_dict()
    return all(torch.equal(mine[name], theirs[name]) for name in mine)


# what an evaluation leaves


def test_gradients_of_an_evaluation_are_not_the_next_steps(here: Path) -> None:
    def influence(model: nn.Module, feed: Any) -> dict[str, float]:
        with torch.enable_grad():
            for batch in feed:
                loss(model, batch).backward()
        return {"norm": float(next(model.parameters()).grad.norm())}  # type: ignore[union-attr]

    with_them = train(work(evaluate=influence, training={"eval_every": 2}), steps=9, out="with")
    without = train(work(), steps=9, out="without")
    assert len(evaluations("with")) == 5
    assert equal(with_them, without)


def test_a_workloads_own_evaluation_runs_in_the_trainings_precision(here: Path) -> None:
    def half(x: float) -> Tensor:
        return torch.tensor([x]).bfloat16()

    kinds: list[torch.dtype] = []

    def score(model: nn.Module, feed: Any) -> dict[str, float]:
        kinds.extend(model(batch["h"]).dtype for batch in feed)
        return {"n": 1.0}

    rows = [{"key": f"k{i:02d}", "x": float(i)} for i in range(N)]
    workload = fl.Workload(
        fl.Pipeline(fl.Source.table(rows), fl.Stage("h", half, reads="x")), model=fl.lazy(nn.Linear, 1, 1),
        loss=lambda model, batch: model(batch["h"]).float().square().mean(), evaluate=score, batch_size=4,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), 1e-4), splits={"train": 0.5, "val": 0.5},
    )  # fmt: skip
    train(workload, steps=2, training={"precision": "bf16"})
    assert {*kinds} == {torch.bfloat16}


# a kill between an evaluation's line and its best


class Rising(fl.Metric):
    """Kills the call, as it were, where it is asked whether the step in `at` is better."""

    at: int | None = None

    def is_better(self, value: float, *, than: float) -> bool:
        if Rising.at is not None and value == Rising.at:
            raise KeyboardInterrupt
        return super().is_better(value, than=than)


def test_killed_before_the_best_is_saved_it_is_saved_by_the_next_call(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def score(model: nn.Module, feed: Any) -> dict[str, float]:
        return {"score": float(1 + len(evaluations("run")))}

    workload = work(evaluate=score, metric=Rising("score", "higher"), training={"eval_every": 4})
    monkeypatch.setattr(Rising, "at", 3)
    with pytest.raises(KeyboardInterrupt):
        train(workload, steps=10)
    assert [line["score"] for line in evaluations()] == [1, 2, 3]
    assert load(Path("run")).state["best"] == 2
    monkeypatch.setattr(Rising, "at", None)
    again = train(workload, steps=10)
    best = Checkpoints(Path("run/checkpoints")).best()
    assert again.best == 3
    assert best is not None
    assert (best.name, load(best).state["best"], load(best).state["names"]) == ("step-00000010", 3, ["best"])
    assert [line["step"] for line in evaluations()] == [4, 8, 10]
    before = os.stat(best / "checkpoint.json").st_mtime_ns
    train(workload, steps=10)
    assert os.stat(best / "checkpoint.json").st_mtime_ns == before  # once is enough


@pytest.mark.parametrize("splits", [{"train": 0.8, "val": 0.2}, None])
def test_the_loss_may_choose_the_best_without_an_evaluation_of_its_own(
    here: Path, splits: dict[str, float] | None
) -> None:
    result = train(work(metric=fl.Metric("loss"), splits=splits), steps=4)
    assert result.best == evaluations()[-1]["loss"]
    assert Checkpoints(Path("run/checkpoints")).best() is not None


def test_a_score_of_another_metric_is_not_the_best_of_this_one(here: Path) -> None:
    def scores(model: nn.Module, feed: Any) -> dict[str, float]:
        return {"right": 0.5, "wrong": 3.0}

    workload = work(evaluate=scores, metric=fl.Metric("right", "higher"))
    assert train(workload, steps=2).best == 0.5
    other = work(evaluate=scores, metric=fl.Metric("wrong", "lower"))
    assert train(other, steps=4).best == 3.0
    assert train(other, steps=6).best == 3.0
    assert load(Path("run/checkpoints/best")).state["metric"] == ["wrong", "lower"]


def test_other_data_from_an_epoch_on_is_said(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload = work(splits={"train": 0.8, "val": 0.2})
    assert train(workload, epochs=1).epoch == 1
    train(workload, epochs=2, quiet=False)
    assert "other data" not in capsys.readouterr().err
    train(work(splits={"train": 0.5, "val": 0.5}), epochs=4, quiet=False)
    assert "from this epoch on with other data, or another order: rows: then" in capsys.readouterr().err


# evaluations that were left


def test_asked_to_stop_at_an_evaluation_the_next_call_makes_it_first(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def score(model: nn.Module, feed: Any) -> dict[str, float]:
        return {"error": sum(float(loss(model, batch)) for batch in feed)}

    settings = {"eval_every": 3, "log_every": 2}
    workload = work(training=settings, evaluate=score, metric=fl.Metric("error"))
    whole = train(workload, steps=8, out="whole")
    stepped = Limits.stepped

    def asked(self: Limits, seconds: float) -> None:
        stepped(self, seconds)
        counted.append(seconds)
        if len(counted) == 6:
            self.why = "SIGTERM"

    counted: list[float] = []
    monkeypatch.setattr(Limits, "stepped", asked)
    first = train(workload, steps=8)
    assert (first.stopped, first.step, [line["step"] for line in evaluations()]) == ("SIGTERM", 6, [3])
    second = train(workload, steps=8)
    told = [
        [{n: v for n, v in line.items() if not n.startswith("time/")} for line in read_metrics(folder)]
        for folder in ("whole", "run")
    ]
    assert told[0] == told[1]
    assert equal(whole, second)
    assert whole.best == second.best


def test_a_last_evaluation_that_does_not_fit_is_left_to_the_next_call(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("run").mkdir()
    (Path("run") / DURATIONS).write_text(json.dumps({"look": 5000.0}))
    first = train(work(), steps=6, max_hours=1.0)
    assert (first.step, first.stopped) == (6, "no time is left for the evaluation of step 6")
    assert evaluations() == []
    second = train(work(), steps=6, max_hours=1.0)
    assert (second.stopped, [line["step"] for line in evaluations()]) == (None, [6])
    assert json.loads((Path("run") / DURATIONS).read_text())["look"] < 3600


def test_one_in_between_that_does_not_fit_ends_the_call(here: Path) -> None:
    Path("run").mkdir()
    (Path("run") / DURATIONS).write_text(json.dumps({"look": 5000.0}))
    first = train(work(training={"eval_every": 3}), steps=6, max_hours=1.0)
    assert (first.step, first.stopped) == (3, "no time is left for an evaluation")
    second = train(work(training={"eval_every": 3}), steps=6, max_hours=1.0)
    assert (second.step, second.stopped) == (6, None)
    assert [line["step"] for line in evaluations()] == [3, 6]


def test_without_a_limit_nothing_is_written_down(here: Path) -> None:
    train(work(), steps=2)
    assert not (Path("run") / DURATIONS).exists()


def test_an_evaluation_takes_no_more_than_it_may_and_always_the_same(here: Path) -> None:
    seen: list[list[str]] = []

    def score(model: nn.Module, feed: Any) -> dict[str, float]:
        seen.append([key for batch in feed for key in batch.keys_of_rows])
        return {"n": float(len(seen[-1]))}

    settings = {"eval_every": 2, "eval_rows": 3}
    train(work(evaluate=score, splits={"train": 0.5, "val": 0.5}), steps=4, training=settings)
    assert len(seen[0]) == 3
    assert seen == [seen[0]] * 2
    evaluate(work(evaluate=score, splits={"train": 0.5, "val": 0.5}), "run", device="cpu", quiet=True)
    assert len(seen[-1]) > 3  # all of them


# the line


def lines(clock: Clock, **options: Any) -> list[dict[str, Any]]:
    def slow(model: nn.Module, batch: fl.Batch) -> Tensor:
        if torch.is_grad_enabled():
            clock.now += 2
        return loss(model, batch)

    def score(model: nn.Module, feed: Any) -> dict[str, float]:
        clock.now += 100
        return {"n": 1.0}

    train(work(loss=slow, evaluate=score, **options), steps=12)
    return [line for line in read_metrics("run") if line["kind"] == "train"]


def rates(found: list[dict[str, Any]]) -> list[float]:
    return [line["time/samples_per_s"] for line in found]


def test_samples_are_those_that_were_there(clock: Clock) -> None:
    found = lines(clock, batch_size=64, training={"log_every": 3})  # 16 rows train, in one short batch
    assert rates(found) == pytest.approx([8.0] * 4)


def test_neither_rehearsal_nor_evaluations_nor_saves_count(clock: Clock) -> None:
    settings = {"log_every": 3, "eval_every": 2, "save_every": 1}
    assert rates(lines(clock, training=settings)) == pytest.approx([2.0] * 4)


def test_a_line_after_every_step_has_its_rate_too(clock: Clock) -> None:
    assert rates(lines(clock, training={"log_every": 1})) == pytest.approx([2.0] * 12)


def test_time_left_is_that_of_steps_and_evaluations(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    left: dict[int, float] = {}

    class Told(loop.TrainProgress):
        def line(self, step: int, *given: Any, **options: Any) -> None:
            left[step] = given[7]

    monkeypatch.setattr("frostline.trainer.run.TrainProgress", Told)
    lines(clock, training={"log_every": 2, "eval_every": 4})
    # 2 s a step; at 4, 8 and 12 an evaluation of 100 s, which is known after the first
    assert left == pytest.approx({2: 20, 4: 16, 6: 12 + 200, 8: 8 + 200, 10: 4 + 100, 12: 100})


def test_after_a_resume_time_left_is_not_shared_by_the_steps_before(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(work(splits=None), steps=100)
    left: list[float] = []

    class Told(loop.TrainProgress):
        def line(self, step: int, *given: Any, **options: Any) -> None:
            left.append(given[7])

    def slow(model: nn.Module, batch: fl.Batch) -> Tensor:
        clock.now += 2
        return loss(model, batch)

    monkeypatch.setattr("frostline.trainer.run.TrainProgress", Told)
    train(work(splits=None, loss=slow), steps=200, training={"log_every": 50})
    assert left == pytest.approx([100.0, 0.0])


class Wordy(nn.Linear):
    """Evaluations leave a graph where it cannot be taken up again: in a loop."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            if not self.training:
                x = x + torch.randn(1, generator=torch.Generator().manual_seed(3))
            x = super().forward(x)
        return x


@pytest.mark.parametrize("own", [True, False])
def test_a_compiled_model_stays_so_after_an_evaluation(
    own: bool, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[bool] = []

    def counting(graph: Any, inputs: Any) -> Any:
        def run(*given: Any) -> Any:
            ran.append(torch.is_grad_enabled())
            return graph.forward(*given)

        return run

    def score(model: nn.Module, feed: Any) -> dict[str, float]:
        return {"loss": sum(float(loss(model, batch)) for batch in feed)}

    real = torch.compile
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", lambda model: real(model, backend=counting))
    evaluated = work(model=fl.lazy(Wordy, 1, 1), evaluate=score if own else None)
    train(evaluated, steps=6, training={"compile": True, "eval_every": 3})
    assert ran == [True] * (2 + 6)  # two rehearsals


def test_the_forecast_leaves_out_what_compiling_took(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = 0

    def slow(model: nn.Module, batch: fl.Batch) -> Tensor:
        nonlocal calls
        calls += 1
        clock.now += 2 if calls > 1 else 100
        return loss(model, batch)

    monkeypatch.setattr(torch, "compile", lambda model: model)
    train(work(loss=slow), steps=12, training={"compile": True}, quiet=False)
    assert "12 steps (3.0 epochs) at 2 s a step" in capsys.readouterr().err


# updates that were skipped


def test_keys_of_skipped_updates_survive_a_resume(here: Path) -> None:
    def bad(model: nn.Module, batch: fl.Batch) -> Tensor:
        names = [f"k{i:02d}" for i in (1, 2, 9)]
        return loss(model, batch) * (float("nan") if batch.keys_of_rows[0] in names else 1.0)

    workload = work(
        loss=bad, splits=None, batch_size=1, order=fl.Sequential(),
        training={"log_every": 8, "max_bad_steps": 2, "save_every": 1},
    )  # fmt: skip
    train(workload, steps=4, training={"log_every": 100})
    with pytest.raises(
        TrainStopped, match=r"window: step 2, keys 'k01'\. The checkpoint of step 16 is whole"
    ):
        train(workload, steps=20)


def without_numbers(*keys: str) -> Any:
    """A loss that is no number where a batch has one of these."""

    def bad(model: nn.Module, batch: fl.Batch) -> Tensor:
        return loss(model, batch) * (float("nan") if {*keys} & {*batch.keys_of_rows} else 1.0)

    return bad


def in_order(**options: Any) -> fl.Workload:
    return work(splits=None, batch_size=2, order=fl.Sequential(), **options)


def test_a_stop_by_the_guard_keeps_the_steps_before_it(here: Path) -> None:
    settings = {"log_every": 4, "max_bad_steps": 1}
    workload = in_order(loss=without_numbers("k09", "k13"), training=settings)
    with pytest.raises(TrainStopped, match=r"2 of the last .* The checkpoint of step 8 is whole"):
        train(workload, steps=10)
    assert load(Path("run")).step == 8
    assert [line["step"] for line in read_metrics("run") if line["kind"] == "train"] == [4, 8]
    stopped = train(workload, steps=8)
    whole = train(workload, steps=8, training={"max_bad_steps": 9}, out="whole")
    assert equal(stopped, whole)


def test_all_keys_of_skipped_updates_are_written_down_once(here: Path) -> None:
    workload = in_order(loss=without_numbers("k03", "k07"), training={"log_every": 6})
    train(workload, steps=3)  # a call ends between the step and the line that tells of it
    train(workload, steps=9)
    events = [line for line in read_metrics("run") if line["kind"] == "event"]
    told = [(line["step"], line["what"], line["skipped_step"], json.loads(line["keys"])) for line in events]
    assert told == [(3, "skipped", 2, ["k02", "k03"]), (6, "skipped", 4, ["k06", "k07"])]


def test_skipped_updates_are_left_out_of_the_means(here: Path) -> None:
    def figures(*keys: str) -> list[dict[str, Any]]:
        out = "-".join(["run", *keys])
        settings = {"log_every": 2, "max_bad_steps": 9}
        train(in_order(loss=without_numbers(*keys), training=settings), steps=4, out=out)
        return [line for line in read_metrics(out) if line["kind"] == "train"]

    good, one, both = figures(), figures("k02"), figures("k00", "k02")
    first = figures("k02", "k03")[0]
    assert [line["bad"] for line in (good[0], one[0], both[0])] == [0, 1, 2]
    assert one[0]["loss"] == first["loss"]
    assert math.isfinite(one[0]["loss"])
    assert one[0]["lr"] == good[0]["lr"]
    assert math.isnan(both[0]["loss"])
    assert math.isfinite(both[1]["loss"])


# evaluations that fail


def test_an_evaluation_that_fails_costs_no_steps(here: Path) -> None:
    made: list[int] = []

    def score(model: nn.Module, feed: Any, step: int) -> dict[str, float]:
        made.append(step)
        if len(made) == 2:
            raise ZeroDivisionError("broke")
        return {"n": 1.0}

    workload = work(evaluate=score, training={"eval_every": 3})
    with pytest.raises(ZeroDivisionError, match="broke"):
        train(workload, steps=8)
    assert [path.name for path in Checkpoints(Path("run/checkpoints")).all()] == ["step-00000006"]
    again = train(workload, steps=8)
    assert made == [3, 6, 6, 8]
    assert equal(again, train(work(), steps=8, out="whole"))


def test_a_save_that_fails_does_not_hide_why_it_was_needed(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def score(model: nn.Module, feed: Any) -> dict[str, float]:
        raise ZeroDivisionError("broke")

    def full(*given: Any, **options: Any) -> Path:
        raise CheckpointError("no room")

    monkeypatch.setattr(Checkpoints, "save", full)
    with pytest.raises(ZeroDivisionError, match="broke"):
        train(work(evaluate=score, training={"eval_every": 3}), steps=8, quiet=False)
    assert "step 3 could not be saved: no room" in capsys.readouterr().err
