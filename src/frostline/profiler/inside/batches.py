"""Batches as scripts have them: tensors inside of lists, tuples and dicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

_DEEP = 6


def first_tensor(value: Any, depth: int = 0) -> Tensor | None:
    """The first tensor with rows.

    >>> import torch
    >>> first_tensor({"id": "a", "x": [torch.ones(3, 2)]}).shape
    torch.Size([3, 2])
    """
    if isinstance(value, Tensor):
        return value if value.dim() else None
    if depth < _DEEP and isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            found = first_tensor(item, depth + 1)
            if found is not None:
                return found
    return None


def n_rows(value: Any) -> int:
    """How many samples a batch holds, by its first tensor; 0 where there is none."""
    found = first_tensor(value)
    return 0 if found is None else int(found.shape[0])


def again(value: Any, change: Callable[[Any], Any] = lambda leaf: leaf, depth: int = 0) -> Any:
    """The same batch in containers of its own: scripts pop what they need from a dict."""
    if depth < _DEEP and type(value) is dict:
        return {name: again(item, change, depth + 1) for name, item in value.items()}
    if depth < _DEEP and type(value) in (list, tuple):
        changed = change(value)  # a list of paths has rows too
        if changed is not value:
            return changed
        return type(value)(again(item, change, depth + 1) for item in value)
    if depth < _DEEP and hasattr(value, "data") and type(getattr(value, "data", None)) is dict:
        copied = value.copy()  # transformers' BatchEncoding and other UserDicts
        copied.data = again(value.data, change, depth + 1)
        return copied
    return change(value)


def half(value: Any) -> Any | None:
    """The first half of a batch; None where it cannot be halved.

    >>> import torch
    >>> half({"x": torch.arange(4), "name": ["a", "b", "c", "d"]})
    {'x': tensor([0, 1]), 'name': ['a', 'b']}
    """
    rows = n_rows(value)
    if rows < 4:
        return None

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == rows:
            return leaf[: rows // 2]
        strings = isinstance(leaf, list) and len(leaf) == rows and not isinstance(leaf[0], Tensor)
        return leaf[: rows // 2] if strings else leaf

    return again(value, cut)
