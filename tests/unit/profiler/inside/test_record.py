"""What an agent writes, as readers find it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from frostline.profiler.inside import modules as code
from frostline.profiler.inside import record
from frostline.profiler.inside.calls import Inputs
from frostline.profiler.inside.instruments import Instruments
from frostline.profiler.inside.modules import Modules
from frostline.profiler.inside.phases import Block
from frostline.profiler.reading import _modules
from frostline.profiler.rows import Spans as Rows


@pytest.fixture(autouse=True)
def only_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "_trained", set)
    monkeypatch.setattr(code, "_compiled_in_place", list)


@pytest.fixture
def agent(tmp_path: Path) -> Any:
    """What `record` looks at of one."""
    return SimpleNamespace(
        pid=71, folder=tmp_path, world=1, boundary_name="SGD.step", n=9, warmup=3, blocks=[], notes=["a"],
        modules=Modules(lambda module: None), inputs={}, swallowed=0, instruments=Instruments(None),
        settings={"steps": 50, "trace": False}, block=None, queue=[],
        starts=SimpleNamespace(missed=0), loaders=SimpleNamespace(summary=list, prepared=[]),
    )  # fmt: skip


def written(agent: Any) -> dict[str, Any]:
    record.write(agent, "stopped")
    found = json.loads((agent.folder / "process-71.json").read_text())
    assert [path.name for path in agent.folder.iterdir()] == ["process-71.json"]
    return dict(found)


def call(agent: Any, net: nn.Module, *, grad: bool = True) -> None:
    agent.modules.begin()
    with torch.set_grad_enabled(grad):
        net(torch.ones(2, 2))
    agent.modules.steps += 1
    agent.modules.end()


def test_a_process_says_what_it_is_and_how_it_ended(agent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    found = written(agent)
    assert (found["pid"], found["rank"], found["ended"], found["steps"], found["warmup"]) == (
        71,
        3,
        "stopped",
        9,
        3,
    )
    assert (found["boundary"], found["notes"], found["torch"]) == ("SGD.step", ["a"], torch.__version__)
    if not torch.cuda.is_available():
        assert found["device"] == {"name": "cpu"}


def test_writing_again_replaces_the_whole_file(agent: Any) -> None:
    written(agent)
    agent.n = 10
    assert written(agent)["steps"] == 10


def test_what_was_planned_and_did_not_come_is_told(agent: Any) -> None:
    agent.block, agent.queue = Block("B", 2), [Block("A", 2), Block("B", 2), Block("look", 2)]
    found = written(agent)
    assert (found["asked"], found["left"]) == (50, ["B", "A", "look"])


def test_modules_are_told_when_all_of_them_are_known(agent: Any) -> None:
    net = nn.Linear(2, 2)
    agent.modules.begin()
    net(torch.ones(2, 2))
    assert written(agent)["modules"] == []
    agent.modules.end()
    assert [m["name"] for m in written(agent)["modules"]] == ["Linear"]


def test_inputs_are_told_by_their_modules_name(agent: Any) -> None:
    net = nn.Linear(2, 2).requires_grad_(False)
    call(agent, net)
    agent.inputs[id(net)] = Inputs(net)
    net(torch.ones(3, 2))
    (told,) = written(agent)["inputs"]
    assert told.pop("s") > 0
    assert told == {"name": "Linear", "calls": 1, "looked": 1, "rows": 3, "repeats": 2, "moved": False}


def test_what_is_given_by_something_trained_never_comes_again(agent: Any) -> None:
    """A trained adapter before a frozen language model: its outputs are other ones in every step."""
    net = nn.Linear(2, 2).requires_grad_(False)
    call(agent, net)
    agent.inputs[id(net)] = Inputs(net)
    net(torch.ones(3, 2, requires_grad=True))
    assert written(agent)["inputs"][0]["moved"]
    assert written(agent)["modules"][0]["frozen"] == ""


def test_a_teacher_that_follows_its_student_is_not_told_as_frozen(agent: Any) -> None:
    """It runs without gradients and no optimiser has it, but its weights change: storing would be wrong."""
    net = nn.Linear(2, 2)
    call(agent, net, grad=False)
    agent.inputs[id(net)] = Inputs(net)
    with torch.no_grad():
        net.weight.mul_(0.99)
    raw = {**written(agent), "spans": []}
    assert raw["inputs"][0]["moved"]
    assert [m.frozen for m in _modules(raw, Rows(raw))] == [""]


def test_counters_only_grow() -> None:
    before, after = record.counters(), record.counters()
    assert {*before} == {"faults", "retries", "swapped"}
    assert all(after[name] >= before[name] for name in before)
