"""From a function to all it stands on: its own code, what it calls, and the values it sees.

A `Walk` gathers a table with one entry for each function and class of the user's own modules that can be
reached by name. Entries refer to each other by a label, so that recursion ends and the order of the text
decides everything: no address, no path and no module name is part of what is digested.

The file is longer than most: following a name leads from functions to classes to modules and back.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

from frostline.errors import UsageError
from frostline.fingerprint import classes, origin, syntax, values
from frostline.fingerprint.source import function_node
from frostline.fingerprint.values import Tree, digest

_MISSING = object()
_PLACES = {"__file__", "__name__", "__package__", "__path__", "__spec__"}
"""Globals that say where a module lies and how it was started, which its functions do not depend on."""


@dataclass(frozen=True)
class Reference:
    """A name in own code that leads into a library: `getattr(container, name)` is `value`.

    path is canonical ("numpy.random.rand" for `np.random.rand`). The container is a module or class, or the
    user's own module for `from time import time`; None for a name in a closure.
    """

    path: str
    container: object
    name: str
    value: object


@dataclass(frozen=True)
class _Imported:
    """What a function imports from a library: by name. It is not loaded for a fingerprint, and whether it
    happens to be loaded must not show in one."""

    path: str


class Walk:
    """Gathers what a function, class or value stands on. `finish` raises all that could not be told.

    vouched: code counts by its name alone, as the author gave a `version`.
    files:   strings that name files count by what those hold: "loader" (folders too), "stage", or None.
    """

    def __init__(self, *, vouched: bool = False, files: str | None = None) -> None:
        self.vouched, self.files = vouched, files
        self.table: dict[str, Tree] = {}
        self.functions: dict[str, str] = {}
        self.values: dict[str, str] = {}
        self.libraries: dict[str, str] = {}
        self.references: list[Reference] = []
        self.sources: set[str] = set()
        self.problems: list[str] = []
        self.visiting: list[object] = []
        self.objects: dict[values.Same, Tree] = {}
        self.hashed: list[tuple[object, Tree]] = []
        self._labels: dict[object, str] = {}
        self._later: deque[tuple[str, Callable[[], Tree]]] = deque()

    def finish(self, what: str) -> None:
        """Works off what was met, one after the other: calls may be nested deeper than the stack."""
        while self._later:
            label, entry = self._later.popleft()
            try:
                self.table[label] = entry()
            except UsageError as error:
                self.problem(str(error))
        if self.problems:
            raise UsageError(f"Cannot tell what {what} is computed from:", problems=self.problems)

    def value(self, value: object, where: str) -> Tree:
        return values.tree(value, self, where)

    def problem(self, text: str) -> Tree:
        if text not in self.problems:
            self.problems.append(text)
        return {"unknown": True}

    def library(self, module: str, name: str) -> Tree:
        """Something of a library, by name; its version goes to `libraries`."""
        kind = origin.kind_of(module)
        version = origin.version_of(module) if kind == "library" else None
        if version:
            self.libraries[version[0]] = version[1]
        return {kind: f"{module}.{name}" if name else module}

    # --- functions ------------------------------------------------------------------------------------

    def function(self, fn: FunctionType) -> Tree:
        """A Python function: by its source when it is the user's own, else by name with what it wraps."""
        home = origin.home_of(fn)
        if origin.kind_of(home) != "own":
            return self._library_function(fn, home)
        if self.vouched:
            return self._vouched(fn)
        if fn not in self._labels:
            self._later.append((self._label(fn, fn.__qualname__), lambda: self._function_entry(fn, home)))
        return {"code": self._labels[fn]}

    def _vouched(self, fn: FunctionType) -> Tree:
        """By name, with what it was made with: a closure and defaults are parameters rather than code."""
        named: dict[str, Tree] = {"named": fn.__qualname__}
        if fn in self._labels:
            return named
        self._labels[fn] = fn.__qualname__
        held = [cell.cell_contents for cell in fn.__closure__ or () if _full(cell)]
        given = [*held, *(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
        if given:
            named["given"] = [self.value(part, f"a parameter of {fn.__qualname__}") for part in given]
        return named

    def _label(self, thing: object, qualname: str) -> str:
        label, count = qualname, 1
        while label in self.table:
            count += 1
            label = f"{qualname}#{count}"
        self._labels[thing] = label
        self.table[label] = None
        return label

    def note(self, home: str, name: str, dumped: Tree) -> str:
        """Under its full name into `functions`, for telling which one changed."""
        plain, short, count = f"{origin.public_module(home)}.{name}", digest(dumped)[:12], 1
        full = plain
        while self.functions.get(full, short) != short:  # two lambdas of one function, say
            count += 1
            full = f"{plain}#{count}"
        self.functions[full] = short
        return full

    def _function_entry(self, fn: FunctionType, home: str) -> Tree:
        node = function_node(fn)
        self.sources.add(fn.__code__.co_filename)
        dumped = syntax.dump(node)
        full = self.note(home, fn.__qualname__, dumped)
        entry: dict[str, Tree] = {"text": digest(dumped), "names": self._names(fn, node)}
        given = dict[object, object](enumerate(fn.__defaults__ or ())) | (fn.__kwdefaults__ or {})
        extra = {name: part for name, part in vars(fn).items() if not name.startswith("_")}
        for what, parts in (("defaults", given), ("attributes", extra)):
            if parts:
                entry[what] = {str(k): self.value(v, f"{full}, {what} {k}") for k, v in parts.items()}
                self.values[f"{full} ({what})"] = digest(entry[what])[:12]
        if hasattr(fn, "__wrapped__"):
            entry["wraps"] = self.value(fn.__wrapped__, f"what {full} wraps")
        return entry

    def _names(self, fn: FunctionType, node: syntax.FunctionNode) -> Tree:
        """What each name in the text leads to. Names that the function itself sets globally are its own."""
        loads, stores = syntax.global_names(fn.__code__)
        module = sys.modules.get(fn.__globals__.get("__name__", ""))
        env: dict[str, tuple[object, object]] = {
            name: (module, fn.__globals__[name])
            for name in loads - stores - _PLACES
            if name in fn.__globals__
        }
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            try:
                env[name] = (None, cell.cell_contents)
            except (
                ValueError
            ):  # an empty cell: a name that is set later, as `__class__` while a class is made
                continue
        self._local_imports(fn, node, env)
        outside: list[ast.AST] = [] if isinstance(node, ast.Lambda) else list(node.decorator_list)
        found = self.resolve(syntax.chains([node]), env, fn.__qualname__)
        around = {name: (module, value) for name, value in fn.__globals__.items()}
        return {**found, **self.resolve(syntax.chains(outside), around, fn.__qualname__)}

    def _local_imports(
        self, fn: FunctionType, node: syntax.FunctionNode, env: dict[str, tuple[object, object]]
    ) -> None:
        package = str(fn.__globals__.get("__package__") or "")
        for name, module, level, attribute in syntax.local_imports(node):
            full = importlib.util.resolve_name("." * level + module, package) if level else module
            if origin.kind_of(full) == "library":
                self.library(full, "")
                if attribute != "":
                    env[name] = (None, _Imported(f"{full}.{attribute}" if attribute else full))
                continue
            loaded = _import(full)
            if attribute and isinstance(loaded, ModuleType):
                below = getattr(loaded, attribute, _MISSING)
                env[name] = (loaded, _import(f"{full}.{attribute}") if below is _MISSING else below)
            elif attribute != "":
                env[name] = (loaded, loaded)

    def resolve(
        self, chains: list[tuple[str, ...]], env: Mapping[str, tuple[object, object]], where: str
    ) -> dict[str, Tree]:
        out: dict[str, Tree] = {}
        for chain in chains:
            if chain[0] in env:
                shown, tree = self._follow(chain, *env[chain[0]], where)
                if tree is not None:
                    out[shown] = tree
        return out

    def _follow(
        self, chain: tuple[str, ...], container: object, value: object, where: str
    ) -> tuple[str, Tree]:
        """Through modules (and classes of libraries) to what the last attribute is."""
        if isinstance(value, _Imported):
            self._note_import(value, chain, where)
            return ".".join(chain), {"library": ".".join([value.path, *chain[1:]])}
        used = 1
        while used < len(chain) and _transparent(value):
            try:
                below = getattr(value, chain[used], _MISSING)
            except (ImportError, RuntimeError):  # modules that load their parts when asked
                below = _MISSING
            container, value, used = value, below, used + 1
        shown = ".".join(chain[:used])
        if value is _MISSING:
            return shown, {"missing": True}
        return shown, self._global(container, chain[used - 1], value, where)

    def _note_import(self, imported: _Imported, chain: tuple[str, ...], where: str) -> None:
        """References of a library that a function imports itself, for the audit; only when it is loaded."""
        top, _, rest = imported.path.partition(".")
        if top in sys.modules:
            self._follow((top, *filter(None, rest.split(".")), *chain[1:]), None, sys.modules[top], where)

    def _global(self, container: object, name: str, value: object, where: str) -> Tree:
        kind = origin.kind_of(origin.home_of(container)) if container is not None else "own"
        code = isinstance(value, FunctionType | type)
        if code and origin.kind_of(origin.home_of(value)) == "own":
            return self.value(value, where)
        if kind == "frostline" and not isinstance(value, ModuleType):
            return None
        if kind in ("library", "standard") and not isinstance(value, ModuleType):
            home = getattr(container, "__module__", "") if isinstance(container, type) else ""
            holder = ".".join(filter(None, [home, origin.named(container)]))
            self.references.append(Reference(f"{holder}.{name}", container, name, value))
            module = home or origin.home_of(container)
            return self.library(module, f"{holder}.{name}".removeprefix(f"{module}."))
        return self._own_global(container, name, value, where)

    def _own_global(self, container: object, name: str, value: object, where: str) -> Tree:
        home = origin.home_of(value)
        if callable(value) and origin.kind_of(home) in ("library", "standard"):
            self.references.append(Reference(f"{home}.{origin.named(value)}", container, name, value))
        holder = origin.public_module(container.__name__) if isinstance(container, ModuleType) else where
        tree = self.value(value, f"{holder}.{name}")
        if not (isinstance(value, type | ModuleType | FunctionType) or tree is None):
            self.values[f"{holder}.{name}"] = digest(tree)[:12]
        return tree

    def _library_function(self, fn: FunctionType, home: str) -> Tree:
        """By name; a decorator of a library holds the user's function in a cell or in `__wrapped__`."""
        out = dict(self.library(home, fn.__qualname__))
        held = [cell.cell_contents for cell in fn.__closure__ or () if _full(cell)]
        held += [getattr(fn, "__wrapped__", None), *getattr(fn, "registry", {}).values()]
        kept = [part for part in held if isinstance(part, (*values.PLAIN, FunctionType, MethodType, type))]
        found = [self.value(part, f"inside {fn.__qualname__}") for part in kept if part is not None]
        return {**out, "holds": found} if found else out

    # --- classes and modules --------------------------------------------------------------------------

    def cls(self, cls: type) -> Tree:
        """A class: header, methods, attributes and bases when it is the user's own, else its name."""
        if origin.kind_of(cls.__module__) != "own":
            return self.library(cls.__module__, cls.__qualname__)
        if self.vouched:
            return {"named": cls.__qualname__}
        if cls not in self._labels:
            self._later.append((self._label(cls, cls.__qualname__), lambda: classes.entry(cls, self)))
        return {"code": self._labels[cls]}

    def module(self, module: ModuleType, where: str) -> Tree:
        """A module used as a value (`getattr(helpers, name)`): of the user's own, all that it defines."""
        if origin.kind_of(module.__name__) != "own":
            return self.library(module.__name__, "")
        if self.vouched or module in self._labels:
            return {"module": origin.public_module(module.__name__).rpartition(".")[2]}
        label = self._label(module, module.__name__.rpartition(".")[2])
        self._later.append((label, lambda: self._module_entry(module)))
        return {"code": label}

    def _module_entry(self, module: ModuleType) -> Tree:
        return {
            name: self.value(value, f"{module.__name__}.{name}")
            for name, value in sorted(vars(module).items())
            if not name.startswith("__") and not isinstance(value, ModuleType)
        }


def _import(module: str) -> object:
    try:
        return importlib.import_module(module)
    except ImportError:  # the function may expect that, and do without
        return _MISSING


def _transparent(value: object) -> bool:
    if isinstance(value, type):
        return origin.kind_of(value.__module__) in ("library", "standard")
    return isinstance(value, ModuleType)


def _full(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 – asking is the only way to know
    except ValueError:
        return False
    return True
