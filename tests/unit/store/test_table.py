from __future__ import annotations

import multiprocessing
import pickle  # noqa: TID251 – what torch's worker processes do with a dataset
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import frostline as fl
from frostline.errors import FieldError, KeyMissing, UsageError
from frostline.store.gc import collect

Row = Callable[[int], dict[str, Any]]


def _rows_of(table: Any) -> list[float]:
    return [float(x) for x in table.rows(np.arange(len(table)), ["x"])["x"][:, 0]]


def test_rows_by_position_key_or_both(store: Path) -> None:
    found = fl.Store.open(store)
    batch = found.rows(["k7", 0, -1, "k7"])
    assert batch["x"][:, 0].tolist() == [7, 0, 9, 7]
    assert batch["caption"] == ["caption 7", "caption 0", "caption 9", "caption 7"]
    assert batch["tokens"].lengths.tolist() == [3, 0, 1, 3]
    assert batch.keys_of_rows == ["k7", "k0", "k9", "k7"]
    assert len(found.rows([])["x"]) == 0
    one = found["k2"]
    assert one["x"].shape == (3,)
    assert one["tokens"].shape == (2, 2)


def test_rows_that_are_not_there(store: Path) -> None:
    found = fl.Store.open(store)
    with pytest.raises(KeyMissing, match=r"has no key 'no' \(nor 1 more"):
        found.rows(["k1", "no", "neither"])
    with pytest.raises(KeyError):  # what people catch
        found["no"]
    with pytest.raises(UsageError, match=r"has rows 0 … 9; asked for 2 … 10"):
        found.rows([2, 10])
    with pytest.raises(FieldError, match="has no field 'z'"):
        found.rows([0], ["z"])


def test_keys_are_a_sequence(store: Path) -> None:
    keys = fl.Store.open(store).keys
    assert (len(keys), keys[0], keys[-1], keys[2:8:3]) == (10, "k0", "k9", ["k2", "k5"])
    assert "k3" in keys
    assert "k33" not in keys
    assert keys.index("k4") == 4
    with pytest.raises(IndexError):
        keys[10]


def test_iterating_a_store_gives_keys_like_a_dict(store: Path) -> None:
    found = fl.Store.open(store)
    assert [key for key in found if key in found] == [f"k{i}" for i in range(10)]


def test_a_table_of_some_rows(store: Path) -> None:
    some = fl.Store.open(store).at(np.array([5, 1, 8]))
    assert list(some.keys) == ["k5", "k1", "k8"]
    assert some.rows(["k8", 0])["x"][:, 0].tolist() == [8, 5]
    assert "k2" not in some
    assert list(some.at(np.array([2, 0])).keys) == ["k8", "k5"]
    assert some.lengths("tokens").tolist() == [1, 1, 0]
    assert some.column("caption") == ["caption 5", "caption 1", "caption 8"]


def test_whole_columns(store: Path, tmp_path: Path) -> None:
    found = fl.Store.open(store)
    assert found.lengths("tokens").tolist() == [i % 4 for i in range(10)]
    assert found.is_ragged("tokens")
    assert not found.is_ragged("x")
    with pytest.raises(FieldError, match="numbers and strings only"):
        found.column("x")
    fields = {name: fl.Field((), name) for name in ("bfloat16", "bool", "uint16", "json")}
    with fl.Store.create(tmp_path / "c", fields) as writer:
        writer.append("a", {"bfloat16": 1.5, "bool": True, "uint16": 65535, "json": [1]})
    other = fl.Store.open(tmp_path / "c")
    assert [other.column(name)[0] for name in fields] == [1.5, True, 65535, [1]]


def test_a_join_has_the_rows_of_both_in_the_first_ones_order(store: Path, tmp_path: Path) -> None:
    with fl.Store.create(tmp_path / "b", {"label": fl.Field((), "int64")}, rows_per_shard=2) as writer:
        for i in (7, 3, 99, 1):
            writer.append(f"k{i}", {"label": i})
    joined = fl.Store.join(fl.Store.open(store), fl.Store.open(tmp_path / "b"))
    assert list(joined.keys) == ["k1", "k3", "k7"]
    assert joined["k3"]["label"] == 3
    assert joined["k3"]["caption"] == "caption 3"
    with pytest.raises(FieldError, match="label stand in more than one"):
        fl.Store.join(joined, fl.Store.open(tmp_path / "b"))
    with pytest.raises(FieldError, match="two or more"):
        fl.Store.join(joined)
    again = pickle.loads(pickle.dumps(joined))  # noqa: S301
    assert list(again.keys) == ["k1", "k3", "k7"]


def test_a_dataset_is_a_sequence_of_rows(store: Path) -> None:
    rows = fl.Store.open(store).dataset(["x", "tokens"])
    assert len(rows) == 10
    every: Any = rows
    assert [float(r["x"][0]) for r in every] == list(range(10))  # a loop ends at the last row
    assert [r["tokens"].shape[0] for r in rows.__getitems__([3, 0, 6])] == [3, 0, 2]
    assert list(rows[-1]) == ["x", "tokens"]
    with pytest.raises(IndexError):
        rows[10]


@pytest.mark.parametrize(("workers", "start"), [(0, None), (2, "fork"), (2, "spawn")])
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_torchs_dataloader_with_any_workers(store: Path, workers: int, start: str | None) -> None:
    found = fl.Store.open(store, check="read")
    context = multiprocessing.get_context(start) if start else None
    rows: Any = found.dataset(["x", "caption"])
    loader: DataLoader[Any] = DataLoader(
        rows, batch_size=4, num_workers=workers, multiprocessing_context=context
    )
    batches = list(loader)
    assert torch.cat([b["x"] for b in batches])[:, 0].tolist() == list(range(10))
    assert [c for b in batches for c in b["caption"]] == [f"caption {i}" for i in range(10)]


def test_what_travels_is_the_snapshot(store: Path, row: Row) -> None:
    found = fl.Store.open(store, check="read")
    with fl.Store.append(store) as writer:
        writer.delete("k0")
        writer.append("new", row(1))
    for thing in (found, found.at(np.array([0, 3])), found.dataset(["x"])):
        again = pickle.loads(pickle.dumps(thing))  # noqa: S301
        assert len(again) == len(thing)
    again = pickle.loads(pickle.dumps(found))  # noqa: S301
    assert list(again.keys) == [f"k{i}" for i in range(10)]
    assert all(reader.check == "read" for reader in again._members[0].readers.values())


def test_whatever_is_made_from_a_store_keeps_its_snapshot_from_the_collector(store: Path) -> None:
    some = fl.Store.open(store).at(np.arange(6))  # the Store itself is gone; its rows are still read
    other = pickle.loads(pickle.dumps(fl.Store.open(store).at(np.arange(3))))  # noqa: S301
    with fl.Store.append(store) as writer:
        for i in range(10):
            writer.delete(f"k{i}")
    collect(store)
    assert _rows_of(some) == [0, 1, 2, 3, 4, 5]
    assert _rows_of(other) == [0, 1, 2]
    del some, other
    assert collect(store).pinned_commits == ()


def test_only_stores_are_joined(store: Path) -> None:
    with pytest.raises(UsageError, match=r"takes stores, as fl.Store.open\(path\) gives them; got PosixPath"):
        fl.Store.join(fl.Store.open(store), store)


def test_joining_compares_keys_not_only_hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frostline.store.runs.key_hash", lambda key: len(key))
    monkeypatch.setattr("frostline.store.snapshot.key_hash", lambda key: len(key))
    for name, keys in (("a", "qrstuv"), ("b", "vxqs")):
        with fl.Store.create(tmp_path / name, {name: fl.Field((), "str")}) as writer:
            for key in keys:
                writer.append(key, {name: name + key})
    joined = fl.Store.join(fl.Store.open(tmp_path / "a"), fl.Store.open(tmp_path / "b"))
    assert list(joined.keys) == ["q", "s", "v"]
    assert joined.rows([0, 1, 2])["b"] == ["bq", "bs", "bv"]
    half = joined.at(np.array([2, 0]))
    assert [half.keys.position(key) for key in "qvs"] == [1, 0, -1]


@pytest.mark.parametrize(
    "which",
    [
        [1.7], [True, False, True], np.array([True, False]), torch.tensor([True]), np.array([0.0, 1.0]),
        "k1", 3, [None], [b"k1"], np.zeros((2, 2), np.int64), slice(2),
    ],
    ids=repr,
)  # fmt: skip
def test_rows_are_asked_for_by_whole_numbers_and_strings(store: Path, which: Any) -> None:
    """A mask taken for numbers would be rows 0 and 1 over and over."""
    with pytest.raises(UsageError, match=r"list of positions .* and keys"):
        fl.Store.open(store).rows(which)


def test_positions_of_any_integer_type(store: Path, row: Row) -> None:
    opened = fl.Store.open(store)
    want = [row(2)["caption"], row(0)["caption"]]
    for which in (
        np.array([2, 0], np.uint8),
        torch.tensor([2, 0]),
        [np.int64(2), 0],
        (2, 0),
        ["k2", np.int8(0)],
    ):
        assert opened.rows(which)["caption"] == want  # type: ignore[arg-type]
    for far in ([1 << 70], np.array([1 << 63], np.uint64), [-(1 << 70)]):
        with pytest.raises(UsageError, match="has rows 0"):
            opened.rows(far)


def test_many_keys_of_a_table_of_some_rows(store: Path) -> None:
    opened = fl.Store.open(store)
    some = opened.at(np.random.default_rng().permutation(len(opened))[: len(opened) // 2])
    assert some.keys.positions(list(some.keys)) == list(range(len(some)))
    others = [key for key in opened if key not in some]
    assert others
    assert some.keys.positions([*others, "no such key"]) == [-1] * (len(others) + 1)
