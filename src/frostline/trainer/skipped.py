"""Updates that were skipped because loss or gradient was no number: which, and when they are too many."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from frostline.batch import Batch
from frostline.errors import TrainStopped
from frostline.training import Training


class Skipped:
    """Flags stay on the device until somebody looks; the keys of the rows stay beside them.

    >>> skipped = Skipped(Training(max_bad_steps=0), print)
    >>> skipped.add(1, Batch({}, ["a"]), torch.tensor(0.0))
    >>> skipped.look(1, any_bad=False)
    >>> skipped.steps()
    []
    """

    def __init__(self, settings: Training, note: Callable[[str], None]) -> None:
        self._most, self._window = settings.max_bad_steps, settings.bad_window
        self._note = note
        self._found: deque[int] = deque()
        self._recent: list[tuple[int, Batch, Tensor]] = []

    def __bool__(self) -> bool:
        """Whether a step was added since the last look."""
        return bool(self._recent)

    def add(self, at: int, batch: Batch, bad: Tensor) -> None:
        self._recent.append((at, Batch({}, batch._keys), bad))  # its rows may go

    def steps(self) -> list[int]:
        """Numbers of the skipped steps, for a checkpoint. Waits for the device."""
        return [*self._found, *(at for at, _ in _bad_of(self._recent))]

    def load(self, steps: Iterable[int]) -> None:
        self._found = deque(steps)

    def look(self, at: int, *, any_bad: bool) -> None:
        """After step `at`; too many end the run, with the first one's keys."""
        recent, self._recent = self._recent, []
        if not any_bad:
            return
        bad = _bad_of(recent)
        self._found.extend(step for step, _ in bad)
        while self._found and self._found[0] <= at - self._window:
            self._found.popleft()
        keys = bad[0][1].keys_of_rows if bad else []
        told = f"step {bad[0][0]:,}, keys {', '.join(map(repr, keys[:5]))}" if bad else "an earlier step"
        self._note(f"{len(bad)} updates skipped: loss or gradient is no number ({told})")
        if len(self._found) > self._most:
            raise TrainStopped(
                f"{len(self._found)} of the last {self._window} updates were skipped, because loss "
                f"or gradient was no number (max_bad_steps={self._most}). First in this "
                f"window: {told}{' …' if len(keys) > 5 else ''}. The last checkpoint is whole. Look at these "
                f"samples; try a smaller rate, clip=1.0, or precision bf16 instead of fp16."
            )


def _bad_of(recent: list[tuple[int, Batch, Tensor]]) -> list[tuple[int, Batch]]:
    flags = torch.stack([bad for _, _, bad in recent]).tolist() if recent else []
    return [(at, batch) for (at, batch, _), flag in zip(recent, flags, strict=True) if flag]
