from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import frostline as fl
from frostline.errors import FieldError, KeyDuplicate, KeyMissing, StoreFull, UsageError
from frostline.store import extender as extender_module
from frostline.store.manifest import commit_numbers

Row = Callable[[int], dict[str, Any]]
Files = Callable[[Path], dict[str, bytes]]
Y = {"y": fl.Field((), "int64")}


def _extend(path: Path, keys: list[str] | None = None, fields: dict[str, fl.Field] = Y) -> None:
    with fl.Store.extend(path, fields) as extender:
        for key in list(extender.pending) if keys is None else keys:
            extender.append(key, {name: int(key[1:]) * 10 for name in fields})


def test_a_field_is_added_and_nothing_else_is_touched(store: Path, files_of: Files) -> None:
    before = files_of(store)
    _extend(store)
    after = files_of(store)
    assert {name: after[name] for name in before} == before
    found = fl.Store.open(store)
    assert found.column("y").tolist() == [i * 10 for i in range(10)]
    assert found["k7"]["caption"] == "caption 7"
    assert found.check(deep=True).ok
    with fl.Store.extend(store, Y) as extender:
        assert list(extender.pending) == []


def test_an_unfinished_extension_is_seen_for_what_it_is_and_goes_on(store: Path) -> None:
    _extend(store, ["k0", "k1", "k2", "k3", "k4"])  # shard 1 is not whole
    found = fl.Store.open(store)
    assert list(found.with_fields(["x", "y"]).keys) == ["k0", "k1", "k2", "k3"]
    assert found.with_fields(["x"]) is found
    assert len(found.rows(["k9"], ["x"])["x"]) == 1
    with pytest.raises(FieldError, match=r"'y' is missing in 1 of the rows asked for, among them \['k4'\]"):
        found.rows(["k3", "k4"])
    with fl.Store.extend(store, Y) as extender:
        assert list(extender.pending) == [f"k{i}" for i in range(4, 10)]
        with pytest.raises(KeyDuplicate, match="has y already"):
            extender.append("k0", {"y": 1})
    _extend(store)
    whole = fl.Store.open(store)
    assert whole.with_fields(["y"]) is whole
    assert len(found.with_fields(["y"])) == 4  # a snapshot stays as it is


def test_rows_may_come_in_any_order_and_in_batches(
    store: Path, tmp_path: Path, make: Any, files_of: Files
) -> None:
    fields = {"y": fl.Field((5,), "float32", "int8/token")}
    values = {f"k{i}": torch.randn(5, generator=torch.Generator().manual_seed(i)) for i in range(10)}
    other = make(tmp_path / "other", 10)
    with fl.Store.extend(store, fields) as extender:
        for key in extender.pending:
            extender.append(key, {"y": values[key]})
    order = ["k3", "k1", "k2", "k0", "k6", "k7", "k5", "k4", "k9", "k8"]
    with fl.Store.extend(other, fields) as extender:
        for some in (order[:3], order[3:7], order[7:]):
            extender.append_batch(some, {"y": torch.stack([values[key] for key in some])})
    assert files_of(store) == files_of(other)


def test_new_rows_have_the_new_field_and_old_ones_still_wait(store: Path, row: Row) -> None:
    _extend(store, ["k0", "k1", "k2", "k3"])
    with fl.Store.append(store) as writer:
        with pytest.raises(FieldError, match="no value for y"):
            writer.append("new", row(1))
        writer.append("new", {**row(1), "y": 77})
    found = fl.Store.open(store)
    assert list(found.with_fields(["y"]).keys) == ["k0", "k1", "k2", "k3", "new"]
    with fl.Store.extend(store, Y) as extender:
        assert list(extender.pending) == [f"k{i}" for i in range(4, 10)]


def test_completeness_is_not_guessed_from_counts(store: Path) -> None:
    """As many values as rows, but of other rows: those that have the field were deleted."""
    _extend(store, ["k0", "k1", "k2", "k3", "k8", "k9"])
    with fl.Store.append(store) as writer:
        for key in ("k0", "k1", "k2", "k3", "k8"):
            writer.delete(key)
    for _ in range(12):  # the runs are merged, and forget the dead rows
        with fl.Store.append(store) as writer:
            writer.quarantine("x", reason="a commit")
    found = fl.Store.open(store)
    assert list(found.with_fields(["y"]).keys) == ["k9"]


def test_the_fields_that_are_added_are_told(store: Path) -> None:
    fields = {"y": fl.Field((), "int64"), "z": fl.Field((2,), "float32", "float16", fingerprint="f")}
    with fl.Store.extend(store, fields) as extender:
        assert extender.fields == fields
        assert list(extender.fields) == ["y", "z"]
    _extend(store, ["k0", "k1", "k2", "k3"])
    with fl.Store.extend(store, Y) as extender:  # begun before
        assert extender.fields == Y


def test_pending_shards_are_those_to_which_nothing_was_added(store: Path) -> None:
    first, second, third = ([f"k{i}" for i in some] for some in (range(4), range(4, 8), range(8, 10)))
    with fl.Store.extend(store, Y) as extender:
        assert list(extender.pending_shards()) == [first, second, third]
        extender.append("k5", {"y": 1})
        assert list(extender.pending_shards()) == [first, third]
        extender.append_batch(first, {"y": [1, 2, 3, 4]})
        assert list(extender.pending_shards()) == [third]
    with fl.Store.extend(store, Y) as extender:  # k5 was of an unfinished shard, and is lost
        assert list(extender.pending_shards()) == [second, third]


def test_pending_shards_may_be_filled_while_they_are_listed(store: Path) -> None:
    with fl.Store.append(store) as writer:
        for key in ("k1", "k8", "k9"):
            writer.delete(key)
    with fl.Store.extend(store, Y) as extender:
        seen = []
        for keys in extender.pending_shards():
            seen.append(keys)
            extender.append_batch(keys, {"y": [int(key[1:]) for key in keys]})
        assert seen == [["k0", "k2", "k3"], ["k4", "k5", "k6", "k7"]]  # a shard without rows is none
        assert list(extender.pending_shards()) == []
    assert fl.Store.open(store).column("y").tolist() == [0, 2, 3, 4, 5, 6, 7]


def test_a_failed_row_is_counted_and_not_asked_for_again(store: Path) -> None:
    with fl.Store.extend(store, Y) as extender:
        for key in extender.pending:
            if key in ("k1", "k8", "k9"):  # k8 and k9: the whole of a shard
                extender.quarantine(key, reason="no", input={"frame": 3})
            else:
                extender.append(key, {"y": 1})
    found = fl.Store.open(store)
    assert [(q["key"], q["field"]) for q in found.quarantine] == [("k1", "y"), ("k8", "y"), ("k9", "y")]
    assert found.commit.quarantined == 3
    assert list(found.with_fields(["y"]).keys) == ["k0", "k2", "k3", "k4", "k5", "k6", "k7"]
    with fl.Store.extend(store, Y) as extender:
        assert list(extender.pending) == []
    with fl.Store.extend(store, {"z": fl.Field((), "int64")}) as extender:  # a failure of y is none of z
        assert list(extender.pending) == [f"k{i}" for i in range(10)]
    with fl.Store.append(store) as writer:
        writer.delete("k1")
    assert fl.Store.open(store).commit.quarantined == len(fl.Store.open(store).quarantine) == 2
    fl.Store.retire(store, "y")
    assert fl.Store.open(store).commit.quarantined == len(fl.Store.open(store).quarantine) == 0
    with fl.Store.extend(store, Y) as extender:  # under the old name, all anew
        assert list(extender.pending) == [f"k{i}" for i in (0, *range(2, 10))]


def test_a_field_is_retired_and_comes_back_under_its_name(store: Path) -> None:
    _extend(store)
    before = fl.Store.open(store)
    fl.Store.retire(store, "y", "x")
    found = fl.Store.open(store)
    assert list(found.fields) == ["caption", "tokens"]
    with pytest.raises(FieldError, match="has no field 'y'; it has caption, tokens"):
        found.rows([0], ["y"])
    with fl.Store.extend(store, {"y": fl.Field((), "str")}) as extender:
        for key in extender.pending:
            extender.append(key, {"y": f"now {key}"})
    assert fl.Store.open(store)["k3"]["y"] == "now k3"
    assert int(before["k3"]["y"]) == 30
    assert fl.Store.open(store).check(deep=True).ok


def test_what_cannot_be_retired(store: Path) -> None:
    with pytest.raises(FieldError, match=r"no field called z\. .* has x, caption, tokens"):
        fl.Store.retire(store, "x", "z")
    with pytest.raises(FieldError, match="keeps at least one field"):
        fl.Store.retire(store, "x", "caption", "tokens")
    with pytest.raises(FieldError, match="name a field"):
        fl.Store.retire(store)
    fl.Store.retire(store, "x")


def test_the_same_name_with_another_type_or_origin_is_refused(store: Path) -> None:
    for other in (fl.Field((4,), "float32"), fl.Field((3,), "float32", fingerprint="other weights")):
        with pytest.raises(FieldError, match=r"has x already.*fl\.Store\.retire"):
            fl.Store.extend(store, {"x": other})
    fl.Store.append(store).close()  # the lock was let go


def test_values_that_do_not_fit(store: Path) -> None:
    fields = {"y": fl.Field((2,), "float32", "int8/token"), "z": fl.Field((), "str")}
    good = torch.ones(2)
    with fl.Store.extend(store, fields) as extender:
        with pytest.raises(FieldError, match="Expected values for y, z, got y"):
            extender.append("k0", {"y": good})
        with pytest.raises(KeyMissing, match="no such key"):
            extender.append("none", {"y": good, "z": ""})
        for i in range(3):
            extender.append(f"k{i}", {"y": good, "z": ""})
        with pytest.raises(KeyDuplicate):
            extender.append("k0", {"y": good, "z": ""})
        with pytest.raises(KeyDuplicate, match="stands twice"):
            extender.append_batch(["k3", "k3"], {"y": [good, good], "z": ["", ""]})
        with pytest.raises(FieldError, match="row 'k3' holds NaN"):
            extender.append("k3", {"y": torch.tensor([math.nan, 1]), "z": ""})
        extender.append("k3", {"y": good, "z": ""})  # nothing was lost by the refusal
        assert next(extender.pending) == "k4"
    with pytest.raises(UsageError, match="closed"):
        extender.append("k4", {"y": good, "z": ""})


def test_what_was_given_may_be_overwritten_before_the_shard_is_whole(store: Path) -> None:
    value = torch.zeros((), dtype=torch.int64)
    with fl.Store.extend(store, Y) as extender:
        for i, key in enumerate(extender.pending):
            extender.append(key, {"y": value.fill_(i)})
    assert fl.Store.open(store).column("y").tolist() == list(range(10))


def test_a_store_without_rows_gets_the_field_at_once(tmp_path: Path) -> None:
    fl.Store.create(tmp_path / "s", {"x": fl.Field((), "int64")}).close()
    _extend(tmp_path / "s")
    assert list(fl.Store.open(tmp_path / "s").fields) == ["x", "y"]
    with fl.Store.append(tmp_path / "s") as writer:
        writer.append("a", {"x": 1, "y": 2})
    assert int(fl.Store.open(tmp_path / "s")["a"]["y"]) == 2


def test_an_extension_that_fails_at_once_changes_nothing(store: Path) -> None:
    before = commit_numbers(store)
    with pytest.raises(ZeroDivisionError), fl.Store.extend(store, Y):
        1 / 0  # noqa: B018
    assert commit_numbers(store) == before
    assert list(fl.Store.open(store).fields) == ["x", "caption", "tokens"]


def test_a_full_disk_stops_the_extension_and_it_goes_on_later(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = vars(extender_module)["write_shard"]

    def full(root: Path, column: Any, shard: int, *rest: Any) -> Any:
        if shard == 1:
            raise StoreFull("No room")
        return real(root, column, shard, *rest)

    monkeypatch.setattr(extender_module, "write_shard", full)
    with pytest.raises(StoreFull):
        _extend(store)
    monkeypatch.undo()
    with fl.Store.extend(store, Y) as extender:
        assert next(extender.pending) == "k4"
    _extend(store)
    assert fl.Store.open(store).column("y").tolist() == [i * 10 for i in range(10)]
    assert fl.Store.open(store).check(deep=True).ok
