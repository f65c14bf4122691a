"""Text as values of types."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NewType, Optional, Union

import pytest

from frostline.typed import Mismatch, convert, describe, expected, of_value


class Colour(enum.Enum):
    RED = "r"
    DEEP_BLUE = 2


Count = NewType("Count", int)
OLD_NONE = Optional[int]  # noqa: UP045 - this spelling is another object
OLD_UNION = Union[int, float]  # noqa: UP007


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("1_000", int, 1000), ("-3", int, -3), ("1e-3", float, 0.001), ("2", float, 2.0),
        ("true", bool, True), ("YES", bool, True), ("1", bool, True), ("No", bool, False), ("0", bool, False),
        ("", str, ""), ("none", str, "none"), ("a b", Any, "a b"), ("x/y", Path, Path("x/y")),
        ("b", Literal["a", "b"], "b"), ("2", Literal[1, 2], 2), ("none", Literal["a", None], None),
        ("True", Literal[True], True), ("RED", Colour, Colour.RED), ("deep_blue", Colour, Colour.DEEP_BLUE),
        ("2", Colour, Colour.DEEP_BLUE), ("none", int | None, None), ("None", OLD_NONE, None),
        ("7", int | None, 7), ("7", str | int, 7), ("x", str | int, "x"), ("yes", int | bool, True),
        ("1", int | bool, 1), ("1.5", OLD_UNION, 1.5), ("auto", Literal["auto"] | int, "auto"),
        ("1,2", list[int], [1, 2]), ("[1, 2]", list[int], [1, 2]), ("", list[int], []),
        ("a, b", list, ["a", "b"]),
        ("3,4", tuple[int, ...], (3, 4)), ("3,x", tuple[int, str], (3, "x")), ("1,1", set[int], {1}),
        ("a,b", Sequence[str], ["a", "b"]), ("[[1],[2,3]]", list[list[int]], [[1], [2, 3]]),
        ("[1, null]", list[int | None], [1, None]), ("a:1,b:2", dict[str, int], {"a": 1, "b": 2}),
        ('{"a": [1]}', dict[str, list[int]], {"a": [1]}), ("t:.8", Mapping[str, float], {"t": 0.8}),
        ('["a,b"]', list[str], ["a,b"]), ("5", Count, 5),
    ],
)  # fmt: skip
def test_a_text_becomes_a_value(text, kind, value) -> None:
    found = convert(text, kind)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("1.5", int, "a whole number"), ("1e3", int, "a whole number"), ("", int, "a whole number"),
        ("x", float, "a number"), ("2", bool, "true or false"), ("c", Literal["a", "b"], "one of a, b"),
        ("green", Colour, "one of RED, DEEP_BLUE"), ("x", int | None, "a whole number or none"),
        ("1,x", list[int], "for 'x' in it: expected a whole number"), ("[1", list[int], "as JSON"),
        ("1", tuple[int, int], "2 of them; 1 given"), ("a", dict[str, int], "name:value pairs"),
        ('{"a": 1.5}', dict[str, int], "for '1.5' in it"), ("x", bytes, "bytes has no form"),
    ],
)  # fmt: skip
def test_a_wrong_text_says_what_was_expected(text, kind, said) -> None:
    with pytest.raises(Mismatch) as caught:
        convert(text, kind)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (int, "int"), (int | None, "int | None"), (OLD_NONE, "int | None"), (list[Path], "list[Path]"),
        (dict[str, float], "dict[str, float]"), (Literal["a.b", 1], "Literal['a.b', 1]"), (Colour, "Colour"),
        (tuple[int, ...], "tuple[int, ...]"), (Sequence[str], "Sequence[str]"), ("Unknown", "Unknown"),
        (Any, "Any"),
    ],
)  # fmt: skip
def test_what_a_type_is_called(kind, text) -> None:
    assert describe(kind) == text


@pytest.mark.parametrize(
    ("value", "kind"),
    [(3, int), (True, bool), (None, str), ([1], list[int]), ((1, 2), tuple[int, ...]), ([], list),
     ([1, "a"], list[str])],
)  # fmt: skip
def test_the_type_a_default_stands_for(value, kind) -> None:
    assert of_value(value) == kind


def test_expected_never_fails() -> None:
    for kind in (int, Path, Colour, list[int], dict[str, int], int | None, bytes, Literal[1], Count):
        assert expected(kind)
