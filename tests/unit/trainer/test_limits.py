"""When a training ends: its margin, the clock, and hours that are bound to one call."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import frostline as fl
from frostline.trainer import forecast, job, limits, loop, run
from frostline.trainer.checkpoint import Checkpoints, load
from frostline.trainer.limits import Limits
from frostline.trainer.recorder import read_metrics


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


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
    for module in (forecast, job, loop, run):
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


def test_hours_of_a_schedule_are_counted_over_calls(hours: Clock) -> None:
    train(hours, max_hours=2, schedule_hours=8, training={"schedule": "linear"})
    train(hours, max_hours=2, schedule_hours=8, training={"schedule": "linear"})
    rates = [line["lr"] for line in read_metrics("run")]
    assert rates == sorted(rates, reverse=True)
    elapsed = [line["time/elapsed_s"] for line in read_metrics("run")]
    assert elapsed == sorted(elapsed)
    assert rates[-1] == pytest.approx(1e-4 * (1 - elapsed[-2] / (8 * 3600)), rel=0.05)
