"""Reading, with nothing asked for: damage is refused, whoever reads."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import frostline as fl
from frostline.errors import FeedError, FrostlineError, StoreCorrupt, StoreError
from frostline.store import verification
from frostline.store.gc import collect

TIERS = ("mmap", "disk", "pinned")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    root = tmp_path / "store"
    with fl.Store.create(root, {"x": fl.Field((64,), "float32")}, rows_per_shard=4) as writer:
        for i in range(12):
            writer.append(f"k{i}", {"x": torch.full((64,), float(i))})
    return root


@pytest.fixture(autouse=True)
def nothing_unsettled() -> Iterator[None]:
    """What a damaged file was about to say in one test must not be heard in the next."""
    yield
    verification._state.unsettled.clear()


def shards(root: Path) -> list[Path]:
    return sorted((root / "data").glob("*/*.safetensors"))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def swap(one: Path, other: Path) -> None:
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def test_rows_of_a_damaged_file_are_refused_by_default(store: Path) -> None:
    flip(shards(store)[1])
    opened = fl.Store.open(store)
    assert opened.rows([0])["x"][0, 0] == 0  # of another file
    with pytest.raises(StoreCorrupt, match="checksum"):
        opened.rows([5])


def test_files_that_changed_places_are_refused(store: Path) -> None:
    swap(*shards(store)[:2])
    with pytest.raises(StoreCorrupt, match="checksum"):
        fl.Store.open(store).rows([0])


@pytest.mark.parametrize("tier", TIERS)
def test_an_epoch_over_a_damaged_file_does_not_end_well(store: Path, tier: str) -> None:
    flip(shards(store)[2])
    feed = fl.Feed(fl.Store.open(store), 4, tier=tier)
    with pytest.raises(FeedError, match="checksum"):
        for _ in feed:
            pass


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.unlink(),
        lambda path: os.truncate(path, path.stat().st_size - 1),
        lambda path: os.truncate(path, path.stat().st_size + 8),
        lambda path: (path.unlink(), path.symlink_to("/etc/hostname")),
        lambda path: (path.unlink(), path.mkdir()),
    ],
    ids=["deleted", "cut short", "longer", "a link", "a folder"],
)
def test_a_file_that_is_not_there_is_noticed_when_the_store_is_opened(
    store: Path, damage: Callable[[Path], Any]
) -> None:
    victim = shards(store)[1]
    damage(victim)
    with pytest.raises(StoreCorrupt, match=victim.name):
        fl.Store.open(store)
    assert fl.Store.open(store, check="open").rows([0])["x"][0, 0] == 0  # for whoever wants what is whole


def test_a_damaged_index_is_refused_when_the_store_is_opened(store: Path) -> None:
    run = sorted((store / "runs").iterdir())[-1]
    flip(run)
    with pytest.raises(StoreCorrupt, match="checksum"):
        fl.Store.open(store)


def test_gc_does_not_make_a_misplaced_shard_official(store: Path) -> None:
    with fl.Store.append(store) as writer:
        for i in (0, 1, 2):
            writer.delete(f"k{i}")
    swap(*shards(store)[:2])
    with pytest.raises(StoreCorrupt, match="checksum"):
        collect(store)
    assert not fl.Store.open(store, check="open").check(deep=True).ok


def test_a_file_is_read_for_its_checksum_once_in_a_process(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[int] = []
    real = verification._digest
    monkeypatch.setattr(verification, "_digest", lambda fd: (hashed.append(fd), real(fd))[1])
    for _ in range(2):
        opened = fl.Store.open(store)
        assert len(opened.rows(list(range(12)))["x"]) == 12
        assert len([*fl.Feed(opened, 4)]) == 3
    assert len(hashed) == 3
    os.utime(shards(store)[0])  # it may have been written
    fl.Store.open(store).rows([0])
    assert len(hashed) == 4


def test_a_forked_reader_waits_for_no_thread_of_its_parent(store: Path) -> None:
    flip(shards(store)[0])
    opened = fl.Store.open(store)
    held = opened.reader("x").shard(0).verification
    assert held is not None
    child = os.fork()
    if child == 0:
        status = 1
        try:
            opened.rows([0])
        except StoreCorrupt:
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_nothing_is_kept_that_was_learned_from_a_damaged_file(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that takes one batch, and stops, before the file was compared."""
    go, real = threading.Event(), verification._digest
    monkeypatch.setattr(verification, "_digest", lambda fd: go.wait(120) and real(fd))
    flip(shards(store)[0])
    feed = fl.Feed(fl.Store.open(store), 4, order=fl.Sequential())
    iterator = iter(feed)
    assert len(next(iterator)["x"]) == 4
    iterator.close()  # type: ignore[attr-defined]
    go.set()
    with pytest.raises(StoreCorrupt, match="checksum"):
        verification.settle_all()


@pytest.mark.parametrize("part", ["runs", "data"])
def test_a_file_cut_short_under_an_open_reader_does_not_end_the_process(store: Path, part: str) -> None:
    """In a child: SIGBUS would end this one."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            opened = fl.Store.open(store)
            opened.rows(list(range(12)))
            for path in (store / part).rglob("*.safetensors"):
                os.truncate(path, 0)
            try:
                opened.rows([f"k{i}" for i in range(12)])
            except FrostlineError:
                status = 0
        finally:
            os._exit(status)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert ended != -signal.SIGBUS
    assert ended == 0


def test_what_the_system_refuses_to_read_is_a_store_error(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, broken = os.open, shards(store)[0].name

    def refused(path: Any, *args: Any, **options: Any) -> int:
        if str(path).endswith(broken):
            raise OSError(5, "Input/output error")
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(StoreError, match="Input/output error"):
        fl.Store.open(store).rows([0])


def test_values_that_start_off_their_page_are_refused(store: Path) -> None:
    """A header that was shortened and refitted everywhere: torch could not look at such bytes."""
    from frostline.store.column import ColumnReader
    from frostline.store.shard import open_shard

    opened = fl.Store.open(store, check="open")
    reader: ColumnReader = opened.reader("x")
    path = shards(store)[0]
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    shorter = data[8 : 8 + length].rstrip(b" ") + b" "
    path.write_bytes(len(shorter).to_bytes(8, "little") + shorter + data[8 + length :])
    table = reader.table
    table.bytes.flags.writeable = True
    table.bytes[0] = path.stat().st_size
    with pytest.raises(StoreCorrupt, match="start"):
        open_shard(store, reader.column, table, 0, 4)


def test_a_whole_copy_elsewhere_is_as_good(store: Path, tmp_path: Path) -> None:
    shutil.copytree(store, tmp_path / "copy")
    opened = fl.Store.open(tmp_path / "copy")
    assert np.array_equal(opened.rows([3])["x"].numpy(), fl.Store.open(store).rows([3])["x"].numpy())
