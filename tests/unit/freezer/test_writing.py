"""How many samples may fail, and blocks on their way into a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import frostline as fl
from frostline.errors import FreezeStopped, StageFailed, UsageError
from frostline.execution import Block
from frostline.freezer.plan import Plan
from frostline.freezer.writing import Budget, Rows, delete_rows, retire_fields

FIELDS = {"x": fl.Field((2,), "float32"), "_source.1": fl.Field((), "str")}


def failures(*keys: str) -> dict[str, StageFailed]:
    return {key: StageFailed("decode", [key], f"no {key}") for key in keys}


@pytest.mark.parametrize(
    ("said", "total", "most"),
    [("1%", 1000, 10), ("1%", 50, 1), ("0%", 50, 0), (0, 50, 0), (3, 50, 3), ("3", 50, 3), ("50%", 3, 1)],
)
def test_a_budget(said: Any, total: int, most: int) -> None:
    assert Budget(said, total, Path()).most == most


@pytest.mark.parametrize("said", ["some", -1, "101%", "x%"])
def test_what_is_no_budget(said: Any) -> None:
    with pytest.raises(UsageError, match="max_bad"):
        Budget(said, 50, Path())


def test_too_many_stop_with_the_first_ten_reasons() -> None:
    budget = Budget(11, 500, Path("store"))
    budget.add(failures(*"abcdef"))
    budget.add(failures(*"ghijk"))
    with pytest.raises(FreezeStopped) as caught:
        budget.add(failures("l"))
    told = str(caught.value)
    assert told.startswith("Stopped: 12 of 500 samples failed, 11 may (max_bad=11).")
    assert [line[4:7] for line in told.splitlines()[1:]] == [f"'{c}'" for c in "abcdefghij"] + ["… a"]
    assert told.endswith("… and 2 more")


def rows(budget: Any = 5) -> Rows:
    plan = Plan(Path(), ("x",), "_source.1", {"x": ("mark", {})})
    return Rows(plan, FIELDS, lambda key: f"text of {key}", Budget(budget, 10, Path()))


def test_rows_and_failures_go_in_in_the_order_of_the_source(tmp_path: Path) -> None:
    block = Block(["a", "c", "d"], {"x": torch.arange(6.0).reshape(3, 2)}, failures("b"))
    with fl.Store.create(tmp_path / "s", FIELDS) as writer:
        rows().into(writer)(["a", "b", "c", "d"], block)
    store = fl.Store.open(tmp_path / "s")
    assert list(store.keys) == ["a", "c", "d"]
    assert store["c"]["x"].tolist() == [2, 3]
    assert store["d"]["_source.1"] == "text of d"
    (entry,) = store.quarantine
    assert (entry["key"], entry["reason"]) == ("b", "decode: no b")
    assert entry["input"][0] == "text of b"


def test_values_that_do_not_fit_their_field_fail(tmp_path: Path) -> None:
    block = Block(["a", "b"], {"x": [torch.zeros(2), torch.zeros(3)]})
    with fl.Store.create(tmp_path / "s", FIELDS) as writer:
        rows().into(writer)(["a", "b"], block)
    store = fl.Store.open(tmp_path / "s")
    assert list(store.keys) == ["a"]
    assert "'x' is [3], the first samples' is [2]" in store.quarantine[0]["reason"]


def test_a_tensor_of_another_shape_fails_as_a_whole(tmp_path: Path) -> None:
    with fl.Store.create(tmp_path / "s", FIELDS) as writer:
        rows().into(writer)(["a", "b"], Block(["a", "b"], {"x": torch.zeros(2, 3)}))
    assert len(fl.Store.open(tmp_path / "s").quarantine) == 2


def test_over_budget_nothing_of_the_block_is_written(tmp_path: Path) -> None:
    with fl.Store.create(tmp_path / "s", FIELDS) as writer:
        write = rows(0).into(writer)
        with pytest.raises(FreezeStopped):
            write(["a", "b"], Block(["a"], {"x": torch.zeros(1, 2)}, failures("b")))
    assert len(fl.Store.open(tmp_path / "s")) == 0


def test_fields_are_added_to_rows_that_are_there(tmp_path: Path) -> None:
    with fl.Store.create(tmp_path / "s", {"_source.1": FIELDS["_source.1"]}) as writer:
        for key in "ab":
            writer.append(key, {"_source.1": "t"})
    with fl.Store.extend(tmp_path / "s", {"x": FIELDS["x"]}) as extender:
        rows().into(extender)(["a", "b"], Block(["a"], {"x": torch.ones(1, 2)}, failures("b")))
    store = fl.Store.open(tmp_path / "s")
    assert list(store.with_fields(["x"]).keys) == ["a"]
    assert [(q["key"], q["field"]) for q in store.quarantine] == [("b", "x")]


def test_rows_and_fields_go(tmp_path: Path) -> None:
    with fl.Store.create(tmp_path / "s", FIELDS) as writer:
        for key in "abc":
            writer.append(key, {"x": torch.zeros(2), "_source.1": ""})
    delete_rows(tmp_path / "s", ["b", "unknown"])
    retire_fields(tmp_path / "s", ["x", "unknown"])
    retire_fields(tmp_path / "s", ["x"])
    store = fl.Store.open(tmp_path / "s")
    assert (list(store.keys), list(store.fields)) == (["a", "c"], ["_source.1"])


@pytest.mark.parametrize(
    ("codec", "value", "told"),
    [
        ("int8/token", float("nan"), "row 'c' holds NaN or infinity, which int8 cannot"),
        ("int8/token", float("inf"), "row 'c' holds NaN or infinity, which int8 cannot"),
        ("float16", 1e6, "row 'c' holds values beyond that type's range (largest 1e+06)"),
    ],
)
@pytest.mark.parametrize("extending", [False, True])
def test_a_value_that_a_codec_cannot_hold_costs_its_sample_and_no_other(
    tmp_path: Path, codec: str, value: float, told: str, extending: bool
) -> None:
    x = torch.arange(10.0).reshape(5, 2)
    x[2, 1] = value
    block = Block([*"abcde"], {"x": x})
    coded = {"x": fl.Field((2,), "float32", codec), "_source.1": FIELDS["_source.1"]}
    if extending:
        with fl.Store.create(tmp_path / "s", {"_source.1": FIELDS["_source.1"]}) as creator:
            for key in "abcde":
                creator.append(key, {"_source.1": "t"})
        opened: Any = fl.Store.extend(tmp_path / "s", {"x": coded["x"]})
    else:
        opened = fl.Store.create(tmp_path / "s", coded)
    budget = Budget(1, 5, Path())
    plan = Plan(Path(), ("x",), "_source.1", {"x": ("mark", {})})
    with opened as writer:
        Rows(plan, coded, lambda key: f"text of {key}", budget).into(writer)([*"abcde"], block)
    store = fl.Store.open(tmp_path / "s")
    assert list(store.with_fields(["x"]).keys) == [*"abde"]
    assert store.rows([*"abde"], ["x"])["x"][2].tolist() == pytest.approx([6, 7], rel=0.01)
    (entry,) = store.quarantine
    assert (entry["key"], entry.get("field")) == ("c", "x" if extending else None)
    assert told in entry["reason"]
    assert (block.keys, [*block.failed], budget.failed) == ([*"abde"], ["c"], 1)  # what is counted as done


def test_values_that_a_codec_cannot_hold_count_as_failures(tmp_path: Path) -> None:
    coded = {"x": fl.Field((2,), "float32", "int8/token"), "_source.1": FIELDS["_source.1"]}
    plan = Plan(Path(), ("x",), "_source.1", {"x": ("mark", {})})
    with fl.Store.create(tmp_path / "s", coded) as writer:
        write = Rows(plan, coded, str, Budget(1, 5, Path())).into(writer)
        with pytest.raises(FreezeStopped, match="2 of 5 samples failed, 1 may"):
            write(
                ["a", "b", "c"],
                Block(["a", "b", "c"], {"x": torch.tensor([[1.0, 2], [torch.nan, 1]] * 2)[1:]}),
            )
    assert len(fl.Store.open(tmp_path / "s")) == 0


def test_an_error_that_no_row_alone_explains_is_not_hidden(tmp_path: Path) -> None:
    with fl.Store.create(tmp_path / "s", {**FIELDS, "other": fl.Field((), "str")}) as writer:
        write = rows().into(writer)
        with pytest.raises(KeyError, match="other"):
            write(["a"], Block(["a"], {"x": torch.zeros(1, 2)}))


def test_how_many_may_be_tried_until_some_work() -> None:
    assert Budget("50%", 200, Path()).tries(8) == 108
    assert Budget("50%", 20_000, Path()).tries(8) == 256
    assert Budget(0, 20_000, Path()).tries(8) == 8
