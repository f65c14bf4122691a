"""Samples through a whole pipeline: what runs where, block sizes, given fields, and who is to blame."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import frostline as fl
from frostline.errors import StageFailed
from frostline.execution import Execution


def source(n: int = 10) -> fl.Source:
    return fl.Source.table([{"key": f"k{i}", "x": float(i), "text": f"text {i}"} for i in range(n)])


def doubled(x: Any) -> Any:
    return 2 * x


def on_device(name: str, reads: str, batch_size: int = 4, fn: Any = doubled) -> fl.Stage:
    return fl.Stage(name, fn, reads=reads, on="device", batch_size=batch_size)


def test_what_takes_chunks_and_what_comes_after_it_is_late() -> None:
    data = fl.Pipeline(
        source(),
        fl.Stage("a", doubled, reads="x"),
        on_device("b", "a"),
        fl.Stage("c", lambda b, text: f"{text}: {float(b):g}", reads=["b", "text"]),
        fl.Stage("d", doubled, reads="x"),
    )
    execution = Execution(data, ["c", "d"])
    assert [stage.name for stage in execution.early.stages] == ["a", "d"]
    assert [stage.name for stage in execution.late] == ["b", "c"]
    assert execution.early.between == ("a", "d", "text")
    assert execution.early.raw_fields == ("x", "text")
    found = execution.compute(range(3)).columns
    assert found == {"c": ["text 0: 0", "text 1: 4", "text 2: 8"], "d": [0.0, 2.0, 4.0]}


def test_only_what_is_needed_runs() -> None:
    data = fl.Pipeline(source(), fl.Stage("a", doubled, reads="x"), fl.Stage("b", lambda x: 1 / 0, reads="x"))
    assert Execution(data, ["a", "text"]).compute([4, 0]).columns == {
        "a": [8.0, 0.0],
        "text": ["text 4", "text 0"],
    }


@pytest.mark.parametrize(
    ("chunks", "size"),
    [([], 32), ([4], 4), ([4, 6], 12), ([512, 1024], 1024), ([1000, 999], 1000), ([3000], 3000), ([1], 1)],
)
def test_a_block_is_whole_chunks_of_every_stage(chunks: list[int], size: int) -> None:
    stages = [on_device(f"s{i}", "x", n) for i, n in enumerate(chunks)]
    data = fl.Pipeline(source(), *stages)
    assert Execution(data, [stage.name for stage in stages]).block_size == size


def test_given_fields_are_not_computed() -> None:
    data = fl.Pipeline(
        source(), fl.Stage("a", lambda x: 1 / 0, reads="x"), on_device("b", "a"), on_device("c", "b")
    )
    execution = Execution(data, ["b", "c"], given=["a"])
    block = execution.finish(execution.begin([1, 2], {"a": torch.tensor([10.0, 20.0])}))
    assert {n: c.tolist() for n, c in block.columns.items()} == {"b": [20, 40], "c": [40, 80]}
    last = Execution(data, ["c"], given=["b", "a"])
    assert [stage.name for stage in last.late] == ["c"]
    assert last.early.raw_fields == ()


def refuses(bad: float) -> Any:
    def fn(x: Tensor) -> Tensor:
        if (x == bad).any():
            raise ValueError(f"no {bad:g}")
        return x + 1

    return fn


def test_the_sample_that_breaks_a_chunk_is_found_and_the_others_are_right() -> None:
    data = fl.Pipeline(source(), on_device("y", "x", fn=refuses(5)), on_device("z", "y", 3))
    execution = Execution(data, ["y", "z", "text"])
    block = execution.finish(execution.begin(range(10)))
    assert block.keys == [f"k{i}" for i in range(10) if i != 5]
    assert block.columns["z"].tolist() == [2 * (i + 1) for i in range(10) if i != 5]
    assert len(block.columns["text"]) == 9
    assert str(block.failed["k5"]) == "Stage 'y' failed for 'k5': ValueError: no 5"
    with pytest.raises(StageFailed, match="no 5"):
        execution.compute(range(10))


def test_a_late_stage_of_single_samples_leaves_out_what_it_cannot_take() -> None:
    data = fl.Pipeline(source(), on_device("y", "x"), fl.Stage("z", lambda y: 1 / (y.item() - 4), reads="y"))
    execution = Execution(data, ["z"])
    block = execution.finish(execution.begin([0, 2, 3]))
    assert (block.keys, list(block.failed)) == (["k0", "k3"], ["k2"])
    assert block.columns["z"] == [-0.25, 0.5]


def test_a_stage_that_fails_only_for_several_is_to_blame_itself() -> None:
    def picky(x: Tensor) -> Tensor:
        if len(set(x.tolist())) > 1:
            raise ValueError("only equal ones")
        return x

    data = fl.Pipeline(source(), on_device("y", "x", fn=picky))
    execution = Execution(data, ["y"])
    with pytest.raises(StageFailed, match="only equal ones"):
        execution.finish(execution.begin(range(4)))


def test_when_every_sample_fails_nothing_is_left_and_later_stages_are_not_called() -> None:
    data = fl.Pipeline(
        source(), on_device("y", "x", fn=lambda x: x[:1]), on_device("z", "y", fn=lambda y: 1 / 0)
    )
    execution = Execution(data, ["y", "z"])
    block = execution.finish(execution.begin(range(4)))
    assert (block.keys, block.columns, len(block.failed)) == ([], {}, 4)
    assert "called with 4 samples" in str(block.failed["k0"])


class Uneven:
    """Arrays of two lengths, straight from a data set; the odd ones lie in two different chunks."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": np.full(3 if i in (1, 6) else 2, i, np.float32)}


def test_samples_of_another_shape_are_left_out_of_every_chunk() -> None:
    data = fl.Pipeline(fl.Source.dataset(Uneven()), on_device("y", "x", fn=lambda x: x.sum(1)))
    execution = Execution(data, ["y"])
    block = execution.finish(execution.begin(range(8)))
    assert list(block.failed) == ["00000001", "00000006"]
    assert block.columns["y"].tolist() == [2.0 * i for i in range(8) if i not in (1, 6)]
    assert "'x' is float32 [2] for the others of the call" in str(block.failed["00000006"])


def test_a_block_that_is_finished_is_not_the_one_that_was_begun() -> None:
    data = fl.Pipeline(source(), on_device("y", "x", fn=refuses(1)))
    execution = Execution(data, ["y"])
    begun = execution.begin(range(3))
    first, again = execution.finish(begun), execution.finish(begun)
    assert begun.keys == ["k0", "k1", "k2"]
    assert not begun.failed
    assert torch.equal(first.columns["y"], again.columns["y"])


def test_a_network_is_loaded_at_the_first_block() -> None:
    net = fl.lazy(torch.nn.Linear, 1, 1)
    data = fl.Pipeline(
        source(), fl.Stage("v", lambda x: torch.tensor([x]), reads="x"), on_device("y", "v", fn=net)
    )
    execution = Execution(data, ["y"])
    assert not net.loaded
    assert execution.compute([0]).columns["y"].shape == (1, 1)
    assert net.loaded
