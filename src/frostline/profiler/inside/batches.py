"""Batches as scripts have them: tensors inside of lists, tuples and dicts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor

_DEEP = 6


def tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """All tensors of a batch, or of a call's arguments.

    >>> import torch
    >>> [t.shape[0] for t in tensors(({"id": "a", "x": [torch.ones(3, 2)]}, torch.ones(5)))]
    [3, 5]
    """
    if isinstance(value, Tensor):
        yield value
    elif depth < _DEEP and isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors(item, depth + 1)


def first_tensor(value: Any) -> Tensor | None:
    """The first tensor with rows."""
    return next((t for t in tensors(value) if t.dim()), None)


def n_rows(value: Any) -> int:
    """How many samples a batch holds, by its first tensor; 0 where there is none."""
    found = first_tensor(value)
    return 0 if found is None else int(found.shape[0])


def again(value: Any, change: Callable[[Any], Any] = lambda leaf: leaf, depth: int = 0) -> Any:
    """The same batch in containers of its own: scripts pop what they need from a dict."""
    if depth >= _DEEP:
        return value
    if isinstance(value, MutableMapping):  # also OrderedDict, and transformers' BatchEncoding
        copied = copy.copy(value)
        for name in [*value]:
            copied[name] = again(value[name], change, depth + 1)
        return copied
    if isinstance(value, list | tuple):
        changed = change(value)  # a list of paths has rows too
        if changed is not value:
            return changed
        items = [again(item, change, depth + 1) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return change(value)


def half(value: Any) -> Any | None:
    """The first half of a batch; None where it cannot be halved.

    >>> import torch
    >>> half({"x": torch.arange(4), "name": ("a", "b", "c", "d")})
    {'x': tensor([0, 1]), 'name': ('a', 'b')}
    """
    rows = n_rows(value)
    all_of_it = sum(t.numel() for t in tensors(value))
    other = sum(t.numel() for t in tensors(value) if not t.dim() or t.shape[0] != rows)
    if rows < 4 or other > 0.2 * all_of_it:  # with much of another length half the rows is not half the work
        return None

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf[: rows // 2] if leaf.dim() and leaf.shape[0] == rows else leaf
        plain = isinstance(leaf, list | tuple) and len(leaf) == rows and not hasattr(leaf, "_fields")
        return (
            leaf[: rows // 2] if plain and not isinstance(leaf[0], Tensor | list | tuple | Mapping) else leaf
        )

    return again(value, cut)
