"""Samples through the stages at full speed.

Three things go on at once: the stages of single samples (workers), the stages that take chunks (this thread;
on a GPU it only queues them), and writing (one more thread). Blocks stay in the order of the source.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from frostline.errors import StageFailed
from frostline.execution import Block, Execution
from frostline.execution.columns import Column, Uneven, kind_of, row_bytes
from frostline.freezer.workers import Pending, Workers
from frostline.store import Field

_AHEAD_BLOCKS = 2
_TURN_BLOCKS = 8
"""What workers prepare in a turn of theirs: whoever has rested is slow for its first milliseconds."""
_QUEUED_BLOCKS = 2
AHEAD_BYTES = 2 << 30
"""What may wait between the workers and the device."""


@dataclass
class Stats:
    """What happened so far. Times in seconds."""

    samples: int = 0
    bytes: int = 0
    failed: int = 0
    busy: float = 0.0
    """Time in which the stages that take chunks ran."""
    starved: float = 0.0
    """Time in which they waited for the workers."""


@dataclass
class Item:
    """A block on its way out: its samples in the order of the source, also those that failed."""

    order: list[str]
    block: Block
    events: tuple[Any, Any] | None = None
    hold: Block | None = None
    """What a GPU may still be reading."""


class Stream:
    """Computes blocks of samples, segment by segment (a segment is what goes into one shard)."""

    def __init__(
        self,
        execution: Execution,
        workers: Workers,
        *,
        group: int,
        sample_bytes: int,
        kinds: Mapping[str, str],
        stats: Stats,
        turns: bool = False,
    ) -> None:
        """
        turns: the workers rest while this thread computes, and the other way round. Where both need the
        same cores, threads that push each other off them cost more than the changes of turn.
        """
        self._execution, self._workers, self.stats = execution, workers, stats
        self._size, self._kinds = execution.block_size, dict(kinds)
        self._group = min(group, self._size)
        room = max(1, AHEAD_BYTES // max(1, sample_bytes))
        # who only reads has one block in hand, and blocks are large and page-locked
        tasks = 3 * workers.n if execution.early.stages else workers.n + 1
        blocks = _TURN_BLOCKS if turns else _AHEAD_BLOCKS
        self._ahead = max(self._size, min(room, max(blocks * self._size, tasks * self._group)))
        self._turns = turns

    def items(self, segments: Iterable[Sequence[int]], stop: Callable[[], bool]) -> Iterator[Item]:
        """Finished blocks in order. When `stop()` says so, ends before the next segment."""
        for first, places, begun in self._begun(segments):
            if first and stop():
                return
            keys = self._execution.pipeline.source.keys
            yield self._finished([keys[i] for i in places], begun)

    def _begun(self, segments: Iterable[Sequence[int]]) -> Iterator[tuple[bool, Sequence[int], Block]]:
        waiting: deque[tuple[bool, Sequence[int], Pending]] = deque()
        coming, ahead, resting = self._blocks(segments), 0, False
        next_block = next(coming, None)
        try:
            while next_block is not None or waiting:
                while next_block is not None and ahead < self._ahead and not resting:
                    first, places = next_block
                    pending = self._workers.begin(places, group=self._group, wait=not waiting)
                    if pending is None:
                        break  # the shared memory is full: finish what waits first
                    waiting.append((first, places, pending))
                    ahead += len(places)
                    next_block = next(coming, None)
                began = time.perf_counter()
                if self._turns and not resting:
                    for _, _, each in waiting:
                        each.wait()
                first, places, pending = waiting.popleft()
                begun = pending.result()
                del pending  # and with it the right to its memory
                self.stats.starved += time.perf_counter() - began
                ahead -= len(places)
                resting = self._turns and bool(waiting)
                yield first, places, begun
                del begun
        finally:
            for _, _, pending in waiting:
                pending.cancel()

    def _blocks(self, segments: Iterable[Sequence[int]]) -> Iterator[tuple[bool, Sequence[int]]]:
        for segment in segments:
            for start in range(0, len(segment), self._size):
                yield start == 0, segment[start : start + self._size]

    def _finished(self, order: list[str], begun: Block) -> Item:
        cuda = self._execution.device.type == "cuda"
        began = time.perf_counter()
        start = _event() if cuda else None
        if several_of(self._execution) & {*begun.columns} - {*self._kinds}:
            # the first samples went another way (a field was read, not computed): these show it instead
            self._kinds = usual_kinds(self._execution, begun) | self._kinds
        keep_to(self._kinds, begun)
        block = self._execution.finish(begun)
        _own(block, begun)
        if start is None:
            self.stats.busy += time.perf_counter() - began
            return Item(order, block)
        return Item(order, block, (start, _event()), begun)


def _own(block: Block, begun: Block) -> None:
    """Give what is stored as it came memory of its own.

    The writer keeps rows until their shard is whole. Rows in shared memory would keep their slot as long,
    and a shard has more blocks than the slab has slots: everybody would wait for ever.
    """
    for name, column in block.columns.items():
        if isinstance(column, Tensor) and column.device.type == "cpu" and _shares(column, begun):
            block.columns[name] = column.clone()


def _shares(column: Tensor, begun: Block) -> bool:
    """Also where it went through numpy: then its storage is another, within the same memory."""
    held = [other.untyped_storage() for other in begun.columns.values() if isinstance(other, Tensor)]
    return any(s.data_ptr() <= column.data_ptr() < s.data_ptr() + s.nbytes() for s in held)


def several_of(execution: Execution) -> set[str]:
    """The fields that go into calls of several samples."""
    return {name for stage in execution.late if (stage.chunk or 1) > 1 for name in stage.reads}


def usual_kinds(execution: Execution, block: Block) -> dict[str, str]:
    """The commonest shape and type of every field that goes into a call of several samples."""
    several = several_of(execution)
    return {
        name: Counter(kind_of(value) for value in column).most_common(1)[0][0]
        for name, column in block.columns.items()
        if name in several and len(column)
    }


def keep_to(kinds: Mapping[str, str], block: Block) -> None:
    """Samples of another shape than that fail: a call of several samples needs one."""
    bad: dict[str, StageFailed] = {}
    for name, usual in kinds.items():
        column = block.columns.get(name)
        if column is None or isinstance(column, Tensor):
            continue  # not here yet, or all of one shape
        for key, value in zip(block.keys, column, strict=True):
            if kind_of(value) != usual:
                told = f"{name!r} is {kind_of(value)}, the first samples' is {usual}"
                reason = f"{told}. A call of several samples {Uneven.remedy(usual, kind_of(value))}"
                bad.setdefault(key, StageFailed(name, [key], reason))
    if bad:
        block.leave_out(bad)


def _event() -> Any:
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


class Sink:
    """Takes finished blocks to memory and hands them to `write`, in a thread of its own."""

    def __init__(
        self, write: Callable[[list[str], Block], None], stats: Stats, specs: Mapping[str, Field]
    ) -> None:
        self._write, self._stats, self._specs = write, stats, specs
        self._queue: queue.Queue[Item | None] = queue.Queue(_QUEUED_BLOCKS)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="frostline-sink", daemon=True)
        self._thread.start()

    def put(self, item: Item) -> None:
        """Hand a block over; raises what writing an earlier one raised."""
        while True:
            if self._error is not None:
                raise self._error
            try:
                self._queue.put(item, timeout=0.2)
                return
            except queue.Full:
                continue

    def close(self) -> None:
        """Wait until everything is written."""
        while self._thread.is_alive():
            try:
                self._queue.put(None, timeout=0.2)
                break
            except queue.Full:
                continue
        self._thread.join()
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """Stop without writing what waits."""
        self._error = self._error or StageFailed("", [], "abandoned")
        while self._thread.is_alive():
            with suppress(queue.Empty):
                self._queue.get_nowait()
            try:
                self._queue.put(None, timeout=0.05)
            except queue.Full:
                continue
            self._thread.join(0.05)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if self._error is not None:
                continue
            try:
                self._take(item)
            except BaseException as e:  # noqa: BLE001 - raised where the next block is handed over
                self._error = e

    def _take(self, item: Item) -> None:
        block = on_host(item)
        if item.events is not None:
            start, end = item.events
            self._stats.busy += start.elapsed_time(end) / 1000
        self._write(item.order, block)
        self._stats.samples += len(block.keys)
        self._stats.failed += len(block.failed)
        self._stats.bytes += sum(stored_bytes(c, self._specs.get(n)) for n, c in block.columns.items())


def on_host(item: Item) -> Block:
    """The block with its tensors in memory; copied beside the stream in which the next ones are computed."""
    if item.events is None:
        return item.block
    stream = _copy_stream()
    with torch.cuda.stream(stream):
        stream.wait_event(item.events[1])
        columns: dict[str, Column] = {n: _copied(c, stream) for n, c in item.block.columns.items()}
    stream.synchronize()
    item.events[1].synchronize()
    item.hold = None
    return Block(item.block.keys, columns, item.block.failed)


def _copied(column: Column, stream: Any) -> Column:
    if not isinstance(column, Tensor) or column.device.type != "cuda":
        return column
    out = torch.empty(column.shape, dtype=column.dtype, pin_memory=True)
    out.copy_(column, non_blocking=True)
    column.record_stream(stream)
    return out


_streams = threading.local()


def _copy_stream() -> Any:
    if not hasattr(_streams, "copy"):
        _streams.copy = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    return _streams.copy


def column_bytes(column: Column) -> int:
    return row_bytes(column) if isinstance(column, Tensor) else sum(map(row_bytes, column))


def stored_bytes(column: Column, spec: Field | None) -> int:
    """What rows take on the disk, in the codec of their field."""
    if spec is None or spec.codec == "raw":
        return column_bytes(column)
    return spec.row_bytes * (sum(map(len, column)) if spec.ragged else len(column))
