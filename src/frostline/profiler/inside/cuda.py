"""The GPU, where the script uses one."""

from __future__ import annotations

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
