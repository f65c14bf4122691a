from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import frostline as fl
from frostline.errors import FieldError, StoreCorrupt, StoreError, StoreLocked
from frostline.store import quarantine
from frostline.store.check import check_store
from frostline.store.manifest import commit_numbers, load_commit
from frostline.store.runs import FANOUT
from frostline.store.session import Session, append_log, make_store

Row = Callable[[int], dict[str, Any]]


def test_a_commit_costs_its_rows_whatever_was_there_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,000 commits of one row: few runs, small commits, and in all O(n log n) bytes of index."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # 6,000 of them would be most of the time
    root, n = tmp_path / "s", 1000
    with fl.Store.create(root, {"n": fl.Field((), "int64")}, rows_per_shard=1) as writer:
        for i in range(n):
            writer.append(f"key {i}", {"n": i})
    assert commit_numbers(root)[-1] == n + 1
    last, _ = load_commit(root, n + 1)
    assert len(last.runs) <= (FANOUT - 1) * 5
    assert (root / "commits" / last.file).stat().st_size < 8192
    indexed = sum(load_commit(root, i)[0].runs[-1].rows for i in commit_numbers(root))
    assert indexed <= n * 5  # each row is written once a level
    store = fl.Store.open(root)
    assert store.column("n").tolist() == list(range(n))
    assert [store.keys.position(f"key {i}") for i in (0, 7, 8, 511, 512, n - 1)] == [0, 7, 8, 511, 512, n - 1]


def test_folders_that_are_links_are_refused_before_anything_is_written(store: Path, tmp_path: Path) -> None:
    for name in ("commits", "runs", "data", "data/000-x"):
        place, aside = store / name, tmp_path / "elsewhere"
        place.rename(aside)
        (aside / "precious.aside").write_text("mine")
        place.symlink_to(aside)
        with pytest.raises(StoreCorrupt, match="link"):
            Session(store)
        assert (aside / "precious.aside").exists()
        place.unlink()
        (aside / "precious.aside").unlink()
        aside.rename(place)
    Session(store).release()


def test_what_a_killed_writer_left_is_swept(store: Path) -> None:
    left = [
        store / "manifest.json.aside",
        store / "commits" / "00000009.json.aside",
        store / "data" / "000-x" / "f.aside",
    ]
    for path in left:
        path.touch()
    with open(store / "log.txt", "ab") as log:
        log.write(b"0123 half a li")
    assert not check_store(store).problems
    Session(store).release()
    assert not any(path.exists() for path in left)
    append_log(store, {"commit": 1})
    assert check_store(store).ok


def test_a_session_that_fails_to_open_lets_the_lock_go(store: Path) -> None:
    newest = store / "commits" / f"{commit_numbers(store)[-1]:08d}.json"
    data = newest.read_bytes()
    newest.write_bytes(data[:-10])
    for _ in range(2):
        with pytest.raises(StoreCorrupt):
            Session(store)
    newest.write_bytes(data)
    Session(store).release()


def test_the_log_tells_when_and_where(store: Path) -> None:
    lines = (store / "log.txt").read_text().splitlines()
    assert [json.loads(line.split(" ", 1)[1])["commit"] for line in lines] == commit_numbers(store)
    assert json.loads(lines[-1].split(" ", 1)[1])["pid"] == os.getpid()


def test_a_pipe_in_place_of_the_log_does_not_hang_the_writer(store: Path, row: Row) -> None:
    (store / "log.txt").unlink()
    os.mkfifo(store / "log.txt")
    with pytest.raises(OSError, match="log"), fl.Store.append(store) as writer:
        writer.append("new", row(1))
    assert not check_store(store).ok


def test_a_store_is_not_made_over_something_else(tmp_path: Path, store: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(StoreError, match="something else is there"):
        make_store(tmp_path, 4)
    assert not (tmp_path / ".lock").exists()
    with pytest.raises(StoreError, match="something else is there"):
        make_store(tmp_path / "notes.txt", 4)
    for path in (store / "commits").iterdir():
        path.unlink()
    (store / "log.txt").unlink()
    with pytest.raises(StoreCorrupt, match="holds data but no commit"):
        make_store(store, 4)


def test_two_that_create_at_once(tmp_path: Path) -> None:
    with fl.Store.create(tmp_path / "s", {"n": fl.Field((), "int64")}) as writer:
        with pytest.raises(StoreLocked, match=f'"pid": {os.getpid()}'):
            fl.Store.create(tmp_path / "s", {"n": fl.Field((), "int64")}, resume=True)
        with pytest.raises(StoreLocked):
            fl.Store.append(tmp_path / "s")
        with pytest.raises(StoreLocked):
            fl.Store.extend(tmp_path / "s", {"y": fl.Field((), "int64")})
        writer.append("a", {"n": np.int64(1)})
    assert len(fl.Store.open(tmp_path / "s")) == 1


def test_a_commit_too_large_to_be_read_is_not_written(tmp_path: Path) -> None:
    fields = {f"f{i}": fl.Field((), "int64", provenance="x" * 65_000) for i in range(270)}
    with pytest.raises(FieldError, match="shorten the fields' provenance"):
        fl.Store.create(tmp_path / "s", fields)
    with fl.Store.create(tmp_path / "s", {"n": fl.Field((), "int64")}):
        pass  # the lock was let go, and nothing is in the way


def test_a_commit_looks_at_new_failures_whatever_failed_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    looked, standing = [], quarantine.standing

    def counted(lines: Any, *held: Any) -> Any:
        looked.append(len(lines := list(lines)))
        return standing(lines, *held)

    with fl.Store.create(tmp_path / "s", {"n": fl.Field((), "int64")}, rows_per_shard=2) as writer:
        monkeypatch.setattr(quarantine, "standing", counted)
        for i in range(60):
            writer.quarantine(f"bad {i}", reason="no")
            writer.append(f"k{i}", {"n": i})
        for i in range(0, 60, 3):
            writer.append(f"bad {i}", {"n": i})
        writer.delete("k7")
    monkeypatch.setattr(quarantine, "standing", standing)
    assert sum(looked) == 60 + 20
    store = fl.Store.open(tmp_path / "s")
    assert [q["key"] for q in store.quarantine] == [f"bad {i}" for i in range(60) if i % 3]
    assert store.commit.quarantined == 40
