"""The plan: where to cut, and what the store has against what it should have. Nothing is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import frostline as fl
from frostline.errors import NotFrozen, StoreError, UsageError
from frostline.freezer.plan import Plan, Wanted, chosen_codecs, chosen_cut, combined, make_plan, marks_of

ROWS = [{"key": f"k{i}", "x": i, "label": i % 2} for i in range(6)]


def flipped(y: int, rng: np.random.Generator) -> int:
    return y if rng.random() < 0.5 else -y


def pipeline(rows: Any = ROWS, *, times: int = 2, outputs: Any = ("z", "label")) -> fl.Pipeline:
    return fl.Pipeline(
        fl.Source.table(rows),
        fl.Stage("y", lambda x: x * times, reads="x"),
        fl.Stage("z", flipped, reads="y", random=True),
        outputs=outputs,
    )


def test_the_last_frozen_fields_are_stored_unless_others_are_asked_for() -> None:
    assert chosen_cut(pipeline(), None) == ("label", "y")
    assert chosen_cut(pipeline(), ["y", "x", "y"]) == ("y", "x")


def test_cuts_that_cannot_be() -> None:
    with pytest.raises(UsageError, match=r"no field 'lable'.*'label'") as caught:
        chosen_cut(pipeline(), ["lable", "q"])
    assert len(caught.value.problems) == 2
    with pytest.raises(UsageError, match="name at least one field"):
        chosen_cut(pipeline(), [])
    with pytest.raises(NotFrozen, match=r"'z': stage 'z' is random"):
        chosen_cut(pipeline(), ["y", "z"])
    moving = fl.Stage("z", lambda key, rng: 0, reads="key", random=True)
    assert chosen_cut(fl.Pipeline(fl.Source.table([{"key": "a"}]), moving), None) == ("key",)


def test_codecs_of_no_field_are_refused() -> None:
    assert chosen_codecs(pipeline(), None) == {}
    assert chosen_codecs(pipeline(), {"*": "float16", "y": "raw"}) == {"*": "float16", "y": "raw"}
    with pytest.raises(UsageError, match=r"no field 'lable'.*'label'"):
        chosen_codecs(pipeline(), {"lable": "float16"})


def plan(root: Path, data: fl.Pipeline, **changes: Any) -> Plan:
    values = {
        "cut": chosen_cut(data, None), "codecs": {}, "limit": None, "paranoid": False, "retry_bad": False,
    } | changes  # fmt: skip
    return make_plan(Wanted(data, **values), root, {})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    fl.freeze(pipeline(), tmp_path / "store", quiet=True)
    return tmp_path / "store"


def test_without_a_store_everything_is_new(tmp_path: Path) -> None:
    found = plan(tmp_path / "none", pipeline(), limit=4)
    assert (found.exists, found.idle, found.new, found.said()) == (False, False, [0, 1, 2, 3], [])
    assert sorted(found.texts) == [0, 1, 2, 3]


def test_the_same_again_is_nothing_to_do(root: Path) -> None:
    found = plan(root, pipeline())
    assert found.idle
    assert sorted(found.held) == ["label", "y"]
    assert found.said() == []


def test_keys_come_go_and_change(root: Path) -> None:
    rows = [*ROWS[1:5], {"key": "new", "x": 1, "label": 1}, {"key": "k5", "x": 55, "label": 1}]
    found = plan(root, pipeline(rows))
    assert found.gone == ["k0"]
    assert found.changed == {"k5": ["x"]}
    assert found.new == [4, 5]
    assert found.extended == []
    assert found.said() == [
        "1 input changed ('k5': x)",
        "1 row no longer in the source ('k0'): deleted",
        "2 samples to be added",
    ]


def test_a_limit_does_not_make_the_others_gone(root: Path) -> None:
    assert plan(root, pipeline(), limit=2).idle


def test_a_field_computed_otherwise_is_retired_with_the_reason(root: Path) -> None:
    found = plan(root, pipeline(times=3))
    assert list(found.retired) == ["y"]
    assert found.extended == ["y"]
    assert (found.waiting, found.new) == (6, [])
    assert found.said()[0].startswith("y: to be computed again; ")
    assert "times" in found.said()[0]


def test_fields_beyond_the_cut_are_kept_and_new_ones_added(root: Path) -> None:
    found = plan(root, pipeline(), cut=("x",))
    assert found.fields == ("x", "label", "y")
    assert found.extended == ["x"]
    assert found.said() == ["x: to be added to 6 rows"]


def test_a_field_that_failed_for_a_row_is_planned_again_only_when_asked(root: Path) -> None:
    def picky(x: int) -> int:
        return 1 // (x - 3)

    def more(times: int = 1) -> fl.Pipeline:
        first = pipeline()
        extra = fl.Stage("w", lambda x: picky(x) * times, reads="x")
        return fl.Pipeline(first.source, *first.steps, extra, outputs=["z", "label", "w"])

    fl.freeze(more(), root, quiet=True)
    assert [q["field"] for q in fl.Store.open(root).quarantine] == ["w"]
    assert plan(root, more()).idle
    found = plan(root, more(), retry_bad=True)
    assert (found.changed, found.retried, found.new) == ({"k3": ["w"]}, ["k3"], [3])
    assert found.said() == [
        "a field of 1 row ('k3') failed before: computed again",
        "1 sample to be added",
    ]
    anew = plan(root, more(times=2), retry_bad=True)  # made anew for all rows: this one stays
    assert (list(anew.retired), anew.changed) == (["w"], {})


def test_a_field_that_no_stage_writes_any_more_goes(root: Path) -> None:
    data = fl.Pipeline(fl.Source.table(ROWS), outputs=["label", "x"])
    found = plan(root, data)
    assert found.retired == {"y": ["no stage writes it any more, or it differs from epoch to epoch"]}


def test_another_codec_asked_for_by_name_is_another_field(tmp_path: Path) -> None:
    import torch

    data = fl.Pipeline(fl.Source.table(ROWS), fl.Stage("v", lambda x: torch.full((8,), float(x)), reads="x"))
    fl.freeze(data, tmp_path / "store", quiet=True)
    assert plan(tmp_path / "store", data, codecs={"v": "raw"}).idle
    assert plan(tmp_path / "store", data, codecs={"*": "int8/token"}).idle
    found = plan(tmp_path / "store", data, codecs={"v": "int8/token"})
    assert found.retired == {"v": ["codec raw → int8/token"]}


def test_a_store_of_something_else_is_not_touched(tmp_path: Path) -> None:
    with fl.Store.create(tmp_path / "s", {"x": fl.Field((), "int64")}) as writer:
        writer.append("a", {"x": 1})
    with pytest.raises(StoreError, match=r"`frostline freeze` did not make it. Give another folder"):
        plan(tmp_path / "s", pipeline())


def test_marks_are_of_fields_and_only_of_what_lies_below_them() -> None:
    one = marks_of(pipeline(), ["y", "label"], {}, paranoid=False)
    other = marks_of(pipeline(times=3), ["y", "label"], {}, paranoid=False)
    assert one["label"] == other["label"]
    assert one["y"][0] != other["y"][0]
    both = [combined(Plan(Path(), ("y", "label"), "_source.1", marks)) for marks in (one, other)]
    assert both[0] != both[1]
