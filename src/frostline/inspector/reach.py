"""What a stage uses: networks, values that it keeps between calls, and names in its code.

From the function outwards: closure cells, globals that it names, arguments of a partial, attributes of a
callable object, `self` of a bound method; through the user's own functions, never into a library's code.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from frostline.fingerprint.origin import home_of, kind_of
from frostline.inspector.bytecode import Use, content_of, is_missing, uses_of
from frostline.stage import Lazy

_DEEPEST = 8
_MOST = 10_000
"""Entries of one container, and things of one type: more than that is data and not state."""
_LARGEST_BYTES = 256 << 20
"""An array or tensor outside of networks that is larger is taken for data and not watched."""
_INTERNAL = frozenset(vars(nn.Module())) - {"training"}
_CACHED = type(functools.lru_cache(abs))
_NUMPY = (np.random.Generator, np.random.RandomState, np.random.BitGenerator)
GENERATORS = (*_NUMPY, torch.Generator, random.Random)
PLAIN = (bool, int, float, complex, str, bytes, type(None))


@dataclass(eq=False)
class Reach:
    """What was found, by names that a user would know it by."""

    modules: dict[str, nn.Module] = field(default_factory=dict)
    uses: list[Use] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    """Leaves that a call may change: numbers, text, arrays, tensors, generators, counters."""
    holders: list[Any] = field(default_factory=list)
    """Dicts, lists, sets and cells whose entries a call may exchange."""
    globals_of: list[tuple[dict[str, Any], str]] = field(default_factory=list)

    def named_modules(self) -> list[tuple[str, nn.Module]]:
        """All networks and their parts."""
        return [
            (joined(label, name), part)
            for label, module in self.modules.items()
            for name, part in module.named_modules()
        ]

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers of all networks."""
        return {
            joined(label, name): tensor
            for label, module in self.modules.items()
            for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers())
        }


def joined(label: str, name: str) -> str:
    return f"{label}.{name}" if label and name else label or name


def reach(fn: Any, called: Iterable[nn.Module] = ()) -> Reach:
    """What fn uses.

    >>> from functools import partial
    >>> list(reach(partial(torch.nn.functional.linear, weight=torch.ones(1, 2))).values)
    ['weight']

    called: networks that were seen to be called; those that cannot be found by looking are added.
    """
    walk = _Walk()
    walk.visit(fn, "", 0)
    found = walk.found
    for module in called:
        name = type(module).__name__
        walk.visit(module, name if name not in found.modules else f"{name} ({len(found.modules)})", 1)
    inner = {part for module in found.modules.values() for part in module.modules() if part is not module}
    found.modules = {label: module for label, module in found.modules.items() if module not in inner}
    return found


class _Walk:
    def __init__(self) -> None:
        self.found = Reach()
        self.seen: dict[type, list[Any]] = {}  # by type: a list of everything would be slow to look through
        self.scanned: set[FunctionType] = set()

    def visit(self, value: Any, label: str, depth: int) -> None:
        if isinstance(value, PLAIN):
            self.found.values[label] = value
        elif depth <= _DEEPEST and self._is_new(value):
            self._visit(value, label, depth)

    def _is_new(self, value: Any) -> bool:
        known = self.seen.setdefault(type(value), [])
        if len(known) >= _MOST or any(value is one for one in known):
            return False
        known.append(value)
        return True

    def _visit(self, value: Any, label: str, depth: int) -> None:
        if isinstance(value, Lazy):
            if value.loaded:
                self.visit(value.get(), label, depth)
        elif isinstance(value, nn.Module):
            self._module(value, label, depth)
        elif isinstance(value, FunctionType):
            self._function(value, label, depth)
        elif isinstance(value, MethodType):
            self.visit(value.__self__, label, depth)
            self._scan(value.__func__, type(value.__self__), depth)
        elif isinstance(value, functools.partial):
            self.visit(value.func, label, depth)
            for name, part in (*enumerate(value.args), *value.keywords.items()):
                self.visit(part, joined(label, str(name)), depth + 1)
        elif isinstance(value, dict | list | tuple | set | frozenset | deque):
            self._container(value, label, depth)
        elif isinstance(value, type):
            self._class(value, depth)
        elif isinstance(value, _CACHED):
            self.visit(value.__wrapped__, label, depth)
        else:
            self._object(value, label, depth)

    def _module(self, module: nn.Module, label: str, depth: int) -> None:
        self.found.modules[label] = module
        for name, part in module.named_modules():
            self._is_new(part)
            inside = [vars(part), part._parameters, part._buffers, part._modules]
            self.found.holders += [holder for holder in inside if isinstance(holder, dict)]
            if kind_of(type(part).__module__) == "own":
                self._scan(getattr(type(part), "forward", None), type(part), depth)
            for attribute, value in list(vars(part).items()):
                if attribute not in _INTERNAL:
                    self.visit(value, joined(joined(label, name), attribute), depth + 1)

    def _container(self, value: Any, label: str, depth: int) -> None:
        if len(value) > _MOST:
            return
        if isinstance(value, dict | list | set | deque):
            self.found.holders.append(value)
        if isinstance(value, set | frozenset):
            self.found.values[label] = frozenset(v for v in value if isinstance(v, PLAIN))
            return
        pairs = list(value.items() if isinstance(value, dict) else enumerate(value))
        self.found.values[joined(label, "len()")] = len(pairs)
        for name, part in pairs:
            self.visit(part, f"{label}[{name!r}]", depth + 1)

    def _object(self, value: Any, label: str, depth: int) -> None:
        if isinstance(value, Tensor | np.ndarray):
            if value.nbytes <= _LARGEST_BYTES and not isinstance(value, np.memmap):
                self.found.values[label] = value
        elif isinstance(value, (*GENERATORS, itertools.count)):
            self.found.values[label] = value
        elif kind_of(type(value).__module__) in ("own", "library") and not isinstance(value, ModuleType):
            call = getattr(type(value), "__call__", None)  # noqa: B004 (the function itself is wanted)
            self._scan(call, type(value), depth)
            if hasattr(value, "__dict__"):
                self.found.holders.append(vars(value))
                for name, part in list(vars(value).items()):
                    self.visit(part, joined(label, name), depth + 1)

    def _class(self, cls: type, depth: int) -> None:
        """A class that own code names is made or used during the call: all its functions count."""
        if kind_of(cls.__module__) == "own":
            for part in list(vars(cls).values()):
                self._scan(getattr(part, "__func__", part), cls, depth + 1)

    def _function(self, fn: FunctionType, label: str, depth: int) -> None:
        own = kind_of(home_of(fn)) == "own"
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False):
            self._cell(cell, name if own else label, depth, own=own)
        for part in (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()):
            if own and not isinstance(part, PLAIN):
                self.visit(part, joined(label, "default"), depth + 1)
        self._scan(fn, None, depth)

    def _cell(self, cell: CellType, name: str, depth: int, *, own: bool) -> None:
        value = content_of(cell)
        if own:
            self.found.holders.append(cell)
            # A network of which only a part is used (`model.backbone(x)`) is visited where code names that.
            if not is_missing(value) and not isinstance(value, nn.Module):
                self.visit(value, name, depth + 1)
        elif isinstance(value, FunctionType | MethodType | functools.partial | nn.Module):
            self.visit(value, name, depth + 1)  # what a library's decorator was put around

    def _scan(self, fn: Any, owner: type | None, depth: int) -> None:
        """The names in a function's code, when it is the user's own."""
        if not isinstance(fn, FunctionType) or fn in self.scanned or kind_of(home_of(fn)) != "own":
            return
        self.scanned.add(fn)
        for use in uses_of(fn, owner):
            self.found.uses.append(use)
            value = use.value.fget if isinstance(use.value, property) else use.value
            if owner is not None and isinstance(value, FunctionType) and use.container is owner:
                self._scan(value, owner, depth)
            elif isinstance(value, PLAIN):
                self._plain(use)
            elif isinstance(value, FunctionType | nn.Module) or not isinstance(value, ModuleType):
                self.visit(value, use.path, depth + 1)

    def _plain(self, use: Use) -> None:
        """A number or text in a global: a counter, perhaps."""
        if isinstance(use.container, dict):
            self.found.globals_of.append((use.container, use.path))
        if isinstance(use.container, dict | CellType):
            self.found.values[use.path] = use.value
