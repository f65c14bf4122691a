"""What is looked at: something that can be called with columns, and the samples to call it with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from frostline.errors import StageFailed
from frostline.execution import Ready
from frostline.execution.call import described
from frostline.execution.columns import Column, as_value, padded, stackable
from frostline.inspector.snapshot import content
from frostline.stage import Lazy


@dataclass(eq=False)
class Witness:
    """Stands in for a function and sees whether it writes into its arguments."""

    fn: Callable[..., Any]
    names: Sequence[str]
    written: set[str] = field(default_factory=set)
    overwritten: bool = False
    """Whether a later call changed what an earlier one had returned."""
    looking: bool = False

    def __call__(self, *args: Any) -> Any:
        if not self.looking:
            return self.fn(*args)
        before = [content_of(arg) for arg in args]
        result = self.fn(*args)
        for i, (was, arg) in enumerate(zip(before, args, strict=True)):
            if content_of(arg) != was:
                self.written.add(self.names[i] if i < len(self.names) else f"argument {i}")
        return result


def content_of(value: Any) -> Any:
    """Content that stays as it is now."""
    if isinstance(value, list | tuple):
        return [content_of(part) for part in value]
    if isinstance(value, Mapping):
        return {name: content_of(part) for name, part in value.items()}
    return content(value)


@dataclass(frozen=True, eq=False)
class Subject:
    """fn is what is looked into, call what runs it. chunk: rows a call; None: one sample at a time."""

    name: str
    fn: Any
    witness: Witness
    call: Callable[[Sequence[Column]], dict[str, Any]]
    inputs: tuple[Column, ...]
    keys: tuple[str, ...]
    chunk: int | None
    where: str


def of_stage(name: str, ready: Ready, keys: Sequence[str], columns: Sequence[Column]) -> Subject:
    """A stage of a pipeline, with values of these samples for what it reads."""
    stage = ready.stage
    witness = Witness(ready.fn, stage.reads)
    watched = copy.copy(ready)
    watched.fn = witness
    chunk = stage.chunk
    inputs = tuple(columns)
    if chunk:
        inputs = tuple(padded(_stacked(column, ready.device), chunk) for column in columns)

    def call(given: Sequence[Column]) -> dict[str, Any]:
        given = [_copied(column) for column in given]
        names = [keys[min(i, len(keys) - 1)] for i in range(len(given[0]))]
        if chunk:
            return dict(watched.many(names, given))
        rows, kept = [], []
        for i, key in enumerate(names):
            rows.append(watched.one(key, [column[i] for column in given]))
            kept.append(content_of(rows[-1]) if witness.looking else None)
        witness.overwritten |= witness.looking and content_of(rows) != kept
        return {name: [row[name] for row in rows] for name in stage.writes}

    return Subject(name, ready.fn, witness, call, inputs, tuple(keys), chunk, _place(stage.fn))


def _copied(column: Any) -> Any:
    """Each call gets values of its own: one that writes into them must not spoil the next."""
    if isinstance(column, Tensor):
        return column.clone()
    if isinstance(column, list):
        return [_copied(value) for value in column]
    return copy.deepcopy(column) if isinstance(column, np.ndarray | dict) else column


def _stacked(column: Column, device: torch.device) -> Column:
    """One tensor where that is possible; these samples went through the stage before, so shapes agree."""
    if isinstance(column, Tensor):
        return column.to(device)
    if not stackable(column):
        return column
    return torch.stack([torch.as_tensor(as_value(v)) for v in column]).to(device)


def of_callable(fn: Callable[..., Any], example: Sequence[Column], device: torch.device | None) -> Subject:
    """A network or function by itself, called with `example`."""
    name = getattr(fn, "__name__", type(fn).__name__)
    inputs = tuple(arg.to(device or arg.device) if isinstance(arg, Tensor) else arg for arg in example)
    witness = Witness(fn, [f"argument {i}" for i in range(len(inputs))])
    rows = len(inputs[0])

    def call(given: Sequence[Column]) -> dict[str, Any]:
        try:
            with torch.inference_mode():
                result = witness(*[_copied(column) for column in given])
        except Exception as e:
            raise StageFailed(name, [f"row {i}" for i in range(len(given[0]))], described(e)) from e
        return dict(_named("output", result))

    return Subject(name, fn, witness, call, inputs, tuple(f"row {i}" for i in range(rows)), rows, _place(fn))


def _named(name: str, result: Any) -> list[tuple[str, Any]]:
    if isinstance(result, Mapping):
        return [pair for key, part in result.items() for pair in _named(f"{name}.{key}", part)]
    if isinstance(result, tuple) or (isinstance(result, list) and any(isinstance(r, Tensor) for r in result)):
        return [pair for i, part in enumerate(result) for pair in _named(f"{name}[{i}]", part)]
    return [(name, as_value(result))]


def _place(fn: Any) -> str:
    """Where a user can do something about it."""
    if isinstance(fn, Lazy):
        loader = getattr(fn.loader, "__qualname__", type(fn.loader).__name__)
        return (
            f"in {loader}" if not isinstance(fn.loader, type) else f"on what {loader}(…) returns, in a loader"
        )
    return "before handing it over" if isinstance(fn, nn.Module) else "where it is made"
