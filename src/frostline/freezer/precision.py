"""Rows in the precision that their stage names, whatever `torch.autocast` surrounds the call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

_KINDS = ("cpu", "cuda", "mps")


@contextmanager
def without_autocast() -> Iterator[None]:
    """Under `torch.autocast` a network gives other bits and another type, which no fingerprint tells of.

    >>> with torch.autocast("cpu", torch.bfloat16), without_autocast():
    ...     torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype
    torch.float32
    """
    with ExitStack() as off:
        for kind in _KINDS:
            if torch.is_autocast_enabled(kind):
                off.enter_context(torch.autocast(kind, enabled=False))
        yield
