"""What the agent does between blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

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
