"""Seconds and bytes that a freeze will take, from made-up measurements."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import frostline as fl
from frostline.errors import StoreFull
from frostline.execution import Block, Execution
from frostline.freezer.forecast import Forecast, Probe, forecast, probe

GPU, CPU = torch.device("cuda"), torch.device("cpu")
Usage = namedtuple("Usage", "total used free")
PROBED = Probe(Block(["a"], {}), sample_s=0.08, chunk_s=0.03, sample_bytes=1, kinds={})


@pytest.fixture(autouse=True)
def disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 0, 10**9))


@pytest.mark.parametrize(
    ("device", "workers", "seconds"),
    [(CPU, 4, 50.0), (GPU, 4, 30.0), (GPU, 1, 80.0), (CPU, 0, 110.0)],
    ids=["shared cores", "the device is slower", "the worker is slower", "at least one worker"],
)
def test_seconds(tmp_path: Path, device: torch.device, workers: int, seconds: float) -> None:
    found = forecast(PROBED, 1000, workers, device, {"x": 100}, tmp_path)
    assert found.seconds == pytest.approx(seconds)


def test_bytes_are_those_of_all_fields_with_a_margin(tmp_path: Path) -> None:
    found = forecast(PROBED, 1000, 1, CPU, {"x": 4000, "_source": 80}, tmp_path / "not" / "there" / "yet")
    assert (found.samples, found.bytes, found.free) == (1000, int(4080 * 1000 * 1.02), 10**9)


def test_nothing_measured_takes_no_time(tmp_path: Path) -> None:
    assert forecast(None, 5, 2, CPU, {}, tmp_path).seconds == 0


def test_a_disk_without_room_is_refused_with_what_to_do(tmp_path: Path) -> None:
    Forecast(1000, 1.0, 5 * 10**8, 10**9).refuse_if_full(tmp_path)
    with pytest.raises(
        StoreFull, match=r"needs about 0\.90 GB for 1,000 samples, and 1\.00 GB are free"
    ) as caught:
        Forecast(1000, 1.0, 9 * 10**8, 10**9).refuse_if_full(tmp_path)  # 256 MB stay free
    assert all(option in str(caught.value) for option in ("--out", "--codec", "--cut", "--limit"))


def source(n: int) -> fl.Source:
    return fl.Source.table([{"key": f"k{i}", "x": float(i)} for i in range(n)])


def halved(x: float) -> Any:
    if x < 3:
        raise ValueError("too small")
    return torch.full((2,), x / 2)


def execution(n: int, fn: Any = halved) -> Execution:
    net = fl.Stage("y", lambda h: h.sum(1), reads="h", on="device", batch_size=4)
    return Execution(fl.Pipeline(source(n), fl.Stage("h", fn, reads="x"), net), ["y"])


def test_the_first_samples_that_work_are_computed() -> None:
    found = probe(execution(20), range(20), None)
    assert found.block.keys == ["k3", "k4", "k5", "k6"]
    assert found.block.columns["y"].tolist() == [3, 4, 5, 6]
    assert list(found.block.failed) == ["k0", "k1", "k2"]
    assert found.sample_bytes == 8
    assert found.kinds == {"h": "float32 [2]"}
    assert found.sample_s > 0
    assert found.chunk_s > 0


def test_it_does_not_try_for_ever() -> None:
    found = probe(execution(100, lambda x: 1 / 0), range(100), None)
    assert not found.block.keys
    assert len(found.block.failed) == 16
    told = found.none_worked()
    assert told.startswith("None of the first 16 samples could be computed; nothing was written:")
    assert told.count("\n  - ") == 10


def test_fewer_samples_than_a_chunk_are_enough() -> None:
    assert probe(execution(5), [3, 4], None).block.keys == ["k3", "k4"]
    assert probe(execution(5), [], None).block.keys == []


def test_given_fields_are_read_and_not_computed() -> None:
    net = fl.Stage("y", lambda h: h.sum(1), reads="h", on="device", batch_size=4)
    data = fl.Pipeline(source(6), fl.Stage("h", lambda x: 1 / 0, reads="x"), net)
    found = probe(Execution(data, ["y"], given=["h"]), range(6), lambda keys: {"h": torch.ones(len(keys), 3)})
    assert found.block.columns["y"].tolist() == [3, 3, 3, 3]


def test_the_commonest_shape_among_them_is_the_usual_one() -> None:
    found = probe(execution(20, lambda x: torch.zeros(3 if x == 1 else 2)), range(20), None)
    assert found.kinds == {"h": "float32 [2]"}
    assert list(found.block.failed) == ["k1"]


def test_it_looks_on_when_a_stage_of_chunks_takes_none_of_the_first() -> None:
    def net(h: torch.Tensor) -> torch.Tensor:
        if (h < 10).any():
            raise ValueError("too small for the net")
        return h.sum(1)

    stage = fl.Stage("y", net, reads="h", on="device", batch_size=1)
    data = fl.Pipeline(source(40), fl.Stage("h", lambda x: torch.full((2,), x), reads="x"), stage)
    run = Execution(data, ["y"])
    found = probe(run, range(40), None, 20)
    assert found.block.keys == ["k10"]
    assert list(found.block.failed) == [f"k{i}" for i in range(10)]
    short = probe(run, range(40), None, 8)
    assert not short.block.keys
    assert short.none_worked().startswith("None of the first 8 samples could be computed")
    assert len(probe(run, range(40), None).block.failed) == 4  # four blocks, if nothing is said


def test_values_that_no_field_can_hold_are_passed_over() -> None:
    def sparse(x: float) -> torch.Tensor:
        return torch.eye(2).to_sparse() if x == 1 else torch.eye(2)

    run = Execution(fl.Pipeline(source(4), fl.Stage("y", sparse, reads="x")), ["y"])
    found = probe(run, range(4), None)
    assert found.block.keys == ["k0", "k2", "k3"]
    assert "sparse tensor" in found.block.failed["k1"].reason


def test_a_probe_tells_waiting_from_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(wall=0.0, spent=0.0)
    clocks = SimpleNamespace(perf_counter=lambda: clock.wall, thread_time=lambda: clock.spent)
    monkeypatch.setattr("frostline.freezer.forecast.time", clocks)

    def sleeps(x: float) -> torch.Tensor:
        clock.wall += 0.02
        return torch.zeros(2)

    def computes(x: float) -> torch.Tensor:
        clock.spent += 0.02
        return sleeps(x)

    def half(x: float) -> torch.Tensor:
        clock.spent += 0.01
        return sleeps(x)

    found = [probe(execution(4, fn), range(4), None) for fn in (sleeps, half, computes)]
    assert [each.waiting for each in found] == pytest.approx([1.0, 0.5, 0.0], abs=1e-9)
    assert [each.sample_s for each in found] == pytest.approx([0.02] * 3)
