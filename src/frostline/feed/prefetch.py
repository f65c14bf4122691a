"""Reading ahead: one conductor thread plans and finishes groups of batches, a pool gathers their bytes.

Small batches are fetched several at a time (a *group*): one gather, one copy to the device, one hand-over,
then views. A group's gathering overlaps the finishing of the one before. Threads, not processes: nothing is
pickled, forked or hung.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch

from frostline.batch import Batch, Ragged
from frostline.errors import FeedError, FrostlineError
from frostline.feed import blame
from frostline.feed.portion import Planned, Portion
from frostline.feed.ring import NoRoom, Ring
from frostline.feed.schedule import Group
from frostline.feed.tiers import Stopped
from frostline.store.codecs import DamagedText
from frostline.store.verification import Verification

_POLL_S = 0.1
_PATIENCE_S = 1.0  # how long to hope for memory once the consumer waits and has nothing more to give back


@dataclass
class _UnderWay:
    group: Group
    planned: dict[str, Planned]
    futures: list[Future[None]]


@dataclass
class _Ready:
    batches: deque[dict[str, Batch]]
    rows: deque[int]
    event: Any


class Prefetch:
    """Delivers the batches of one epoch in order. `close` leaves no thread behind."""

    def __init__(
        self,
        groups: Iterator[Group],
        portions: dict[str, Portion],
        ring: Ring,
        *,
        n_threads: int,
        seed: int,
        epoch: int,
        train: bool,
    ) -> None:
        self._groups, self._portions, self._ring = groups, portions, ring
        self._draw = {"seed": seed, "epoch": epoch, "train": train}
        self._ready: queue.Queue[Any] = queue.Queue(maxsize=ring.depth)
        self._stop = threading.Event()
        self._pid = os.getpid()
        self._device = next(iter(portions.values())).device
        self._stream: Any = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._n_threads = n_threads
        self._pool = ThreadPoolExecutor(n_threads, "frostline-gather")
        self.wait_s = 0.0
        self.rows = 0
        self._consumer_waits = False
        self._verifications: set[Verification] = set()
        _open.add(self)
        self._conductor = threading.Thread(target=self._conduct, name="frostline-feed", daemon=True)
        self._conductor.start()

    def batches(self) -> Iterator[dict[str, Batch]]:
        """The epoch's batches, one dict of portions each."""
        while True:
            ready = self._next()
            if ready is None:
                return
            while ready.batches:
                self.rows += ready.rows.popleft()
                hand_over(ready.batches[0], ready.event)
                yield ready.batches.popleft()
                self._check_alive()

    def _check_alive(self) -> None:
        if self._pid != os.getpid():
            raise FeedError(
                "This feed's iterator came here by fork, its threads did not. Begin an iteration here."
            )
        if self._stop.is_set():
            raise FeedError(
                "This iteration is over: another one of the same feed began, or its epoch or state was set."
            )

    def _next(self) -> _Ready | None:
        began = time.perf_counter()
        while True:
            self._check_alive()
            try:
                ready = self._ready.get(timeout=_POLL_S)
                break
            except queue.Empty:
                self._consumer_waits = True
        self._consumer_waits = False
        self.wait_s += time.perf_counter() - began
        if isinstance(ready, BaseException):
            raise ready
        return ready  # type: ignore[no-any-return]

    # the conductor's side

    def _conduct(self) -> None:
        try:
            under_way: deque[_UnderWay] = deque()
            for portion in self._portions.values():
                portion.load(self._stop.is_set)
            last = self._carry_all(under_way)
            while under_way:
                self._deliver(under_way.popleft())
            if last is not None:
                raise last
            blame.settled(self._verifications)  # an epoch ends well only if its files were whole
            self._put(None)
        except Stopped:
            return
        except BaseException as e:  # noqa: BLE001 - it is raised again where the batches are consumed
            self._fail(e)

    def _carry_all(self, under_way: deque[_UnderWay]) -> Exception | None:
        """Begin group after group. An order's failure is given back: the batches before it come first."""
        while True:
            try:
                group = next(self._groups, None)
            except Exception as e:  # noqa: BLE001 - an order may raise anything
                return e
            if group is None:
                return None
            self._carry_on(group, under_way)

    def _fail(self, error: BaseException) -> None:
        if not isinstance(error, FrostlineError):
            failure = FeedError(f"The feed's background thread failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            error = failure
        with suppress(Stopped):
            self._put(error)

    def _carry_on(self, group: Group, under_way: deque[_UnderWay]) -> None:
        """Begin a group, then deliver the one before.

        Where that fails, the one before is delivered first and the group is tried in smaller pieces, so
        that every batch before a bad row arrives. For memory we also wait: the consumer may give it back.
        """
        patience_s = _PATIENCE_S
        while True:
            try:
                under_way.append(self._begin(group))
                break
            except FrostlineError as e:
                if under_way:
                    self._deliver(under_way.popleft())
                elif group.n_batches > 1:
                    for half in group.halves():
                        self._carry_on(half, under_way)
                    return
                elif not isinstance(e, NoRoom) or patience_s <= 0:
                    raise
                elif self._stop.wait(_POLL_S):
                    raise Stopped from None
                elif self._consumer_waits:  # one at work may still give buffers back, however long it takes
                    patience_s -= _POLL_S
        if len(under_way) > 1:
            self._deliver(under_way.popleft())

    def _deliver(self, work: _UnderWay) -> None:
        try:
            ready = self._finish(work)
        except (FeedError, DamagedText) as e:
            if work.group.n_batches == 1:
                raise FeedError(str(e)) from e
            for half in work.group.halves():
                self._deliver(self._begin(half))
        else:
            self._put(ready)

    def _begin(self, group: Group) -> _UnderWay:
        planned: dict[str, Planned] = {}
        try:
            for name, portion in self._portions.items():
                planned[name] = portion.plan(group.rows[name], **self._draw)  # type: ignore[arg-type]
        except NoRoom:
            for other in planned.values():
                self._ring.give_back(other.slab)
            raise
        # two tasks a thread: more would cost more than they even out
        aim = 2 * self._n_threads
        tasks = deque(
            task for name, portion in self._portions.items() for task in portion.tasks(planned[name], aim)
        )
        # one job a thread, which takes tasks as it goes: a future a task cost more than copying a row
        jobs = min(self._n_threads, len(tasks))
        return _UnderWay(group, planned, [self._pool.submit(_work_off, tasks) for _ in range(jobs)])

    def _finish(self, work: _UnderWay) -> _Ready:
        for future in work.futures:
            future.result()
        self._look_at_files(work)
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            parts = {
                name: portion.finish(work.planned[name], work.group.cuts[name], self._stream)
                for name, portion in self._portions.items()
            }
            event = None if self._stream is None else self._stream.record_event()
        n = work.group.n_batches
        batches = deque({name: parts[name][i] for name in parts} for i in range(n))
        sizes = deque(sum(cuts[i + 1] - cuts[i] for cuts in work.group.cuts.values()) for i in range(n))
        return _Ready(batches, sizes, event)

    def _look_at_files(self, work: _UnderWay) -> None:
        """What is known of the files so far: to wait here would hold the first batch up for all of them."""
        for planned in work.planned.values():
            self._verifications |= planned.read.verifications
        if self._verifications:
            over = {v for v in self._verifications if v.finished}
            self._verifications -= over
            blame.settled(over)

    def _put(self, item: Any) -> None:
        """Queue an item; Stopped when the consumer has gone."""
        self._ready.maxsize = self._ring.depth
        while not self._stop.is_set():
            try:
                self._ready.put(item, timeout=_POLL_S)
                return
            except queue.Full:
                continue
        raise Stopped

    def close(self) -> None:
        if self._pid != os.getpid():
            return
        self._stop.set()
        while not self._ready.empty():
            self._ready.get_nowait()
        # an iterator that the garbage collector finds may be closed on one of our own threads
        ours = threading.current_thread().name.startswith("frostline-")
        self._pool.shutdown(wait=not ours, cancel_futures=True)
        if not ours:
            self._conductor.join()
        while not self._ready.empty():  # what it had put before it saw the stop
            self._ready.get_nowait()


def hand_over(parts: dict[str, Batch], event: Any) -> None:
    """Make the consumer's stream wait for a batch, and keep its memory until that stream is done with it."""
    if event is None:
        return
    for value in (value for batch in parts.values() for value in batch.values()):
        for tensor in (value.values, value.offsets) if isinstance(value, Ragged) else (value,):
            if isinstance(tensor, torch.Tensor):
                stream = torch.cuda.current_stream(tensor.device)
                stream.wait_event(event)
                tensor.record_stream(stream)


def _work_off(tasks: deque[Callable[[], None]]) -> None:
    """Run tasks until none is left; the first that fails ends them all."""
    while tasks:
        try:
            task = tasks.popleft()
        except IndexError:  # another thread took the last one
            return
        try:
            task()
        except BaseException:
            tasks.clear()
            raise


_open: weakref.WeakSet[Prefetch] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """End what nobody ended while threads still run; in the interpreter's last moments they are frozen."""
    for prefetch in list(_open):
        prefetch.close()
