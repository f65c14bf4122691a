"""Pipelines: the graph, the line, and all that can be wrong with them."""

from __future__ import annotations

import pytest

import frostline as fl
from frostline.errors import UsageError


def same(*values):
    return values


def noisy(*values, rng):
    return values


def stage(name: str, reads, writes=None, **options) -> fl.Stage:
    return fl.Stage(name, noisy if options.get("random") else same, reads=reads, writes=writes, **options)


def source(*names: str) -> fl.Source:
    return fl.Source.table([{"key": "a", **dict.fromkeys(names or ("x",), 1)}])


def problems(*parts, **options) -> tuple[str, ...]:
    with pytest.raises(UsageError, match="pipeline cannot work") as caught:
        fl.Pipeline(*parts, **options)
    return caught.value.problems


# what is wrong


def test_an_unknown_field_suggests_the_nearest() -> None:
    assert problems(source("frames"), stage("a", "frmaes")) == (
        "stage 'a' reads 'frmaes', which nothing writes (did you mean 'frames'?); there are key, frames, a",
    )
    assert "outputs name 'b', which nothing writes" in problems(source(), outputs=["b"])[0]
    assert "(did you mean 'frames'?)" in problems(source("frames"), fl.Pick("frame", 2))[0]


def test_a_circle() -> None:
    (found,) = problems(source(), stage("a", ["x", "c"]), stage("b", "a"), stage("c", "b"), stage("d", "x"))
    assert found.startswith("these stages wait for each other in a circle: 'a' reads x, c")
    assert "'d'" not in found
    assert "circle" in problems(source(), stage("a", "a"))[0]


def test_two_writers() -> None:
    assert problems(source(), stage("a", "x", "y"), stage("b", "x", "y")) == (
        "field 'y' is written twice: by stage 'a' and by stage 'b'",
    )
    assert "by stage 'a' and by the source (1 rows)" in problems(source(), stage("a", "key", "x"))[0]


def test_two_stages_of_one_name() -> None:
    assert problems(source(), stage("a", "x", "y"), stage("a", "x", "z")) == ("two stages are called 'a'",)


def test_a_stage_that_leads_nowhere() -> None:
    steps = (stage("a", "x"), stage("b", "a"), stage("c", "x"))
    assert problems(source(), *steps, outputs=["a"]) == (
        "stage 'b' is not used: nothing that is in outputs (a) is computed from b",
        "stage 'c' is not used: nothing that is in outputs (a) is computed from c",
    )
    assert fl.Pipeline(source(), *steps, outputs=["b", "c"]).outputs == ("b", "c")
    assert fl.Pipeline(source(), stage("a", "x"), fl.Pick("a", 2), outputs=["x"]).outputs == ("x",)


def test_strangers() -> None:
    assert problems("clips/*.mp4", len) == (
        "it begins with str; expected a Source, as Source.files(…)",
        "builtin_function_or_method is no Stage or Pick",
    )


def test_all_that_is_wrong_is_said_at_once() -> None:
    found = problems(
        source(), stage("a", "gone"), stage("a", "x", "x"), stage("b", "c"), stage("c", "b"), outputs=["nope"]
    )
    for words in ("two stages", "written twice", "'gone'", "'nope'", "circle"):
        assert any(words in problem for problem in found), words


# the graph


def test_stages_are_ordered_and_otherwise_keep_their_order() -> None:
    data = fl.Pipeline(source(), stage("c", "b"), stage("z", "x"), stage("b", "a"), stage("a", "x"))
    assert [s.name for s in data.stages] == ["z", "a", "b", "c"]
    assert data.outputs == ("c", "z")
    assert data.fields == ("key", "x", "c", "z", "b", "a")


def test_what_fields_need() -> None:
    data = fl.Pipeline(
        source("x", "y"),
        stage("a", "x"),
        stage("b", ["a", "y"]),
        stage("c", "a", ["c", "d"]),
        stage("e", "d"),
    )

    def names(*fields, given=()):
        return [s.name for s in data.needed(fields, given=given)]

    assert (names("e"), names("b", "c"), names("x")) == (["a", "c", "e"], ["a", "b", "c"], [])
    assert names("e", "b", given=["d", "a"]) == ["b", "e"]
    assert data.raw_needed(["e"]) == ("x",)
    assert data.raw_needed(["b"], given=["a"]) == ("y",)
    assert data.raw_needed(["y", "key"]) == ("key", "y")
    assert data.writer_of("d").name == "c"
    assert data.writer_of("x") is None


def test_other_stages_under_the_same_names() -> None:
    data = fl.Pipeline(source(), stage("a", "x"), fl.Pick("a", 2), stage("b", "a"))
    changed = data.with_stages({"b": data.stages[1].with_options(batch_size=4)})
    assert [s.batch_size for s in changed.stages] == [None, 4]
    assert (changed.picks, changed.outputs) == (data.picks, data.outputs)


# the line


def test_everything_downstream_of_what_is_random_lies_above_the_line() -> None:
    data = fl.Pipeline(
        source("x", "label"),
        stage("a", "x"),
        stage("late", "mid"),
        stage("crop", "a", random=True),
        stage("mid", ["label", "crop"]),
        stage("b", "a"),
    )
    assert data.why_not_frozen == {
        "crop": "stage 'crop' is random",
        "mid": "it reads 'crop', and stage 'crop' is random",
        "late": "it reads 'mid', and stage 'crop' is random",
    }
    assert [s.name for s in data.frozen] == ["a", "b"]
    assert data.cut == ("label", "a", "b")
    assert (data.is_frozen("x"), data.is_frozen("a"), data.is_frozen("late")) == (True, True, False)


def test_stages_before_a_pick_read_the_whole_and_those_after_it_the_picked() -> None:
    data = fl.Pipeline(source(), stage("a", "x"), stage("before", "a"), fl.Pick("a", 2), stage("after", "a"))
    assert data.why_not_frozen == {"after": "it reads 'a', and 'a' is picked at random"}
    assert data.cut == ("a", "before")
    assert data.outputs == ("a", "before", "after")


def test_what_differs_from_epoch_to_epoch_cannot_be_picked() -> None:
    with pytest.raises(UsageError, match="Pick reads 'r', which differs from epoch to epoch"):
        fl.Pipeline(source(), stage("r", "x", random=True), stage("s", "r"), fl.Pick("r", 2))


def test_a_field_is_picked_once() -> None:
    with pytest.raises(UsageError, match="'x' is picked twice"):
        fl.Pipeline(source(), fl.Pick("x", 2), fl.Pick("x", 3))


def test_without_stages_the_raw_fields_are_the_cut() -> None:
    data = fl.Pipeline(source("x", "y"))
    assert (data.cut, data.outputs, data.frozen) == (("x", "y"), ("x", "y"), ())
