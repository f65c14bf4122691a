"""When a training ends: its margin, the clock, and hours that are bound to one call."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import frostline as fl
from frostline.trainer import forecast, job, limits, loop, meter, run
from frostline.trainer.checkpoint import Checkpoints, load
from frostline.trainer.limits import Limits
from frostline.trainer.recorder import read_metrics

from .conftest import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=made.monotonic))
    return made


def test_a_call_ends_early_enough_for_a_step_and_a_save(clock: Clock) -> None:
    found = Limits(1.0, lambda text: None)
    found.stepped(10)
    found.saved(100)
    found.saved(60)
    assert found.margin == 160
    clock.now += 3600 - 161
    assert found.reason is None
    clock.now += 1
    assert found.reason == "the time limit of 1 h"


def test_without_a_limit_only_a_signal_ends_it(clock: Clock) -> None:
    found = Limits(None, lambda text: None)
    clock.now += 1e9
    assert found.reason is None
    found.why = "SIGTERM"
    assert found.reason == "SIGTERM"


def test_a_call_that_ends_with_an_evaluation_keeps_time_for_it_and_for_its_best(clock: Clock) -> None:
    found = Limits(1.0, lambda text: None)
    found.stepped(10)
    found.saved(100)
    found.evaluated(300)
    assert found.margin == 160  # an evaluation in between is asked for when it comes
    found.looks_last = True
    assert found.margin == pytest.approx(160 + 330 + 150 + 36)
    found.evaluated(1801)
    assert found.margin == 160  # more than half of a call: nothing would be trained


def test_an_evaluation_is_made_where_it_is_known_to_fit(clock: Clock) -> None:
    found = Limits(1.0, lambda text: None)
    clock.now += 3600 - 360
    assert found.may_look  # nobody has timed one: a tenth of the call
    clock.now += 1
    assert not found.may_look
    assert found.why_not_look() == "how long it takes is not known yet, and 6 min of this call are left"
    found.evaluated(200)
    found.saved(159)
    assert found.may_look
    clock.now += 1
    assert not found.may_look
    assert found.why_not_look() == "it takes 3 min, and 6 min of this call are left"
    assert Limits(None, lambda text: None).may_look


def test_a_call_that_does_not_know_how_long_a_save_takes_makes_one_early(clock: Clock) -> None:
    found = Limits(1.0, lambda text: None)
    clock.now += 71
    assert not found.wants_save
    clock.now += 1
    assert found.wants_save
    found.saved(10)
    assert not found.wants_save
    known = Limits(1.0, lambda text: None)
    known.know({"save": 10.0})
    unlimited = Limits(None, lambda text: None)
    clock.now += 3000
    assert not known.wants_save
    assert not unlimited.wants_save


def test_what_is_left_for_steps_is_without_what_the_end_needs(clock: Clock) -> None:
    found = Limits(1.0, lambda text: None)
    found.saved(100)
    clock.now += 450
    assert found.left_s == 3000
    clock.now += 3300
    assert found.left_s == 0
    assert Limits(None, lambda text: None).left_s is None


def test_the_forecast_is_for_what_is_left_of_a_limit_and_has_a_date_where_it_is_another_day(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    evening = 20 * 3600.0
    times = SimpleNamespace(time=lambda: evening, localtime=time.gmtime, strftime=time.strftime)
    monkeypatch.setattr(forecast, "time", times)
    supply: Any = SimpleNamespace(n_batches=lambda: 100)

    def told(left: int | None, limit: Limits) -> str:
        return forecast.forecast(1.0, left, limit.left_s, supply, torch.device("cpu")).split(";")[0]

    found = Limits(1.0, lambda text: None)
    found.saved(100)
    clock.now += 450
    assert told(None, found) == "3,000 steps (30.0 epochs) at 1 steps/s: about 50 min, until 20:50"
    assert told(9000, found) == told(None, found)
    assert told(600, found).endswith("about 10 min, until 20:10")
    assert told(5 * 3600, Limits(None, print)).endswith("about 5.0 h, until 1970-01-02 01:00")


def test_the_next_call_knows_how_long_things_take(clock: Clock, tmp_path: Path) -> None:
    def call(hours: float | None = 1.0) -> Limits:
        made = Limits(hours, lambda text: None)
        made.remember(tmp_path)
        return made

    call(None).evaluated(7)
    assert call().look_s is None
    first = call()
    first.saved(10)
    first.evaluated(100)
    first.evaluated(90)
    second = call()
    assert (second.look_s, second.margin) == (100, 15)
    second.evaluated(40)  # it got faster
    assert (second.look_s, call().look_s, call().margin) == (40, 40, 15)
    (tmp_path / limits.DURATIONS).write_text("{")
    assert call().look_s is None


def test_a_call_that_is_killed_in_an_evaluation_is_remembered(clock: Clock, tmp_path: Path) -> None:
    tried = []
    for _ in range(3):
        killed = Limits(1.0, lambda text: None)
        killed.remember(tmp_path)
        tried.append(killed.may_time_look)
        killed.looking()
    assert tried == [True, True, False]


def loss(model: nn.Module, batch: fl.Batch) -> Tensor:
    out: Tensor = model(batch["x"].float()[:, None]).square().mean()
    return out


def workload(clock: Clock) -> fl.Workload:
    """Every step takes ten minutes on the clock."""

    def slow(model: nn.Module, batch: fl.Batch) -> Tensor:
        if torch.is_grad_enabled():
            clock.now += 600 / 3 if clock.now < 1500 else 600  # rehearsals are short
        return loss(model, batch)

    rows = [{"key": str(i), "x": float(i)} for i in range(16)]
    return fl.Workload(
        fl.Pipeline(fl.Source.table(rows)), model=fl.lazy(nn.Linear, 1, 1), loss=slow, name="slow",
        optimizer=lambda model: torch.optim.SGD(model.parameters(), 1e-4), batch_size=4,
        training={"log_every": 1},
    )  # fmt: skip


@pytest.fixture
def hours(clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Clock:
    times = SimpleNamespace(
        monotonic=clock.monotonic, perf_counter=clock.monotonic, time=clock.monotonic,
        strftime=lambda *a: "12:00", localtime=lambda *a: None,
    )  # fmt: skip
    for module in (forecast, job, loop, meter, run):
        monkeypatch.setattr(module, "time", times)
    monkeypatch.chdir(tmp_path)
    return clock


def train(clock: Clock, **options: Any) -> Any:
    return fl.train(workload(clock), out="run", live=True, device="cpu", quiet=True, **options)


def test_hours_alone_are_wsd_and_the_next_call_goes_on_from_before_the_fall(hours: Clock) -> None:
    first = train(hours, max_hours=5)
    rates = [line["lr"] for line in read_metrics("run")]
    assert first.stopped == "the time limit of 5 h"
    assert rates[0] == pytest.approx(1e-4)
    falling = [i for i, rate in enumerate(rates) if rate < 0.999e-4]
    assert falling
    assert rates[falling[0] :] == sorted(rates[falling[0] :], reverse=True)
    stable = Checkpoints(Path("run/checkpoints")).labelled("stable")
    assert stable is not None
    kept = load(stable)
    assert kept.step <= falling[0] + 1
    second = train(hours, max_hours=5)
    again = read_metrics("run")
    after = [line["lr"] for line in again if line["step"] == kept.step + 1]
    assert after == [pytest.approx(1e-4)]  # at the peak again, not where the fall had ended
    assert second.step > first.step


def test_a_first_call_whose_saves_are_slow_ends_in_time(
    hours: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(self: Checkpoints, *given: Any, **options: Any) -> Path:
        hours.now += 3000
        return write(self, *given, **options)

    write = Checkpoints.save
    monkeypatch.setattr(Checkpoints, "save", save)
    began = hours.now
    result = train(hours, max_hours=6, steps=1000, training={"save_minutes": 1000})
    assert result.stopped == "the time limit of 6 h"
    assert hours.now - began <= 6 * 3600
    assert result.step > 10


def test_hours_of_a_schedule_are_counted_over_calls(hours: Clock) -> None:
    train(hours, max_hours=2, schedule_hours=8, training={"schedule": "linear"})
    train(hours, max_hours=2, schedule_hours=8, training={"schedule": "linear"})
    rates = [line["lr"] for line in read_metrics("run")]
    assert rates == sorted(rates, reverse=True)
    elapsed = [line["time/elapsed_s"] for line in read_metrics("run")]
    assert elapsed == sorted(elapsed)
    assert rates[-1] == pytest.approx(1e-4 * (1 - elapsed[-2] / (8 * 3600)), rel=0.05)


def held_out(clock: Clock, seconds: float, made: list[float]) -> fl.Workload:
    def score(model: nn.Module, feed: Any) -> dict[str, float]:
        made.append(clock.now)
        clock.now += seconds
        return {"n": 1.0}

    return replace(workload(clock), evaluate=score, splits={"train": 0.5, "val": 0.5})


def test_hours_alone_end_with_an_evaluation_that_fits_from_the_second_call_on(hours: Clock) -> None:
    made: list[float] = []
    work = held_out(hours, 1500, made)
    options: dict[str, Any] = {"out": "run", "live": True, "device": "cpu", "quiet": True, "max_hours": 5}
    settings = {"save_minutes": 1000, "save_every": 3}  # a first call of fewer minutes does not try
    for call in range(3):
        began, n = hours.now, len(made)
        result = fl.train(work, **options, training=settings)
        assert result.stopped == "the time limit of 5 h"
        assert hours.now - began <= 5 * 3600
        assert len(made) - n == (0, 2, 1)[call]  # left; one to time it, and the last; the last
    steps = [line["step"] for line in read_metrics("run") if line["kind"] == "eval"]
    assert steps[-1] == result.step


def test_a_long_first_call_times_one_itself_after_a_save(hours: Clock) -> None:
    made: list[float] = []
    began = hours.now
    result = fl.train(
        held_out(hours, 1500, made), out="run", live=True, device="cpu", quiet=True, max_hours=5
    )
    assert hours.now - began <= 5 * 3600
    steps = [line["step"] for line in read_metrics("run") if line["kind"] == "eval"]
    assert len(steps) == 2
    assert steps[-1] == result.step


def test_one_that_takes_longer_than_a_call_is_left_out_and_steps_are_made(hours: Clock) -> None:
    made: list[float] = []
    work = held_out(hours, 6 * 3600, made)
    options: dict[str, Any] = {"out": "run", "live": True, "device": "cpu", "quiet": True, "max_hours": 5}
    settings = {"save_minutes": 1000}
    results = [fl.train(work, **options, training=settings).step for _ in range(2)]
    began = hours.now
    third = fl.train(work, **options, training=settings)
    assert len(made) == 1
    assert hours.now - began <= 5 * 3600
    assert third.step > results[0]
