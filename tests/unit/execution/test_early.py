"""The stages of single samples: what goes on from them, and what is left out."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import nn

import frostline as fl
from frostline.errors import StageFailed
from frostline.execution.early import SOURCE, Block, Early, Loaded, together

SOURCE_OF_THREE = fl.Source.table([{"key": k, "x": i, "y": 10 * i} for i, k in enumerate("abc")])
CPU = torch.device("cpu")


def doubled(x: int) -> int:
    if x == 1:
        raise ValueError("one is bad")
    return 2 * x


def added(a: int, b: int) -> int:
    return a + b


def early(*stages: fl.Stage, raw: Any = ("x",), between: Any = ("doubled",)) -> Early:
    return Early(SOURCE_OF_THREE, stages, raw, between)


def begun(what: Early, given: Any = None) -> Block:
    return what.block(list("abc"), [what.raw(k, i) for i, k in enumerate("abc")], given)


DOUBLED = fl.Stage("doubled", doubled, reads="x")
ADDED = fl.Stage("added", added, reads=["x", "held"])


def test_a_sample_that_fails_is_left_out_with_the_reason() -> None:
    block = begun(early(DOUBLED, between=("x", "doubled")))
    assert block.keys == ["a", "c"]
    assert block.columns == {"x": [0, 2], "doubled": [0, 4]}
    assert list(block.failed) == ["b"]
    assert str(block.failed["b"]) == "Stage 'doubled' failed for 'b': ValueError: one is bad"


def test_given_fields_keep_to_the_samples_that_came_through() -> None:
    held = torch.tensor([5, 6, 7])
    block = begun(early(DOUBLED, between=("doubled", "held")), {"held": held})
    assert block.columns["held"].tolist() == [5, 7]
    whole = begun(early(ADDED, between=("added", "held")), {"held": held})
    assert whole.columns["held"] is held  # no copy where nothing failed
    assert [int(v) for v in whole.columns["added"]] == [5, 7, 9]


def test_nothing_is_asked_of_a_source_whose_fields_are_not_needed() -> None:
    class Refuses:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, i: int) -> dict[str, int]:
            if i:
                raise OSError("unreachable")
            return {"x": 1}

    source = fl.Source.dataset(Refuses(), version="1")
    assert Early(source, [], [], []).raw("b", 1) == {}
    failed = Early(source, [], ["x"], ["x"]).raw("b", 1)
    assert isinstance(failed, StageFailed)
    assert (failed.stage, failed.reason) == (SOURCE, "OSError: unreachable")


def test_when_all_fail_there_are_no_columns() -> None:
    what = early(fl.Stage("doubled", lambda x: 1 / 0, reads="x"))
    block = begun(what, {"held": [1, 2, 3]})
    assert (block.keys, block.columns, list(block.failed)) == ([], {}, ["a", "b", "c"])


def test_it_travels_without_what_it_loaded() -> None:
    what = early(DOUBLED)
    begun(what)
    again = copy.copy(what)  # the protocol that takes it to a worker process
    assert (again.stages, again.raw_fields, again.between) == (what.stages, ("x",), ("doubled",))
    assert not again._loaded._ready
    assert begun(again).columns == begun(what).columns


def test_a_stage_is_loaded_once_however_many_threads_ask() -> None:
    made: list[int] = []
    gate = threading.Barrier(4)

    def load() -> nn.Module:
        made.append(1)
        return nn.Linear(1, 1)

    loaded = Loaded([fl.Stage("net", fl.lazy(load), reads="x")], CPU)
    found = []

    def ask() -> None:
        gate.wait()
        found.append(loaded["net"])

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [1]
    assert len(set(found)) == 1


def test_blocks_together_in_their_order() -> None:
    bad = StageFailed("s", ["z"], "no")
    first = Block(["a"], {"x": torch.tensor([1])}, {"z": bad})
    second = Block(["b", "c"], {"x": torch.tensor([2, 3])})
    whole = together([first, Block([], {}, {"y": bad}), second])
    assert whole.keys == ["a", "b", "c"]
    assert whole.columns["x"].tolist() == [1, 2, 3]
    assert list(whole.failed) == ["z", "y"]
    assert together([first]) is first
    assert together([]) == Block([], {}, {})
    assert together([Block([], {}, {"z": bad}), Block([], {})]) == Block([], {}, {"z": bad})


def test_samples_are_left_out_of_every_column() -> None:
    block = Block(["a", "b", "c"], {"x": torch.tensor([1, 2, 3]), "t": ["p", "q", "r"]})
    block.leave_out({"b": StageFailed("s", ["b"], "no")})
    assert (block.keys, block.columns["x"].tolist(), block.columns["t"]) == (["a", "c"], [1, 3], ["p", "r"])


@pytest.mark.parametrize("between", [(), ("y",)])
def test_raw_fields_go_on_when_they_are_wanted(between: tuple[str, ...]) -> None:
    block = begun(early(raw=("x", "y"), between=between))
    assert block.columns == ({"y": [0, 10, 20]} if between else {})
    assert block.keys == ["a", "b", "c"]
