"""Files that are whole or absent, opened without ever leaving the store's folder.

Writing: aside, checksummed on the way, fsynced, renamed, folder fsynced. Reading: every step of the path is
opened relative to its parent with O_NOFOLLOW, so neither `..` nor a symlink leads out.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import shutil
import socket
import stat
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from frostline.errors import StoreCorrupt, StoreError, StoreFull, StoreLocked

ASIDE = ".aside"
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_STEP = 8 << 20
_SYNC_FILE_RANGE_WRITE = 2


def _found(name: str) -> Any:
    """A function of the C library that Python does not show; None where there is none (it is Linux's)."""
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return function


_sync_file_range = _found("sync_file_range")


def sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(folder: Path) -> None:
    """Create `folder` so that it survives a crash of the machine."""
    if not folder.is_dir():
        make_folder(folder.absolute().parent)
        with explained(folder, 0):
            folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def write_whole(path: Path, chunks: Iterable[Any]) -> tuple[int, int]:
    """Write `chunks` (buffers) to `path`: a crash leaves the old state or the new; → bytes, xxh3-64."""
    aside = path.with_name(path.name + ASIDE)
    buffers = [memoryview(chunk).cast("B") for chunk in chunks]
    size = sum(b.nbytes for b in buffers)
    with explained(path, size):
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            digest = pour(fd, (b[at : at + _STEP] for b in buffers for at in range(0, b.nbytes, _STEP)))
            os.fsync(fd)
        except BaseException:
            os.unlink(aside)
            raise
        finally:
            os.close(fd)
        os.replace(aside, path)
        sync_folder(path.parent)
    return size, digest


def pour(fd: int, pieces: Iterable[memoryview]) -> int:
    """Write pieces one after the other; → xxh3-64 of all. They are on the disk only when `fd` is synced."""
    digest, done, started = xxhash.xxh3_64(), 0, 0
    for piece in pieces:
        digest.update(piece)
        write_all(fd, piece)
        done += piece.nbytes
        if done - started >= _STEP:
            _start_writing(fd, started, done - started)
            started = done
    return digest.intdigest()


def _start_writing(fd: int, start: int, size: int) -> None:
    """The disk begins now, not when fsync asks. Only a hint: what it answers does not matter.

    64 MB and their sync took 40 ms instead of 60. posix_fadvise(DONTNEED) does so too, but may take the file
    out of the page cache, and who reads it next waits for the disk.
    """
    if _sync_file_range is not None:
        _sync_file_range(fd, start, size, _SYNC_FILE_RANGE_WRITE)


def write_all(fd: int, buffer: memoryview) -> None:
    while buffer.nbytes:
        buffer = buffer[os.write(fd, buffer) :]


@contextmanager
def explained(path: Path, size: int) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        if e.errno in _NO_ROOM:
            there = next(p for p in (path.parent, *path.parent.parents) if p.exists())
            free = shutil.disk_usage(there).free
            raise StoreFull(
                f"No room to write {path.name}: it needs {size:,} bytes, {there} has {free:,} free "
                f"({os.strerror(e.errno or 0)}). What was committed is whole; free some space and run the "
                f"same again."
            ) from e
        if e.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise StoreError(
                f"Cannot write {path}: {os.strerror(e.errno)}. Give this user write access to the folder, "
                f"or choose another one."
            ) from e
        raise


@contextmanager
def reading(name: str | Path) -> Iterator[None]:
    """What the system says when a file cannot be read (EIO, no permission, …) as a StoreError."""
    try:
        yield
    except OSError as e:
        raise StoreError(
            f"Cannot read {name}: {e.strerror or e}. Check the disk, the permissions and the limits of this "
            f"process, then try again."
        ) from e


def open_inside(root: Path, *parts: str) -> int:
    """A read-only descriptor of the regular file root/parts…; refuses links and anything outside `root`."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        fd = os.open(root, flags | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError) as e:
        raise StoreError(f"There is no store at {root} any more: it was moved or deleted.") from e
    except OSError as e:
        raise StoreError(f"Cannot open {root}: {e.strerror}.") from e
    try:
        for part in parts[:-1]:
            _refuse_odd_name(root, part)
            inner = os.open(part, flags | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
            os.close(fd)
            fd = inner
        _refuse_odd_name(root, parts[-1])
        # O_NONBLOCK: a FIFO planted under a shard's name must not hang the reader.
        found = os.open(parts[-1], flags | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=fd)
    except OSError as e:
        place = "/".join(parts)
        if e.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
            raise StoreCorrupt(
                f"{root}: {place} is a link, passes through one, or is no file; a store's files are plain "
                f"files inside its "
                f"folder. Copy the data in place of the link."
            ) from e
        if e.errno == errno.ENOENT:
            raise StoreCorrupt(
                f"{root}: {place} is missing. Restore it from a copy, or run `frostline store check {root}` "
                f"to see all that is damaged."
            ) from e
        raise StoreError(f"Cannot open {root}/{place}: {e.strerror}.") from e
    finally:
        os.close(fd)
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        raise StoreCorrupt(f"{root}: {'/'.join(parts)} is not a regular file.")
    return found


def is_still(path: Path, fd: int) -> bool:
    """Whether the name stands for this open file; not so once its folder was moved, deleted or made anew."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except (FileNotFoundError, NotADirectoryError):
        return False


def _refuse_odd_name(root: Path, part: str) -> None:
    if not part or part in (".", "..") or "/" in part or "\0" in part:
        raise StoreCorrupt(f"{root}: {part!r} is not a file name; it would leave the store's folder.")


def read_inside(root: Path, *parts: str, limit: int) -> bytes:
    """The whole of a small file; refused when larger than `limit` bytes, before memory is taken."""
    fd = open_inside(root, *parts)
    try:
        size = os.fstat(fd).st_size
        if size > limit:
            raise StoreCorrupt(
                f"{root}: {'/'.join(parts)} has {size:,} bytes; at most {limit:,} are expected."
            )
        data = b""
        with reading(f"{root}/{'/'.join(parts)}"):
            while len(data) < size and (piece := os.read(fd, size - len(data))):
                data += piece
        return data
    finally:
        os.close(fd)


def refuse_links(*folders: Path) -> None:
    """StoreCorrupt when one of these is a link: writing or collecting there would leave the store."""
    for folder in folders:
        if folder.is_symlink():
            raise StoreCorrupt(
                f"{folder} is a link; a store's files and folders are plain ones inside its folder. "
                f"Copy the data in place of the link."
            )


_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


def digest_inside(root: Path, *parts: str, step: Callable[[int], None] | None = None) -> str:
    """xxh3-64 of a whole file, in 16 digits; `step` hears how many bytes were read."""
    fd = open_inside(root, *parts)
    digest = xxhash.xxh3_64()
    try:
        with reading(f"{root}/{'/'.join(parts)}"):
            while piece := os.read(fd, _STEP):
                digest.update(piece)
                if step:
                    step(len(piece))
    finally:
        os.close(fd)
    return f"{digest.intdigest():016x}"


class Lock:
    """The one-writer lock: flock on `.lock`, which the kernel frees when its owner dies."""

    def __init__(self, root: Path) -> None:
        self._fd, self._path = -1, root / ".lock"
        with explained(root / ".lock", 0):
            fd = os.open(root / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            owner = os.pread(fd, 4096, 0).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            if e.errno not in (errno.EAGAIN, errno.EACCES):
                raise StoreError(
                    f"{root}: this file system refuses flock ({e}); a store is written on one that has it."
                ) from e
            ours = f'"pid": {os.getpid()},' in owner
            who = f"this process ({owner}): close its writer" if ours else f"another process ({owner})"
            raise StoreLocked(
                f"{root} is being written by {who}. One writer at a time: wait for it, or stop it."
            ) from e
        self._fd, self._pid = fd, os.getpid()
        _locks.add(self)
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        except (
            OSError
        ) as e:  # it is for messages only, and `store gc`, which frees a full disk, needs the lock
            if e.errno not in _NO_ROOM:
                self.release()
                raise

    def refuse_other(self) -> None:
        """StoreError unless the folder is still the one that is locked: another may stand in its place."""
        if not is_still(self._path, self._fd):
            raise StoreError(
                f"{self._path.parent} was moved, deleted or made anew while it was being written. Nothing "
                f"more is written there; open the store again."
            )

    def release(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            if (
                self._pid == os.getpid()
            ):  # a child just forked may still have the file open: closing is not enough
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)


def _let_go_in_child() -> None:
    """A forked child shares the open file and its lock, which would outlive the writer in workers."""
    for lock in list(_locks):
        lock.release()


os.register_at_fork(after_in_child=_let_go_in_child)
