"""Which files does a function open?

>>> import tempfile
>>> from pathlib import Path
>>> path = Path(tempfile.mkdtemp()) / "weights.pt"
>>> _ = path.write_bytes(b"w")
>>> with recording() as opened:
...     _ = path.read_bytes()
>>> [Path(name).name for name in opened.files]
['weights.pt']

Python tells of each `open` (an audit event), in any thread: a loader may read its shards by several. What it
misses is caught where possible: `safetensors.safe_open` opens files by itself and is wrapped for the time of
the recording. Files beside an opened one that look like weights are added by `with_siblings`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from frostline.fingerprint import files

SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".npz", ".npy", ".h5", ".onnx", ".gguf", ".json")
_CODE = (".py", ".pyc", ".pyi", ".so", ".pyd", ".dll", ".dylib", ".pth.lock")
_PLACES = ("/proc/", "/sys/", "/dev/")
_MOST = 2000
"""Siblings that are looked at; a folder with more is no folder of weights."""

_active: list[Opened] = []
_lock = threading.Lock()
_installed: list[bool] = []


@dataclass(eq=False)
class Opened:
    """Files opened for reading, with their identity at that moment (None: there was none).

    here: how many of them the recording thread itself opened.  broken: an event could not be understood.
    """

    files: dict[str, str | None] = field(default_factory=dict)
    here: int = 0
    broken: bool = False
    thread: int = field(default_factory=threading.get_ident)

    def add(self, path: Any) -> None:
        try:
            name = os.path.abspath(os.fsdecode(path))
        except (TypeError, ValueError):  # an open descriptor, or no path at all
            self.broken = self.broken or not isinstance(path, int)
            return
        if _ignored(name):
            return
        self.here += threading.get_ident() == self.thread
        self.files.setdefault(name, files.identity(name))


@contextmanager
def recording() -> Iterator[Opened]:
    """Records the files that are opened for reading meanwhile."""
    opened = Opened()
    with _lock:
        if not _installed:  # a hook cannot be removed: one for good, that asks whether somebody records
            sys.addaudithook(_hook)
            _installed.append(True)
        if not _active:
            _swap(_safe_open(), _noted)
        _active.append(opened)
    try:
        yield opened
    finally:
        with _lock:
            _active.remove(opened)
            if not _active:
                _swap(_noted, _safe_open())


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if event != "open" or not _active:
        return
    path, mode, flags = args
    writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)
    if not (writes or (isinstance(mode, str) and set(mode) & set("wax+"))):
        for opened in list(_active):
            opened.add(path)


def _ignored(name: str) -> bool:
    if name.startswith(_PLACES) or name.endswith(_CODE):
        return True
    installed = any(name.startswith(prefix + os.sep) for prefix in {sys.prefix, sys.base_prefix})
    return installed and not name.endswith(SUFFIXES)


@lru_cache(maxsize=1)
def _safe_open() -> Any:
    from safetensors import safe_open

    return safe_open


def _noted(filename: Any, *args: Any, **kwargs: Any) -> Any:
    """`safetensors.safe_open`, which is not Python's and tells of no file that it opens."""
    for opened in list(_active):
        opened.add(filename)
    return _safe_open()(filename, *args, **kwargs)


def _swap(old: object, new: object) -> None:
    """Wherever a module holds it under its name: most import it by `from safetensors import safe_open`."""
    for module in list(sys.modules.values()):
        held = getattr(module, "__dict__", {})
        if held.get("safe_open") is old:
            held["safe_open"] = new


def with_siblings(names: list[str]) -> list[str] | None:
    """The files and those beside them that look like weights; None when a folder holds too many to tell."""
    found = set(names)
    for folder in {os.path.dirname(name) for name in names}:
        try:
            beside = os.listdir(folder)
        except OSError:
            continue
        alike = [os.path.join(folder, name) for name in beside if name.endswith(SUFFIXES)]
        if len(alike) > _MOST:
            return None
        found.update(alike)
    return sorted(found)
