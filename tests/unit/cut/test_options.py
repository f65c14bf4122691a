"""Where a line can be drawn: chains, branches, raw fields, picks, and too many stages."""

from __future__ import annotations

from typing import Any

import frostline as fl
from frostline.cut.options import MOST_OPTIONS, possible_cuts


def same(*values: Any) -> Any:
    return values[0]


def shaken(*values: Any, rng: Any) -> Any:
    return values[0]


def source(**fields: Any) -> fl.Source:
    return fl.Source.table([{"key": "a", "x": 1.0, **fields}])


def stage(name: str, *reads: str, random: bool = False) -> fl.Stage:
    return fl.Stage(name, shaken if random else same, reads=reads, random=random)


def cuts(*stages: fl.Stage, of: fl.Source | None = None, **seconds: float) -> set[tuple[str, ...]]:
    return {*possible_cuts(fl.Pipeline(of or source(), *stages), seconds)}


def test_a_chain_can_be_cut_after_every_stage_or_not_at_all() -> None:
    assert cuts(stage("a", "x"), stage("b", "a"), stage("c", "b")) == {(), ("a",), ("b",), ("c",)}


def test_nothing_above_the_line_is_ever_stored() -> None:
    assert cuts(stage("a", "x"), stage("b", "a", random=True), stage("c", "b")) == {(), ("a",)}


def test_branches_are_cut_each_by_itself() -> None:
    found = cuts(stage("a", "x"), stage("b", "a"), stage("c", "a"))
    assert found == {(), ("a",), ("b",), ("c",), ("a", "b"), ("a", "c"), ("b", "c")}


def test_a_cut_holds_no_field_that_nothing_above_it_needs() -> None:
    for cut in cuts(stage("a", "x"), stage("b", "a"), stage("c", "b")):
        assert len(cut) <= 1


def test_raw_fields_that_leave_the_pipeline_come_along_and_others_stay() -> None:
    found = cuts(stage("a", "x"), stage("b", "a"), of=source(caption="a cat"))
    assert found == {(), ("caption", "a"), ("caption", "b")}


def test_raw_fields_that_a_random_stage_reads_come_along() -> None:
    mixed = stage("m", "a", "caption", random=True)
    assert cuts(stage("a", "x"), mixed, of=source(caption="a cat")) == {(), ("caption", "a")}


def test_a_picked_field_is_wanted_above_the_line() -> None:
    data = fl.Pipeline(source(), stage("a", "x"), stage("b", "a"), fl.Pick("b", n=2))
    assert {*possible_cuts(data, {})} == {(), ("a",), ("b",)}


def test_a_pipeline_of_raw_fields_can_be_stored_as_it_is() -> None:
    assert possible_cuts(fl.Pipeline(source()), {}) == [(), ("x",)]


def test_where_nothing_is_frozen_nothing_can_be_stored() -> None:
    data = fl.Pipeline(source(), stage("a", "x", random=True))
    assert possible_cuts(data, {}) == [(), ("x",)]


def test_of_very_many_cuts_those_stay_that_save_most_and_the_pipelines_own() -> None:
    stages = [stage(f"s{i:02d}", "x") for i in range(14)]
    seconds = {s.name: float(i) for i, s in enumerate(stages)}
    data = fl.Pipeline(source(), *stages)
    found = possible_cuts(data, seconds)
    assert found[0] == ()
    assert len(found) <= MOST_OPTIONS + 2
    assert data.cut in found
    assert tuple(f"s{i:02d}" for i in range(4, 14)) in found
    assert ("s04",) not in found
