"""The code that a function stands on: its source, and that of all it calls in the user's own modules.

>>> import numpy as np
>>> list(code_of(np.linalg.norm).libraries)
['numpy']

Own modules are those outside Python's and the installed packages' folders. Libraries count by the names that
are used and by their versions. Comments, white space, docstrings, other functions of the same file and the
place in the file do not count.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from frostline.errors import UsageError
from frostline.fingerprint import lazies, origin
from frostline.fingerprint.values import Tree, digest
from frostline.fingerprint.walk import Reference, Walk

__all__ = ["Code", "Reference", "code_of", "examine", "summary"]


@dataclass(frozen=True)
class Code:
    """What code there is.

    digest:     of everything below but the versions.
    functions:  full name → digest of its text.
    values:     name of a constant, default or class attribute → digest.
    libraries:  distribution → version.  references: names that lead into libraries, for an audit.
    sources:    files that the text came from.
    """

    digest: str
    functions: dict[str, str]
    values: dict[str, str] = field(repr=False)
    libraries: dict[str, str]
    references: tuple[Reference, ...] = field(repr=False)
    sources: tuple[str, ...] = field(repr=False)


def code_of(fn: Any) -> Code:
    """The code of a function, method, class, `functools.partial`, callable object, module or `fl.lazy`.

    >>> import numpy as np
    >>> code_of(np.clip).digest == code_of(np.round).digest
    False

    UsageError, with all reasons, when some of it has no source or was edited since it was imported.
    """
    walk = Walk()
    root = _root(fn, walk)
    walk.finish(_shown(fn))
    return summary(walk, root)


def examine(fn: Any, *, vouched: bool = False, files: str | None = None) -> tuple[Code, Tree]:
    """The code of a callable and the tree of its parameters: of what it was made with, or is bound to."""
    walk = Walk(vouched=vouched, files=files)
    root = _root(fn, walk)
    found = parameters_of(fn)
    given = None if found is None else walk.value(found, f"a parameter of {origin.named(_called(fn))}")
    walk.finish(_shown(fn))
    return summary(walk, root), given


def parts_of(called: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """The functions and constants that callables stand on, by name, with digests: a process that has the same
    runs the same. None of a callable of which that cannot be told."""
    found: dict[str, dict[str, str]] = {}
    for name, fn in called.items():
        try:
            code = code_of(fn)
        except UsageError:
            found[name] = {}
        else:
            found[name] = {**code.functions, **code.values}
    return found


def parameters_of(fn: Any) -> Any:
    """What a callable carries along; None for a plain function, whose defaults belong to its code."""
    if lazies.is_lazy(fn):
        return {"args": fn.args, "kwargs": dict(fn.kwargs)}
    if isinstance(fn, functools.partial):
        inner = parameters_of(fn.func)
        given = {"args": fn.args, "kwargs": fn.keywords}
        return given if inner is None else {**given, "of": inner}
    if isinstance(fn, types.MethodType):
        return fn.__self__
    plain = isinstance(fn, types.FunctionType | types.BuiltinFunctionType | type) or hasattr(
        fn, "__wrapped__"
    )
    return None if plain else fn


def summary(walk: Walk, root: Tree) -> Code:
    """What a walk has gathered."""
    once: list[Reference] = []
    seen: set[tuple[str, str]] = set()
    for found in walk.references:
        place = (found.path, getattr(found.container, "__name__", ""))
        if place not in seen:
            seen.add(place)
            once.append(found)
    return Code(
        digest=digest([root, walk.table]),
        functions=dict(sorted(walk.functions.items())),
        values=dict(sorted(walk.values.items())),
        libraries=dict(sorted(walk.libraries.items())),
        references=tuple(once),
        sources=tuple(sorted(walk.sources)),
    )


def _root(fn: Any, walk: Walk) -> Tree:
    """The callable itself, without its parameters."""
    called = _called(fn)
    if isinstance(called, types.MethodType):
        owner = called.__self__ if isinstance(called.__self__, type) else type(called.__self__)
        return [walk.value(called.__func__, _shown(fn)), walk.cls(owner)]
    plain = isinstance(called, types.FunctionType | types.BuiltinFunctionType | type)
    if plain or hasattr(called, "__wrapped__"):
        found = walk.value(called, _shown(fn))
        home = origin.home_of(called)
        if origin.kind_of(home) in ("library", "standard"):
            walk.references.append(Reference(f"{home}.{origin.named(called)}", None, "", called))
        return found
    return walk.cls(type(called))


def _called(fn: Any) -> Any:
    """Past `functools.partial` and `fl.lazy`."""
    while isinstance(fn, functools.partial) or lazies.is_lazy(fn):
        fn = fn.func if isinstance(fn, functools.partial) else fn.loader
    return fn


def _shown(fn: Any) -> str:
    called = _called(fn)
    return f"{origin.public_module(origin.home_of(called))}.{origin.named(called)}"
