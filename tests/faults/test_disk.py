"""Disks that are full, may not be written, or give back other bytes than they were given."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import frostline as fl
from frostline.errors import StoreCorrupt, StoreError, StoreFull
from frostline.store.check import check_store
from frostline.store.container import parse

# full disks


@pytest.mark.parametrize("write", range(1, 40, 3))
def test_no_room_at_any_write(
    tmp_path: Path, faults: Any, monkeypatch: pytest.MonkeyPatch, write: int
) -> None:
    want = faults.files_of(faults.write(tmp_path / "whole"))
    real, calls = os.write, [0]

    def full(fd: int, data: Any) -> int:
        calls[0] += 1
        if calls[0] == write:  # half of it fits, and nothing after that
            return real(fd, data[: len(data) // 2])
        if calls[0] > write:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StoreFull, match=r"No room to write .* run the same again"):
        faults.write(tmp_path / "s")
    monkeypatch.undo()
    if (tmp_path / "s" / "commits").exists() and any((tmp_path / "s" / "commits").iterdir()):
        assert check_store(tmp_path / "s", deep=True).ok
    assert faults.files_of(faults.write(tmp_path / "s", resume=True)) == want
    assert check_store(tmp_path / "s", deep=True).ok


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 200 KB."""
    place = tmp_path / "disk"
    place.mkdir()
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", place], check=False).returncode
    ):
        pytest.skip("mounting a small disk needs root")
    yield place
    # lazily: an object that waits for the garbage collector may still have one of its files mapped
    subprocess.run(["umount", "--lazy", place], check=True)


def test_a_disk_that_is_really_full(tmp_path: Path, small_disk: Path, faults: Any) -> None:
    whole = faults.write(tmp_path / "whole", 60)
    with pytest.raises(StoreFull, match=r"bytes, .* has [0-9,]+ free"):
        faults.write(small_disk / "s", 60)
    rows = len(fl.Store.open(small_disk / "s"))
    assert 0 < rows < 60
    assert check_store(small_disk / "s", deep=True).ok
    subprocess.run(["mount", "-o", "remount,size=20m", small_disk], check=True)
    faults.write(small_disk / "s", 60, resume=True)
    assert faults.files_of(small_disk / "s") == faults.files_of(whole)


def test_a_disk_that_may_not_be_written(small_disk: Path, faults: Any) -> None:
    faults.write(small_disk / "s", 4)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    assert len(faults.read_all(small_disk / "s")["keys"]) == 4  # reading needs no right to write
    assert check_store(small_disk / "s", deep=True).ok
    for attempt in (
        lambda: fl.Store.append(small_disk / "s"),
        lambda: fl.Store.extend(small_disk / "s", {"y": fl.Field((), "int64")}),
        lambda: fl.Store.create(small_disk / "new", {"y": fl.Field((), "int64")}),
    ):
        with pytest.raises(StoreError, match="Give this user write access"):
            attempt()


# files that are not what they were


def _damageable(root: Path) -> list[str]:
    return sorted(
        p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file() and p.name != ".lock"
    )


def _same_or_refused(faults: Any, root: Path, want: dict[str, Any]) -> bool:
    """Whether reading was refused; if not, everything is as it was. Nothing else may happen."""
    try:
        found = faults.read_all(root)
    except StoreError:
        return True
    assert found == want
    return False


def test_files_cut_short_or_missing(store: Path, faults: Any) -> None:
    want = faults.read_all(store)
    for name in _damageable(store):
        path = store / name
        data = path.read_bytes()
        for left in (None, 0, 7, len(data) // 2, len(data) - 1):
            if left is None:
                path.unlink()
            else:
                path.write_bytes(data[:left])
            refused = (
                _same_or_refused(faults, store, want) if left is not None or "commits" not in name else None
            )
            quiet = name == "log.txt" or (
                left is None and name.startswith("commits/")
            )  # as after a collection
            assert quiet or not check_store(store).ok, (name, left)
            assert refused or not name.startswith(("data/", "manifest")), (name, left)
            path.write_bytes(data)
    assert check_store(store, deep=True).ok


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_other_things_in_place_of_files(store: Path, tmp_path: Path, faults: Any, kind: str) -> None:
    newest = {
        top: max(p.relative_to(store).as_posix() for p in (store / top).rglob("*.*"))
        for top in ("commits", "runs", "data")
    }
    for name in (*newest.values(), "manifest.json"):
        path, aside = store / name, tmp_path / "aside"
        path.rename(aside)
        if kind == "link":
            path.symlink_to(aside)
        elif kind == "fifo":
            os.mkfifo(path)
        else:
            path.mkdir()
        with pytest.raises(StoreError):
            faults.read_all(store)
        assert not check_store(store).ok
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink()
        aside.rename(path)
    assert check_store(store, deep=True).ok


def test_links_in_place_of_folders(store: Path, tmp_path: Path, faults: Any) -> None:
    for name in ("commits", "runs", "data", "data/000-x"):
        (store / name).rename(tmp_path / "aside")
        (store / name).symlink_to(tmp_path / "aside")
        with pytest.raises(StoreCorrupt, match="link"):
            faults.read_all(store)
        assert not check_store(store).ok
        (store / name).unlink()
        (tmp_path / "aside").rename(store / name)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory, faults: Any) -> tuple[Path, list[str], dict[str, Any]]:
    root = faults.write(tmp_path_factory.mktemp("flips") / "store")
    with fl.Store.append(root) as writer:
        writer.delete("k4")
        writer.replace("k5", faults.row(50))
    return root, _damageable(root), faults.read_all(root)


def _in_a_row(data: bytes, path: Path, place: int) -> bool:
    """Whether a byte of a shard belongs to a row: its values, scales or checksum."""
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    try:
        entries = parse(fd, path.name)
    finally:
        os.close(fd)
    return any(
        entries[n].start <= place < entries[n].stop for n in ("values", "scales", "checksums") if n in entries
    )


@settings(max_examples=150)
@given(data=st.data())
def test_one_flipped_bit_anywhere(
    sound: tuple[Path, list[str], dict[str, Any]], faults: Any, data: st.DataObject
) -> None:
    root, names, want = sound
    name = data.draw(st.sampled_from(names))
    path = root / name
    before = path.read_bytes()
    # headers are padded to a page with spaces; half of the draws go to what comes after them
    spans = [st.integers(0, len(before) - 1)] + (
        [st.integers(4000, len(before) - 1)] if len(before) > 4096 else []
    )
    place, bit = data.draw(st.one_of(spans)), data.draw(st.integers(0, 7))
    in_a_row = name.startswith("data/") and _in_a_row(before, path, place)
    changed = bytearray(before)
    changed[place] ^= 1 << bit
    try:
        path.write_bytes(changed)
        assert not check_store(root).ok
        refused = _same_or_refused(faults, root, want)
        assert refused or not in_a_row or _dead(name)
    finally:
        path.write_bytes(before)


def _dead(name: str) -> bool:
    """Shard 1 holds the rows that were deleted and replaced: nobody reads those."""
    return "/00000001." in name


def test_a_row_that_nobody_reads_does_not_stand_in_the_way(tmp_path: Path, faults: Any) -> None:
    """Damage in one row: the others are read, it is refused; writing it anew repairs the store's use."""
    root = faults.write(tmp_path / "s")
    place = next((root / "data").glob("*-h/00000000.*"))
    changed = bytearray(place.read_bytes())
    changed[-1] ^= 128  # the last row of shard 0: k3
    place.write_bytes(changed)
    store = fl.Store.open(root, check="read")
    assert len(store.rows(["k0", "k1", "k2", "k4"])["h"]) == 4
    with pytest.raises(StoreCorrupt, match=r"writer\.replace"):
        store["k3"]
    assert "k3" in fl.Store.open(root)
    with fl.Store.append(root) as writer:
        writer.replace("k3", faults.row(3))
    again = fl.Store.open(root, check="read")
    assert len(again.rows(list(range(len(again))))["h"]) == 10


def test_a_copy_is_as_good_as_the_store(store: Path, tmp_path: Path, faults: Any) -> None:
    shutil.copytree(store, tmp_path / "copy")
    assert faults.read_all(tmp_path / "copy") == faults.read_all(store)
    assert check_store(tmp_path / "copy", deep=True).ok
