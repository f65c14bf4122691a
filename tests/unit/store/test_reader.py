from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import frostline as fl
from frostline.errors import FeedError, FieldError, StoreCorrupt, StoreError, UsageError
from frostline.store.gc import collect
from frostline.store.manifest import dump_manifest

Row = Callable[[int], dict[str, Any]]
NUMBER = {"n": fl.Field((), "int64")}
DTYPES = (
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "uint16",
    "uint32",
    "uint64",
)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_fixed_and_ragged(tmp_path: Path, dtype: str) -> None:
    fields = {"x": fl.Field((2, 3), dtype), "r": fl.Field((None,), dtype), "n": fl.Field((), dtype)}
    x = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(getattr(torch, dtype))
    with fl.Store.create(tmp_path / "s", fields, rows_per_shard=2) as writer:
        for i in range(3):
            writer.append(str(i), {"x": x, "r": x[0, :i], "n": 1})
    batch = fl.Store.open(tmp_path / "s", check="read").rows([2, 0])
    assert batch["x"].dtype == batch["r"].values.dtype == batch["n"].dtype == getattr(torch, dtype)
    assert batch["x"].tolist() == [x.tolist()] * 2
    assert [r.tolist() for r in batch["r"]] == [x[0, :2].tolist(), []]


def test_a_snapshot_stays_as_it_is(store: Path, row: Row) -> None:
    before = fl.Store.open(store)
    with fl.Store.append(store) as writer:
        writer.replace("k1", row(100))
        writer.delete("k2")
        writer.append("new", row(5))
        assert len(fl.Store.open(store)) == 10  # not committed yet
    assert float(before["k1"]["x"][0]) == 1
    assert "k2" in before
    assert len(fl.Store.open(store)) == 10
    assert list(fl.Store.open(store).keys)[-2:] == ["k1", "new"]


def test_creating_over_a_store_and_resuming(store: Path) -> None:
    fields = fl.Store.open(store).fields
    with pytest.raises(StoreError, match=r"A store with 10 rows is at .*resume=True"):
        fl.Store.create(store, fields)
    with pytest.raises(StoreError, match=r"begun otherwise: caption: there .*None"):
        fl.Store.create(store, {k: v for k, v in fields.items() if k != "caption"}, resume=True)
    with pytest.raises(StoreError, match="rows_per_shard: there 4, now 8"):
        fl.Store.create(store, fields, rows_per_shard=8, resume=True)
    with fl.Store.create(store, fields, resume=True) as writer:
        assert (len(writer), writer.resumed_rows) == (10, 10)


def test_a_creation_that_was_killed_is_begun_anew(tmp_path: Path) -> None:
    root = tmp_path / "s"
    for name in ("commits", "runs", "data"):
        (root / name).mkdir(parents=True)
    (root / "manifest.json.aside").write_bytes(b"half")
    with fl.Store.create(root, NUMBER, rows_per_shard=4):
        pass
    other = tmp_path / "t"
    for name in ("commits", "runs", "data"):
        (other / name).mkdir(parents=True)
    (other / "manifest.json").write_bytes(dump_manifest(16))
    with pytest.raises(StoreError, match="never begun"):
        fl.Store.append(other)
    with pytest.raises(StoreError, match="never begun"):
        fl.Store.open(other)
    with fl.Store.create(other, NUMBER, rows_per_shard=4):
        pass
    assert fl.Store.open(other).rows_per_shard == 4


@pytest.mark.parametrize("rows", [0, -1, 1.5, True, 1 << 30])
def test_rows_per_shard(tmp_path: Path, rows: Any) -> None:
    with pytest.raises(UsageError, match="expected a whole number"):
        fl.Store.create(tmp_path / "s", NUMBER, rows_per_shard=rows)
    assert not (tmp_path / "s").exists()


def test_paths(tmp_path: Path, store: Path) -> None:
    with pytest.raises(UsageError, match="URL"):
        fl.Store.open("s3://bucket/store")
    with pytest.raises(StoreError, match="No store at"):
        fl.Store.open(tmp_path / "none")
    with pytest.raises(FieldError):
        fl.Store.create(tmp_path / "none", {})
    assert not (tmp_path / "none").exists()
    assert len(fl.Store.open(str(store))) == 10
    (tmp_path / "link").symlink_to(store)  # the way to the store may be a link, the store's files may not
    assert len(fl.Store.open(tmp_path / "link")) == 10
    (tmp_path / "else" / "where").mkdir(parents=True)
    (tmp_path / "out").symlink_to(tmp_path / "else" / "where")
    fl.Store.create(tmp_path / "out" / ".." / "made", {"x": fl.Field((), "int64")}).close()
    assert (tmp_path / "else" / "made").is_dir(), "`..` of a link is where the system says"


def test_check_levels(store: Path) -> None:
    with pytest.raises(UsageError, match="expected 'files'"):
        fl.Store.open(store, check="never")  # type: ignore[arg-type]
    run = max((store / "runs").iterdir())
    data = bytearray(run.read_bytes())
    data[-1] ^= 1
    run.write_bytes(data)
    with pytest.raises(StoreCorrupt, match="does not have its checksum"):
        fl.Store.open(store, check="read")


def test_an_empty_store(tmp_path: Path) -> None:
    fl.Store.create(tmp_path / "s", NUMBER).close()
    store = fl.Store.open(tmp_path / "s", check="read")
    assert (len(store), list(store), len(store.rows([])["n"]), len(store.column("n"))) == (0, [], 0, 0)
    assert store.with_fields(["n"]) is store
    assert store.check(deep=True).ok
    assert "0 rows of n" in repr(store)


def test_a_copy_without_empty_folders_and_a_moved_store_still_work(
    tmp_path: Path, store: Path, row: Row
) -> None:
    fl.Store.create(tmp_path / "s", NUMBER).close()
    os.rmdir(tmp_path / "s" / "data" / "000-n")
    with fl.Store.append(tmp_path / "s") as writer:
        writer.append("a", {"n": 1})
    store.rename(tmp_path / "moved")
    with fl.Store.append(tmp_path / "moved") as writer:
        writer.append("new", row(1))
    assert len(fl.Store.open(tmp_path / "moved")) == 11


def test_a_store_is_let_go_by_with(store: Path) -> None:
    with fl.Store.open(store) as found:
        with fl.Store.append(store) as writer:
            writer.delete("k1")
        assert collect(store, dry_run=True).pinned_commits == (found.commit.number,)
    assert collect(store, dry_run=True).pinned_commits == ()


@pytest.mark.parametrize("how", ["deleted", "moved", "moved and made anew", "deleted and made anew"])
def test_another_store_in_the_place_of_the_one_that_is_open(
    tmp_path: Path, make: Callable[..., Path], how: str
) -> None:
    """Files of the new one have the names and sizes of the old: rows of both must not come together."""
    path = make(tmp_path / "s", 12)
    store = fl.Store.open(path)
    feed = fl.Feed(store, 4, order=fl.Sequential())
    first = store.rows([0, 1])["x"]
    if how.startswith("moved"):
        path.rename(tmp_path / "aside")
    else:
        shutil.rmtree(path)
    if how.endswith("anew"):
        make(path, 12)
    assert torch.equal(store.rows([0, 1])["x"], first)  # of a shard that is open
    with pytest.raises(StoreError, match="moved, deleted or made anew"):
        store.rows([0, 11])
    with pytest.raises(FeedError, match="moved, deleted or made anew"):
        list(feed)


def test_another_working_folder_while_stores_are_open(
    tmp_path: Path, make: Callable[..., Path], row: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    make(Path("s"), 9)
    store = fl.Store.open("s")
    with fl.Store.append("s") as writer:
        writer.append("new", row(9))
        monkeypatch.chdir(tmp_path / "there")
    assert store.rows([8])["caption"] == ["caption 8"]
    assert "new" in fl.Store.open(tmp_path / "s")
    assert not list((tmp_path / "there").iterdir())
