"""Nested stretches of time: who is inside of whom, also after exceptions and in other threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.profiler.inside import agent as agents
from frostline.profiler.inside import spans as code
from frostline.profiler.inside.parts import Parts
from frostline.profiler.inside.phases import Block
from frostline.profiler.inside.spans import Spans


class Label:
    """Stands for torch's record_function."""

    def __init__(self, told: list[str], name: str) -> None:
        self.told, self.name = told, name

    def __enter__(self) -> None:
        self.told.append(f"+{self.name}")

    def __exit__(self, *error: object) -> None:
        self.told.append(f"-{self.name}")


def labels(told: list[str]) -> Callable[[str], Label]:
    return lambda name: Label(told, name)


def test_spans_nest_and_know_their_step() -> None:
    spans = Spans(cuda=False)
    a = spans.enter("optimizer", "SGD.step")
    b = spans.enter("forward", "Model")
    spans.leave(b)
    c = spans.enter("backward", "backward")
    spans.leave(c)
    spans.leave(a)
    spans.boundary()
    spans.leave(spans.enter("forward", "Model"))
    spans.boundary()
    lines = spans.lines()
    assert [line[:4] for line in lines] == [
        ["optimizer", "SGD.step", -1, 0], ["forward", "Model", 0, 0], ["backward", "backward", 0, 0],
        ["forward", "Model", -1, 1],
    ]  # fmt: skip
    assert all(line[8] == 0 for line in lines)
    assert lines[0][4] <= lines[1][4] <= lines[1][5] <= lines[2][4] <= lines[2][5] <= lines[0][5]
    (first, _), (second, _) = spans.bounds()
    assert lines[0][5] <= first <= lines[3][4] <= lines[3][5] <= second


def test_what_an_exception_left_open_ends_with_what_is_around_it() -> None:
    told: list[str] = []
    spans = Spans(cuda=False, label=labels(told))
    outer = spans.enter("forward", "Model")
    spans.enter("forward", "Model.head")  # raises: nobody leaves it
    spans.leave(outer)
    after = spans.enter("backward", "backward")
    spans.leave(after)
    assert [s.parent for s in spans.found] == [-1, 0, -1]
    assert all(s.end >= s.start for s in spans.found)
    names = ["forward:Model", "forward:Model.head", "backward:backward"]
    assert told[:4] == [
        f"{sign}frostline:{names[i]}" for sign, i in ("+0", "+1", "-1", "-0") for i in [int(i)]
    ]


def test_a_span_that_is_open_at_the_end_is_marked_as_none() -> None:
    spans = Spans(cuda=False)
    spans.enter("forward", "Model")
    spans.boundary()
    assert spans.lines() == [["forward", "Model", -1, -1, 0.0, 0.0, 0.0, 0.0, 1, 0.0]]


def test_leaving_twice_does_nothing() -> None:
    spans = Spans(cuda=False)
    outer = spans.enter("optimizer", "o")
    inner = spans.enter("forward", "f")
    spans.leave(inner)
    end = spans.found[inner].end
    spans.leave(inner)
    assert spans.found[inner].end == end
    assert spans.found[outer].end < 0
    spans.leave(outer)


def test_another_thread_has_its_own_nest_and_is_beside() -> None:
    spans = Spans(cuda=False)
    mine = spans.enter("forward", "Model")

    def other() -> None:
        a = spans.enter("save", "torch.save")
        b = spans.enter("sync", "item")
        spans.leave(mine)  # not its own: nothing happens
        spans.leave(b)
        spans.leave(a)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    spans.leave(mine)
    assert [(s.name, s.parent, s.beside) for s in spans.found] == [
        ("Model", -1, False), ("torch.save", -1, True), ("item", 1, True),
    ]  # fmt: skip


def test_the_trace_is_told_where_steps_end() -> None:
    """`kernels._device` looks for these: without them what comes before a trace's first kernel is lost."""
    told: list[str] = []
    spans = Spans(cuda=False, label=labels(told))
    spans.boundary()
    assert any(name.startswith("+frostline:end") for name in told)


def test_a_blocks_clock_begins_with_its_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooking everything up takes milliseconds, before the step begins: they are none of its rows."""
    now = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    for module in (agents, code):
        monkeypatch.setattr(module, "time", clock)
    hook_up = Parts.install

    def slowly(parts: Parts) -> None:
        now[0] += 100
        hook_up(parts)

    monkeypatch.setattr(Parts, "install", slowly)
    settings = {"folder": str(tmp_path), "keep_going": True, "quiet": True, "steps": 6, "warmup": 2,
                "trace": False, "replay": False}  # fmt: skip
    agent = agents.Agent(settings)
    agent.block, agent.left = Block("B", 2, 0), 2
    agent._enter("B")
    agent._start_block()
    agent.last = now[0]
    for _ in range(2):
        now[0] += 1
        agent.boundary("step")
    assert agent.blocks[0]["times"] == [1, 1]
    assert [host for host, _ in agent.instruments.found["spans"][0]["bounds"]] == [1, 2]


@given(st.lists(st.sampled_from("([x")))
def test_any_order_of_entering_and_leaving_keeps_the_nest_whole(moves: list[str]) -> None:
    spans = Spans(cuda=False)
    open_: list[int] = []
    for move in moves:
        if move == "(":
            open_.append(spans.enter("forward", "f"))
        elif move == "[":
            spans.boundary()
        elif open_:
            spans.leave(open_.pop(0))  # the outermost, with all that is inside of it
            open_.clear()
    for i, s in enumerate(spans.found):
        assert s.parent < i
        if s.parent >= 0 and s.end >= 0:
            around = spans.found[s.parent]
            assert around.start <= s.start <= s.end
            assert around.end < 0 or s.end <= around.end


@pytest.mark.gpu
def test_on_a_gpu_spans_have_the_devices_times() -> None:
    import torch

    spans = Spans(cuda=True)
    x = torch.ones(2048, 2048, device="cuda")
    place = spans.enter("forward", "Model")
    for _ in range(20):
        x = x @ x
    spans.leave(place)
    spans.boundary()
    torch.cuda.synchronize()
    ((*_, first, last, beside, _),) = spans.lines()
    assert 0 <= first < last <= spans.bounds()[0][1]
    assert not beside


def test_what_entering_and_leaving_takes_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 1  # every look at the clock takes a second
        return now[0]

    monkeypatch.setattr(code, "time", SimpleNamespace(perf_counter=clock))
    spans = Spans(cuda=False)
    spans.leave(spans.enter("forward", "Model"))
    ((*_, start, end, _, _, _, ours),) = spans.lines()
    assert (end - start, ours) == (1, 2)
