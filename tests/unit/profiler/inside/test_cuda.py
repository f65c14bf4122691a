"""The device's clock and its settings, with a device that is made up; and a real one where there is any."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from frostline.profiler.inside import cuda
from frostline.profiler.inside.agent import Agent
from frostline.profiler.inside.phases import Block

SETTINGS = {"keep_going": True, "quiet": True, "steps": 6, "warmup": 2, "trace": False, "replay": False}


class Event:
    """Recorded when the device gets there: `now`, in milliseconds."""

    now = 0.0

    def __init__(self) -> None:
        self.at = Event.now

    def elapsed_time(self, other: Event) -> float:
        return other.at - self.at


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    Event.now = 0.0
    monkeypatch.setattr(cuda, "used", lambda: True)
    monkeypatch.setattr(cuda, "event", lambda device=None: Event())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_stats", dict)


def test_without_a_device_there_are_no_times() -> None:
    clock = cuda.Clock()
    clock.begin()
    clock.step()
    assert clock.times() == []


@pytest.mark.usefixtures("device")
def test_the_devices_clock_gives_each_steps_time() -> None:
    clock = cuda.Clock()
    for _ in range(2):  # a second block begins anew
        clock.begin()
        for took in (3, 5):
            Event.now += took
            clock.step()
        assert clock.times() == pytest.approx([0.003, 0.005])


@pytest.mark.usefixtures("device")
def test_a_blocks_steps_take_what_the_device_took_not_what_the_host_did(tmp_path: Path) -> None:
    """The host runs ahead of the device: it sees microseconds."""
    agent = Agent({**SETTINGS, "folder": str(tmp_path)})
    agent.block, agent.left, agent.queue = Block("A", 3, 0), 3, [Block("bare", 1, 9)]
    agent._start_block()
    for _ in range(3):
        Event.now += 40
        agent.boundary("step")
    block = agent.blocks[0]
    assert block["times"] == pytest.approx([0.04] * 3)
    assert block["device_s"] == pytest.approx(0.12)
    assert block["end"] - block["start"] < 0.1


@pytest.mark.usefixtures("device")
def test_a_device_that_broke_costs_the_last_block_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frostline.profiler.inside.record._device", lambda: {"name": "broken"})
    agent = Agent({**SETTINGS, "folder": str(tmp_path)})
    agent.handles = []
    for phase in ("A", "bare"):
        agent.block, agent.left = Block(phase, 2, 0), 2
        agent._start_block()
        agent.boundary("step")
        if phase == "A":
            agent.queue = [Block("bare", 1, 9)]
            agent.boundary("step")

    def broken() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    agent.finish("an exception of the script")
    found = json.loads((tmp_path / f"process-{agent.pid}.json").read_text())
    assert [block["phase"] for block in found["blocks"]] == ["A"]
    assert "device-side assert" in found["notes"][0]


def test_nothing_of_a_step_that_is_captured_as_a_graph_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = Agent({**SETTINGS, "folder": str(tmp_path)})
    monkeypatch.setattr(cuda, "capturing", lambda: True)
    agent.boundary("step")
    assert agent.n == 0


@pytest.fixture
def precision() -> Iterator[Any]:
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = matmul.fp32_precision, conv.fp32_precision
    yield
    matmul.fp32_precision, conv.fp32_precision = before


@pytest.mark.usefixtures("precision")
@pytest.mark.parametrize("wanted", ["tf32", "ieee"])
def test_rounding_is_known_whichever_way_it_was_asked_for(wanted: str) -> None:
    """torch refuses to tell the old switch once the new one was used."""
    torch.backends.cuda.matmul.fp32_precision = wanted
    torch.backends.cudnn.conv.fp32_precision = wanted
    assert cuda.rounded("matmul") == cuda.rounded("conv") == (wanted == "tf32")


@pytest.mark.gpu
def test_on_a_gpu_steps_of_the_clock_add_up_and_nothing_waits() -> None:
    x = torch.randn(4096, 4096, device="cuda")
    clock = cuda.Clock()
    clock.begin()
    for _ in range(5):
        for _ in range(8):
            x = torch.nn.functional.normalize(x @ x)
        clock.step()
    torch.cuda.synchronize()
    times = clock.times()
    assert len(times) == 5
    assert all(t > 0 for t in times)
