"""Parameters of functions, and `key=value` for them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from frostline.errors import UsageError
from frostline.parameters import parameters_of, values_of

if TYPE_CHECKING:
    from elsewhere import Unknown


def work(
    *,
    clips: Path,
    num_frames: int = 16,
    mode: Literal["fast", "slow"] = "fast",
    size=(224, 224),
    odd: Unknown = None,
) -> None:
    """A workload.

    clips:      the folder; it may hold
                other folders: they are read too
    num_frames (int): how many of a clip

    Note: this is no parameter.
    - `mode`: which way
    """


THERE = "There are clips, num_frames, mode, size, odd."


def problems(function, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(UsageError) as caught:
        values_of(function, overrides)
    return caught.value.problems


def test_names_types_defaults_and_help() -> None:
    found = {p.name: p for p in parameters_of(work)}
    assert {n: p.type for n, p in found.items()} == {
        "clips": "Path", "num_frames": "int", "mode": "Literal['fast', 'slow']", "size": "tuple[int, ...]",
        "odd": "Unknown",
    }  # fmt: skip
    assert [n for n, p in found.items() if p.required] == ["clips"]
    assert found["num_frames"].default == 16
    assert found["clips"].help == "the folder; it may hold other folders: they are read too"
    assert (found["num_frames"].help, found["mode"].help, found["size"].help) == (
        "how many of a clip", "which way", "",
    )  # fmt: skip


def test_values_have_the_types_of_the_signature() -> None:
    given = ["clips=a=b/c", "num_frames=1_000", "mode=slow", "size=8,16"]
    assert values_of(work, given) == {
        "clips": Path("a=b/c"),
        "num_frames": 1000,
        "mode": "slow",
        "size": (8, 16),
    }


def test_all_that_is_wrong_is_said_at_once() -> None:
    assert problems(
        work, "num_frmaes=3", "num_frames=1.5", "mode=quick", "size", "--mode=x", "num_frames=2"
    ) == (
        f"num_frmaes: no such parameter; did you mean num_frames? {THERE}",
        "num_frames=1.5: expected a whole number; type int, default 16",
        "mode=quick: expected one of fast, slow; type Literal['fast', 'slow'], default 'fast'",
        "size: expected size=value, as size=(224, 224)",
        f"--mode: no such parameter; did you mean mode? {THERE}",
        "num_frames: given twice",
        "clips: missing; it is required (Path). Give clips=…",
    )


def test_an_annotation_that_cannot_be_found_spoils_its_own_parameter_only() -> None:
    assert values_of(work, ["clips=x"]) == {"clips": Path("x")}
    assert problems(work, "clips=x", "odd=1") == (
        "odd=1: its annotation 'Unknown' names something that cannot be found",
    )


def test_without_parameters() -> None:
    assert values_of(lambda: None, []) == {}
    assert problems(lambda: None, "a=1") == ("a: no such parameter. It takes no parameters.",)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda a, /: None, "a is positional-only"),
        (lambda *args: None, "*args is variadic positional"),
        (lambda **options: None, "**options is variadic keyword"),
    ],
)
def test_parameters_without_a_name_are_refused(function, said) -> None:
    with pytest.raises(UsageError, match="needs a name for each parameter") as caught:
        parameters_of(function)
    assert caught.value.problems == (said,)


def test_wrapped_and_partial_functions() -> None:
    @functools.wraps(work)
    def wrapped(*args, **kwargs):
        return work(*args, **kwargs)

    assert parameters_of(wrapped) == parameters_of(work)
    part = functools.partial(work, num_frames=4)
    assert values_of(part, ["clips=x", "mode=slow"]) == {"clips": Path("x"), "mode": "slow"}
    assert {p.name: p.default for p in parameters_of(part)}["num_frames"] == 4
