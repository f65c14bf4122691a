"""Settings of a training: what is refused, how it is told, and what a change leaves alone."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest

from frostline.errors import UsageError
from frostline.training import Training

FINE: dict[str, list[Any]] = {
    "precision": ["fp32", "tf32", "bf16", "fp16"],
    "microbatch": [None, 1, 7],
    "clip": [None, 1, 0.5],
    "schedule": [None, "constant", "cosine", "linear", "wsd"],
    "warmup_steps": [0, 5],
    "decay": [1, 0.3],
    "floor": [0, 0.1, 1.0],
    "compile": [True, False],
    "deterministic": [True, False],
    "seed": [0, 12],
    "log_every": [1, 50],
    "eval_every": [None, 1],
    "eval_rows": [None, 500],
    "save_every": [None, 3],
    "save_minutes": [0.5, 20],
    "keep": [1, 9],
    "keep_every": [None, 100],
    "max_bad_steps": [0, 4],
    "bad_window": [1, 10],
    "unused": [(), ("head.*", "b")],
}
WHOLE_FROM_1 = [0, -1, 2.0, True, "3", math.nan]
WHOLE_FROM_0 = [-1, 1.5, False, "3"]
BAD: dict[str, list[Any]] = {
    "precision": ["fp8", "FP32", None, 16, ["bf16"]],
    "schedule": ["cosin", "", 3],
    "microbatch": WHOLE_FROM_1,
    "clip": [0, -1.0, math.nan, True, "1"],
    "warmup_steps": [*WHOLE_FROM_0, None],
    "decay": [-0.1, 1.1, math.nan, None, "half", True],
    "floor": [-0.1, 2, math.nan, None, "half", True],
    "seed": [*WHOLE_FROM_0, None],
    "log_every": [*WHOLE_FROM_1, None],
    "eval_every": WHOLE_FROM_1,
    "eval_rows": WHOLE_FROM_1,
    "save_every": WHOLE_FROM_1,
    "save_minutes": [0, -2, math.nan, None, True, "10"],
    "keep": [*WHOLE_FROM_1, None],
    "keep_every": WHOLE_FROM_1,
    "max_bad_steps": [*WHOLE_FROM_0, None],
    "bad_window": [*WHOLE_FROM_1, None],
}
UNCHECKED = {"compile", "deterministic", "unused"}


def pairs(table: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(name, value) for name, values in table.items() for value in values]


def test_these_tests_know_every_setting() -> None:
    names = {one.name for one in fields(Training)}
    assert {*FINE} == names
    assert {*BAD} == names - UNCHECKED


@pytest.mark.parametrize(("name", "value"), pairs(FINE))
def test_what_can_work_is_taken(name: str, value: Any) -> None:
    assert getattr(Training(**{name: value}), name) == value


@pytest.mark.parametrize(("name", "value"), pairs(BAD))
def test_what_cannot_work_is_named_with_its_value(name: str, value: Any) -> None:
    with pytest.raises(UsageError) as caught:
        Training(**{name: value})
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(f"{name} is {value!r}; ")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("compile", "no"),  # would compile
        ("deterministic", "no"),
        ("unused", "head.*"),  # would be taken for six patterns
        ("unused", (3,)),
        ("decay", 0),  # the schedule refuses it later, when the store is made
        ("seed", 2**64),  # torch refuses it, in its own words
    ],
)
def test_what_fails_later_or_means_something_else_is_refused_too(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=name):
        Training(**{name: value})


@pytest.mark.parametrize("given", [{"unused": 5}, {3: 4}])
def test_settings_of_the_wrong_kind_are_told(given: Any) -> None:
    with pytest.raises(UsageError):
        Training.of(given)


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        Training(**{name: values[0] for name, values in BAD.items()})
    assert {problem.split()[0] for problem in caught.value.problems} == {*BAD}


def test_settings_that_do_not_exist_are_all_told_with_what_was_meant() -> None:
    with pytest.raises(UsageError) as caught:
        Training.of({"precison": "bf16", "loging": 3, "keep": 2})
    first, second = caught.value.problems
    assert first == "there is no setting 'precison' (did you mean 'precision'?)"
    assert second.startswith("there is no setting 'loging'")


@pytest.mark.parametrize("given", [["keep"], "bf16", 3, True])
def test_settings_are_a_dict(given: Any) -> None:
    with pytest.raises(UsageError, match=r"expected a dict such as \{'precision': 'bf16'\}"):
        Training.of(given)


def test_from_nothing_from_a_dict_and_from_settings() -> None:
    assert Training.of(None) == Training() == Training.of({})
    made = Training.of({"clip": 2.0, "keep": 5})
    assert made == Training(clip=2.0, keep=5)
    assert Training.of(made) is made


def test_a_change_leaves_the_rest_and_none_leaves_all() -> None:
    made = Training(precision="bf16", clip=1.0)
    assert made.but({"clip": 0.5, "precision": None, "seed": 3}) == Training("bf16", clip=0.5, seed=3)
    assert made.but({"clip": None}) == made
    with pytest.raises(UsageError, match="clip is 0"):
        made.but({"clip": 0})


def test_unused_is_one_pattern_or_several() -> None:
    assert Training.of({"unused": "head.*"}).unused == ("head.*",)
    assert Training.of({"unused": ["head.*", "bias"]}).unused == ("head.*", "bias")
