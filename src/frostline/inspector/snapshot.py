"""The state of what a stage uses: taken, compared, and put back, so that an audit leaves no trace."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import CellType
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from frostline.flat import flat_bytes
from frostline.inspector.bytecode import content_of, is_missing
from frostline.inspector.reach import PLAIN, Reach


def content(value: Any) -> Any:
    """Something to compare instead of a value: equal when the bits are.

    >>> content(torch.tensor([0.0])) == content(torch.tensor([-0.0]))
    False
    """
    if isinstance(value, Tensor):
        return _tensor_content(value)
    if isinstance(value, np.ndarray):
        data = value.tobytes() if value.dtype != object else repr(value.tolist()).encode()
        return ("array", value.shape, value.dtype.str, xxhash.xxh3_128_hexdigest(data))
    if isinstance(value, np.random.Generator | np.random.BitGenerator):
        return ("generator", repr(_bits(value).state))
    if isinstance(value, np.random.RandomState):
        return ("generator", repr(value.get_state(legacy=False)))
    if isinstance(value, torch.Generator):
        return ("generator", *content(value.get_state()))
    if isinstance(value, random.Random):
        system = isinstance(value, random.SystemRandom)  # it has no state to ask for
        return ("generator", None if system else hash(value.getstate()))
    if isinstance(value, itertools.count | complex | float | np.generic):
        return (type(value).__name__, repr(value))  # repr: NaN equals itself, 0.0 and -0.0 differ
    return (type(value).__name__, value if isinstance(value, (*PLAIN, frozenset)) else _inside(value))


def _inside(value: Any) -> Any:
    """The bytes of a picture, the parts of other objects: `==` of a stranger may mean anything."""
    if callable(getattr(value, "tobytes", None)):
        return xxhash.xxh3_128_hexdigest(value.tobytes())
    if isinstance(value, Mapping):
        return {name: content(part) for name, part in value.items()}
    if isinstance(value, Sequence):
        return [content(part) for part in value]
    parts = getattr(value, "__dict__", {})
    return {
        name: content(part) for name, part in parts.items() if isinstance(part, (*PLAIN, Tensor, np.ndarray))
    }


def _bits(generator: np.random.Generator | np.random.BitGenerator) -> np.random.BitGenerator:
    return generator.bit_generator if isinstance(generator, np.random.Generator) else generator


def _tensor_content(tensor: Tensor) -> tuple[Any, ...]:
    shape, dtype = tuple(tensor.shape), str(tensor.dtype)
    if tensor.is_meta:
        return ("tensor", shape, dtype, "meta")
    return ("tensor", shape, dtype, xxhash.xxh3_128_hexdigest(_bytes(tensor).cpu().numpy().data))


def _bytes(tensor: Tensor) -> Tensor:
    # to_dense() of compressed rows writes in place, which a tensor made in inference mode allows only there
    with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
        dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
        return flat_bytes(dense)


class Snapshot:
    """What a stage uses, as it was at one moment.

    weights: keep a copy of parameters and buffers too, to restore them.
    """

    def __init__(self, found: Reach, *, weights: bool = True) -> None:
        self.tensors = {name: content(tensor) for name, tensor in found.tensors().items()}
        self.values = {name: content(value) for name, value in found.values.items()}
        self.shown = {name: value for name, value in found.values.items() if isinstance(value, PLAIN)}
        self._undo = [_undo_holder(holder) for holder in found.holders]
        self._undo += [_undo_global(names, name, names.get(name)) for names, name in found.globals_of]
        self._undo += _undo_leaves(found.values.values())
        self._undo_weights = _undo_leaves(found.tensors().values() if weights else ())

    def restore(self) -> None:
        for undo in self._undo:
            undo()
        self.restore_weights()

    def restore_weights(self) -> None:
        for undo in self._undo_weights:
            undo()

    def moved(self, later: Snapshot) -> list[str]:
        """Parameters and buffers that another content has replaced."""
        return [n for n, was in self.tensors.items() if n in later.tensors and later.tensors[n] != was]

    def changed(self, later: Snapshot) -> list[str]:
        """Values outside of parameters and buffers that are others now, in words."""
        names = [n for n in later.values if n in self.values and later.values[n] != self.values[n]]
        return [self._told(later, name) for name in names if not name.endswith("len()") or len(names) == 1]

    def _told(self, later: Snapshot, name: str) -> str:
        new = later.values[name]
        if name in later.shown:
            was = repr(self.shown[name])[:40] if name in self.shown else "something else"
            return f"{name!r} ({was} → {later.shown[name]!r:.40})"
        return f"{name!r} ({'a ' if new[0] != 'array' else 'an '}{new[0]})"


def _undo_holder(holder: Any) -> Callable[[], None]:
    if isinstance(holder, CellType):
        value = content_of(holder)
        return (lambda: None) if is_missing(value) else (lambda: setattr(holder, "cell_contents", value))
    listed = isinstance(holder, list | deque)
    kept: Any = list(holder) if listed else dict(holder) if isinstance(holder, dict) else set(holder)

    def undo() -> None:
        if not _same(holder, kept):
            holder.clear()
            (holder.extend if listed else holder.update)(kept)

    return undo


def _same(holder: Any, kept: Any) -> bool:
    """Whether the very same things are in it; `==` would compare tensors by value."""
    if len(holder) != len(kept):
        return False
    if isinstance(holder, list | deque):
        return all(a is b for a, b in zip(holder, kept, strict=True))
    if isinstance(holder, set):
        return bool(holder == kept)
    return all(name in holder and holder[name] is value for name, value in kept.items())


def _undo_global(names: dict[str, Any], name: str, value: Any) -> Callable[[], None]:
    def undo() -> None:
        names[name] = value

    return undo


def _undo_leaves(leaves: Iterable[Any]) -> list[Callable[[], None]]:
    return [undo for leaf in leaves if (undo := _undo_leaf(leaf)) is not None]


def _undo_leaf(leaf: Any) -> Callable[[], None] | None:
    if isinstance(leaf, Tensor):
        return None if leaf.is_meta else _undo_tensor(leaf)
    if isinstance(leaf, np.ndarray):
        kept = leaf.copy()
        return (lambda: np.copyto(leaf, kept)) if leaf.flags.writeable else None
    if isinstance(leaf, np.random.Generator | np.random.BitGenerator):
        state = _bits(leaf).state
        return lambda: setattr(_bits(leaf), "state", state)
    if isinstance(leaf, np.random.RandomState | torch.Generator):
        drawer: Any = leaf
        now = drawer.get_state()
        return lambda: drawer.set_state(now) and None
    if isinstance(leaf, random.Random) and not isinstance(leaf, random.SystemRandom):
        drawn = leaf.getstate()
        return lambda: leaf.setstate(drawn)
    return None


def _undo_tensor(tensor: Tensor) -> Callable[[], None]:
    flag = tensor.requires_grad
    with torch.inference_mode(tensor.is_inference()):
        kept = tensor.detach().clone()

    def undo() -> None:
        if tensor.shape != kept.shape or tensor.device != kept.device:
            tensor.data = kept.clone()
        elif not torch.equal(_bytes(tensor), _bytes(kept)):  # unasked writes would unshare mapped weights
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.copy_(kept)
        if tensor.is_leaf and tensor.requires_grad != flag:
            tensor.requires_grad_(flag)

    return undo
