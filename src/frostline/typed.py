"""Text from the command line as a value of a type: `convert("1_000", int)`; and what a type is called."""

from __future__ import annotations

import collections.abc
import inspect
import json
import types
import typing
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, Literal, Union

from frostline.errors import UsageError

_BOOLS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_NONES = ("none", "null")
_UNIONS = (Union, types.UnionType)
_LISTS: dict[Any, Callable[[list[Any]], Any]] = {
    list: list, tuple: tuple, set: set, frozenset: frozenset,
    collections.abc.Sequence: list, collections.abc.Iterable: list, collections.abc.Collection: list,
    collections.abc.Set: set,
}  # fmt: skip
_DICTS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_SCALARS: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_LAST = (str, Path, PurePath)  # in `int | str`, what anything can be read as comes after the rest


class Mismatch(UsageError):
    """A text that is no value of the type; the message says what would be."""


def convert(text: str, kind: Any) -> Any:
    """The value of type `kind` that a text stands for; Mismatch says what was expected.

    >>> convert("1_000", int), convert("no", bool), convert("8,16", list[int]), convert("none", int | None)
    (1000, False, [8, 16], None)
    """
    kind = _plain(kind)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in _UNIONS:
        return _union(text, kind, args)
    if origin is Literal:
        return _one_of(text, {_written(value): value for value in args}, kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _enum(text, kind)
    if (origin or kind) in _LISTS:
        return _list(text, kind)
    if (origin or kind) in _DICTS:
        return _dict(text, kind)
    return _scalar(text, kind)


def expected(kind: Any) -> str:
    """What a text has to look like, in words."""
    kind = _plain(kind)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in _UNIONS:
        return " or ".join("none" if a is types.NoneType else expected(a) for a in args)
    if origin is Literal:
        return "one of " + ", ".join(_written(value) for value in args)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "one of " + ", ".join(member.name for member in kind)
    if (origin or kind) in _LISTS:
        return "values with commas between (a,b) or a JSON list"
    if (origin or kind) in _DICTS:
        return "name:value pairs with commas between (a:1,b:2) or a JSON object"
    if kind in (Path, PurePath):
        return "a path"
    return _SCALARS.get(kind, f"nothing: {describe(kind)} has no form on the command line")


def describe(kind: Any) -> str:
    """A type as one would write it, without the modules it comes from.

    >>> describe(list[Path] | None), describe(Literal["a", 2]), describe(tuple[int, ...])
    ('list[Path] | None', "Literal['a', 2]", 'tuple[int, ...]')
    """
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, str):
        return kind
    if kind in (None, types.NoneType):
        return "None"
    if kind is Ellipsis:
        return "..."
    if origin in _UNIONS:
        return " | ".join(describe(a) for a in args)
    if origin is Literal:
        return f"Literal[{', '.join(repr(a) for a in args)}]"
    name = getattr(origin or kind, "__name__", None) or inspect.formatannotation(kind)
    inner = [describe(a) if not isinstance(a, list) else "..." for a in args]
    return f"{name}[{', '.join(inner)}]" if inner else str(name)


def of_value(value: Any) -> Any:
    """The type that a default stands for, where a parameter has no annotation."""
    if value is None:
        return str
    if type(value) in (list, tuple, set, frozenset) and value:
        first, *rest = {type(v) for v in value}
        inner = first if not rest else str
        container: Any = type(value)
        return container[inner, ...] if container is tuple else container[inner]
    return type(value)


def _plain(kind: Any) -> Any:
    """A type behind the names that stand for it: NewType, `type X = …`, Any."""
    while True:
        behind = getattr(kind, "__supertype__", None)
        if type(kind).__name__ == "TypeAliasType":  # Python 3.12 and newer
            behind = kind.__value__
        if behind is None:
            break
        kind = behind
    return str if kind in (Any, object, inspect.Parameter.empty) else kind


def _mismatch(kind: Any, why: str = "") -> Mismatch:
    return Mismatch(f"expected {expected(kind)}{f' ({why})' if why else ''}")


def _scalar(text: str, kind: Any) -> Any:
    if kind is bool and text.strip().lower() in _BOOLS:
        return _BOOLS[text.strip().lower()]
    if kind in (None, types.NoneType) and text.lower() in _NONES:
        return None
    if kind in (Path, PurePath, str):
        return kind(text)
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError as e:
            raise _mismatch(kind) from e
    raise _mismatch(kind)


def _union(text: str, kind: Any, args: Sequence[Any]) -> Any:
    if types.NoneType in args and text.lower() in _NONES:
        return None
    for choice in sorted(args, key=lambda a: (a in _LAST, a is bool)):
        try:
            return convert(text, choice)
        except Mismatch:
            continue
    raise _mismatch(kind)


def _written(value: Any) -> str:
    return str(value.name if isinstance(value, Enum) else value).lower() if _odd(value) else str(value)


def _odd(value: Any) -> bool:
    """Whether Python writes a value otherwise than people do: None, True, a member of an Enum."""
    return value is None or isinstance(value, bool | Enum)


def _one_of(text: str, choices: dict[str, Any], kind: Any) -> Any:
    if text in choices:
        return choices[text]
    if text.lower() in choices and _odd(choices[text.lower()]):
        return choices[text.lower()]
    raise _mismatch(kind)


def _enum(text: str, kind: type[Enum]) -> Enum:
    for member in kind:
        if text in (member.name, str(member.value)):
            return member
    folded = [member for member in kind if member.name.lower() == text.lower()]
    if folded:
        return folded[0]
    raise _mismatch(kind)


def _list(text: str, kind: Any) -> Any:
    args = typing.get_args(kind)
    parts = _json(text, list, kind) if text.lstrip().startswith("[") else _split(text)
    made = _LISTS[typing.get_origin(kind) or kind]
    if made is tuple and args and args[-1] is not Ellipsis:
        if len(parts) != len(args):
            raise _mismatch(kind, f"{len(args)} of them; {len(parts)} given")
        inner = list(args)
    else:
        inner = [args[0] if args else str] * len(parts)
    return made([_part(part, k, kind) for part, k in zip(parts, inner, strict=True)])


def _dict(text: str, kind: Any) -> dict[Any, Any]:
    of_key, of_value = typing.get_args(kind) or (str, str)
    if text.lstrip().startswith("{"):
        pairs = list(_json(text, dict, kind).items())
    else:
        pairs = [(key.strip(), value.strip()) for key, _, value in (p.partition(":") for p in _split(text))]
        if any(":" not in part for part in _split(text)):
            raise _mismatch(kind)
    return {_part(key, of_key, kind): _part(value, of_value, kind) for key, value in pairs}


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")] if text.strip() else []


def _json(text: str, shape: type, kind: Any) -> Any:
    try:
        found = json.loads(text)
    except ValueError as e:
        raise _mismatch(kind, f"as JSON: {e}") from e
    if not isinstance(found, shape):
        raise _mismatch(kind)
    return found


def _part(value: Any, kind: Any, whole: Any) -> Any:
    """One entry of a list or dict; what JSON already made a number, a list or null is read once more."""
    text = value if isinstance(value, str) else json.dumps(value)
    try:
        return convert(text, kind)
    except Mismatch as e:
        raise Mismatch(f"expected {expected(whole)}; for {text!r} in it: {e}") from e
