"""What the agent does between blocks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from frostline.profiler.inside import agent as module
from frostline.profiler.inside.agent import Agent
from frostline.profiler.inside.phases import Block

TURNS = [Block("compute", 4), Block("half", 4), Block("compute", 4), Block("half", 4)]


def agent(*, queue: list[Block], done: list[str]) -> Any:
    """As much of one as blocks need."""
    nothing = lambda *_: None  # noqa: E731
    return SimpleNamespace(
        queue=queue, blocks=[{"phase": phase, "times": [1.0]} for phase in done], plan=[Block("A", 2)],
        unsure=0, asked=100, graphs=1, clock=SimpleNamespace(times=list), _usual=lambda: 0.01,
        _leave=nothing, _enter=lambda phase: True, note_progress=nothing, _start_block=nothing, _over=nothing,
    )  # fmt: skip


@pytest.mark.parametrize(("graphs", "left", "asked"), [(2, 0, 80), (1, 4, 100)])
def test_what_was_compiled_for_half_a_batch_ends_the_turns(
    monkeypatch: pytest.MonkeyPatch, graphs: int, left: int, asked: int
) -> None:
    """It may run in the whole batch too from then on, and the whole one has been measured."""
    monkeypatch.setattr(module, "_graphs", lambda: graphs)
    found = agent(queue=[*TURNS], done=["compute", "half"])
    Agent._close_block(found, 1.0)
    assert (len(found.queue), found.asked) == (left, asked)
    assert found.blocks[-1]["phase"].startswith("half")


@pytest.mark.parametrize(("done", "first"), [(["A", "compute"], "A"), (["A", "compute", "half"], "half")])
def test_passes_come_again_before_half_a_batch_was_tried_and_never_after(
    monkeypatch: pytest.MonkeyPatch, done: list[str], first: str
) -> None:
    monkeypatch.setattr(module, "more", lambda *_: [Block("A", 2), Block("B", 2)])
    found = agent(queue=[Block("half", 4)], done=done)
    Agent._next(found)
    assert found.block.phase == first


SETTINGS = {"keep_going": False, "trace": False, "quiet": True, "steps": 6, "warmup": 2, "replay": False}


def test_an_error_of_ours_never_reaches_the_script_also_where_the_end_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Agent({**SETTINGS, "folder": str(tmp_path)})

    def fails(*_: Any) -> None:
        raise AssertionError("the stack of modes is another one")

    monkeypatch.setattr(found, "finish", fails)
    found.guarded(fails)()
    said = capsys.readouterr().err
    assert "let the script go on: AssertionError" in said
    assert "what was measured is lost" in said


def test_all_but_the_last_steps_are_written_where_a_block_cannot_be_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Agent({**SETTINGS, "folder": str(tmp_path)})
    found.n, found.blocks = 1, [{"phase": "A", "times": []}]

    def fails(*_: Any) -> None:
        raise AssertionError("the stack of modes is another one")

    monkeypatch.setattr(found, "_close_block", fails)
    found.finish("its own end")
    assert (tmp_path / f"process-{found.pid}.json").exists()
    assert (found.blocks, len(found.notes)) == ([], 1)


@pytest.mark.parametrize(("measured", "notes"), [([{"phase": "A", "times": []}], 1), ([], 0)])
def test_a_training_that_comes_after_calls_begins_again(
    tmp_path: Path, measured: list[Any], notes: int
) -> None:
    """Features are computed first: that was no training."""
    found = Agent({**SETTINGS, "folder": str(tmp_path)})
    found.starts.by_calls, found.n, found.boundary_name = True, 30, "call of Encoder"
    found.block, found.blocks, found.held = Block("A", 2), measured, True
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1)
    try:
        found._stepped(optimizer, (), {})
        assert (found.starts.by_calls, found.n, found.block, found.held) == (False, 0, None, False)
        assert len(found.notes) == notes
        found._stepped(optimizer, (), {})
        assert (found.n, found.boundary_name) == (1, "SGD.step")
    finally:
        found.modules.end()
