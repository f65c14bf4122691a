"""Progress of a freeze on standard error: a line that is rewritten on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from typing import TextIO

from frostline.freezer.stream import Stats
from frostline.wording import duration, size

log = logging.getLogger("frostline")

_EVERY_S = {True: 0.2, False: 10.0}
"""Seconds between two lines, on a terminal and elsewhere."""


class Reporter:
    """Says what happens. quiet: only what must not be missed."""

    def __init__(self, *, quiet: bool = False, out: TextIO | None = None) -> None:
        self._out = out or sys.stderr
        self._terminal = self._out.isatty()
        self._quiet = quiet
        self._what = ""
        self._began = self._said = 0.0
        self._first = Stats()
        self._open = False

    def note(self, text: str) -> None:
        """A sentence of its own."""
        if not self._quiet:
            self._clear()
            self._write(text + "\n")

    def looked(self, done: int, total: int) -> None:
        self._line("looking at the inputs", done, total, None)

    def computed(self, what: str, done: int, total: int, stats: Stats) -> None:
        self._line(what, done, total, stats)

    def end(self) -> None:
        self._clear()
        self._what = ""

    def _line(self, what: str, done: int, total: int, stats: Stats | None) -> None:
        now = time.monotonic()
        if what != self._what:
            self._what, self._began, self._said, self._begun_with = what, now, now, done
            self._first = Stats(**vars(stats)) if stats else Stats()
        if self._quiet or now - self._said < _EVERY_S[self._terminal]:
            return
        self._said = now
        text = self._text(what, done, total, stats, now - self._began)
        if self._terminal:
            self._write(f"\r\x1b[2K{text}")
            self._open = True
        else:
            self._write(text + "\n")

    def _text(self, what: str, done: int, total: int, stats: Stats | None, took: float) -> str:
        rate = (done - self._begun_with) / max(took, 1e-9)
        parts = [f"{what}: {done:,} of {total:,} ({done / max(total, 1):.0%})", f"{rate:,.1f} samples/s"]
        if stats is not None:
            first = self._first
            parts.append(f"{size((stats.bytes - first.bytes) / max(took, 1e-9))}/s")
            parts.append(f"device busy {min(1.0, (stats.busy - first.busy) / max(took, 1e-9)):.0%}")
            if stats.failed:
                parts.append(f"{stats.failed:,} quarantined")
        left = (total - done) / rate if rate > 0 else None
        parts.append(f"{duration(left)} left" if left is not None else "time left not known yet")
        return ", ".join(parts)

    def _clear(self) -> None:
        if self._open:
            self._write("\r\x1b[2K")
            self._open = False

    def _write(self, text: str) -> None:
        if self._quiet:
            return
        try:
            self._out.write(text)
            self._out.flush()
        except (OSError, ValueError) as e:  # ValueError: it was closed
            self._quiet = True
            log.warning("Progress is no longer shown, the output is gone (%s). Freezing goes on.", e)
