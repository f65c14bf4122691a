"""Threads and processes begin the same blocks; what cannot travel is told before a process is started."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import frostline as fl
from frostline.errors import UsageError
from frostline.execution import Early
from frostline.freezer.workers import Processes, Threads, cores, packed

Module = Callable[[str], ModuleType]


def source(n: int = 6) -> fl.Source:
    return fl.Source.table([{"key": f"k{i}", "x": i} for i in range(n)])


STAGES = """
    import numpy as np
    import torch

    def parts(x):
        if x == 3:
            raise ValueError("three")
        return torch.arange(x, dtype=torch.bfloat16), np.float64(x) / 3, np.full((2, 2), x), f"text {x}"
"""
WRITES = ["t", "f", "a", "s"]


def test_threads_and_processes_give_the_same_blocks(module: Module) -> None:
    stage = fl.Stage("parts", module(STAGES).parts, reads="x", writes=WRITES)
    early = Early(source(), [stage], ["x"], ["x", *WRITES])
    blocks = []
    for workers in (Threads(early, 2), Processes(early, 1)):
        futures = [workers.submit(places) for places in ([0, 1], [2, 3, 4], [5])]
        blocks.append([future.result() for future in futures])
        workers.close()
    for one, other in zip(*blocks, strict=True):
        assert one.keys == other.keys
        assert {k: str(e) for k, e in one.failed.items()} == {k: str(e) for k, e in other.failed.items()}
        for name in one.columns:
            for a, b in zip(one.columns[name], other.columns[name], strict=True):
                assert type(a) is type(b)
                assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
                assert not isinstance(a, np.ndarray)


def test_threads_are_given_rows_of_a_store() -> None:
    early = Early(source(), [fl.Stage("y", lambda x, h: x + h, reads=["x", "h"])], ["x"], ["y", "h"])
    threads = Threads(early, 1, lambda keys: {"h": [10 * int(key[1:]) for key in keys]})
    assert threads.submit([2, 4]).result().columns == {"y": [22, 44], "h": [20, 40]}
    threads.close()


def early_of(fn: Any) -> Early:
    return Early(source(), [fl.Stage("y", fn, reads="x")], ["x"], ["y"])


def test_what_cannot_travel_is_told_with_what_to_do() -> None:
    with pytest.raises(UsageError, match=r"cannot be sent to worker processes.*use threads"):
        packed(early_of(lambda x: x))

    def in_script(x: int) -> int:
        return x

    in_script.__module__ = "__main__"
    with pytest.raises(
        UsageError, match="'y' is defined in the script itself: processes need it in a module"
    ):
        packed(early_of(in_script))
    assert packed(early_of(abs))


def test_there_is_a_core() -> None:
    assert cores() >= 1


def test_closing_waits_and_drops_what_did_not_begin() -> None:
    threads = Threads(early_of(abs), 1)
    done = threads.submit([1])
    threads.close()
    assert done.result().columns == {"y": [1]}
    with pytest.raises(RuntimeError):
        threads.submit([1])
