"""Each file against its checksum, once per process, on its first use, beside whatever reads it.

A few daemon threads read the file again and hash it (the hash is faster than memory, so a warm file costs
its bytes from the page cache once). Whoever gives values away settles first, or, where that would hold up a
step, before it claims that all was well: `Table.rows` for the rows it returns, a feed at the end of an epoch,
a training when it keeps a checkpoint. A file that was found whole is not looked at again while its size and
time of change stay as they are.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from dataclasses import dataclass, field

import xxhash

from frostline.errors import StoreCorrupt

_STEP = 1 << 20
_THREADS = 2
_Identity = tuple[int, int, int, int, int]
"""Device, inode, size, time of the last change, expected checksum."""


@dataclass(eq=False)
class Verification:
    """One file's comparison: under way, whole, or failed."""

    name: str
    fd: int
    want: int
    pid: int = field(default_factory=os.getpid)
    finished: bool = False
    error: str | None = None
    _done: threading.Event = field(default_factory=threading.Event)

    def settle(self) -> None:
        """Wait for the outcome; StoreCorrupt where the file does not have its checksum."""
        if not self.finished:
            if self.pid == os.getpid():
                self._done.wait()
            else:  # forked while it was under way: the threads are the parent's
                self.run()
        _state.heard(self)
        if self.error:
            raise StoreCorrupt(self.error)

    @property
    def failed(self) -> bool:
        return self.error is not None

    def run(self) -> None:
        try:
            identity = _identity(self.fd, self.want)
            if _digest(self.fd) != self.want:
                self.error = (
                    f"{self.name} does not have its checksum; its bytes changed after writing. `frostline "
                    f"store check` lists all that is damaged; write those keys again with writer.replace."
                )
            else:
                _state.whole.add(identity)
        except OSError as e:
            self.error = f"Cannot read {self.name}: {e.strerror or e}."
        finally:
            os.close(self.fd)
            self.finished = True
            self._done.set()


class _State:
    """This process's queue and threads, and the files that were found whole (by anyone before a fork)."""

    def __init__(self) -> None:
        self.whole: set[_Identity] = set()
        self.unsettled: weakref.WeakSet[Verification] = weakref.WeakSet()
        """Begun, nobody has asked for the outcome yet, and somebody still has the file open."""
        self.renew()

    def renew(self) -> None:
        self.lock = threading.Lock()
        self.todo: queue.SimpleQueue[Verification] = queue.SimpleQueue()
        self.threads: list[threading.Thread] = []

    def submit(self, work: Verification) -> None:
        with self.lock:
            if len(self.threads) < _THREADS:
                thread = threading.Thread(target=_work, args=(self.todo,), name="store-verify", daemon=True)
                self.threads.append(thread)
                thread.start()
            self.unsettled.add(work)
        self.todo.put(work)

    def heard(self, work: Verification) -> None:
        with self.lock:
            self.unsettled.discard(work)

    def unheard(self) -> list[Verification]:
        with self.lock:
            return [*self.unsettled]


_state = _State()
os.register_at_fork(after_in_child=_state.renew)


def begin(fd: int, name: str, want: int) -> Verification | None:
    """Have an open file compared in the background; None where it was found whole before."""
    if _identity(fd, want) in _state.whole:
        return None
    work = Verification(name, os.dup(fd), want)
    _state.submit(work)
    return work


def settle_all() -> None:
    """Wait until every file that was read from so far has been compared; StoreCorrupt where one is damaged.

    For whoever is about to keep a result: a checkpoint, a unit of an experiment.
    """
    for work in _state.unheard():
        work.settle()


def _work(todo: queue.SimpleQueue[Verification]) -> None:
    while True:
        todo.get().run()


def _identity(fd: int, want: int) -> _Identity:
    found = os.fstat(fd)
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, want)


def _digest(fd: int) -> int:
    """xxh3-64 of a whole file. By `pread`: a mapping that is cut short meanwhile would end the process."""
    digest, offset, buffer = xxhash.xxh3_64(), 0, bytearray(_STEP)
    view = memoryview(buffer)
    while got := os.preadv(fd, [buffer], offset):
        digest.update(view[:got])
        offset += got
    return digest.intdigest()
