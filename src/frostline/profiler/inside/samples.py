"""What the script's own code does between the parts that are known: its lines, looked at now and then.

A thread looks at the stack of the thread that steps, every few milliseconds. In steps of its own: a thread
that wants Python's lock slows down a script that holds it, by half in a loop of plain Python.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from collections import Counter
from typing import Any

_EVERY_S = 0.002
_HERE = os.path.dirname(os.path.abspath(__file__))
OURS = os.path.join(_HERE.rsplit(os.sep, 2)[0], "")
_PATHS = {sysconfig.get_paths()[name] for name in ("purelib", "platlib", "stdlib")}
LIBRARIES = (*(os.path.join(path, "") for path in _PATHS), OURS)
"""Where code lies that is not the user's own: also frostline's, wherever it is installed."""


class Samples:
    """Lines of the thread that begins it, until `end`, whenever that thread is in no span."""

    def __init__(self) -> None:
        self.lines: Counter[str] = Counter()
        self.looked = 0
        self._thread: threading.Thread | None = None
        self._over = threading.Event()

    def begin(self, spans: Any) -> None:
        self._over.clear()
        watched = threading.get_ident()
        self._thread = threading.Thread(
            target=self._watch, args=(watched, spans), name="frostline-samples", daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        if self._thread is not None:
            self._over.set()
            self._thread.join()
            self._thread = None

    def _watch(self, watched: int, spans: Any) -> None:
        while not self._over.wait(_EVERY_S):
            self.looked += 1
            if not spans.within(watched):
                frame = sys._current_frames().get(watched)
                self.lines[user_line(frame)] += 1

    def told(self) -> list[list[Any]]:
        """[line, share of the time that was looked at], the largest first."""
        return [[line, n / self.looked] for line, n in self.lines.most_common(8)] if self.looked else []


def user_line(frame: Any) -> str:
    """The innermost line of the user's own code; of a library, where none of it is on the stack."""
    first = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(("<", _HERE)):
            told = f"{file}:{frame.f_lineno}"
            if not file.startswith(LIBRARIES):
                return told
            first = first or told
        frame = frame.f_back
    return first or "somewhere"
