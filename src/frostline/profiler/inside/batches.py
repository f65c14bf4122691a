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
    """How many samples a batch holds: as long as its lists are, where it is made of lists of samples, else by
    its first tensor; 0 where there is none.

    >>> import torch
    >>> n_rows([torch.ones(8, 3), torch.ones(8)]), n_rows((8 * [torch.ones(3, 2, 2)], 8 * [{"label": 1}]))
    (8, 8)
    """
    found = first_tensor(value)
    return 0 if found is None else _listed(value) or length(found)


def length(tensor: Tensor) -> int:
    """Its first dimension; nested tensors have no shape."""
    return int(tensor.size(0))


def _listed(value: Any) -> int:
    """The length that all fields of a batch have as lists of samples, as `zip(*batch)` makes them; 0 where
    they are none: all of its tensors have one length, and each list has tensors in it."""
    if isinstance(value, list) and len(value) > 1 and all(isinstance(item, Mapping) for item in value):
        return len(value)
    if not isinstance(value, Mapping | list | tuple):
        return 0
    fields = [*(value.values() if isinstance(value, Mapping) else value)]
    if not all(isinstance(field, list | tuple) and not hasattr(field, "_fields") for field in fields):
        return 0
    if len({len(field) for field in fields}) != 1 or not fields[0]:
        return 0
    plain = [not any(isinstance(item, Tensor | list | tuple) for item in field) for field in fields]
    alike = all(len({_kind(item) for item in field}) == 1 for field in fields)
    lengths = {length(t) for t in tensors(value) if t.dim()}
    return len(fields[0]) if any(plain) or (alike and len(lengths) > 1) else 0


def _kind(item: Any) -> Any:
    return item.dim() if isinstance(item, Tensor) else type(item)


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
    other = sum(t.numel() for t in tensors(value) if t.is_nested or not t.dim() or length(t) != rows)
    if rows < 4 or other > 0.2 * all_of_it:  # with much of another length half the rows is not half the work
        return None

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf[: rows // 2] if leaf.dim() and not leaf.is_nested and len(leaf) == rows else leaf
        plain = isinstance(leaf, list | tuple) and len(leaf) == rows and not hasattr(leaf, "_fields")
        return (
            leaf[: rows // 2] if plain and not isinstance(leaf[0], Tensor | list | tuple | Mapping) else leaf
        )

    return again(value, cut)
