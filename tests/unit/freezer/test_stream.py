"""Blocks in order, segment by segment; samples of another shape; and the thread that writes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

import frostline as fl
from frostline.execution import Block, Execution
from frostline.freezer.stream import (
    Item,
    Sink,
    Stats,
    Stream,
    _own,
    column_bytes,
    keep_to,
    on_host,
    usual_kinds,
)
from frostline.freezer.workers import Pending

N = 23


class Inline:
    """Workers that begin a block when it is submitted, and keep what they were asked for."""

    kind, n = "threads", 2

    def __init__(self, execution: Execution) -> None:
        self.execution, self.asked = execution, list[list[int]]()

    def begin(self, places: Sequence[int], *, group: int, wait: bool = True) -> Pending | None:
        return Pending([self.submit(places[s : s + group]) for s in range(0, len(places), group)])

    def submit(self, places: Sequence[int]) -> Future[Block]:
        self.asked.append([*places])
        future: Future[Block] = Future()
        future.set_result(self.execution.begin(places))
        return future

    def close(self) -> None:
        pass


def execution(fn: Any = lambda x: torch.full((2,), float(x)), batch_size: int = 4) -> Execution:
    data = fl.Pipeline(
        fl.Source.table([{"key": f"k{i}", "x": i} for i in range(N)]),
        fl.Stage("v", fn, reads="x"),
        fl.Stage("y", lambda v: v.sum(1), reads="v", on="device", batch_size=batch_size),
    )
    return Execution(data, ["y"])


def stream(what: Execution, **options: Any) -> tuple[Stream, Inline]:
    workers = Inline(what)
    values = {"group": 3, "sample_bytes": 8, "kinds": {"v": "float32 [2]"}, "stats": Stats()} | options
    return Stream(what, workers, **values), workers


def never() -> bool:
    return False


def test_blocks_come_in_order_and_never_cross_a_segment() -> None:
    found, workers = stream(execution())
    segments = [range(10), range(10, N)]
    items = [*found.items(segments, never)]
    assert [len(item.order) for item in items] == [4, 4, 2, 4, 4, 4, 1]
    assert [key for item in items for key in item.order] == [f"k{i}" for i in range(N)]
    assert torch.cat([item.block.columns["y"] for item in items]).tolist() == [2.0 * i for i in range(N)]
    assert workers.asked[:4] == [[0, 1, 2], [3], [4, 5, 6], [7]]  # groups of three, within blocks
    assert found.stats.busy > 0


def test_a_stop_is_asked_for_once_a_segment_and_ends_before_the_next() -> None:
    answers = [False, True]
    found, _ = stream(execution())
    items = [*found.items([range(10), range(10, N)], lambda: answers.pop(0))]
    assert [key for item in items for key in item.order] == [f"k{i}" for i in range(10)]
    assert answers == []


@pytest.mark.parametrize(
    ("sample_bytes", "ahead"), [(8, 18), (1 << 40, 4)], ids=["three tasks a worker", "memory is short"]
)
def test_workers_are_not_far_ahead(sample_bytes: int, ahead: int) -> None:
    found, workers = stream(execution(), sample_bytes=sample_bytes)
    next(found.items([range(N)], never))
    begun = sum(map(len, workers.asked))
    assert begun <= ahead + 4


def test_in_turns_the_workers_rest_while_chunks_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frostline.freezer.stream._TURN_BLOCKS", 2)
    begun_at: list[int] = []  # samples that were begun when each block came
    found, workers = stream(execution(), turns=True)
    items = []
    for item in found.items([range(10), range(10, N)], never):
        items.append(item)
        begun_at.append(sum(map(len, workers.asked)))
    assert [key for item in items for key in item.order] == [f"k{i}" for i in range(N)]
    assert begun_at == [18] * 5 + [N] * 2  # nothing new is begun before all of a turn is computed


def test_a_turn_waits_for_what_a_worker_raised() -> None:
    class Raises(Inline):
        def submit(self, places: Sequence[int]) -> Future[Block]:
            future: Future[Block] = Future()
            future.set_exception(ValueError("the worker is broken"))
            return future

    found = Stream(
        execution(), Raises(execution()), group=4, sample_bytes=8, kinds={}, stats=Stats(), turns=True
    )
    with pytest.raises(ValueError, match="the worker is broken"):
        next(found.items([range(N)], never))


def test_a_group_is_no_larger_than_a_block() -> None:
    found, workers = stream(execution(), group=100)
    assert len([*found.items([range(8)], never)]) == 2
    assert workers.asked == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_what_was_begun_and_is_not_wanted_is_cancelled() -> None:
    class Later(Inline):
        def submit(self, places: Sequence[int]) -> Future[Block]:
            if places[0] < 4:
                return super().submit(places)
            self.waiting.append(Future())
            return self.waiting[-1]

        waiting: list[Future[Block]] = []  # noqa: RUF012

    what = execution()
    workers = Later(what)
    items = Stream(what, workers, group=4, sample_bytes=8, kinds={}, stats=Stats()).items([range(N)], never)
    next(items)
    items.close()
    assert workers.waiting
    assert all(future.cancelled() for future in workers.waiting)


def test_a_sample_of_another_shape_fails_alone() -> None:
    found, _ = stream(execution(lambda x: torch.zeros(3 if x == 5 else 2)))
    items = [*found.items([range(N)], never)]
    failed = {key: e for item in items for key, e in item.block.failed.items()}
    assert list(failed) == ["k5"]
    assert "'v' is float32 [3], the first samples' is float32 [2]" in str(failed["k5"])
    assert sum(len(item.block.keys) for item in items) == N - 1
    assert "k5" in items[1].order  # its place is known


def test_usual_kinds_are_those_of_calls_of_several_samples() -> None:
    block = Block(["a", "b", "c"], {"v": [torch.zeros(2), torch.zeros(3), torch.zeros(3)]})
    assert usual_kinds(execution(), block) == {"v": "float32 [3]"}
    assert usual_kinds(execution(batch_size=1), block) == {}
    assert usual_kinds(execution(), Block([], {})) == {}


def test_columns_that_are_tensors_are_even() -> None:
    block = Block(["a", "b"], {"v": torch.zeros(2, 2), "t": ["p", "q"]})
    keep_to({"v": "float32 [9]", "t": "str", "gone": "int"}, block)
    assert block.keys == ["a", "b"]


# --- writing ------------------------------------------------------------------------------------------


def item(*keys: str) -> Item:
    return Item([*keys], Block([*keys], {"y": torch.zeros(len(keys), 2)}))


def test_blocks_are_written_in_order_in_one_other_thread() -> None:
    seen: list[tuple[list[str], str]] = []
    stats = Stats()
    sink = Sink(lambda order, block: seen.append((order, threading.current_thread().name)), stats, {})
    for i in range(6):
        sink.put(item(f"k{i}"))
    sink.close()
    assert seen == [([f"k{i}"], "frostline-sink") for i in range(6)]
    assert (stats.samples, stats.failed, stats.bytes) == (6, 0, 6 * 8)


@pytest.mark.parametrize("shape", [(6, 4), (None, 4)])
def test_bytes_are_those_of_the_store(tmp_path: Path, shape: tuple[int | None, ...]) -> None:
    spec = fl.Field(shape, "float32", codec="int8/token")
    rows = [torch.randn(6, 4) for _ in range(3)]
    stats = Stats()
    sink = Sink(lambda order, block: None, stats, {"y": spec})
    sink.put(Item([*"abc"], Block([*"abc"], {"y": rows if spec.ragged else torch.stack(rows)})))
    sink.close()
    with fl.Store.create(tmp_path / "s", {"y": spec}) as writer:
        writer.append_batch([*"abc"], {"y": rows})
    reader = fl.Store.open(tmp_path / "s").reader("y")
    held = sum(reader.shard(0).view(part).nbytes for part in spec.parts)
    assert stats.bytes == held < 3 * 6 * 4 * 4


def test_what_writing_raises_is_raised_where_the_next_block_is_handed_over() -> None:
    seen: list[str] = []

    def write(order: list[str], block: Block) -> None:
        seen.append(order[0])
        raise OSError("disk")

    sink = Sink(write, Stats(), {})
    with pytest.raises(OSError, match="disk"):
        [sink.put(item("a")) for _ in range(100)]
    with pytest.raises(OSError, match="disk"):
        sink.close()
    assert seen == ["a"]  # nothing is written after that


def test_what_waits_is_dropped_when_it_is_abandoned() -> None:
    begun, seen = threading.Event(), list[str]()

    def write(order: list[str], block: Block) -> None:
        begun.set()
        while sink._error is None:  # until it is abandoned
            threading.Event().wait(0.001)
        seen.append(order[0])

    sink = Sink(write, Stats(), {})
    for key in ("a", "b", "c"):
        sink.put(item(key))
    assert begun.wait(120)
    sink.abandon()
    assert seen == ["a"]


def test_a_block_in_memory_is_not_copied() -> None:
    made = item("a")
    assert on_host(made) is made.block


def test_bytes_of_a_column() -> None:
    assert column_bytes(torch.zeros(3, 2)) == 24
    assert column_bytes([torch.zeros(2), "abc", 1]) == 8 + 3 + 8


def test_what_went_through_numpy_is_still_the_slabs_memory() -> None:
    """torch.from_numpy makes a storage that begins in the middle of the slot's."""
    slot = torch.zeros(64, dtype=torch.uint8)
    begun = Block(["a"], {"first": slot[:32].reshape(1, 32), "second": slot[32:].reshape(1, 32)})
    view = torch.from_numpy(slot[32:].numpy().reshape(1, 4, 8))
    block = Block(["a"], {"out": view, "own": torch.zeros(1, 8, dtype=torch.uint8)})
    own = block.columns["own"]
    _own(block, begun)
    assert block.columns["out"].data_ptr() != view.data_ptr()
    assert torch.equal(block.columns["out"], view)
    assert block.columns["own"] is own
