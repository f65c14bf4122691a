"""A class of the user's own: its header, its bases, its attributes by value, its methods by code."""

from __future__ import annotations

import inspect
import sys
from enum import Enum, EnumMeta
from types import FunctionType
from typing import TYPE_CHECKING

from frostline.fingerprint import origin, syntax, values
from frostline.fingerprint.source import class_node
from frostline.fingerprint.values import Tree, digest

if TYPE_CHECKING:
    from frostline.fingerprint.walk import Walk

_IGNORED = {"_abc_impl"}
"""Class attributes that Python makes; those with two underscores are left out too, unless functions."""


def entry(cls: type, walk: Walk) -> Tree:
    """Header, bases, members and methods of a class of the user's own."""
    node = class_node(cls)
    module = sys.modules.get(cls.__module__)
    walk.sources.update(filter(None, [getattr(module, "__file__", None)]))
    dumped = syntax.dump_header(node) if node else ["made", cls.__name__]
    full = walk.note(cls.__module__, cls.__qualname__, dumped)
    around = {name: (module, value) for name, value in vars(module or object).items()}
    nodes = syntax.header(node) if node else []
    bases = [base for base in (*cls.__bases__, type(cls)) if base not in (object, type)]
    made = node is not None or hasattr(cls, "_fields")
    return {
        "text": digest(dumped),
        "bases": [walk.cls(base) for base in bases],
        "names": walk.resolve(syntax.chains(nodes), around, full),
        "made": _made(cls, walk, full),
        "members": {
            name: _member(value, walk, f"{full}.{name}")
            for name, value in sorted(vars(cls).items())
            if _counts(cls, name, value, made=made)
        },
    }


def _made(cls: type, walk: Walk, full: str) -> Tree:
    """What a class is by its members or its decorator: the text alone could be newer than what runs."""
    if isinstance(cls, EnumMeta):
        named: dict[str, Enum] = dict(cls.__members__)
        members = {name: walk.value(part.value, full) for name, part in named.items()}
        walk.values[f"{full} (members)"] = digest(members)[:12]
        return members
    params = vars(cls).get("__dataclass_params__")
    kinds = [bool(getattr(params, name, None)) for name in ("init", "eq", "order", "frozen")]
    fields = vars(cls).get("__dataclass_fields__", {})
    given = {
        name: walk.value([part.init, part.kw_only, part.default, part.default_factory], f"{full}.{name}")
        for name, part in fields.items()
    }
    if given:
        walk.values[f"{full} (fields)"] = digest(given)[:12]
    return [kinds, given] if params else None


def _member(value: object, walk: Walk, full: str) -> Tree:
    for name in ("__func__", "func", "fget"):  # static and class methods, cached and plain properties
        if isinstance(value, values.DESCRIPTORS) and hasattr(value, name):
            others = [getattr(value, other, None) for other in ("fset", "fdel")]
            parts = [part for part in (getattr(value, name), *others) if part is not None]
            return [type(value).__name__, *(walk.value(part, full) for part in parts)]
    # names of a named tuple's fields are never files, whatever lies in the working directory
    tree = [*value] if full.endswith("._fields") and isinstance(value, tuple) else walk.value(value, full)
    if not isinstance(value, FunctionType | type):
        walk.values[full] = digest(tree)[:12]
    return tree


def _counts(cls: type, name: str, value: object, *, made: bool) -> bool:
    """Whether a class attribute counts: not what Python or a class decorator made from the text."""
    inner = inspect.unwrap(value.__func__ if isinstance(value, staticmethod | classmethod) else value)  # type: ignore[arg-type]
    if isinstance(inner, FunctionType):
        # what `enum` and `dataclasses` put there differs between versions of Python
        given = origin.kind_of(origin.home_of(inner)) == "standard"
        return not (given or (made and inner.__code__.co_filename.startswith("<")))
    if isinstance(value, values.DESCRIPTORS):
        return True
    if name.startswith("__") or name in _IGNORED or type(value).__name__ in values.SLOTS:
        return False
    return not isinstance(cls, EnumMeta)
