"""What is measured is right, and measuring it makes nothing wait."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from frostline.trainer import gauges
from frostline.trainer.gauges import Busy, memory

# memory


def test_the_memory_of_the_process_is_that_of_the_operating_system() -> None:
    found = memory("cpu")
    assert set(found) == {"rss_bytes", "peak_rss_bytes"}
    assert found["rss_bytes"] == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    assert found["peak_rss_bytes"] >= found["rss_bytes"]


def test_the_peak_stays_when_memory_is_given_back() -> None:
    before = memory("cpu")["rss_bytes"]
    held = torch.ones(200 << 20, dtype=torch.uint8)
    during = memory("cpu")
    del held
    after = memory("cpu")
    assert during["rss_bytes"] > before + (150 << 20)
    assert after["rss_bytes"] < during["rss_bytes"] - (150 << 20)
    assert after["peak_rss_bytes"] > before + (150 << 20)


def test_cuda_figures_come_from_the_counters_of_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {
        "allocated_bytes": {"all": {"current": 60, "peak": 90}, "small_pool": {"current": 1, "peak": 2}},
        "reserved_bytes": {"all": {"current": 80, "peak": 100}},
        "inactive_split_bytes": {"all": {"current": 7, "peak": 9}},
        "num_alloc_retries": 3,
        "num_ooms": 1,
    }
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: stats)
    found = memory("cuda:0")
    assert {name: value for name, value in found.items() if "rss" not in name} == {
        "allocated_bytes": 60,
        "peak_allocated_bytes": 90,
        "reserved_bytes": 80,
        "peak_reserved_bytes": 100,
        "inactive_split_bytes": 7,
        "alloc_retries": 3,
        "ooms": 1,
        "fragmentation": 0.25,
    }
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: {})  # before any tensor
    assert memory("cuda")["fragmentation"] == 0


@pytest.mark.gpu
def test_cuda_figures_follow_what_is_allocated() -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = memory("cuda")
    held = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    during = memory("cuda")
    del held
    after = memory("cuda")
    assert during["allocated_bytes"] - before["allocated_bytes"] == 64 << 20
    assert after["allocated_bytes"] == before["allocated_bytes"]
    assert after["peak_allocated_bytes"] == during["allocated_bytes"]
    assert after["reserved_bytes"] >= 64 << 20  # kept by the allocator
    assert after["fragmentation"] == 1 - after["allocated_bytes"] / after["reserved_bytes"]


# Busy


class Device:
    """A queue and a clock: an event's time is known once the device has come to it."""

    def __init__(self) -> None:
        self.now, self.reached, self.made = 0.0, 0.0, 0

    def event(self, **options: Any) -> SimpleNamespace:
        assert options == {"enable_timing": True}
        self.made += 1
        made = SimpleNamespace(at=math.nan)
        made.record = lambda: setattr(made, "at", self.now)
        made.query = lambda: self.reached >= made.at
        made.elapsed_time = lambda other: self._between(made, other)
        return made  # without `synchronize`: waiting would be an AttributeError

    def _between(self, start: Any, end: Any) -> float:
        assert start.query()
        assert end.query()
        return end.at - start.at

    def step(self, busy: Busy, *, idle: float, work: float) -> None:
        self.now += idle
        busy.begin()
        self.now += work
        busy.end()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    return made


def test_busy_is_the_share_of_the_time_since_the_last_reading(device: Device) -> None:
    busy = Busy("cuda")
    for _ in range(10):
        device.step(busy, idle=1, work=3)
    device.reached = device.now
    assert busy.read() == 30 / 39  # the wait before the first step is not seen
    for _ in range(10):
        device.step(busy, idle=3, work=1)
    device.reached = device.now
    assert busy.read() == 10 / 40
    assert busy.read() is None


def test_steps_that_the_device_has_not_done_wait_for_the_next_reading(device: Device) -> None:
    busy = Busy("cuda")
    for _ in range(4):
        device.step(busy, idle=0, work=2)
    assert busy.read() is None
    device.reached = 5  # two steps are done, the third is not
    assert busy.read() == 1
    device.step(busy, idle=4, work=2)
    device.reached = device.now
    assert busy.read() == 6 / 10


def test_an_evaluation_between_steps_is_not_idle_time(device: Device) -> None:
    busy = Busy("cuda")
    device.step(busy, idle=0, work=2)
    busy.pause()
    device.step(busy, idle=1000, work=2)
    device.step(busy, idle=4, work=2)
    device.reached = device.now
    assert busy.read() == 6 / 10


def test_a_step_that_failed_is_forgotten(device: Device) -> None:
    busy = Busy("cuda")
    device.step(busy, idle=0, work=2)
    device.now += 1
    busy.begin()  # out of memory in the middle of it
    device.step(busy, idle=1, work=2)
    busy.end()  # of nothing
    device.reached = device.now
    assert busy.read() == 4 / 6


def test_events_are_used_again(device: Device) -> None:
    busy = Busy("cuda")
    for _ in range(10_000):
        device.step(busy, idle=1, work=1)
        device.reached = device.now - 20
    assert device.made < 200


def test_on_the_cpu_it_is_the_time_in_steps_over_all_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(gauges, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    busy = Busy("cpu")
    for idle, work in [(0, 3), (1, 3), (2, 3)]:
        clock.now += idle
        busy.begin()
        clock.now += work
        busy.end()
    assert busy.read() == pytest.approx(9 / 12)


def test_on_other_devices_nothing_is_claimed() -> None:
    busy = Busy("meta")
    busy.begin()
    busy.end()
    assert busy.read() is None


@pytest.mark.gpu
def test_a_gpu_that_waits_for_the_host_is_not_busy() -> None:
    def share(pause_cycles: int) -> float:
        busy = Busy("cuda")
        for _ in range(5):
            busy.begin()
            torch.cuda._sleep(20_000_000)
            busy.end()
            torch.cuda._sleep(pause_cycles)
        torch.cuda.synchronize()
        found = busy.read()
        assert found is not None
        return found

    assert share(0) > 0.95
    assert 0.4 < share(20_000_000) < 0.65  # 5 of 9
