"""Which names a function uses, from its byte code: this also works for code without source.

Only what can be looked up without running anything is followed: globals, closure cells, imports inside the
function, attributes of modules, classes and networks, and methods that are called on `self`.
"""

from __future__ import annotations

import dis
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

_MISSING = object()


@dataclass(frozen=True, eq=False)
class Use:
    """One name as it stands in the code: `time.time` in `flip (aug.py:12)`."""

    path: str
    value: Any
    container: Any
    """What the last part was looked up in: a module, class or object; the dict of globals for a bare name."""
    where: str

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


def uses_of(fn: FunctionType, owner: type | None = None) -> Iterator[Use]:
    """Every name that the function and the functions nested in it use.

    owner: the class that `self` is of, when fn is a method.
    """
    cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False))
    yield from _Scan(fn, cells, owner).code(fn.__code__)


class _Scan:
    def __init__(self, fn: FunctionType, cells: dict[str, Any], owner: type | None) -> None:
        self.fn, self.cells = fn, cells
        self.first = fn.__code__.co_varnames[:1] if owner is not None else ()
        self.owner = owner

    def code(self, code: CodeType) -> Iterator[Use]:
        imported: dict[str, Any] = {}
        line = code.co_firstlineno
        steps = list(dis.get_instructions(code))
        for i, step in enumerate(steps):
            line = step.positions.lineno or line if step.positions else line
            if step.opname == "IMPORT_NAME":
                imported |= self._imports(steps, i)
            start = self._start(step, imported)
            if start is not None:
                yield from self._chain(*start, steps[i + 1 :], line)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from self.code(constant)

    def _start(self, step: dis.Instruction, imported: dict[str, Any]) -> tuple[str, Any, Any] | None:
        """(name, value, container) where a chain of attributes begins."""
        name, op = step.argval, step.opname
        if not isinstance(name, str):
            return None
        if op in ("LOAD_GLOBAL", "LOAD_NAME") and name in self.fn.__globals__:
            return name, self.fn.__globals__[name], self.fn.__globals__
        if op.startswith(("LOAD_FAST", "LOAD_DEREF")) and name in imported:
            return name, imported[name], None
        if op in ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF") and name in self.cells:
            value = content_of(self.cells[name])
            return None if value is _MISSING else (name, value, self.cells[name])
        if op.startswith("LOAD_FAST") and name in self.first:
            return name, self.owner, None
        return None

    def _chain(
        self, name: str, value: Any, container: Any, rest: list[dis.Instruction], line: int
    ) -> Iterator[Use]:
        where = f"{self.fn.__qualname__} ({self.fn.__code__.co_filename.rpartition('/')[2]}:{line})"
        path = name
        for step in rest:
            if step.opname not in ("LOAD_ATTR", "LOAD_METHOD") or not _followed(value):
                break
            found = _attribute(value, step.argval)
            if found is _MISSING or (isinstance(value, nn.Module) and not isinstance(found, nn.Module)):
                break
            path, container, value = f"{path}.{step.argval}", value, found
        if value is not self.owner:
            yield Use(path, value, container, where)

    def _imports(self, steps: list[dis.Instruction], i: int) -> dict[str, Any]:
        """The local names that an import statement binds, for modules that are loaded already."""
        full = str(steps[i].argval)
        level = steps[i - 2].argval if i >= 2 and isinstance(steps[i - 2].argval, int) else 0
        if level:
            package = self.fn.__globals__.get("__package__") or ""
            full = importlib.util.resolve_name("." * level + full, package) if package else full
        found: dict[str, Any] = {}
        listed = i >= 1 and steps[i - 1].argval is not None  # `from a.b import c`, and not `import a.b as c`
        base: Any = sys.modules.get(full if listed else full.partition(".")[0])
        value = base
        for step in steps[i + 1 :]:
            if step.opname == "IMPORT_FROM":
                value = _attribute(base, step.argval)
                base = base if listed else value
            elif step.opname.startswith(("STORE_FAST", "STORE_DEREF")):
                found[str(step.argval)] = value
            elif step.opname not in ("SWAP", "POP_TOP", "ROT_TWO"):
                break
        return {name: value for name, value in found.items() if value is not None and value is not _MISSING}


def _followed(value: Any) -> bool:
    return isinstance(value, ModuleType | type | nn.Module)


def _attribute(value: Any, name: str) -> Any:
    if isinstance(value, ModuleType):
        return vars(value).get(name, _MISSING)  # no __getattr__: looking must not import anything
    try:
        return getattr(value, name, _MISSING)
    except (RuntimeError, TypeError, ValueError):  # a descriptor that cannot be asked without an instance
        return _MISSING


def content_of(cell: Any) -> Any:
    """What a closure cell holds; a marker for one that is still empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING


def is_missing(value: Any) -> bool:
    return value is _MISSING
