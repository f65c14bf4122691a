"""Values as canonical trees: equal content, equal tree, in any process.

>>> value_of({"size": (256, 256), "mean": 0.5})
{'dict': {'mean': 0.5, 'size': {'tuple': [256, 256]}}}
>>> digest(value_of(1)) == digest(value_of(1.0)) or digest(value_of(1)) == digest(value_of(True))
False

Numbers, strings, lists and None are themselves; everything else is a dict that says what it is. Arrays,
tensors and files count by a digest of their content; functions and classes by their code; other objects by
their class and by the state they would be copied with. Sets and dicts do not depend on order. The file is
long because each kind of value has its own few lines; `_HANDLERS` at the end is the way in.
"""

from __future__ import annotations

import copyreg
import functools
import json
import logging
import math
import os
import re
import sys
import threading
import types
import typing
import weakref
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from enum import Enum
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from frostline.errors import UsageError
from frostline.fingerprint import files, origin

if TYPE_CHECKING:
    from frostline.fingerprint.walk import Walk

Tree = Any
"""None, bool, int, float, str, a list of trees, or a dict from strings to trees: what JSON can hold."""

PLAIN = (bool, int, float, complex, str, bytes, tuple, list)
DESCRIPTORS = (staticmethod, classmethod, property, functools.cached_property)
SLOTS = {"member_descriptor", "getset_descriptor", "_tuplegetter"}
_LONG = 512
"""Longer strings and bytes are shown by their digest."""
_LARGE = 4096
"""Objects that take more JSON are shown by their digest: shared parts would make it grow without end."""
_GLOBAL_RANDOM = ("random", "numpy.random", "torch")
"""Modules whose functions are methods of a hidden generator; its state is not a parameter."""
_STATELESS: tuple[type, ...] = (
    *(logging.Logger, logging.LoggerAdapter, type(threading.Lock()), type(threading.RLock())),
    *(threading.Event, threading.Condition, threading.local, ContextVar, weakref.ref),
)
"""What guards or reports, and holds nothing that a result is computed from."""
_TYPING = (type(list[int]), types.UnionType, typing.TypeVar, type(typing.Any), type(typing.Optional["Tree"]))


def value_of(value: object, *, vouched: bool = False, files: str | None = None) -> Tree:
    """The tree of a value; with functions or classes in it, {"value": tree, "code": digest}.

    vouched: functions and classes count by name alone.
    files:   "loader" or "stage": strings that name existing files count by content (a `Path` always does).
    """
    from frostline.fingerprint.walk import Walk

    walk = Walk(vouched=vouched, files=files)
    found = walk.value(value, "the value")
    walk.finish(f"a value of type {type(value).__qualname__}")
    return {"value": found, "code": digest(walk.table)} if walk.table else found


def digest(tree: Tree) -> str:
    """32 hex digits that stand for a tree.

    >>> digest({"a": 1, "b": [2.0]}) == digest({"b": [2.0], "a": 1})
    True
    """
    text = json.dumps(tree, sort_keys=True, allow_nan=False, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(text.encode())


def tree(value: object, walk: Walk, where: str) -> Tree:
    """The tree of a value met on a walk; `where` names its place in case that it has no stable content."""
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return _scalar(value, walk)
    if isinstance(value, types.FunctionType | type | types.ModuleType):
        return _handled(value, walk, where)  # the walk itself ends their recursion, by labels
    if any(value is outer for outer in walk.visiting):
        return {"cycle": next(i for i, outer in enumerate(reversed(walk.visiting)) if outer is value)}
    walk.visiting.append(value)
    try:
        return _handled(value, walk, where)
    except RecursionError:
        return walk.problem(f"{where} is nested too deeply; give its Stage `version=`")
    finally:
        walk.visiting.pop()


def _handled(value: object, walk: Walk, where: str) -> Tree:
    for kind, handler in _HANDLERS:
        if isinstance(value, kind):
            return handler(value, walk, where)
    return _other(value, walk, where)


# --- plain values -------------------------------------------------------------------------------------


def _scalar(value: Any, walk: Walk) -> Tree:
    if type(value) is int:
        return value if abs(value) < 1 << 64 else {"int": hex(value)}
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if type(value) is complex:
        return {"complex": [_scalar(value.real, walk), _scalar(value.imag, walk)]}
    if type(value) is str and walk.files and files.names_content(value, folders=walk.files):
        return {"file": files.content_of_any(value)}
    if type(value) in (str, bytes) and len(value) > _LONG:
        data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        return {"kind": type(value).__name__, "digest": xxhash.xxh3_128_hexdigest(data)}
    return {"bytes": value.hex()} if type(value) is bytes else value


def _path(value: PurePath, walk: Walk, where: str) -> Tree:
    if isinstance(value, Path) and value.exists():
        if value.is_dir() and files.holds_code(value):
            return {"place": "of code"}
        if walk.files and not files.names_content(str(value), folders=walk.files):
            return {"path": value.as_posix()}
        try:
            return {"file": files.content_of_any(value)}
        except (OSError, UsageError) as error:
            return walk.problem(f"{where}: {error}")
    return {"path": value.as_posix()}


def _sequence(value: Any, walk: Walk, where: str) -> Tree:
    if type(value) not in (list, tuple):
        return _other(value, walk, where)
    parts = [tree(part, walk, f"{where}[{i}]") for i, part in enumerate(value)]
    return parts if type(value) is list else {"tuple": parts}


def _mapping(value: Mapping[Any, Any], walk: Walk, where: str) -> Tree:
    if type(value) not in (dict, types.MappingProxyType):
        return _other(value, walk, where)
    return {"dict": _pairs(value.items(), walk, where)}


def _pairs(items: Any, walk: Walk, where: str) -> Tree:
    pairs = [(key, tree(part, walk, f"{where}[{key!r}]")) for key, part in list(items)]
    if all(type(key) is str for key, _ in pairs):
        return dict(sorted(pairs))
    return sorted(([tree(key, walk, where), part] for key, part in pairs), key=digest)


def _set(value: Any, walk: Walk, where: str) -> Tree:
    return {"set": sorted((tree(part, walk, where) for part in value), key=digest)}


def _enum(value: Enum, walk: Walk, where: str) -> Tree:
    return {"enum": [tree(type(value), walk, where), value.name, tree(value.value, walk, where)]}


# --- arrays -------------------------------------------------------------------------------------------


def _array(value: np.ndarray[Any, Any], walk: Walk, where: str) -> Tree:
    head = {"kind": "array", "dtype": value.dtype.str, "shape": list(value.shape)}
    if value.dtype.names:
        head["fields"] = repr(value.dtype.descr)
    if type(value) not in (np.ndarray, np.memmap):  # the mask of a masked array, say
        head["of"] = tree(type(value), walk, where)
        head["attributes"] = _state(dict(getattr(value, "__dict__", {})), walk, where)
        value = value.view(np.ndarray)
    if value.dtype.hasobject:
        return {**head, "values": [tree(part, walk, where) for part in value.ravel().tolist()]}
    flat = np.ascontiguousarray(value).reshape(-1)
    return {**head, "digest": xxhash.xxh3_128_hexdigest(flat.view(np.uint8).data) if flat.size else ""}


def _numpy_scalar(value: np.generic, walk: Walk, where: str) -> Tree:
    return {"numpy": _array(np.asarray(value), walk, where)}


def _torch(value: Any, walk: Walk, where: str) -> Tree:
    """Anything of torch's that this knows; NotImplemented for the rest."""
    import torch

    from frostline.fingerprint import weights

    if isinstance(value, torch.nn.Module):
        return weights.network(value, walk, where)
    if isinstance(value, torch.Tensor):
        if value.is_meta:
            return walk.problem(f"{where} is a tensor without content (device 'meta'); load it first")
        head = {"kind": "tensor", "dtype": str(value.dtype), "shape": list(value.shape)}
        return {**head, "digest": weights.tensor_digest(value)}
    if isinstance(value, torch.Generator):
        return {"generator": tree(value.get_state().numpy(), walk, where)}
    if isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format):
        return {"torch": str(value)}
    return NotImplemented


# --- code ---------------------------------------------------------------------------------------------


def _method(value: Any, walk: Walk, where: str) -> Tree:
    owner = getattr(value, "__self__", None)
    name = getattr(value, "__name__", "")
    for module in _GLOBAL_RANDOM:
        if name and getattr(sys.modules.get(module), name, None) == value:
            return walk.library(module, name)
    if owner is None or isinstance(owner, types.ModuleType):
        return walk.library(origin.home_of(value), origin.named(value))
    fn = getattr(value, "__func__", None)
    return {"method": tree(fn, walk, where) if fn else name, "of": tree(owner, walk, where)}


def _partial(value: functools.partial[Any], walk: Walk, where: str) -> Tree:
    given = [tree(value.args, walk, where), tree(value.keywords, walk, where)]
    return {"partial": tree(value.func, walk, where), "given": given}


def _named(value: Any, walk: Walk, where: str) -> Tree:
    return walk.library(origin.home_of(value), origin.named(value))


def _shown(value: Any, walk: Walk, where: str) -> Tree:
    return {"type": str(value)}


def _stateless(value: Any, walk: Walk, where: str) -> Tree:
    return {"stateless": type(value).__name__}


def _pattern(value: re.Pattern[Any], walk: Walk, where: str) -> Tree:
    return {"pattern": [tree(value.pattern, walk, where), value.flags]}


def _span(value: Any, walk: Walk, where: str) -> Tree:
    return {type(value).__name__: [tree(part, walk, where) for part in (value.start, value.stop, value.step)]}


# --- everything else ----------------------------------------------------------------------------------


def _other(value: Any, walk: Walk, where: str) -> Tree:
    """By class and by the state that a copy would get."""
    from frostline.fingerprint import lazies

    if type(value).__module__.partition(".")[0] == "torch" or "torch" in sys.modules:
        found = _torch(value, walk, where)
        if found is not NotImplemented:
            return found
    if lazies.is_lazy(value):
        return lazies.as_value(value, walk, where)
    if callable(value) and hasattr(value, "__wrapped__"):  # functools.lru_cache and its like
        return {"wrapper": type(value).__qualname__, "of": tree(value.__wrapped__, walk, where)}
    reducer = copyreg.dispatch_table.get(type(value))
    try:
        state = reducer(value) if reducer else value.__reduce_ex__(4)
        if (
            isinstance(state, str)
            and getattr(sys.modules.get(origin.home_of(value)), state, None) is not value
        ):
            raise TypeError(f"it is not what {origin.home_of(value)}.{state} is")  # np.frompyfunc, say
    except Exception as error:  # noqa: BLE001 - anybody's object: whatever it raises is told with its place
        if walk.vouched:  # `version=` stands for it: that is what the message below advises
            return {"vouched": type(value).__qualname__}
        return walk.problem(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which has no content that "
            f"could be compared ({error}); pass what it is made from, or give the Stage `version=`"
        )
    if isinstance(state, str):
        return walk.library(origin.home_of(value), state)
    known = walk.objects.get(Same(value))
    if known is None:
        known = _reduced(value, state, walk, where)
        if len(json.dumps(known)) > _LARGE:
            known = {"kind": type(value).__qualname__, "digest": digest(known)}
        walk.objects[Same(value)] = known
    return known


class Same:
    """A key that is equal for the very same object only, whatever the object says of itself."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return object.__hash__(self.value)


def _reduced(value: Any, state: tuple[Any, ...], walk: Walk, where: str) -> Tree:
    make, args, rest, items, pairs = (*state, None, None, None, None)[:5]
    if args and args[0] is type(value):
        args = args[1:]  # said by the class
    out: dict[str, Tree] = {"object": tree(type(value), walk, where)}
    if make.__module__ not in ("copyreg", None) and make is not type(value):
        out["make"] = tree(make, walk, where)
    out["args"] = [tree(part, walk, f"{where}, argument {i}") for i, part in enumerate(args or ())]
    out["state"] = _state(rest, walk, where)
    if items is not None:
        out["items"] = [tree(part, walk, f"{where}[{i}]") for i, part in enumerate(items)]
    if pairs is not None:
        out["pairs"] = _pairs(pairs, walk, where)
    return {name: part for name, part in out.items() if part not in ([], {}, None)}


def _state(rest: Any, walk: Walk, where: str) -> Tree:
    """The attributes, by name; `(dict, slots)` for a class with slots."""
    parts = rest if isinstance(rest, tuple) and len(rest) == 2 else (rest,)
    if not all(part is None or isinstance(part, dict) for part in parts):
        return tree(rest, walk, where)
    merged = {str(name): part for attributes in parts for name, part in (attributes or {}).items()}
    return {name: tree(part, walk, f"{where}.{name}") for name, part in sorted(merged.items())}


_Handler = Callable[[Any, "Walk", str], Tree]
_HANDLERS: list[tuple[Any, _Handler]] = [
    (Enum, _enum),
    (type(os), lambda value, walk, where: walk.module(value, where)),
    (types.FunctionType, lambda value, walk, where: walk.function(value)),
    (_TYPING, _shown),
    (type, lambda value, walk, where: walk.cls(value)),
    ((types.MethodType, types.BuiltinFunctionType), _method),
    ((types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType), _named),
    (functools.partial, _partial),
    (PurePath, _path),
    ((list, tuple), _sequence),
    (Mapping, _mapping),
    ((set, frozenset), _set),
    (np.ndarray, _array),
    (np.generic, _numpy_scalar),
    (_STATELESS, _stateless),
    (re.Pattern, _pattern),
    ((range, slice), _span),
]
"""In this order: an Enum may be an int, a namedtuple is a tuple. Subclasses end in `_other`."""
