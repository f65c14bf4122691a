"""Updates that were skipped because loss or gradient was no number: which, and when they are too many."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from frostline.batch import Batch
from frostline.errors import TrainStopped
from frostline.training import Training

_KEYS = 8
"""So many keys of a skipped step are said; one more is kept then, to know that there are more."""

Bad = tuple[int, list[str]]
"""A skipped step and the keys of its rows."""


class Skipped:
    """Flags stay on the device until somebody looks; the keys of the rows stay beside them.

    >>> skipped = Skipped(Training(max_bad_steps=0), print)
    >>> skipped.add(1, Batch({}, ["a"]), torch.tensor(0.0))
    >>> skipped.look(1, any_bad=False)
    []
    >>> skipped.state()
    {'steps': [], 'told': 1}
    """

    def __init__(self, settings: Training, note: Callable[[str], None]) -> None:
        self._most, self._window = settings.max_bad_steps, settings.bad_window
        self._note = note
        self._found: deque[Bad] = deque()
        self._told = 0
        """The step of the last look: skipped ones after it have not been told of."""
        self._recent: list[tuple[int, Batch, Tensor]] = []

    def __bool__(self) -> bool:
        """Whether a step was added since the last look."""
        return bool(self._recent)

    def add(self, at: int, batch: Batch, bad: Tensor) -> None:
        self._recent.append((at, Batch({}, batch._keys), bad))  # its rows may go

    def state(self) -> dict[str, Any]:
        """The skipped steps with their keys, for a checkpoint. Waits for the device."""
        return {"steps": [[*one] for one in (*self._found, *_bad_of(self._recent))], "told": self._told}

    def load(self, state: Mapping[str, Any] | Sequence[int]) -> None:
        """Go on where `state` was taken. A list of numbers: as checkpoints had it at first, without keys."""
        if not isinstance(state, Mapping):
            state = {"steps": [[at, []] for at in state], "told": 0}
        self._found, self._told = deque((at, [*keys]) for at, keys in state["steps"]), state["told"]

    def look(self, at: int, *, any_bad: bool) -> list[Bad]:
        """After step `at`; → those that nobody was told of, with all their keys."""
        recent, self._recent = self._recent, []
        told, self._told = self._told, at
        if not any_bad:
            return []
        self._found.extend(_bad_of(recent))
        new = [bad for bad in self._found if bad[0] > told]
        while self._found and self._found[0][0] <= at - self._window:
            self._found.popleft()
        self._found = deque((step, keys[: _KEYS + 1]) for step, keys in self._found)
        if new:
            skipped = "1 update" if len(new) == 1 else f"{len(new):,} updates"
            self._note(f"{skipped} skipped: loss or gradient is no number ({named(new[0])})")
        return new

    @property
    def too_many(self) -> bool:
        """Whether the run is to end, for those in the window of the last look."""
        return len(self._found) > self._most

    def stopped(self, saved: int | None) -> TrainStopped:
        """The error for too many, with the first one's keys. saved: the last checkpoint."""
        kept = (
            "No checkpoint was written yet" if saved is None else f"The checkpoint of step {saved:,} is whole"
        )
        return TrainStopped(
            f"{len(self._found)} of the last {self._window} updates were skipped, because loss or gradient "
            f"was no number (max_bad_steps={self._most}). First in this window: {named(self._found[0])}. "
            f"{kept}. Look at these samples (metrics.jsonl names them all); try a smaller rate, clip=1.0, or "
            f"precision bf16 instead of fp16."
        )


def named(bad: Bad) -> str:
    """
    >>> named((7, ["a", "b"]))
    "step 7, keys 'a', 'b'"
    """
    at, keys = bad
    more = ", …" if len(keys) > _KEYS else ""
    return f"step {at:,}" + (f", keys {', '.join(map(repr, keys[:_KEYS]))}{more}" if keys else "")


def _bad_of(recent: list[tuple[int, Batch, Tensor]]) -> list[Bad]:
    flags = torch.stack([bad for _, _, bad in recent]).tolist() if recent else []
    found = [(at, batch) for (at, batch, _), flag in zip(recent, flags, strict=True) if flag]
    return [(at, [*batch.keys_of_rows]) for at, batch in found]
