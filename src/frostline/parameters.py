"""The parameters of a function as `key=value` on the command line: their types, defaults and help."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from frostline import typed
from frostline.errors import UsageError

REQUIRED = inspect.Parameter.empty
"""The default of a parameter that has none."""


@dataclass(frozen=True)
class Parameter:
    """One keyword parameter of a function.

    >>> def workload(*, num_frames: int = 16): ...
    >>> parameters_of(workload)
    (Parameter(name='num_frames', type='int', default=16, help=''),)
    """

    name: str
    type: str
    default: Any
    help: str = ""

    @property
    def required(self) -> bool:
        return self.default is REQUIRED

    @property
    def usual(self) -> str:
        """The default in words."""
        return "none: it is required" if self.required else repr(self.default)


def parameters_of(function: Callable[..., Any]) -> tuple[Parameter, ...]:
    """Name, type, default and help of each; UsageError when some cannot be given by name.

    Help is what the docstring says in lines such as `num_frames: how many of a clip`.
    """
    signature = inspect.signature(function)
    nameless = [
        p for p in signature.parameters.values() if p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if nameless:
        raise UsageError(
            f"{name_of(function)}{signature} cannot be a target: key=value needs a name for each parameter. "
            f"Write them out, as in def workload(*, batch_size: int = 64).",
            problems=[f"{p} is {p.kind.description}" for p in nameless],
        )
    hints, helps = _hints(function, signature), _helps(inspect.getdoc(function) or "")
    return tuple(
        Parameter(p.name, typed.describe(hints[p.name]), p.default, helps.get(p.name, ""))
        for p in signature.parameters.values()
    )


def values_of(
    function: Callable[..., Any], overrides: Sequence[str], before: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """`key=value` texts as arguments for a function; all that is wrong with them at once.

    before: values of an earlier call, where nothing else is given; what the function no longer takes is left.

    >>> def workload(*, num_frames: int = 16, lr: float = 0.1): ...
    >>> values_of(workload, ["num_frames=8"])
    {'num_frames': 8}
    """
    parameters = {p.name: p for p in parameters_of(function)}
    hints = _hints(function, inspect.signature(function))
    values: dict[str, Any] = {}
    problems: list[str] = []
    for text in overrides:
        name, sign, value = text.partition("=")
        wrong = _shape_problem(name, sign, values, parameters)
        if wrong is None:
            values[name] = None  # a wrong value is reported once, and not as missing as well
            wrong = _assign(values, parameters[name], hints[name], value)
        problems += [wrong] if wrong else []
    problems += [
        f"{p.name}: missing; it is required ({p.type}). Give {p.name}=…"
        for p in parameters.values()
        if p.required and p.name not in {**(before or {}), **values}
    ]
    if problems:
        raise UsageError(
            f"{name_of(function)} cannot be called so (`frostline show TARGET --parameters` lists all):",
            problems=problems,
        )
    return {name: value for name, value in (before or {}).items() if name in parameters} | values


def name_of(function: Any) -> str:
    """
    >>> name_of(parameters_of), name_of(functools.partial(parameters_of))
    ('parameters_of', 'parameters_of')
    """
    function = function.func if isinstance(function, functools.partial) else function
    return str(getattr(function, "__name__", type(function).__name__))


def _shape_problem(
    name: str, sign: str, values: dict[str, Any], parameters: dict[str, Parameter]
) -> str | None:
    """What is wrong with an override before its value is looked at."""
    if name not in parameters:
        near = difflib.get_close_matches(name.strip("-").replace("-", "_"), parameters, n=1)
        meant = f"; did you mean {near[0]}?" if near else "."
        there = f" There are {', '.join(parameters)}." if parameters else " It takes no parameters."
        return f"{name}: no such parameter{meant}{there}"
    if not sign:
        return f"{name}: expected {name}=value, as {name}={_example(parameters[name])}"
    return f"{name}: given twice" if name in values else None


def _example(parameter: Parameter) -> str:
    return "…" if parameter.required or parameter.default is None else str(parameter.default)


def _assign(values: dict[str, Any], parameter: Parameter, hint: Any, text: str) -> str | None:
    about = f"type {parameter.type}, default {parameter.usual}"
    if isinstance(hint, str):
        return f"{parameter.name}={text}: its annotation {hint!r} names something that cannot be found"
    try:
        values[parameter.name] = typed.convert(text, hint)
    except typed.Mismatch as e:
        return f"{parameter.name}={text}: {e}; {about}"
    return None


def _hints(function: Callable[..., Any], signature: inspect.Signature) -> dict[str, Any]:
    """The type of each parameter; where an annotation cannot be resolved, its text."""
    inner = function.func if isinstance(function, functools.partial) else function
    names = getattr(inspect.unwrap(inner), "__globals__", {})
    return {p.name: _hint(p, names) for p in signature.parameters.values()}


def _hint(parameter: inspect.Parameter, names: dict[str, Any]) -> Any:
    if parameter.annotation is REQUIRED:
        return str if parameter.default is REQUIRED else typed.of_value(parameter.default)
    holder = types.SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
    try:  # one at a time: a name imported for type checkers only spoils its own parameter and no other
        return typing.get_type_hints(holder, globalns=names)[parameter.name]
    except (NameError, AttributeError, TypeError, SyntaxError):
        return str(parameter.annotation)


def _helps(doc: str) -> dict[str, str]:
    """The texts of "name: text" lines, with the lines below that are indented further."""
    found: dict[str, str] = {}
    name, depth = "", 0
    for line in doc.splitlines():
        start = re.match(r"(\s*)(?:[-*] )?`{0,2}(\w+)`{0,2}(?: ?\([^)]*\))?:\s+(\S.*)", line)
        indent = len(line) - len(line.lstrip())
        if start and not (name and indent > depth):
            name, depth = start[2], len(start[1])
            found[name] = start[3].strip()
        elif name and line.strip() and indent > depth:
            found[name] += " " + line.strip()
        else:
            name = ""
    return found
