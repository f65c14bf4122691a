"""Names in a stage's code that make its result depend on something else than its inputs."""

from __future__ import annotations

import datetime
import os
import random
import secrets
import threading
import uuid
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from frostline.inspector.bytecode import Use
from frostline.inspector.watching import CLOCKS

_PROCESS = {
    os.getpid: "the process",
    threading.get_ident: "the thread",
    torch.initial_seed: "the seed of the process",
    torch.seed: "the seed of the process",
    torch.utils.data.get_worker_info: "the worker of a DataLoader",
}
_ENTROPY = (
    uuid.uuid1, uuid.uuid4, os.urandom, secrets.token_bytes, secrets.token_hex, secrets.randbelow,
    secrets.randbits, secrets.choice, random.SystemRandom,
)  # fmt: skip
_PYTHON = getattr(random.random, "__self__", None)
_NUMPY = getattr(np.random.rand, "__self__", None)
_NOW = ("now", "today", "utcnow")


def random_uses(uses: Iterable[Use]) -> list[str]:
    """Functions of global random generators, and of the operating system's."""
    return _told(use for use in uses if _is_random(use.value))


def process_uses(uses: Iterable[Use]) -> list[str]:
    """What is another in each process, thread or worker."""
    return _told((use for use in uses if _process(use.value)), says=lambda use: f" ({_process(use.value)})")


def date_uses(uses: Iterable[Use]) -> list[str]:
    """Dates of today: nothing can show that a result does not depend on them, short of waiting."""
    return _told(use for use in uses if _is_date(use))


def clock_uses(uses: Iterable[Use]) -> list[str]:
    return _told(use for use in uses if _among(use.value, CLOCKS))


def _is_random(value: Any) -> bool:
    if _among(value, _ENTROPY):
        return True
    holder = getattr(value, "__self__", None) if callable(value) and not isinstance(value, type) else None
    return holder is not None and (holder is _PYTHON or holder is _NUMPY)


def _process(value: Any) -> str | None:
    return next((what for known, what in _PROCESS.items() if value is known), None)


def _is_date(use: Use) -> bool:
    inside = isinstance(use.container, type) and issubclass(use.container, datetime.date)
    return inside and use.name in _NOW


def _among(value: Any, known: Iterable[Any]) -> bool:
    return any(value is one for one in known)


def _told(uses: Iterable[Use], says: Any = lambda use: "") -> list[str]:
    return list(dict.fromkeys(f"{use.path}{says(use)} in {use.where}" for use in uses))
