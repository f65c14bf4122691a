"""Where a step ends: at the last optimiser's step of a cycle; without one, where an outermost call recurs."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .modules import alive

_CALLS = 24
"""Calls of outermost modules without any optimiser, after which it is a loop of calls."""
_AGAIN = 3
"""Other optimisers' steps in a row after which the one that ended the cycle is taken to be gone."""


class Starts:
    """Finds the end of steps for an agent."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._seen: list[Callable[[], Any]] = []
        self._last: Callable[[], Any] | None = None
        self._others = 0
        self.missed = 0
        """Steps that went by before it was known what ends them."""
        self.changed = False
        """Another optimiser than the one that ended the steps so far has taken over;"""
        self.alike = False
        """of the same class, for parameters of the same shapes: the same training once more."""
        self._kind: Any = None
        self._calls: Counter[int] = Counter()
        self._asked_at = _CALLS
        self._modules: dict[int, nn.Module] = {}
        self._handle: Any = None
        self.by_calls = False

    def is_last(self, optimizer: Any) -> bool:
        """Whether this optimiser's step ends a cycle of them; known once the first of them comes again.

        >>> starts, d, g = Starts(None), *(torch.optim.SGD([torch.ones(1)]) for _ in "dg")
        >>> [starts.is_last(o) for o in (d, g, d, g, d, g)]
        [False, False, False, True, False, True]
        """
        if self._last is not None:
            last = self._last()
            self._others = 0 if optimizer is last else self._others + 1
            if last is not None and self._others <= max(_AGAIN, 2 * len(self._seen)):
                return optimizer is last
            self._seen, self._last, self._others, self.changed = [], None, 0, True
            self.alike, self._kind = self._kind == _kind(optimizer), _kind(optimizer)
        if any(seen() is optimizer for seen in self._seen):
            self._last, self.missed, self._kind = self._seen[-1], self.missed + 1, _kind(optimizer)
            return self._last() is optimizer
        self._seen.append(weakref.ref(optimizer))
        return False

    def called(self, module: nn.Module) -> None:
        """An outermost call, while modules are watched."""
        if self.by_calls or self._seen:
            return
        self._calls[id(module)] += 1
        self._modules[id(module)] = module
        if sum(self._calls.values()) >= self._asked_at:
            self._asked_at *= 2  # looking through all objects takes its time
            if not alive(torch.optim.Optimizer):
                self._choose()

    def _choose(self) -> None:
        """Of the modules that are called the fewest times (but again and again) the last one."""
        often = {key: n for key, n in self._calls.items() if n >= 3}
        if not often:
            return
        fewest = min(often.values())
        module = self._modules[[key for key, n in often.items() if n <= fewest + 1][-1]]
        self.by_calls = True
        name = f"call of {type(module).__name__}"

        def before(module: nn.Module, args: Any) -> None:
            if not torch.compiler.is_compiling():
                self._agent.boundary(name)

        self._handle = module.register_forward_pre_hook(before)

    def forget_calls(self) -> None:
        """An optimiser's step was seen after all."""
        self.remove()
        self.by_calls = False

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        self._modules.clear()


def _kind(optimizer: Any) -> tuple[Any, ...]:
    shapes = tuple(tuple(p.shape) for group in optimizer.param_groups for p in group["params"])
    return type(optimizer), shapes
