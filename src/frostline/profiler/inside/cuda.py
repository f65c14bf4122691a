"""The GPU, where the script uses one."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch


def used() -> bool:
    """Whether the script has touched a GPU; asking does not."""
    return bool(torch.cuda.is_available() and torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def device() -> str:
    """The one that the script computes on, as torch names it."""
    return f"cuda:{torch.cuda.current_device()}" if used() else "cpu"


def settle() -> None:
    """Waits until the device has done everything."""
    if used():
        torch.cuda.synchronize()


def capturing() -> bool:
    """Whether what is launched now goes into a graph: then nothing may wait, and nothing of ours belong to
    it."""
    begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return bool(begun and torch.cuda.is_current_stream_capturing())


def event(device: int | None = None) -> Any:
    """Of what was launched so far on a device's stream; by default on the current one's."""
    made = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    made.record(torch.cuda.current_stream(device))
    return made


def rounded(kind: str) -> bool:
    """Whether float32 matrix products (`matmul`) or convolutions (`conv`) run as TF32."""
    backend: Any = torch.backends.cuda.matmul if kind == "matmul" else torch.backends.cudnn
    try:
        return bool(backend.allow_tf32)
    except RuntimeError:  # the script set it the other way; torch does not like both
        newer = backend if kind == "matmul" else backend.conv
        return str(newer.fp32_precision) == "tf32"


class Clock:
    """Ends of steps on the device. Nothing waits for it: a block that begins while it is still at work on the
    step before has no more of a start, and no less, than any other step."""

    def __init__(self) -> None:
        self._ends: list[Any] = []
        self._device = 0

    def begin(self) -> None:
        self._ends.clear()
        if used():
            self._device = torch.cuda.current_device()
            self._ends.append(event(self._device))

    def step(self) -> None:
        if self._ends:
            self._ends.append(event(self._device))

    def times(self) -> list[float]:
        """Seconds of each step; ask when the device has settled. Empty without a device."""
        return [1e-3 * float(a.elapsed_time(b)) for a, b in pairwise(self._ends)]
