"""Shards on their way to disk: their files are written side by side, their commits come one after the other.

Killed anywhere, the store ends with the last commit. Files of later shards may lie there then; nothing names
them, and the same rows given again are written over them.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Any

from frostline.store.session import FileEntry, Session

_AT_ONCE = 3
"""Shards. One thread that hashes and writes reaches some 1.2 GB/s, and waits for every fsync."""
_AT_ONCE_BYTES = 256 << 20
"""Of those; a shard that is larger by itself goes alone."""


class InOrder:
    """put(…) again and again, wait() for all, close().

    In a fork there is nothing to wait for: the threads are its parent's, which writes on.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._files = ThreadPoolExecutor(_AT_ONCE, "frostline-write")
        self._commits = ThreadPoolExecutor(1, "frostline-commit")
        self._under_way: deque[tuple[int, Future[None]]] = deque()
        self._last: list[Future[Any]] = []
        self._next = session.next_commit
        self._failed = False
        self._pid = os.getpid()

    def put(
        self, size: int, write: Callable[[int], list[FileEntry]], commit: Callable[[list[FileEntry]], None]
    ) -> None:
        """Have a shard of `size` bytes written; raises what went wrong with an earlier one.

        write:  makes its files, under the number of the commit that will name them.
        commit: makes them part of the store.
        """
        while self._under_way and (self._under_way[0][1].done() or not self._fits(size)):
            self._first()
        number, self._next = self._next, self._next + 1
        files = self._files.submit(self._write, write, number)
        committed = self._commits.submit(self._commit, number, files, commit)
        self._last = [files, committed]
        self._under_way.append((size, committed))

    def _write(self, write: Callable[[int], list[FileEntry]], number: int) -> list[FileEntry]:
        self._session.refuse_other()
        return write(number)

    def _fits(self, size: int) -> bool:
        held = sum(other for other, _ in self._under_way)
        return len(self._under_way) < _AT_ONCE and held + size <= _AT_ONCE_BYTES

    def _first(self) -> None:
        try:
            self._under_way[0][1].result()
        except Exception:
            self._under_way.clear()  # all others fail because of this one, and have nothing to add
            raise
        self._under_way.popleft()

    def _commit(
        self, number: int, files: Future[list[FileEntry]], commit: Callable[[list[FileEntry]], None]
    ) -> None:
        try:
            if self._failed:
                files.cancel()
            entries = files.result()
            if self._failed or self._session.next_commit != number:
                raise RuntimeError(f"commit {number} does not follow {self._session.next_commit - 1}")
            commit(entries)
        except BaseException:
            self._failed = True
            raise

    def wait(self) -> None:
        """Until all is committed; raises what went wrong."""
        while self._under_way and self._pid == os.getpid():
            self._first()

    def close(self) -> None:
        """Afterwards nothing is written any more. What was put is committed, up to the first that failed.

        Interrupted, it may be called again: a thread whose join was interrupted counts as ended while it
        runs on, so it is the last commit that is waited for, not the threads.
        """
        if self._pid != os.getpid():
            return
        wait_for(self._last)
        self._commits.shutdown(wait=True)
        self._files.shutdown(wait=True)
