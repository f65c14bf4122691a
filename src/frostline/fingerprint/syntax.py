"""What a piece of source says, free of how it is written.

>>> a = ast.parse("def f(x: int):\\n    '''Twice.'''\\n    return 2 * x  # doubled").body[0]
>>> b = ast.parse("def f( x ):\\n\\n    return (2*x)").body[0]
>>> dump(a) == dump(b)
True

Comments, white space, brackets and docstrings do not count. Annotations do not count in a function without
decorators: nothing reads them there. In a class body (fields of a dataclass) and under a decorator they do.
`ast.dump` is not used: what it prints differs between versions of Python.
"""

from __future__ import annotations

import ast
import dis
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import Any

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_MARKS = {"ctx", "kind", "type_comment", "type_ignores", "type_params"}
_ANNOTATIONS = {"annotation", "returns"}
_LOADS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}


def dump(node: ast.AST) -> list[str]:
    """A flat list of strings that is equal for equal code."""
    return _dump([node], annotations=bool(getattr(node, "decorator_list", ())))


def dump_header(node: ast.ClassDef) -> list[str]:
    """A class without its methods and inner classes: bases, decorators, fields, other statements."""
    return ["class", node.name, *_dump(header(node), annotations=True)]


def header(node: ast.ClassDef) -> list[ast.AST]:
    """The parts of a class that are no methods, inner classes or docstring."""
    body = [part for part in _body(node) if not isinstance(part, DEFINITIONS)]
    return [*node.decorator_list, *node.bases, *node.keywords, *body]


def _dump(nodes: Sequence[ast.AST], *, annotations: bool) -> list[str]:
    """With a stack of its own: an expression or a chain of `elif` may be nested deeper than Python's."""
    out: list[str] = []
    stack: list[Any] = list(reversed(nodes))
    while stack:
        part = stack.pop()
        if isinstance(part, ast.Constant):
            out += ["Constant", *_constant(part.value)]
        elif isinstance(part, ast.AST):
            out += ["(", _kind(part, annotations=annotations)]
            stack.append(_Mark(")"))
            for name, value in reversed(list(_fields(part, annotations=annotations))):
                stack += [value, _Mark(name)]
        elif isinstance(part, list):
            out.append("[")
            stack += [_Mark("]"), *reversed(part)]
        else:
            out.append(str(part))
    return out


class _Mark(str):
    """A bracket or the name of a part, which is never taken for text of the program."""

    __slots__ = ()

    def __str__(self) -> str:
        return f" {str.__str__(self)}"


def _kind(node: ast.AST, *, annotations: bool) -> str:
    return "Assign" if isinstance(node, ast.AnnAssign) and not annotations else type(node).__name__


def _fields(node: ast.AST, *, annotations: bool) -> Iterator[tuple[str, Any]]:
    if isinstance(node, ast.AnnAssign) and not annotations:
        yield from [("targets", [node.target]), *([("value", node.value)] if node.value else [])]
        return
    for name, value in ast.iter_fields(node):
        if name in _MARKS or value is None or value == [] or (name in _ANNOTATIONS and not annotations):
            continue
        if name == "body" and isinstance(node, DEFINITIONS):
            yield name, _body(node)
        elif isinstance(node, ast.JoinedStr):
            yield name, _joined(value)
        else:
            yield name, value


def _joined(values: list[ast.expr]) -> list[ast.expr]:
    """The parts of an f-string; Python 3.12 splits the text between them where others do not."""
    out: list[ast.expr] = []
    for part in values:
        last = out[-1] if out else None
        if isinstance(part, ast.Constant) and isinstance(last, ast.Constant):
            out[-1] = ast.Constant(str(last.value) + str(part.value))
        elif not (isinstance(part, ast.Constant) and part.value == ""):
            out.append(part)
    return out


def _constant(value: object) -> list[str]:
    return [type(value).__name__, value if isinstance(value, str) else repr(value)]


def _body(node: Any) -> list[ast.stmt]:
    """The statements without the docstring."""
    body: list[ast.stmt] = node.body
    first = body[0] if body else None
    text = first.value if isinstance(first, ast.Expr) else None
    return body[1:] if isinstance(text, ast.Constant) and isinstance(text.value, str) else body


# --- names --------------------------------------------------------------------------------------------


def chains(nodes: list[ast.AST]) -> list[tuple[str, ...]]:
    """Every name with the attributes asked of it, in the order of the text, each once.

    >>> chains([ast.parse("np.clip(helpers.resize(x), 0, 1)")])
    [('np', 'clip'), ('helpers', 'resize'), ('x',)]
    """
    found: dict[tuple[str, ...], None] = {}
    for node in nodes:
        found.update(dict.fromkeys(_chains(node)))
    return list(found)


def _chains(node: ast.AST) -> Iterator[tuple[str, ...]]:
    stack = [node]
    while stack:
        inner, attributes = stack.pop(), list[str]()
        while isinstance(inner, ast.Attribute):
            attributes.append(inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name):
            yield (inner.id, *reversed(attributes))
            continue
        below = [
            part
            for name, value in ast.iter_fields(inner)
            if name not in _ANNOTATIONS
            for part in (value if isinstance(value, list) else [value])
            if isinstance(part, ast.AST)
        ]
        stack += reversed(below)


def local_imports(node: ast.AST) -> Iterator[tuple[str, str, int, str | None]]:
    """(name it gets, module, level, attribute) of each import inside a function."""
    for part in ast.walk(node):
        if isinstance(part, ast.Import):
            for alias in part.names:
                top = alias.name.partition(".")[0]
                yield (alias.asname or top, alias.name if alias.asname else top, 0, None)
                if not alias.asname and alias.name != top:
                    yield (top, alias.name, 0, "")  # `import a.b` binds a, and b must be loaded too
        elif isinstance(part, ast.ImportFrom):
            for alias in part.names:
                yield (alias.asname or alias.name, part.module or "", part.level, alias.name)


def global_names(code: CodeType) -> tuple[set[str], set[str]]:
    """Names that a code object and those inside it look up globally, and names that it sets globally."""
    loads, stores = set[str](), set[str]()
    for step in dis.get_instructions(code):
        if step.opname in _LOADS:
            loads.add(str(step.argval))
        elif step.opname == "STORE_GLOBAL":
            stores.add(str(step.argval))
    for part in code.co_consts:
        if isinstance(part, CodeType):
            inner = global_names(part)
            loads |= inner[0]
            stores |= inner[1]
    return loads, stores
