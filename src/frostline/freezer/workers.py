"""Who runs the stages of single samples ahead: threads, or worker processes for code that holds the GIL.

A worker process is a fresh interpreter that is handed the stages (by reference, so they must be importable)
and writes what they return into memory that both share. It never runs the user's script. When one dies, of a
decoder that crashes or of a kill, another takes its place and its samples are done again, one by one: the
sample that kills it twice is the one to blame.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from multiprocessing.reduction import ForkingPickler
from typing import Literal, Protocol

import torch

from frostline.errors import StageFailed, UsageError
from frostline.execution import Block, Early, together
from frostline.execution.columns import Column
from frostline.execution.slab import Layout, Lease, Slab
from frostline.execution.wire import InSlab
from frostline.fingerprint.code import parts_of
from frostline.freezer.child import Child, WorkerDied, close_all

Kind = Literal["threads", "processes"]
Given = Callable[[Sequence[str]], Mapping[str, Column]]
"""Columns of given fields for some keys, as read from a store."""
Parts = Mapping[str, Mapping[str, str]]
"""Of each stage: the functions and constants it stands on, with digests."""


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Pending:
    """A block that workers have begun."""

    def __init__(self, futures: list[Future[Block]], lease: Lease | None = None) -> None:
        self._futures, self._lease = futures, lease

    def result(self) -> Block:
        block = together([future.result() for future in self._futures])
        if self._lease is not None:
            block.columns = {name: _read(column, name, self._lease) for name, column in block.columns.items()}
        return block

    def wait(self) -> None:
        """Until the workers are through with it; what they raised comes with `result`."""
        wait_for(self._futures)

    def cancel(self) -> None:
        for future in self._futures:
            future.cancel()


def _read(column: Column, name: str, lease: Lease) -> Column:
    """A column whose rows lie in the slab, as one tensor; or, where some do not, as a list."""
    if not isinstance(column, list) or not any(isinstance(row, InSlab) for row in column):
        return column
    if all(isinstance(row, InSlab) for row in column):
        return lease.rows(name, [row.place for row in column])
    return [lease.rows(name, [row.place])[0] if isinstance(row, InSlab) else row for row in column]


class Workers(Protocol):
    """Blocks of samples, begun somewhere else."""

    kind: Kind
    n: int

    def begin(self, places: Sequence[int], *, group: int, wait: bool = True) -> Pending | None:
        """Begin a block, `group` samples a task; None when there is no room now, and nobody waits for it."""

    def close(self) -> None: ...


class Threads:
    """Workers in this process: no copies; enough where libraries let go of the GIL, as decoders do."""

    kind: Kind = "threads"

    def __init__(self, early: Early, n: int, given: Given | None = None) -> None:
        self.n = n
        self._early, self._given = early, given
        self._pool = ThreadPoolExecutor(n, "frostline-stage")
        self._start()

    def _start(self) -> None:
        """Start all threads, each with one of torch's. Otherwise n threads compute with n threads each.

        torch.set_num_threads also changes what threads that start later get, so the usual number is put
        back when all are there.
        """
        usual, barrier = torch.get_num_threads(), threading.Barrier(self.n)

        def one() -> None:
            torch.get_num_threads()  # asked once, a thread gets the usual number; then it has its own
            torch.set_num_threads(1)
            barrier.wait()

        for future in [self._pool.submit(one) for _ in range(self.n)]:
            future.result()
        torch.set_num_threads(usual)

    def begin(self, places: Sequence[int], *, group: int, wait: bool = True) -> Pending | None:
        tasks = (places[s : s + group] for s in range(0, len(places), group))
        return Pending([self._pool.submit(self._block, some) for some in tasks])

    def _block(self, places: Sequence[int]) -> Block:
        keys = [self._early.source.keys[i] for i in places]
        raws = [self._early.raw(key, i) for key, i in zip(keys, places, strict=True)]
        return self._early.block(keys, raws, self._given(keys) if self._given else None)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


class Processes:
    """One interpreter a worker; each is served by a thread of its own here.

    layout:  how rows of a fixed shape lie in shared memory; without it all go through pipes.
    hatched: interpreters that were started before.
    parts:   what the stages stood on before they were called, which may fill a cache; default: now.
    """

    kind: Kind = "processes"

    def __init__(
        self,
        early: Early,
        n: int,
        *,
        layout: Layout | None = None,
        pin: bool = False,
        hatched: Sequence[Child] = (),
        parts: Parts | None = None,
    ) -> None:
        self.n = n
        self._early = early
        self._setup = packed(early, layout)
        self._parts = parts_of(early.called) if parts is None else parts
        self._slab = Slab(layout) if layout is not None else None
        if self._slab is not None and pin:
            self._slab.pin()
        self._pool = ThreadPoolExecutor(n, "frostline-worker")
        self._mine = threading.local()
        self._children = [*hatched]
        self._idle = [*hatched]
        self._lock = threading.Lock()

    def begin(self, places: Sequence[int], *, group: int, wait: bool = True) -> Pending | None:
        lease = self._slab.lease(wait=wait) if self._slab is not None else None
        if self._slab is not None and lease is None:
            return None
        number = None if lease is None else lease.number
        tasks = ((s, places[s : s + group]) for s in range(0, len(places), group))
        return Pending([self._pool.submit(self._block, some, number, first) for first, some in tasks], lease)

    def _block(self, places: Sequence[int], slot: int | None, first: int) -> Block:
        try:
            return self._ask(places, slot, first)
        except WorkerDied as e:
            if not e.answered:
                raise  # it could not even start: no sample is to blame
        return together([self._alone(place, slot, first + i) for i, place in enumerate(places)])

    def _alone(self, place: int, slot: int | None, first: int) -> Block:
        key = self._early.source.keys[place]
        try:
            return self._ask([place], slot, first)
        except WorkerDied:
            pass  # a kill from outside hits once: the second death is this sample's
        try:
            return self._ask([place], slot, first)
        except WorkerDied as e:
            reason = f"{e} on this sample, twice"
            return Block([], {}, {key: StageFailed(self._early.stages[0].name, [key], reason)})

    def _ask(self, places: Sequence[int], slot: int | None, first: int) -> Block:
        source = self._early.source
        keys = [source.keys[i] for i in places]
        raws = [self._early.raw(k, i) for k, i in zip(keys, places, strict=True)] if source.cheap else None
        return self._child().ask((keys, list(places), raws, None if slot is None else (slot, first)))

    def _child(self) -> Child:
        child: Child | None = getattr(self._mine, "child", None)
        if child is None or not child.alive:
            with self._lock:
                child = self._idle.pop() if self._idle else Child()
                self._children = [c for c in self._children if c.alive and c is not child] + [child]
            parts = child.set_up(self._setup, self._slab.fd if self._slab is not None else None)
            self._refuse_others(parts)
            self._mine.child = child
        return child

    def _refuse_others(self, parts: Parts) -> None:
        """A new interpreter imports everything anew; the fingerprint is of what this one runs."""
        for name, there in parts.items():
            here = self._parts[name]
            other = [part for part in sorted({*here, *there}) if here.get(part) != there.get(part)]
            if other:
                more = f" and {len(other) - 3} more" if len(other) > 3 else ""
                raise UsageError(
                    f"A worker process would compute {name!r} otherwise than this one: there, "
                    f"{', '.join(other[:3])}{more} is not what it is here. A file was edited since it was "
                    "imported (then start again), or a value was set at run time (then give it as a "
                    "parameter, as functools.partial(fn, size=224)); or use threads."
                )

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        close_all(self._children)
        if self._slab is not None:
            self._slab.close()


def packed(early: Early, layout: Layout | None = None) -> bytes:
    """The stages as bytes for a worker, or UsageError with the reason why they cannot travel."""
    for stage in early.stages:
        home = getattr(stage.fn, "__module__", type(stage.fn).__module__)
        if home == "__main__":
            raise UsageError(
                f"Stage {stage.name!r} is defined in the script itself: processes need it in a module."
            )
    try:
        return bytes(ForkingPickler.dumps((early, layout, parts_of)))
    except Exception as e:
        raise UsageError(f"The stages cannot be sent to worker processes ({e}): use threads.") from e


def rate_of(workers: Workers, places: Sequence[int], *, group: int, block: int, seconds: float) -> float:
    """Samples a second that workers prepare, over about so long; what they prepare is thrown away.

    All of them have something to do, however small a block is.
    """
    enough = 2 * workers.n * group
    size = min(block, enough)
    waiting: deque[tuple[int, Pending]] = deque()
    began, took, begun = time.perf_counter(), 0.0, 0
    while True:
        while took <= seconds and begun < len(places) and sum(n for n, _ in waiting) < enough:
            some = places[begun : begun + size]
            pending = workers.begin(some, group=group, wait=not waiting)
            if pending is None:
                break  # the shared memory is full
            waiting.append((len(some), pending))
            begun += len(some)
            del pending
        if not waiting:
            return begun / max(took, 1e-9)
        waiting.popleft()[1].result()
        took = time.perf_counter() - began
