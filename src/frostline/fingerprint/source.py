"""The source of what is *running*, as a syntax tree.

A file can be edited after its module was imported; `inspect.getsource` would then return new text for old
code. Here the text is compiled and its byte code compared with the function's: old text that is still at hand
(`linecache`, or an earlier call) is used as long as it is what runs, and when no text fits, that is an error
and never a wrong answer. A new process reads the new text.
"""

from __future__ import annotations

import ast
import linecache
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from types import CodeType, FunctionType
from typing import Any

from frostline.errors import UsageError
from frostline.fingerprint.syntax import FunctionNode

_HAS_DOCSTRING = 0x4000000
"""`co_flags` from Python 3.13 on; before, a docstring is simply the first constant."""
_KEPT = 3
"""Texts kept for each file: what runs, and a few edits of it."""

_texts: dict[str, list[Text]] = {}


@dataclass(frozen=True, eq=False)
class Text:
    """One text of a file, parsed, with the code objects that it compiles to."""

    lines: tuple[str, ...]
    codes: tuple[CodeType, ...]
    functions: dict[tuple[int, str], list[FunctionNode]] = field(default_factory=dict)
    classes: dict[str, list[ast.ClassDef]] = field(default_factory=dict)


def function_node(fn: FunctionType) -> FunctionNode:
    """The syntax tree of a function or lambda; UsageError when there is none that fits what runs."""
    code = fn.__code__
    texts = list(_texts_of(code.co_filename, fn.__globals__))
    if not texts:
        raise UsageError(
            f"no source for {fn.__qualname__} ({code.co_filename}); put it into a file, or give its Stage "
            "`version=` and raise that when you change it"
        )
    for text in texts:
        for match in _matches(text, code):
            node = _node(text, match)
            if node is not None:
                return node
    if not _plain_loader(fn.__globals__):  # pytest rewrites `assert`: the byte code of no text can fit
        for text in texts:
            node = _node(text, code)
            if node is not None:
                return node
    raise UsageError(
        f"{fn.__qualname__} in {code.co_filename} was edited since it was imported: what runs is no longer "
        "in the file. Start the process again (or reload the module)"
    )


def class_node(cls: type) -> ast.ClassDef | None:
    """The syntax tree of a class; None for one that was made by a call; UsageError without any source.

    No code object of a class is kept, so the newest text that has all its methods is taken; attributes,
    fields and members count by their values besides, and those are always the ones that run.
    """
    module = sys.modules.get(cls.__module__)
    functions = [part for part in vars(cls).values() if isinstance(part, FunctionType)]
    inside = [part for part in functions if part.__globals__.get("__name__") == cls.__module__]
    names = [str(getattr(module, "__file__", None) or ""), *(part.__code__.co_filename for part in inside)]
    texts = [text for name in dict.fromkeys(names) if name for text in _texts_of(name, vars(module or sys))]
    if not texts:
        raise UsageError(
            f"no source for class {cls.__qualname__} of {cls.__module__}; put it into a file, or give its "
            "Stage `version=` and raise that when you change it"
        )
    lines = {part.__code__.co_firstlineno for part in inside}
    written = [part.__code__ for part in inside if not part.__code__.co_filename.startswith("<")]
    running = [text for text in texts if all(_matches(text, code) for code in written)]
    for text in running or texts:
        nodes = sorted(text.classes.get(cls.__qualname__, []), key=lambda node: node.lineno)
        # a class that is defined twice: the one that holds the methods, else the later one
        for node in [*(n for n in nodes if _holds(n, lines)), *reversed(nodes)]:
            return node
    return None


def _holds(node: ast.ClassDef, lines: set[int]) -> bool:
    return any(node.lineno <= line <= (node.end_lineno or node.lineno) for line in lines)


# --- texts --------------------------------------------------------------------------------------------


def _texts_of(filename: str, namespace: dict[str, Any]) -> Iterator[Text]:
    """Texts of a file: what it says now, then what it said when it was met before."""
    known = _texts.setdefault(filename, [])
    for fresh in (False, True):
        if fresh:
            linecache.checkcache(filename)
        lines = tuple(linecache.getlines(filename, namespace))
        parsed = next((text for text in known if text.lines == lines), None) or _parse(lines, filename)
        if lines and parsed is not None:
            known[:] = [parsed, *(text for text in known if text is not parsed)][:_KEPT]
    yield from list(known)


def _parse(lines: tuple[str, ...], filename: str) -> Text | None:
    source = "".join(lines)
    with warnings.catch_warnings():  # the import has given them already
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(source, filename)
            code = compile(source, filename, "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError):  # in the middle of an edit: not what runs
            return None
    text = Text(lines, tuple(_inside(code)))
    _index(tree, text)
    return text


def _inside(code: CodeType) -> Iterator[CodeType]:
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield part
            yield from _inside(part)


def _index(tree: ast.AST, text: Text) -> None:
    """Where each function and class stands. In no particular order, and as deep as the text goes."""
    stack = [(child, "") for child in ast.iter_child_nodes(tree)]
    while stack:
        child, prefix = stack.pop()
        inner = prefix
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            line = min([child.lineno, *(part.lineno for part in child.decorator_list)])
            text.functions.setdefault((line, child.name), []).append(child)
            inner = f"{prefix}{child.name}.<locals>."
        elif isinstance(child, ast.Lambda):
            text.functions.setdefault((child.lineno, "<lambda>"), []).append(child)
            inner = f"{prefix}<lambda>.<locals>."
        elif isinstance(child, ast.ClassDef):
            text.classes.setdefault(prefix + child.name, []).append(child)
            inner = f"{prefix}{child.name}."
        stack += [(below, inner) for below in ast.iter_child_nodes(child)]


# --- the text that runs -------------------------------------------------------------------------------


def _matches(text: Text, running: CodeType) -> list[CodeType]:
    """Code objects of the text that do what the running one does; those on its very place first."""
    same = [code for code in text.codes if code.co_qualname == running.co_qualname and _same(code, running)]
    place = list(running.co_positions())
    return sorted(same, key=lambda code: list(code.co_positions()) != place)


def _same(a: CodeType, b: CodeType) -> bool:
    names = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_argcount")
    if any(getattr(a, name) != getattr(b, name) for name in (*names, "co_kwonlyargcount")):
        return False
    return _same_constant(_constants(a), _constants(b))


def _constants(code: CodeType) -> tuple[Any, ...]:
    """The constants, with the docstring blanked."""
    constants = code.co_consts
    if sys.version_info >= (3, 13):
        documented = bool(code.co_flags & _HAS_DOCSTRING)
    else:
        documented = bool(constants) and isinstance(constants[0], str) and not code.co_name.startswith("<")
    return (None, *constants[1:]) if documented else constants


def _same_constant(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, CodeType):
        return a.co_name == b.co_name and _same(a, b)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_same_constant, a, b))
    return bool(a == b) if isinstance(a, frozenset) else repr(a) == repr(b)


def _node(text: Text, code: CodeType) -> FunctionNode | None:
    nodes = text.functions.get((code.co_firstlineno, code.co_name), [])
    nodes = sorted(nodes, key=lambda node: node.col_offset)
    if len(nodes) < 2:
        return nodes[0] if nodes else None
    spans = set(code.co_positions())
    for node in nodes:  # several lambdas on one line: the byte code says which columns it came from
        body = node.body
        if isinstance(body, ast.expr) and _span(body) in spans:
            return node
    return nodes[0]


def _span(node: ast.expr) -> tuple[int | None, ...]:
    return (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)


def _plain_loader(namespace: dict[str, Any]) -> bool:
    loader = namespace.get("__loader__")
    return loader is None or type(loader) is SourceFileLoader
