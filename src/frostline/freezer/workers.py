"""Who runs the stages of single samples ahead: threads, or worker processes for code that holds the GIL.

A worker process is a fresh interpreter that is handed the stages (by reference, so they must be importable)
and sends back what they return as plain bytes. It never runs the user's script. When one dies, of a decoder
that crashes or of a kill, another takes its place and its samples are done again, one by one: the sample that
kills it twice is the one to blame.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import ForkingPickler
from typing import Any, Literal, Protocol, TypeVar

from frostline.errors import FrostlineError, StageFailed, UsageError
from frostline.execution import Block, Early, together
from frostline.execution.columns import Column
from frostline.freezer.wire import receive, refuse_untransportable

_T = TypeVar("_T")
Kind = Literal["threads", "processes"]
Given = Callable[[Sequence[str]], Mapping[str, Column]]
"""Columns of given fields for some keys, as read from a store."""


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Workers(Protocol):
    """Blocks of samples, begun somewhere else."""

    kind: Kind
    n: int

    def submit(self, places: Sequence[int]) -> Future[Block]: ...

    def close(self) -> None: ...


class Threads:
    """Workers in this process: no copies; enough where libraries let go of the GIL, as decoders do."""

    kind: Kind = "threads"

    def __init__(self, early: Early, n: int, given: Given | None = None) -> None:
        self.n = n
        self._early, self._given = early, given
        self._pool = ThreadPoolExecutor(n, "frostline-stage")

    def submit(self, places: Sequence[int]) -> Future[Block]:
        return self._pool.submit(self._block, places)

    def _block(self, places: Sequence[int]) -> Block:
        keys = [self._early.source.keys[i] for i in places]
        raws = [self._early.raw(key, i) for key, i in zip(keys, places, strict=True)]
        return self._early.block(keys, raws, self._given(keys) if self._given else None)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


class WorkerDied(FrostlineError):
    """A worker process ended in the middle of a block."""


class Processes:
    """One interpreter a worker; each is served by a thread of its own here."""

    kind: Kind = "processes"

    def __init__(self, early: Early, n: int) -> None:
        self.n = n
        self._early = early
        self._setup = packed(early)
        self._pool = ThreadPoolExecutor(n, "frostline-worker")
        self._mine = threading.local()
        self._children: list[_Child] = []
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, places: Sequence[int]) -> Future[Block]:
        return self._pool.submit(self._block, places)

    def _block(self, places: Sequence[int]) -> Block:
        try:
            return self._ask(places)
        except WorkerDied:
            return together([self._alone(place) for place in places])

    def _alone(self, place: int) -> Block:
        key = self._early.source.keys[place]
        try:
            return self._ask([place])
        except WorkerDied:
            pass  # a kill from outside hits once: the second death is this sample's
        try:
            return self._ask([place])
        except WorkerDied as e:
            return Block([], {}, {key: StageFailed(self._early.stages[0].name, [key], str(e))})

    def _ask(self, places: Sequence[int]) -> Block:
        source = self._early.source
        keys = [source.keys[i] for i in places]
        raws = [self._early.raw(k, i) for k, i in zip(keys, places, strict=True)] if source.cheap else None
        return self._child().ask(keys, list(places), raws)

    def _child(self) -> _Child:
        child = getattr(self._mine, "child", None)
        if child is None or not child.alive:
            child = self._mine.child = _Child(self._setup)
            with self._lock:
                self._children = [c for c in self._children if c.alive] + [child]
        if self._closed:
            child.close()
        return child

    def close(self) -> None:
        self._closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)
        for child in self._children:
            child.close()


class _Child:
    """A worker process and the pipe to it."""

    def __init__(self, setup: bytes) -> None:
        ours, theirs = Pipe()
        command = [sys.executable, "-m", "frostline.freezer.worker", str(theirs.fileno())]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        # a group of its own: Ctrl-C is for the parent, which ends its workers when the shard is whole
        self._process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            env=environment,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self._pipe: Connection[Any, Any] = ours
        self.alive = True
        self._guarded(lambda: self._pipe.send_bytes(setup))

    def ask(self, keys: list[str], places: list[int], raws: list[Any] | None) -> Block:
        request = ForkingPickler.dumps((keys, places, raws))

        def exchange() -> Block:
            self._pipe.send_bytes(request)
            return receive(self._pipe)

        return self._guarded(exchange)

    def _guarded(self, do: Callable[[], _T]) -> _T:
        try:
            return do()
        except (EOFError, OSError) as e:
            self.alive = False
            self._pipe.close()
            self._process.kill()
            status = self._process.wait()
            how = f"signal {-status}" if status < 0 else f"exit status {status}"
            raise WorkerDied(f"the worker process died ({how}) on this sample") from e

    def close(self) -> None:
        if self.alive:
            self.alive = False
            self._pipe.close()  # the worker reads the end of the pipe and goes
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def packed(early: Early) -> bytes:
    """The stages as bytes for a worker, or UsageError with the reason why they cannot travel."""
    for stage in early.stages:
        home = getattr(stage.fn, "__module__", type(stage.fn).__module__)
        if home == "__main__":
            raise UsageError(
                f"Stage {stage.name!r} is defined in the script itself: processes need it in a module."
            )
    try:
        return bytes(ForkingPickler.dumps(early))
    except Exception as e:
        raise UsageError(f"The stages cannot be sent to worker processes ({e}): use threads.") from e


__all__ = ["Given", "Processes", "Threads", "Workers", "cores", "packed", "refuse_untransportable"]
