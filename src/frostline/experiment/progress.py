"""What a person sees of an experiment; its notes are kept in the run's folder, too."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TextIO

from frostline.trainer.progress import TrainProgress
from frostline.wording import duration

NOTES = "notes.txt"
_EVERY_S = {True: 0.2, False: 10.0}


class Progress(TrainProgress):
    """Lines as training writes them: one that is rewritten on a terminal, whole ones elsewhere.

    >>> import sys
    >>> progress = Progress(None, sys.stdout)
    >>> progress.at("clips", 3, 40, left_s=62)
    clips: 3 of 40 (7%) · 62 s left
    """

    def __init__(self, folder: Path | None, out: TextIO | None = None, quiet: bool = False) -> None:
        super().__init__(out, quiet)
        self._notes = None if folder is None else folder / NOTES

    def at(self, what: str, done: int, total: int | None, left_s: float | None = None) -> None:
        of = "" if total is None else f" of {total:,} ({100 * done // max(total, 1)}%)"
        self._unsaid = [f"{what}: {done:,}{of}"]
        if left_s is not None:
            self._unsaid.append(f"{duration(left_s)} left")
        now = time.monotonic()
        if self._said is None or now - self._said >= _EVERY_S[self._terminal]:
            self._said = now
            self._say()

    def note(self, text: str) -> None:
        super().note(text)
        if self._notes is not None:
            with self._notes.open("a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
