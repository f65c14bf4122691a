"""What a person sees of a training: a line that is rewritten on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
import unicodedata
from collections.abc import Iterator, Mapping
from typing import TextIO

from frostline.wording import about, duration, size

log = logging.getLogger("frostline")

_EVERY_S = {True: 0.2, False: 10.0}
"""Seconds between two lines, on a terminal and elsewhere."""

_BACK = "\r\x1b[2K"
"""Back to the first column, and what is there taken away."""


class TrainProgress:
    """The line of a training on standard error (or `out`).

    >>> progress = TrainProgress(sys.stdout)
    >>> progress.line(
    ...     1200, 10_000, epoch=3.41, loss=1.234, samples_per_s=812, data_wait=0.02, busy=0.97, left_s=840
    ... )
    step 1,200 of 10,000 (12%) · epoch 3.41 · loss 1.234 · 812 samples/s · data wait 2% · device busy 97% ·
    14 min left

    A terminal gets one line, rewritten at most five times a second; where it is too long, parts of it are
    left out, the time left never. Anything else gets whole lines without carriage returns: the first at once,
    then one every ten seconds, the last, and one before a note, so that what comes first is said first. An
    output that breaks (a closed terminal, a full disk under a log file) is given up with a warning: a
    training does not end for it. quiet: says nothing at all.
    """

    def __init__(self, out: TextIO | None = None, quiet: bool = False) -> None:
        self._out = out or sys.stderr
        self._terminal = self._out.isatty()
        self._quiet = quiet
        self._said: float | None = None
        self._open = False
        self._unsaid: list[str] = []
        self._spare: list[str] = []
        """What is left out of it where there is no room, that which matters least first."""
        self._between, self._cut = (" · ", "…") if _can_say(self._out, "·…") else (" | ", "...")

    def line(
        self,
        step: int,
        total_steps: int | None,
        epoch: float,
        loss: float | None,
        samples_per_s: float | None,
        data_wait: float | None,
        busy: float | None = None,
        memory_bytes: float | None = None,
        left_s: float | None = None,
        extra: Mapping[str, float | int | str] | None = None,
    ) -> None:
        """Where the training is. data_wait and busy are shares; what is None is not known and left out."""
        if self._quiet:
            return
        known: list[tuple[int, str, float | None]] = [  # first, whose turn it is where there is no room
            (1, f"epoch {epoch:.2f}", epoch),
            (7, f"loss {_figure(loss)}", loss),
            (5, f"{_rate(samples_per_s or 0)} samples/s", samples_per_s),
            (4, f"data wait {_share(data_wait)}", data_wait),
            (2, f"device busy {_share(busy)}", busy),
            (3, size(memory_bytes or 0), memory_bytes),
            (0, f"{duration(left_s or 0)} left", None if step == total_steps else left_s),
        ]
        parts = [(0, _steps(step, total_steps))]
        parts += [(turn, text) for turn, text, value in known if value is not None]
        parts += [(6, _plain(f"{name} {_figure(value)}")) for name, value in (extra or {}).items()]
        self._unsaid = [text for _, text in parts]
        self._spare = [text for turn, text in sorted(parts, key=lambda part: part[0]) if turn]
        if self._said is None or time.monotonic() - self._said >= _EVERY_S[self._terminal]:
            self._say()

    def note(self, text: str) -> None:
        """A sentence of its own; the line comes back with the next step."""
        if self._unsaid and not self._terminal:
            self._say()
        if not self._quiet:
            self._write(f"{_BACK if self._open else ''}{text}\n")
            self._open = False

    def end(self) -> None:
        """The last line, if it was held back, and the terminal's next line free."""
        if self._unsaid:
            self._say()
        if self._open:
            self._write("\n")
            self._open = False

    def _say(self) -> None:
        parts, self._unsaid = self._unsaid, []
        self._said = time.monotonic()
        if self._terminal:
            self._write(_BACK + self._fitted(parts))
            self._open = True
        else:
            self._write(self._between.join(parts) + "\n")

    def _fitted(self, parts: list[str]) -> str:
        """As much as the terminal does not wrap: a wrapped line cannot be rewritten."""
        room = _columns(self._out) - 1  # some terminals wrap when the last column is filled
        text = ""
        for some in _shorter(parts, self._spare):
            text = self._between.join(some)
            if _cells(text) <= room:
                return text
        room -= len(self._cut)
        while text and _cells(text) > room:
            text = text[:-1]
        return text + self._cut if room > 0 else ""

    def _write(self, text: str) -> None:
        if self._quiet:
            return
        encoding = getattr(self._out, "encoding", None) or "utf-8"
        try:
            self._out.write(text.encode(encoding, "replace").decode(encoding))
            self._out.flush()
        except (OSError, ValueError, RuntimeError) as e:  # ValueError: it was closed
            self._quiet = True
            log.warning("Progress is no longer shown, the output is gone (%s). The training goes on.", e)


def _shorter(parts: list[str], spare: list[str]) -> Iterator[list[str]]:
    """All of them, then fewer and fewer; of the last two, the step and the time left, the latter."""
    kept = [*parts]
    yield kept
    for text in spare:
        kept.remove(text)
        yield kept
    steps, *left = kept
    yield [steps.partition(" of ")[0], *left]
    yield left or [steps]


def forecast_text(
    steps: int | None,
    epochs: float | None,
    seconds: float | None,
    ends_at: str | None = None,
    *,
    steps_per_s: float | None = None,
    memory_bytes: float | None = None,
    memory_total_bytes: float | None = None,
) -> str:
    """What is about to happen, in a sentence for the time before step 1.

    >>> forecast_text(10_000, 8.2, 244, "14:32", memory_bytes=12.3e9, memory_total_bytes=141e9)
    '10,000 steps (8.2 epochs) at 41 steps/s: about 4 min, until 14:32; peak memory 12.30 GB of 141 GB'
    >>> forecast_text(None, None, None, steps_per_s=0.4)
    'no end is set: until it is stopped, at 2.5 s a step'

    steps, epochs: those still to be done. steps_per_s: from steps and seconds, if not given.
    """
    if steps_per_s is None and steps is not None and seconds:
        steps_per_s = steps / seconds
    pace = "" if not steps_per_s else f" at {_pace(steps_per_s)}"
    if steps is None and seconds is None:
        text = "no end is set: until it is stopped" + ("," + pace if pace else "")
    else:
        text = f"{steps:,} step{'' if steps == 1 else 's'}" if steps is not None else "as many steps as fit"
        text += f" ({_epochs(epochs)} epochs)" if epochs is not None else ""
        text += pace
        text += f": {about(seconds)}" if seconds is not None else ""
    text += f", until {ends_at}" if ends_at else ""
    if memory_bytes is not None:
        of = f" of {size(memory_total_bytes)}" if memory_total_bytes is not None else ""
        text += f"; peak memory {size(memory_bytes)}{of}"
    return text


def _steps(step: int, total: int | None) -> str:
    if total is None:
        return f"step {step:,}"
    # rounded down: 100% is said when it is done
    return f"step {step:,} of {total:,} ({100 * step // max(total, 1)}%)"


def _epochs(value: float) -> str:
    return f"{value:,.1f}" if value >= 1 else f"{value:.2g}"


def _pace(steps_per_s: float) -> str:
    return f"{_rate(steps_per_s)} steps/s" if steps_per_s >= 1 else f"{1 / steps_per_s:.3g} s a step"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _share(value: float | None) -> str:
    return f"{value or 0:.0%}"


def _figure(value: float | int | str | None) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _plain(text: str) -> str:
    """Without what would end or move the line: names come from workloads."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def _cells(text: str) -> int:
    """Columns that a text takes on a terminal."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(bool(unicodedata.combining(c)) for c in text)


def _columns(out: TextIO) -> int:
    try:
        found = os.get_terminal_size(out.fileno()).columns
    except (OSError, ValueError, AttributeError):  # something that only says it is a terminal
        found = shutil.get_terminal_size().columns
    return found if found > 0 else 80  # a terminal that does not know its size says 0


def _can_say(out: TextIO, text: str) -> bool:
    try:
        text.encode(getattr(out, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True
