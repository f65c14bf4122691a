"""Shards are written side by side and committed one after the other."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import frostline as fl
from frostline.errors import StoreLocked
from frostline.store import extender as extender_module
from frostline.store import inorder
from frostline.store import writer as writer_module
from frostline.store.session import Session

NUMBER = {"n": fl.Field((), "int64")}


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    fl.Store.create(tmp_path / "s", NUMBER).close()
    session = Session(tmp_path / "s")
    yield session
    session.release()


class Committed:
    """Commits that only count: number by number, in their order."""

    def __init__(self, session: Session) -> None:
        self._session, self.order = session, list[int]()

    def __call__(self, files: list[Any]) -> None:
        self.order.append(files[0])
        commit = self._session.snapshot.commit
        self._session.commit(columns=commit.columns, next_shard=0, next_column=commit.next_column)


def test_a_later_shard_may_be_written_first_and_is_committed_later(session: Session) -> None:
    order, commit, second = inorder.InOrder(session), Committed(session), threading.Event()

    def slow(number: int) -> list[Any]:
        assert second.wait(120)
        return [number]

    def quick(number: int) -> list[Any]:
        second.set()
        return [number]

    first = session.next_commit
    order.put(1, slow, commit)
    order.put(1, quick, commit)
    order.wait()
    order.close()
    assert commit.order == [first, first + 1]


def test_only_so_many_are_under_way(session: Session) -> None:
    order, commit = inorder.InOrder(session), Committed(session)
    now, most, lock = 0, 0, threading.Lock()

    def counted(number: int) -> list[Any]:
        nonlocal now, most
        with lock:
            now, most = now + 1, max(most, now + 1)
        threading.Event().wait(0.002)
        with lock:
            now -= 1
        return [number]

    for size in (1, 1, 1, 1, 1, 1):
        order.put(size, counted, commit)
    order.wait()
    assert 1 <= most <= inorder._AT_ONCE
    most = 0
    for _ in range(3):
        order.put(inorder._AT_ONCE_BYTES, counted, commit)  # large ones go alone
    order.wait()
    order.close()
    assert most == 1


def test_after_one_that_failed_nothing_is_committed(session: Session) -> None:
    order, commit, go = inorder.InOrder(session), Committed(session), threading.Event()

    def broken(number: int) -> list[Any]:
        assert go.wait(120)
        raise OSError("no room")

    first = session.next_commit
    order.put(1, lambda number: [number], commit)
    order.put(1, broken, commit)
    order.put(1, lambda number: [number], commit)
    go.set()
    with pytest.raises(OSError, match="no room"):
        order.wait()
    order.close()
    assert commit.order == [first]
    assert session.next_commit == first + 1


@pytest.mark.parametrize("kind", ["append", "extend"])
def test_stores_end_before_the_shard_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """One fails after later ones are written: what is before it is in, and the next try adds the rest."""
    keys = [f"k{i:02d}" for i in range(12)]
    held = keys if kind == "extend" else keys[:2]
    with fl.Store.create(tmp_path / "s", NUMBER, rows_per_shard=2) as writer:
        writer.append_batch(held, {"n": [*range(len(held))]})
    module: Any = extender_module if kind == "extend" else writer_module
    whole: Callable[..., Any] = module.write_shard

    def failing(*args: Any) -> Any:
        if args[2] == (1 if kind == "extend" else 2):
            threading.Event().wait(0.2)
            raise OSError("the disk broke")
        return whole(*args)

    def add() -> None:
        if kind == "append":
            with fl.Store.append(tmp_path / "s") as writer:
                missing = [(i, key) for i, key in enumerate(keys) if key not in writer]
                for i, key in missing:
                    writer.append(key, {"n": i})
        else:
            with fl.Store.extend(tmp_path / "s", {"m": fl.Field((), "int64")}) as extender:
                for key in list(extender.pending):
                    extender.append(key, {"m": int(key[1:]) * 10})

    monkeypatch.setattr(module, "write_shard", failing)
    with pytest.raises(OSError, match="the disk broke"):
        add()
    monkeypatch.undo()
    store = fl.Store.open(tmp_path / "s")
    if kind == "append":
        assert sorted(store.keys) == keys[:4]
    add()
    store = fl.Store.open(tmp_path / "s")
    name, times = ("m", 10) if kind == "extend" else ("n", 1)
    assert {key: int(store[key][name]) for key in store.keys} == {k: times * i for i, k in enumerate(keys)}
    assert not store.check(deep=True).problems


def test_after_a_failure_closing_adds_no_error_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`finally: extender.close()` must not hide why it failed, however many shards were under way."""
    keys = [f"k{i:02d}" for i in range(12)]
    with fl.Store.create(tmp_path / "s", NUMBER, rows_per_shard=2) as writer:
        writer.append_batch(keys, {"n": [*range(12)]})

    def broken(*args: Any) -> Any:
        raise OSError("the disk broke")

    monkeypatch.setattr(extender_module, "write_shard", broken)
    extender = fl.Store.extend(tmp_path / "s", {"m": fl.Field((), "int64")})
    try:
        with pytest.raises(OSError, match="the disk broke"):
            extender.append_batch(keys, {"m": [*range(12)]})
    finally:
        extender.close()
    extender.close()
    fl.Store.append(tmp_path / "s").close()  # and the store is free


def given_a_row(root: Path, kind: str) -> Any:
    """A writer or an extender with a whole shard."""
    other: Any
    if kind == "append":
        other = fl.Store.append(root)
        other.append("b", {"n": 2})
    else:
        other = fl.Store.extend(root, {"m": fl.Field((), "int64")})
        other.append("a", {"m": 2})
    return other


@pytest.mark.parametrize("kind", ["append", "extend"])
def test_a_fork_neither_waits_nor_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Its threads are its parent's: waiting for them would take for ever."""
    with fl.Store.create(tmp_path / "s", NUMBER, rows_per_shard=1) as writer:
        writer.append("a", {"n": 1})
    go = threading.Event()
    module: Any = extender_module if kind == "extend" else writer_module
    whole = module.write_shard
    monkeypatch.setattr(module, "write_shard", lambda *args: go.wait(120) and whole(*args))
    other = given_a_row(tmp_path / "s", kind)
    child = os.fork()
    if child == 0:
        other.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    go.set()
    other.close()
    store = fl.Store.open(tmp_path / "s")
    assert (int(store["b"]["n"]) if kind == "append" else int(store["a"]["m"])) == 2


@pytest.mark.parametrize("kind", ["append", "extend"])
def test_an_interrupted_close_keeps_the_lock_until_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    with fl.Store.create(tmp_path / "s", NUMBER, rows_per_shard=1) as writer:
        writer.append("a", {"n": 1})
    other = given_a_row(tmp_path / "s", kind)

    def interrupted(futures: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(inorder, "wait_for", interrupted)
    with pytest.raises(KeyboardInterrupt):
        other.close()
    with pytest.raises(StoreLocked):
        fl.Store.append(tmp_path / "s")
    monkeypatch.undo()
    other.close()
    fl.Store.append(tmp_path / "s").close()
