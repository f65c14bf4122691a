from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import frostline as fl
from frostline.errors import StoreCorrupt, StoreFull
from frostline.store import session as session_module
from frostline.store.check import check_store
from frostline.store.gc import Collected, collect
from frostline.store.manifest import commit_numbers

Row = Callable[[int], dict[str, Any]]
Files = Callable[[Path], dict[str, bytes]]


def _captions(path: Path) -> dict[str, str]:
    store = fl.Store.open(path, check="read")
    assert check_store(path, deep=True).ok
    return {key: store[key]["caption"] for key in store}


def test_only_what_is_needed_is_left(store: Path, row: Row) -> None:
    with fl.Store.append(store) as writer:
        for i in (0, 1, 2, 3, 4, 5, 6):
            writer.delete(f"k{i}")
        writer.replace("k9", row(99))
        writer.quarantine("bad", reason="no")
        writer.append("bad", row(5))
    (store / "data" / "000-x" / "00000077.00000001.safetensors").touch()
    would = collect(store, dry_run=True)
    assert would.files > 0
    want = {"k7": "caption 7", "k8": "caption 8", "k9": "caption 99", "bad": "caption 5"}
    assert _captions(store) == want
    done = collect(store)
    assert done.rewritten_shards == would.rewritten_shards == 9
    assert _captions(store) == want
    found = check_store(store)
    assert (found.commits, found.notes) == (1, [])
    assert len(list((store / "runs").iterdir())) == 1
    assert fl.Store.open(store).commit.quarantined == 0
    assert not any(
        p.name.startswith("00000000.") for p in (store / "data").rglob("*")
    )  # a shard without live rows
    assert collect(store) == Collected(0, 0, 0, ())


def test_a_dry_run_changes_nothing_and_says_what_would_go(store: Path, files_of: Files) -> None:
    fl.Store.retire(store, "x")
    before = files_of(store)
    would = collect(store, dry_run=True, min_dead=2)
    assert files_of(store) == before
    old = {n for n in before if n.startswith("commits/") or "-x/" in n}
    assert (
        would.files >= len(old) - 1 - 3
    )  # all commits but the newest; the files of x are named by the old run
    collect(store)
    assert not any("-x" in p.name for p in (store / "data").iterdir())


@pytest.mark.parametrize("pinned", [False, True])
def test_a_dry_run_foretells_what_is_freed(tmp_path: Path, files_of: Files, pinned: bool) -> None:
    root = tmp_path / "s"
    with fl.Store.create(root, {"x": fl.Field((50_000,), "uint8")}, rows_per_shard=10) as writer:
        for i in range(20):
            writer.append(f"k{i}", {"x": torch.full((50_000,), i, dtype=torch.uint8)})
    reader = fl.Store.open(root)
    if not pinned:
        reader.close()
    with fl.Store.append(root) as writer:
        for i in (*range(8), 12):
            writer.delete(f"k{i}")
    before = sum(map(len, files_of(root).values()))
    would = collect(root, dry_run=True)
    assert sum(map(len, files_of(root).values())) == before
    done = collect(root)
    assert (would.files, would.rewritten_shards, would.pinned_commits) == (
        done.files, 1, done.pinned_commits,
    )  # fmt: skip
    after = sum(map(len, files_of(root).values()))
    if pinned:
        assert would.bytes < 10_000  # the old shard stays for the reader
        assert after - before == pytest.approx(100_000, rel=0.1)
        reader.close()
        return
    assert done.bytes == before - after
    assert would.bytes == pytest.approx(done.bytes, rel=0.05)
    assert done.bytes == pytest.approx(400_000, rel=0.05)


def test_rows_appended_and_looked_up_after_a_collection(store: Path, row: Row) -> None:
    with fl.Store.append(store) as writer:
        writer.delete("k3")
    collect(store, min_dead=0.01)
    with fl.Store.append(store) as writer:
        writer.append("k3", row(33))
        writer.delete("k4")
    collect(store, min_dead=0.01)
    assert _captions(store) == {
        **{f"k{i}": f"caption {i}" for i in (0, 1, 2, 5, 6, 7, 8, 9)},
        "k3": "caption 33",
    }
    sizes = {c.name: (c.rows, c.bytes) for c in fl.Store.open(store).commit.columns}
    files = {n: list((store / "data").glob(f"*-{n}/*")) for n in sizes}
    assert sizes == {n: (9, sum(p.stat().st_size for p in paths)) for n, paths in files.items()}


def test_a_snapshot_in_use_is_left_alone(store: Path) -> None:
    held = fl.Store.open(store)
    with fl.Store.append(store) as writer:
        for i in range(10):
            writer.delete(f"k{i}")
    done = collect(store)
    assert done.pinned_commits == (held.commit.number,)
    assert held.rows(list(range(10)))["x"][:, 0].tolist() == list(range(10))
    assert check_store(store, deep=True).ok
    held.close()
    assert collect(store).pinned_commits == ()
    assert commit_numbers(store) == [held.commit.number + 2]
    assert list((store / "data").rglob("*.safetensors")) == []
    with fl.Store.append(store) as writer:  # folders of fields in use are still there
        writer.append("a", {"x": [1.0, 2.0, 3.0], "caption": "", "tokens": held["k1"]["tokens"]})
    assert len(fl.Store.open(store)) == 1


def test_quarantine_of_rows_and_fields_survives(store: Path) -> None:
    with fl.Store.append(store) as writer:
        writer.quarantine("bad", reason="no")
    with fl.Store.extend(store, {"y": fl.Field((), "int64")}) as extender:
        for key in extender.pending:
            if key == "k1":
                extender.quarantine(key, reason="no y")
            else:
                extender.append(key, {"y": 1})
    before = fl.Store.open(store).quarantine
    collect(store)
    found = fl.Store.open(store)
    assert found.quarantine == before
    assert found.commit.quarantined == 2
    assert len(found.with_fields(["y"])) == 9


@pytest.mark.parametrize("min_dead", [0.2, 0.5, 0.9, 1.0, 2.0])
def test_a_shard_is_rewritten_from_that_share_of_dead_rows_on(store: Path, min_dead: float) -> None:
    with fl.Store.append(store) as writer:
        for key in ("k0", "k4", "k5", "k8", "k9"):  # a quarter of shard 0, half of 1, all of 2
            writer.delete(key)
    shares = [0.25, 0.5, 1.0]
    assert collect(store, min_dead=min_dead).rewritten_shards == 3 * sum(s >= min_dead for s in shares)
    assert sorted(_captions(store)) == ["k1", "k2", "k3", "k6", "k7"]


def test_a_link_in_place_of_a_folder_is_not_followed(store: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "home"
    (store / "data").rename(elsewhere)
    (elsewhere / "precious.txt").write_text("mine")
    (store / "data").symlink_to(elsewhere)
    with pytest.raises(StoreCorrupt, match="link"):
        collect(store)
    assert (elsewhere / "precious.txt").exists()


def test_a_store_never_begun(tmp_path: Path) -> None:
    fl.Store.create(tmp_path / "s", {"n": fl.Field((), "int64")}).close()
    collect(tmp_path / "s")
    assert len(fl.Store.open(tmp_path / "s")) == 0


def test_damage_is_not_sealed_again(store: Path) -> None:
    """Rewriting a shard gives its rows fresh checksums: a damaged row must stop it."""
    with fl.Store.append(store) as writer:
        for key in ("k0", "k1"):
            writer.delete(key)
    damaged = sorted((store / "data").glob("*-x/00000000.*"))[0]
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1  # in the values of k3, the shard's last row
    damaged.write_bytes(data)
    with pytest.raises(StoreCorrupt, match="checksum"):
        collect(store, min_dead=0.5)
    assert not check_store(store).ok, "and check still finds it"


def test_a_damaged_run_is_not_merged(store: Path) -> None:
    with fl.Store.append(store) as writer:
        writer.delete("k0")
    run = sorted((store / "runs").iterdir())[1]  # the first one with rows: its last byte is of a key
    data = bytearray(run.read_bytes())
    data[-1] ^= 1
    run.write_bytes(data)
    with pytest.raises(StoreCorrupt, match="checksum"):
        collect(store)


def test_a_full_disk_is_freed_of_what_the_newest_commit_does_not_need(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Merging the index needs room itself; a retired field's files give it."""
    fl.Store.retire(store, "x")
    want, files = _captions(store), list((store / "data").glob("*-x/*"))
    write = session_module.write_whole

    def full(path: Path, chunks: Any) -> tuple[int, int]:
        if any(file.exists() for file in files):
            raise StoreFull("No room")
        return write(path, chunks)

    monkeypatch.setattr(session_module, "write_whole", full)
    assert collect(store).files >= len(files) > 0
    assert _captions(store) == want
    assert (check_store(store).commits, len(list((store / "runs").iterdir()))) == (1, 1)


@pytest.mark.parametrize("shape", [(0,), (2, 0), (None, 0)])
@pytest.mark.parametrize("codec", ["raw", "bfloat16", "int8/token"])
def test_values_without_bytes(tmp_path: Path, shape: tuple[int | None, ...], codec: str) -> None:
    spec = fl.Field(shape, "float32", codec)
    with fl.Store.create(tmp_path / "s", {"x": spec, "n": fl.Field((), "int64")}) as writer:
        for i in range(4):
            writer.append(f"k{i}", {"x": torch.zeros([i if n is None else n for n in shape]), "n": i})
        for i in (0, 2):
            writer.delete(f"k{i}")
    assert collect(tmp_path / "s").rewritten_shards == 2
    store = fl.Store.open(tmp_path / "s", check="read")
    assert [store[key]["n"].item() for key in store] == [1, 3]
    assert [len(store[key]["x"]) for key in store] == _lengths(shape)
    assert store.check(deep=True).ok


def _lengths(shape: tuple[int | None, ...]) -> list[int]:
    return [1, 3] if shape[0] is None else [shape[0]] * 2
