"""What a block is watched with: on in its phase, off after it, and what it leaves behind."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from frostline.profiler.inside.instruments import Instruments
from frostline.profiler.inside.phases import PHASES


def block(instruments: Instruments, phase: str, steps: int = 1) -> None:
    teller = SimpleNamespace(spans=None)
    instruments.put_on(phase, list, [teller])
    instruments.start(phase)
    for _ in range(steps):
        if teller.spans is not None:
            teller.spans.leave(teller.spans.enter("data", "waiting"))
            teller.spans.boundary()
        float((torch.ones(2, 3) @ torch.ones(3, 4)).sum())
    instruments.take_off(steps)
    assert teller.spans is None


@pytest.mark.parametrize("phase", PHASES)
def test_everything_is_off_after_a_block(phase: str, tmp_path: Path) -> None:
    to, collects = torch.Tensor.to, gc.isenabled()
    instruments = Instruments(tmp_path / "trace.json")
    block(instruments, phase)
    assert torch.Tensor.to is to
    assert gc.isenabled() == collects
    assert instruments.spans is None
    assert instruments.parts is None
    assert (tmp_path / "trace.json").exists() == (phase == "trace")
    instruments.take_off(0)  # nothing is on: nothing happens


def test_spans_of_each_block_of_pass_b_are_added() -> None:
    instruments = Instruments(None)
    for phase in ("B", "lines", "B", "A"):
        block(instruments, phase, steps=2)
    assert [(len(b["spans"]), len(b["bounds"]), b["cuda"]) for b in instruments.found["spans"]] == [
        (2, 2, False)
    ] * 2


def test_copies_of_pass_b_are_added() -> None:
    instruments = Instruments(None)
    instruments.put_on("B", list, [])
    instruments.start("B")
    assert instruments.parts is not None
    instruments.parts.copies[("pinned", False)] = [1.0, 8.0, 0.5]
    instruments.take_off(1)
    assert instruments.found["copies"] == [
        {"kind": "pinned", "blocking": False, "calls": 1, "bytes": 8, "s": 0.5}
    ]


def test_copies_of_steps_that_settle_do_not_count() -> None:
    instruments = Instruments(None)
    instruments.put_on("B", list, [])
    assert instruments.parts is not None
    instruments.parts.copies[("pageable", True)] = [1.0, 8.0, 0.5]
    instruments.start("B")
    instruments.restart()
    instruments.take_off(1)
    assert instruments.found["copies"] == []


def test_a_block_that_ends_while_it_settles_adds_nothing() -> None:
    """A script may end in the steps before those that count."""
    instruments = Instruments(None)
    instruments.put_on("B", list, [])
    instruments.take_off(5)
    assert "spans" not in instruments.found


def test_a_forked_child_has_nothing_on_and_tells_nothing() -> None:
    instruments, teller = Instruments(None), SimpleNamespace(spans=None)
    instruments.put_on("B", list, [teller])
    instruments.start("B")
    instruments.drop()
    assert (teller.spans, instruments.spans) == (None, None)
    instruments.take_off(1)
    assert "spans" not in instruments.found


def test_what_was_looked_at_is_told_a_step() -> None:
    instruments = Instruments(None)
    block(instruments, "look", steps=2)
    found = instruments.found["look"]
    assert (found["steps"], found["flops"], found["flops_by_dtype"]) == (2, 48, {"float32": 48})
    assert [(w["calls"], w["s"], w["where"].split(":")[0]) for w in found["waits"]] == [(1, 0, __file__)]


def test_lines_are_sampled_where_the_step_is_in_no_span() -> None:
    instruments = Instruments(None)
    instruments.put_on("lines", list, [])
    instruments.start("lines")
    until = time.monotonic() + 300
    while not instruments.samples.looked and time.monotonic() < until:
        torch.ones(64, 64) @ torch.ones(64, 64)
    instruments.take_off(1)
    assert instruments.samples.told()
