"""The tree drawn at the top of errors.py is the tree, and errors survive a trip between processes."""

from __future__ import annotations

import copy
import inspect
import re

import pytest

from frostline import errors

CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == errors.__name__]


def test_drawing_shows_every_class_and_its_built_in_base() -> None:
    line = re.compile(r"^[ │├└─]*(\w+) *(?:\(also (\w+)\))?.*$", flags=re.MULTILINE)
    drawn = dict(line.findall(errors.__doc__ or ""))
    for cls in CLASSES:
        also = [b.__name__ for b in cls.__bases__ if b.__module__ == "builtins" and b is not Exception]
        assert [drawn[cls.__name__]] == (also or [""])


@pytest.mark.parametrize("cls", CLASSES)
def test_one_base_and_plain_message(cls: type[errors.FrostlineError]) -> None:
    assert issubclass(cls, errors.FrostlineError)
    assert str(cls("no key 'a'")) == "no key 'a'"


@pytest.mark.parametrize("cls", CLASSES)
def test_survives_reconstruction(cls: type[errors.FrostlineError]) -> None:
    """copy uses the same protocol as multiprocessing does to hand an error to the parent."""
    again = copy.copy(cls("no key 'a'"))
    assert type(again) is cls
    assert str(again) == "no key 'a'"


def test_problems_survive_reconstruction() -> None:
    again = copy.copy(errors.UsageError("Feed cannot start:", problems=["a", "b"]))
    assert again.problems == ("a", "b")
    assert str(again) == "Feed cannot start:\n  - a\n  - b"
