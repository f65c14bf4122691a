"""Splits: disjoint, complete, groups kept together, the same from a store and from the source."""

from __future__ import annotations

from typing import Any

import pytest

import frostline as fl
from frostline.errors import UsageError

SPLITS = {"train": 0.6, "val": 0.2, "test": 0.2}


def data(n: int = 60, **options: Any) -> fl.Pipeline:
    rows = [{"key": f"k{i}", "video": i // 4, "kind": ("a", "b")[i % 2], "x": float(i)} for i in range(n)]
    return fl.Pipeline(fl.Source.table(rows), fl.Stage("y", lambda x: 2 * x, reads="x"), **options)


def keys(supply: Any) -> list[str]:
    return [key for batch in supply for key in batch.keys_of_rows]


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("group", [None, "video"])
def test_splits_are_disjoint_and_complete_and_keep_groups_together(
    make: Any, live: bool, group: str | None
) -> None:
    work = make.workload(data(outputs=["y"]), splits=SPLITS, group=group)
    stores = None if live else make.stores(work)
    found = {name: keys(make.supply(work, stores, split=name)) for name in SPLITS}
    assert sorted(key for some in found.values() for key in some) == sorted(f"k{i}" for i in range(60))
    assert all(found.values())
    for name, some in found.items():
        for key in some:
            assert work.split_of(str(int(key[1:]) // 4) if group else key) == name
    assert sorted(keys(make.supply(work, stores))) == sorted(f"k{i}" for i in range(60))


def test_a_field_may_hold_the_split(make: Any) -> None:
    work = make.workload(data(outputs=["y"]), splits="kind")
    for stores in (make.stores(work), None):
        assert {*keys(make.supply(work, stores, split="b"))} == {f"k{i}" for i in range(1, 60, 2)}
        with pytest.raises(
            UsageError, match=r"no split 'c'.*there are 'a' \(30 samples\), 'b' \(30 samples\)"
        ):
            make.supply(work, stores, split="c")


def test_an_expensive_source_is_not_read_where_the_store_has_the_field(make: Any) -> None:
    class Rows:
        def __init__(self) -> None:
            self.read = 0

        def __len__(self) -> int:
            return 20

        def __getitem__(self, i: int) -> dict[str, Any]:
            self.read += 1
            return {"x": float(i), "video": i // 4}

    rows = Rows()
    stage = fl.Stage("y", lambda x: 2 * x, reads="x")
    pipeline = fl.Pipeline(fl.Source.dataset(rows, version="1"), stage, outputs=["y", "video"])
    work = make.workload(pipeline, splits=SPLITS, group="video")
    stores = make.stores(work)
    rows.read = 0
    stored = keys(make.supply(work, stores, split="train"))
    assert rows.read == 0
    assert stored == keys(make.supply(work, None, split="train"))


def test_the_field_may_be_in_the_source_of_another_pipeline(make: Any) -> None:
    rows = [{"key": f"k{i}", "z": float(i)} for i in range(60)]
    work = make.workload({"a": data(), "b": fl.Pipeline(fl.Source.table(rows))}, splits=SPLITS, group="video")
    for stores in (make.stores(work), None):
        for batch in make.supply(work, stores, split="val"):
            assert batch["a"].keys_of_rows == batch["b"].keys_of_rows
            assert {work.split_of(str(int(key[1:]) // 4)) for key in batch["b"].keys_of_rows} == {"val"}


def test_fewer_of_a_split_are_always_the_same_ones_in_their_order(make: Any) -> None:
    work = make.workload(data(outputs=["y"]), splits=SPLITS)
    stores = make.stores(work)
    options = {"split": "train", "train": False}
    every = keys(make.supply(work, stores, **options))
    for n in (1, 5, 9):
        few = keys(make.supply(work, stores, most=n, **options))
        assert len(few) == n
        assert few == [key for key in every if key in few]
        assert few != every[:n] or n == 1
        assert few == keys(make.supply(work, None, most=n, **options))
        more = keys(
            make.supply(make.workload(data(90, outputs=["y"]), splits=SPLITS), None, most=n, **options)
        )
        assert {*more} & {f"k{i}" for i in range(60)} <= {*few}  # some made room, and no other came
    assert keys(make.supply(work, stores, most=10_000, **options)) == every
    assert len(keys(make.supply(work, stores, most=7, train=False))) == 7


def test_fewer_of_several_pipelines_are_the_same_samples(make: Any) -> None:
    rows = [{"key": f"k{i}", "z": float(i)} for i in range(59, 9, -1)]
    work = make.workload({"a": data(), "b": fl.Pipeline(fl.Source.table(rows))}, splits=SPLITS)
    for stores in (make.stores(work), None):
        found = [*make.supply(work, stores, split="train", most=6, train=False)]
        assert sum(batch["a"].n_rows for batch in found) == 6
        assert all(batch["a"].keys_of_rows == batch["b"].keys_of_rows for batch in found)


def test_a_split_that_does_not_exist_names_those_that_do(make: Any) -> None:
    work = make.workload(data(), splits=SPLITS)
    with pytest.raises(
        UsageError, match=r"no split 'trian'.*'train'.*there are 'train' \(\d+ samples\), 'val'"
    ):
        make.supply(work, None, split="trian")
    with pytest.raises(UsageError, match="this workload has no splits"):
        make.supply(make.workload(data()), None, split="train")


def test_a_split_without_samples_is_refused(make: Any) -> None:
    work = make.workload(data(n=2), splits={"train": 0.999, "val": 0.001})
    with pytest.raises(
        UsageError, match=r"split 'val' has no sample; there are 'train' \(2 samples\), 'val' \(0"
    ):
        make.supply(work, None, split="val")
