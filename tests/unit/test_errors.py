"""The tree drawn at the top of errors.py is the tree, and errors survive a trip between processes."""

from __future__ import annotations

import copy
import inspect
import re

import pytest

from frostline import errors

ABOUT_A_STAGE = (errors.StageFailed, errors.ChunkTooLarge, errors.CompileFailed)
"""Their message is made of parts."""
CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == errors.__name__]


def test_drawing_shows_every_class_and_its_built_in_base() -> None:
    line = re.compile(r"^[ │├└─]*(\w+) *(?:\(also (\w+)\))?.*$", flags=re.MULTILINE)
    drawn = dict(line.findall(errors.__doc__ or ""))
    for cls in CLASSES:
        also = [b.__name__ for b in cls.__bases__ if b.__module__ == "builtins" and b is not Exception]
        assert [drawn[cls.__name__]] == (also or [""])


PLAIN = [c for c in CLASSES if c not in ABOUT_A_STAGE]


@pytest.mark.parametrize("cls", PLAIN)
def test_one_base_and_plain_message(cls: type[errors.FrostlineError]) -> None:
    assert issubclass(cls, errors.FrostlineError)
    assert str(cls("no key 'a'")) == "no key 'a'"


@pytest.mark.parametrize("cls", PLAIN)
def test_survives_reconstruction(cls: type[errors.FrostlineError]) -> None:
    """copy uses the same protocol as multiprocessing does to hand an error to the parent."""
    again = copy.copy(cls("no key 'a'"))
    assert type(again) is cls
    assert str(again) == "no key 'a'"


def test_problems_survive_reconstruction() -> None:
    again = copy.copy(errors.UsageError("Feed cannot start:", problems=["a", "b"]))
    assert again.problems == ("a", "b")
    assert str(again) == "Feed cannot start:\n  - a\n  - b"


@pytest.mark.parametrize("cls", [errors.UsageError, errors.NotFrozen])
def test_all_problems_are_told_and_kept(cls: type[errors.UsageError | errors.NotFrozen]) -> None:
    error = cls("Cannot:", problems=(text for text in ("one", "two")))
    assert error.problems == ("one", "two")
    assert str(error) == "Cannot:\n  - one\n  - two"
    again = copy.copy(error)
    assert (again.problems, str(again)) == (error.problems, str(error))


def test_a_stage_that_failed_names_itself_its_samples_and_the_reason() -> None:
    assert issubclass(errors.StageFailed, errors.FrostlineError)
    few = errors.StageFailed("decode", ["a", "b"], "truncated")
    assert str(few) == "Stage 'decode' failed for 'a', 'b': truncated"
    many = errors.StageFailed("decode", list("abcde"), "truncated")
    assert str(many) == "Stage 'decode' failed for 'a', 'b', 'c' and 2 more: truncated"
    again = copy.copy(many)
    assert (again.stage, again.keys, again.reason, str(again)) == (
        "decode",
        (*"abcde",),
        "truncated",
        str(many),
    )


def test_a_chunk_that_is_too_large_says_how_large_and_what_to_do() -> None:
    error = errors.ChunkTooLarge("net", 64, "tried 2 GiB")
    assert issubclass(errors.ChunkTooLarge, errors.FrostlineError)
    told = "Stage 'net' ran out of memory with 64 samples a call: tried 2 GiB. Give it a smaller batch_size."
    assert (error.stage, error.chunk, str(error)) == ("net", 64, told)


def test_a_network_that_cannot_be_compiled_is_named() -> None:
    error = errors.CompileFailed("net", "no compiler")
    assert (error.stage, error.reason) == ("net", "no compiler")
    assert str(error).startswith("Stage 'net' cannot be compiled: no compiler")


@pytest.mark.parametrize(
    "error",
    [errors.ChunkTooLarge("net", 64, "tried 2 GiB"), errors.CompileFailed("net", "no compiler")],
    ids=lambda error: type(error).__name__,
)
def test_what_a_stage_could_not_do_survives_reconstruction(error: errors.FrostlineError) -> None:
    again = copy.copy(error)
    assert (vars(again), str(again)) == (vars(error), str(error))
