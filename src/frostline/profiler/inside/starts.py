"""Where a step ends: at the last optimiser's step of a cycle; without one, where an outermost call recurs."""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from . import hooks
from .modules import alive

_CALLS, _UNSTEPPED = 24, 4
"""Calls of outermost modules without any optimiser, after which it is a loop of calls; and how many times as
many where there is one that is not seen to step: a test without gradients, or its step is compiled. With
gradients and without a step it may gather them, or leave out steps whose loss is no number."""
_AGAIN = 3
"""Other optimisers' steps in a row after which the one that ended the cycle is taken to be gone."""
_CYCLE = 8
"""Steps of optimisers in a cycle that is looked for: five of a critic and one of a generator are six."""


class Starts:
    """Finds the end of steps for an agent."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._seen: list[Callable[[], Any]] = []
        self._last: Callable[[], Any] | None = None
        self._others = 0
        self._recent: deque[int] = deque(maxlen=2 * _CYCLE + 1)
        """Whose steps came last, by id,"""
        self._cycle = 0
        """and after how many of them the cycle begins again, where some of its optimisers step twice."""
        self._before: list[Callable[[], Any]] = []
        """Those that others took over from,"""
        self._in_turns = False
        """and one of them has come back: a few steps of one, a few of another."""
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
        self._handle: hooks.Hook | None = None
        self.by_calls = False
        self._unstepped: list[Callable[[], Any]] = []
        """Optimisers that were there when calls were taken to end steps,"""
        self._as: list[Any] = []
        """and how far they had come."""

    def is_last(self, optimizer: Any) -> bool:
        """Whether this optimiser's step ends a cycle of them; known once the first of them comes again.

        >>> starts, d, g = Starts(None), *(torch.optim.SGD([torch.ones(1)]) for _ in "dg")
        >>> [starts.is_last(o) for o in (d, g, d, g, d, g)]
        [False, False, False, True, False, True]
        """
        if self._in_turns:
            return True
        self._recent.append(id(optimizer))
        if self._last is not None:
            last = self._last()
            self._others = 0 if optimizer is last else self._others + 1
            if last is not None and self._others <= max(_AGAIN, 2 * len(self._seen), 2 * self._cycle):
                if optimizer is not last and (cycle := self._rarer(id(optimizer), id(last))):
                    self._last, self._others, self._cycle = weakref.ref(optimizer), 0, cycle
                    self.changed, self.alike, self._kind = True, False, _kind(optimizer)
                    return False
                return optimizer is last
            self._in_turns = any(before() is optimizer for before in self._before)
            self._before.append(self._last)
            self._seen, self._last, self._others, self.changed = [], None, 0, True
            self._recent.clear()
            self._cycle = 0
            self.alike, self._kind = self._kind == _kind(optimizer), _kind(optimizer)
        if any(seen() is optimizer for seen in self._seen):
            self._last, self.missed, self._kind = self._seen[-1], self.missed + 1, _kind(optimizer)
            return self._last() is optimizer
        self._seen.append(weakref.ref(optimizer))
        return False

    def _rarer(self, one: int, last: int) -> int:
        """The length of a cycle that has one step of this optimiser and several of the one that was taken to
        end it, twice in a row: of D D G each G ends a step. 0: there is none."""
        ago = [n for n, step in enumerate(reversed(self._recent)) if step == one]
        if len(ago) < 3 or ago[2] != 2 * ago[1] or ago[1] > _CYCLE:
            return 0
        recent = [*self._recent][-ago[1] :]
        return ago[1] if recent.count(last) > 1 else 0

    def called(self, module: nn.Module) -> None:
        """An outermost call, while modules are watched."""
        if self.by_calls or self._seen:
            return
        self._calls[id(module)] += 1
        self._modules[id(module)] = module
        if sum(self._calls.values()) >= self._asked_at:
            self._asked_at *= 2  # looking through all objects takes its time
            found = alive(torch.optim.Optimizer)
            moved = self._come() != self._as
            if not self._unstepped:
                self._remember(found)
            often = sum(self._calls.values()) >= _UNSTEPPED * _CALLS
            if not found or (often and (moved or not torch.is_grad_enabled())):
                self._remember(found)
                self._choose()

    def _remember(self, optimizers: list[Any]) -> None:
        self._unstepped = [weakref.ref(optimizer) for optimizer in optimizers]
        self._as = self._come()

    def _choose(self) -> None:
        """Of the modules that are called the fewest times (but again and again) the last one."""
        often = {key: n for key, n in self._calls.items() if n >= 3}
        if not often:
            return
        fewest = min(often.values())
        module = self._modules[[key for key, n in often.items() if n <= fewest + 1][-1]]
        self.by_calls = True
        name = f"call of {type(module).__name__}"

        ended = self._agent.guarded(self._agent.boundary)
        self._handle = hooks.before(module, lambda module, args: ended(name))

    def _come(self) -> list[Any]:
        """How often the parameters of these optimisers were written to, and what is kept of each of them."""
        each = [found for optimizer in self._unstepped if (found := optimizer()) is not None]
        return [(len(o.state), _versions(o)) for o in each if hasattr(o, "param_groups")]

    @property
    def unseen(self) -> bool:
        """Calls end steps, and an optimiser steps that is not seen to: compiled, as a rule."""
        return self.by_calls and self._come() != self._as

    @property
    def unsure(self) -> bool:
        """Calls end steps, and there is an optimiser that has not stepped: training may be yet to come."""
        return self.by_calls and bool(self._as) and self._come() == self._as

    def forget_calls(self) -> None:
        """An optimiser's step was seen after all."""
        self.remove()
        self.by_calls = False

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        self._modules.clear()


def _versions(optimizer: Any) -> int:
    return sum(p._version for g in optimizer.param_groups for p in g["params"] if not p.is_inference())


def _kind(optimizer: Any) -> tuple[Any, ...]:
    shapes = tuple(tuple(p.shape) for group in optimizer.param_groups for p in group["params"])
    return type(optimizer), shapes
