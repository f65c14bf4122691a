"""Files by their content.

>>> import tempfile
>>> path = Path(tempfile.mkdtemp()) / "clip.mp4"
>>> _ = path.write_bytes(b"frames")
>>> before = file_id(path)
>>> _ = path.write_bytes(b"others")
>>> "ends" in before.differs(file_id(path))
True

`file_id` is cheap, for the inputs of a pipeline: size, time and the two ends. `content_of` reads everything,
for weights; what it found is kept by the file's identity, so that the next process need not read it again.
"""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash

from frostline.errors import UsageError
from frostline.fingerprint import cache

_END = 64 << 10
_PIECE = 4 << 20
_SMALL = 1 << 20
"""Smaller files are read again sooner than looked up."""
SETTLED_NS = 2_000_000_000
"""A file that changed this recently could change again within one tick of the file system's clock."""


@dataclass(frozen=True)
class FileId:
    """What a file was when it was read: size in bytes, time of change, hash of its ends, hash of all of it.

    >>> FileId.parse("4823 1731648000123456789 9f3a").size
    4823
    """

    size: int
    mtime_ns: int
    ends: str
    full: str | None = None

    @property
    def text(self) -> str:
        """In one line, for a store: `size mtime_ns ends [full]`."""
        return " ".join([str(self.size), str(self.mtime_ns), self.ends, *([self.full] if self.full else [])])

    @classmethod
    def parse(cls, text: str) -> FileId:
        parts = text.split(" ")
        try:
            return cls(int(parts[0]), int(parts[1]), parts[2], *parts[3:])
        except (IndexError, ValueError, TypeError) as error:
            raise UsageError(
                f"{text!r} is no file identity; expected 'size mtime_ns ends [full]'."
            ) from error

    def differs(self, other: FileId) -> list[str]:
        """Which of "size", "mtime", "ends", "content" differ. Equal full hashes settle it: a file that was
        only touched, or copied, is the same."""
        full = bool(self.full and other.full)
        if full and self.full == other.full and self.size == other.size:
            return []
        names = {"size": "size", "mtime": "mtime_ns", "ends": "ends", **({"content": "full"} if full else {})}
        return [name for name, at in names.items() if getattr(self, at) != getattr(other, at)]


def file_id(path: str | Path, *, full: bool = False) -> FileId:
    """The identity of a regular file (links are followed). full: also a hash of all of it."""
    with _opened(path) as (handle, info):
        ends = xxhash.xxh3_64(str(info.st_size).encode())
        ends.update(os.pread(handle, _END, 0))
        ends.update(os.pread(handle, _END, max(0, info.st_size - _END)))
        whole = _hash_all(handle) if full else None
    return FileId(info.st_size, info.st_mtime_ns, ends.hexdigest(), whole)


def content_of(path: str | Path) -> str:
    """xxh3_128 of everything in a regular file; 32 hex digits."""
    with _opened(path) as (handle, info):
        key = _identity(info)
        known = cache.recall("content", key) if info.st_size >= _SMALL else None
        if isinstance(known, str):
            return known
        found = _hash_all(handle)
        after = os.fstat(handle)
    if info.st_size >= _SMALL and _identity(after) == key and settled(after):
        cache.keep("content", key, found)
    return found


def tree_of(path: str | Path) -> str:
    """A folder by the names and contents of all files below it; 32 hex digits."""
    root = Path(path)
    state = xxhash.xxh3_128(b"folder")
    for found in sorted(p for p in root.rglob("*") if not p.is_dir()):
        name = found.relative_to(root).as_posix().encode("utf-8", "surrogateescape")
        state.update(len(name).to_bytes(8, "little") + name + bytes.fromhex(content_of(found)))
    return str(state.hexdigest())


def content_of_any(path: str | Path) -> str:
    """`content_of` a file or `tree_of` a folder."""
    return tree_of(path) if os.path.isdir(path) else content_of(path)


def names_content(text: str, *, folders: str) -> bool:
    """Whether a string names a file, or a folder whose content it stands for.

    A folder above the working directory is a place and not content. A stage's string may name a folder of
    inputs, which are compared one by one; only a folder of a model (with a .json in it) counts there.
    """
    if not text or "\0" in text or len(text) > 4096:
        return False
    if os.path.isfile(text):
        return True
    if not os.path.isdir(text) or Path.cwd().is_relative_to(Path(text).resolve()):
        return False
    return folders == "loader" or any(name.endswith(".json") for name in os.listdir(text))


def holds_code(folder: Path) -> bool:
    """Whether code that runs lies in a folder, as in `Path(__file__).parent`: then it is no content, and may
    hold the stores themselves."""
    inside = (f"{folder.absolute()}{os.sep}", f"{folder.resolve()}{os.sep}")
    return any(str(getattr(m, "__file__", None) or "").startswith(inside) for m in list(sys.modules.values()))


def identity(path: str | Path) -> str | None:
    """What tells whether a file is still the one that was read; None when there is no such file."""
    try:
        info = os.stat(path)
    except (OSError, ValueError):
        return None
    return _identity(info) if stat.S_ISREG(info.st_mode) else None


def _identity(info: os.stat_result) -> str:
    return f"{info.st_dev} {info.st_ino} {info.st_size} {info.st_mtime_ns} {info.st_ctime_ns}"


def settled(info: os.stat_result) -> bool:
    """Whether the last change is old enough that a further one would show in the times."""
    return time.time_ns() - max(info.st_mtime_ns, info.st_ctime_ns) > SETTLED_NS


@contextmanager
def _opened(path: str | Path) -> Iterator[tuple[int, os.stat_result]]:
    """A descriptor of a regular file. A pipe would wait for a writer, so it is never opened to be read."""
    _refuse(path, os.stat(path))
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    try:
        info = os.fstat(handle)
        _refuse(path, info)  # it may have been replaced in between
        yield handle, info
    finally:
        os.close(handle)


def _refuse(path: str | Path, info: os.stat_result) -> None:
    if not stat.S_ISREG(info.st_mode):
        kind = "folder" if stat.S_ISDIR(info.st_mode) else "pipe, socket or device"
        raise UsageError(f"Cannot read the content of {os.fspath(path)!r}: it is a {kind}, expected a file.")


def _hash_all(handle: int) -> str:
    state, at = xxhash.xxh3_128(), 0
    while piece := os.pread(handle, _PIECE, at):
        state.update(piece)
        at += len(piece)
    return str(state.hexdigest())
