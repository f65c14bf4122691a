"""Seeing randomness while a stage runs: generators that move, operators that draw, entropy that is asked for.

Nothing here changes what the stage computes, and everything that is exchanged for the duration is put back.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from frostline.fingerprint.origin import kind_of
from frostline.inspector.bytecode import Use
from frostline.inspector.snapshot import content

CLOCKS = tuple(
    getattr(time, name)
    for name in (
        "time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns",
        "process_time", "process_time_ns", "localtime", "gmtime", "ctime", "strftime",
    )
)  # fmt: skip


# generators


def generator_states() -> dict[str, Any]:
    """The states of all global generators, by names to tell a user."""
    states: dict[str, Any] = {
        "torch's CPU generator": torch.get_rng_state(),
        "numpy's global generator": np.random.get_state(legacy=False),
        "Python's random generator": random.getstate(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for i, state in enumerate(torch.cuda.get_rng_state_all()):
            states[f"torch's generator of cuda:{i}"] = state
    if torch.backends.mps.is_available():
        states["torch's generator of mps"] = torch.mps.get_rng_state()
    return states


def moved(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in before if _comparable(before[name]) != _comparable(after[name])]


def _comparable(state: Any) -> Any:
    return content(state) if isinstance(state, torch.Tensor) else repr(state)


def put_back(states: dict[str, Any]) -> None:
    for name, state in states.items():
        if name.startswith("torch's CPU"):
            torch.set_rng_state(state)
        elif name.startswith("numpy"):
            np.random.set_state(state)
        elif name.startswith("Python"):
            random.setstate(state)
        elif name.endswith("mps"):
            torch.mps.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, name.rpartition(" ")[2])


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


@contextmanager
def generators_kept() -> Iterator[None]:
    states = generator_states()
    try:
        yield
    finally:
        put_back(states)


# operators


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators that draw from one of torch's global generators, and where they were called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[str, str] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs):
            self.found.setdefault(str(func.overloadpacket), user_frame())
        return func(*args, **kwargs)


def _draws(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Dropout outside of training and attention without dropout are tagged and draw nothing; a generator of
    one's own is no global."""
    named = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    named |= dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    if any(isinstance(value, torch.Generator) for value in named.values()):
        return False
    idle = named.get("train", True) is False or named.get("training", True) is False
    return not idle and named.get("dropout_p", named.get("p", 1)) != 0


def user_frame() -> str:
    """' in flip (aug.py:12)' for the innermost frame of the user's own code below the audit, or nothing."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_the_audit(frame):
        if kind_of(str(frame.f_globals.get("__name__", ""))) == "own":
            code = frame.f_code
            return f" in {code.co_qualname} ({code.co_filename.rpartition('/')[2]}:{frame.f_lineno})"
        frame = frame.f_back
    return ""


@contextmanager
def modules_called() -> Iterator[list[nn.Module]]:
    """The networks and parts of networks that are called, each once: also those that no name leads to."""
    found: dict[nn.Module, None] = {}
    calls: list[nn.Module] = []
    handle = register_module_forward_pre_hook(lambda module, args: found.setdefault(module))
    try:
        yield calls
    finally:
        handle.remove()
        calls += found


# entropy and clocks


@contextmanager
def entropy_watched(uses: Sequence[Use]) -> Iterator[list[str]]:
    """Where the operating system is asked for random bytes.

    Python's `secrets`, `SystemRandom` and `uuid4`, and numpy's generators without a seed all ask through
    `os.urandom` or the name that the `random` module has for it.
    """
    found: list[str] = []
    real, thread = os.urandom, threading.get_ident()

    def watched(n: int) -> bytes:
        if threading.get_ident() == thread and not _importing():
            found.append(user_frame())
        return real(n)

    with ExitStack() as exchanged:
        exchanged.enter_context(exchanged_name(vars(os), "urandom", watched))
        exchanged.enter_context(exchanged_name(vars(random), "_urandom", watched))
        for names, name in _bare(uses, (real,)):
            exchanged.enter_context(exchanged_name(names, name, watched))
        yield found


def _importing() -> bool:
    """A module that is imported in mid-call may make itself a random name: that is no part of the result."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not _is_the_audit(frame):
        if frame.f_globals.get("__name__") == "importlib._bootstrap":
            return True
        frame = frame.f_back
    return False


def _is_the_audit(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name != __name__ and kind_of(name) == "frostline"


@contextmanager
def clocks_shifted(uses: Sequence[Use], seconds: int) -> Iterator[None]:
    """Clocks of the `time` module that are this much ahead, also under names imported from it."""
    with ExitStack() as exchanged:
        for clock in CLOCKS:
            later = _later(clock, seconds)
            exchanged.enter_context(exchanged_name(vars(time), clock.__name__, later))
            for names, name in _bare(uses, (clock,)):
                exchanged.enter_context(exchanged_name(names, name, later))
        yield


def _later(clock: Callable[..., Any], seconds: int) -> Callable[..., Any]:
    real_time, localtime, name = time.time, time.localtime, clock.__name__

    def later(*args: Any) -> Any:
        if name in ("localtime", "gmtime", "ctime"):
            return clock(args[0] if args and args[0] is not None else real_time() + seconds)
        if name == "strftime":
            return clock(args[0], args[1] if len(args) > 1 else localtime(real_time() + seconds))
        return clock() + (seconds * 10**9 if name.endswith("_ns") else seconds)

    return later


def _bare(uses: Sequence[Use], values: Sequence[Any]) -> list[tuple[dict[str, Any], str]]:
    """Globals of the user's modules that are one of these functions, as after `from time import time`."""
    found: list[tuple[dict[str, Any], str]] = []
    for use in uses:
        if isinstance(use.container, dict) and any(use.value is value for value in values):
            known = any(names is use.container and name == use.path for names, name in found)
            found += [] if known else [(use.container, use.path)]
    return found


@contextmanager
def exchanged_name(names: dict[str, Any], name: str, value: Any) -> Iterator[None]:
    was = names[name]
    names[name] = value
    try:
        yield
    finally:
        names[name] = was
