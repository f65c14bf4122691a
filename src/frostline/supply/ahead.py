"""Batches that are prepared ahead: a thread conducts, a pool computes single samples.

The conductor begins a batch before it finishes the one before, so that the pool is never idle at the end of
one, and keeps a few ready. Batches arrive in order; a failure arrives in the place of its batch.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Generic, TypeVar

import torch

from frostline.errors import FeedError, FrostlineError

READY = 2
_POLL_S = 0.1
_MOST_THREADS = 16
_NAME = "supply-of-frostline"
"""Not `frostline-…`: a feed that is closed on a thread so called does not wait for its own threads."""

T = TypeVar("T")


def n_threads() -> int:
    """A thread a core; ranks of one machine, as torchrun starts them, share the cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, min(_MOST_THREADS, cores // max(1, int(ranks) if ranks.isdecimal() else 1)))


class Pool:
    """Threads that compute single samples, each with one of torch's: bits must not depend on their number."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._pool = ThreadPoolExecutor(n, _NAME)
        usual, barrier = torch.get_num_threads(), threading.Barrier(n)

        def one() -> None:
            torch.get_num_threads()  # asked once, a thread gets the usual number; then it has its own
            torch.set_num_threads(1)
            barrier.wait()

        for future in [self._pool.submit(one) for _ in range(n)]:
            future.result()
        torch.set_num_threads(usual)  # threads that start later would get 1 otherwise

    def submit(self, task: Callable[[], T]) -> Future[T]:
        return self._pool.submit(task)

    def close(self) -> None:
        self._pool.shutdown(wait=not on_own_thread(), cancel_futures=True)


def on_own_thread() -> bool:
    """An iterator that the garbage collector finds may be closed on a thread that would wait for itself."""
    return threading.current_thread().name.startswith((_NAME, "frostline-"))


class _Stopped(Exception):
    """The consumer has gone."""


class Ahead(Generic[T]):
    """The results of `begun`, computed on another thread, in order. `close` leaves no thread behind.

    begun: each item is a batch that is begun; calling it finishes it.
    """

    def __init__(self, begun: Iterator[Callable[[], T]]) -> None:
        self._begun = begun
        self._ready: queue.Queue[Any] = queue.Queue(READY)
        self._stop = threading.Event()
        _open.add(self)
        self._thread = threading.Thread(target=self._conduct, name=_NAME, daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        while not self._stop.is_set():
            try:
                kind, value = self._ready.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if kind == "batch":
                return value  # type: ignore[no-any-return]
            self._stop.set()
            if kind == "error":
                raise value
        raise StopIteration

    def _conduct(self) -> None:
        try:
            waiting: deque[Callable[[], T]] = deque()
            failed = self._carry_all(waiting)
            while waiting:
                self._put("batch", waiting.popleft()())
            self._put("end", None) if failed is None else self._fail(failed)
        except _Stopped:
            pass
        except BaseException as e:  # noqa: BLE001 - it is raised again where the batches are consumed
            self._fail(e)
        finally:
            close = getattr(self._begun, "close", None)
            if close is not None:
                close()

    def _carry_all(self, waiting: deque[Callable[[], T]]) -> BaseException | None:
        """Begin batch after batch. What fails at that is given back: the batches before it come first."""
        while True:
            try:
                batch = next(self._begun, None)
            except Exception as e:  # noqa: BLE001 - whatever it is, it is raised to the consumer
                return e
            if batch is None:
                return None
            waiting.append(batch)
            if len(waiting) > 1:
                self._put("batch", waiting.popleft()())

    def _put(self, kind: str, value: Any) -> None:
        while not self._stop.is_set():
            with suppress(queue.Full):
                self._ready.put((kind, value), timeout=_POLL_S)
                return
        raise _Stopped

    def _fail(self, error: BaseException) -> None:
        if not isinstance(error, FrostlineError):
            told = FeedError(f"Preparing batches failed: {type(error).__name__}: {error}")
            told.__cause__ = error
            error = told
        with suppress(_Stopped):
            self._put("error", error)

    def stop(self) -> None:
        """Let the conductor end as soon as it can."""
        self._stop.set()

    def close(self) -> None:
        self.stop()
        with suppress(queue.Empty):
            while True:
                self._ready.get_nowait()
        if not on_own_thread():
            self._thread.join()


_open: weakref.WeakSet[Ahead[Any]] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """End what nobody ended while threads still run; in the interpreter's last moments they are frozen."""
    for ahead in list(_open):
        ahead.close()
