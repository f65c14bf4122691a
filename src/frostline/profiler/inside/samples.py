"""What the script's own code does between the parts that are known: its lines, looked at now and then.

A thread looks at the stack of the thread that steps, every few milliseconds. In steps of its own: a thread
that wants Python's lock slows down a script that holds it, by half in a loop of plain Python. It is given the
lock soon: with the usual 5 ms it came by when an operator let go of it, and saw that line, whatever had run
when the look was due. A line of plain Python that took 72 % of a step was told as 33 %. A look counts for the
time since the last one, as those that had to wait for the lock are fewer. Looks are not evenly spaced: in a
loop of about 2 ms, looks every 2 ms met the same operator again and again, and told 3 % as 31 to 42 %.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

_EVERY_S = 0.002
_GOLDEN = (5**0.5 - 1) / 2
_SWITCH_S = 0.0001
"""What a line may run on after a look is due."""
_HERE = os.path.dirname(os.path.abspath(__file__))
OURS = os.path.join(_HERE.rsplit(os.sep, 2)[0], "")
_PATHS = {sysconfig.get_paths()[name] for name in ("purelib", "platlib", "stdlib", "scripts")}
LIBRARIES = (*(os.path.join(path, "") for path in _PATHS), OURS)
"""Where code lies that is not the user's own: also torchrun and other commands, and frostline's."""


class Samples:
    """Lines of the thread that begins it, until `end`, whenever that thread is in no span."""

    def __init__(self) -> None:
        self.lines: dict[str, float] = defaultdict(float)
        """Seconds."""
        self.looked = 0.0
        """In all, also inside of parts."""
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._switch = Switch()

    def begin(self, spans: Any) -> None:
        self._over.clear()
        self._switch.shorten()
        watched = threading.get_ident()
        self._thread = threading.Thread(
            target=self._watch, args=(watched, spans), name="frostline-samples", daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        if self._thread is not None:
            self._over.set()
            self._thread.join()  # at once in a forked child, which has no such thread
            self._thread = None
            self._switch.restore()

    def _watch(self, watched: int, spans: Any) -> None:
        last = time.perf_counter()
        waits = uneven()
        while not self._over.wait(next(waits)):
            frame = None if spans.within(watched) else sys._current_frames().get(watched)
            now = time.perf_counter()
            self.looked += now - last
            if frame is not None:
                self.lines[user_line(frame)] += now - last
            last = now

    def told(self) -> list[list[Any]]:
        """[line, share of the time that was looked at], the largest first."""
        most = sorted(self.lines.items(), key=lambda found: -found[1])[:8]
        return [[line, seconds / self.looked] for line, seconds in most] if self.looked else []


def uneven() -> Iterator[float]:
    """Waits from half to one and a half of the usual one, in an order that no loop has; none is drawn, as
    random numbers are the script's.

    >>> waits = uneven()
    >>> [round(1000 * next(waits), 2) for _ in range(4)]
    [1.0, 2.24, 1.47, 2.71]
    """
    place = 0.0
    while True:
        yield _EVERY_S * (0.5 + place)
        place = (place + _GOLDEN) % 1.0


class Switch:
    """How long a thread keeps Python's lock that another one wants: less for a while, then as before, unless
    the script has set it meanwhile. A child that is forked meanwhile has the usual time."""

    def __init__(self) -> None:
        self._usual: float | None = None
        self._short = 0.0
        self._known = False

    def shorten(self) -> None:
        if not self._known:
            os.register_at_fork(after_in_child=self.restore)
            self._known = True
        if self._usual is None:
            self._usual = sys.getswitchinterval()
            sys.setswitchinterval(min(_SWITCH_S, self._usual))
            self._short = sys.getswitchinterval()

    def restore(self) -> None:
        usual, self._usual = self._usual, None
        if usual is not None and sys.getswitchinterval() == self._short:
            sys.setswitchinterval(usual)


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
