from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import frostline as fl
from frostline.store.check import check_store
from frostline.store.manifest import commit_numbers

Row = Callable[[int], dict[str, Any]]


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def test_a_whole_store(store: Path) -> None:
    seen: list[tuple[int, int]] = []
    result = check_store(store, deep=True, progress=lambda done, total: seen.append((done, total)))
    assert result.ok
    assert (result.rows, result.commits, result.files, result.notes) == (10, 4, 13, [])
    assert seen[-1][0] == result.bytes <= seen[-1][1]


def test_all_damage_is_listed(store: Path) -> None:
    shards = sorted((store / "data").rglob("*.safetensors"))
    _flip(shards[0], -1)
    shards[1].unlink()
    shards[2].write_bytes(shards[2].read_bytes()[:-1])
    os.unlink(shards[3])
    os.symlink(shards[4], shards[3])
    (store / "notes.txt").write_text("mine")
    result = check_store(store)
    text = "\n".join(result.problems)
    for path in shards[:4]:
        assert path.name in text
    assert len(result.problems) >= 4
    assert [note.split()[0] for note in result.notes] == ["notes.txt"]


def test_each_row_is_compared_when_deep(store: Path) -> None:
    place = next((store / "data").glob("*-caption/00000001*"))
    _flip(place, -2)
    deep = check_store(store, deep=True)
    assert any("row 3 of the shard does not have its checksum" in p for p in deep.problems)
    assert any("checksum" in p and place.name in p for p in check_store(store).problems)


def test_a_damaged_commit_does_not_hide_the_others(store: Path) -> None:
    _flip(store / "commits" / "00000002.json", 40)
    shard = max((store / "data").glob("*-x/*"))
    _flip(shard, -1)
    text = "\n".join(check_store(store).problems)
    assert "00000002.json" in text
    assert shard.name in text


def test_history_that_was_rewritten_is_noticed(store: Path, tmp_path: Path, make: Any, row: Row) -> None:
    other = make(tmp_path / "other", 9)
    number = commit_numbers(store)[-1]
    for folder in ("commits", "runs"):
        for path in (other / folder).iterdir():
            if path.name[:8] == f"{number - 1:08d}":
                (store / folder / path.name).write_bytes(path.read_bytes())
    with fl.Store.append(other) as writer:
        writer.append("z", row(1))
    place = f"commits/{number:08d}.json"
    (store / place).write_bytes((other / place).read_bytes().replace(b'"parent": "', b'"parent": "', 1))
    assert not check_store(store).ok


def test_leftovers_are_notes_not_damage(store: Path) -> None:
    (store / "data" / "000-x" / "00000007.00000099.safetensors").touch()
    (store / "commits" / "00000099.json.aside").touch()
    result = check_store(store)
    assert result.ok
    assert ["killed writer" in note for note in result.notes] == [True, False]


@pytest.mark.parametrize("change", ["flip", "newline", "fifo", "link"])
def test_the_log(store: Path, change: str) -> None:
    log = store / "log.txt"
    if change == "flip":
        _flip(log, 60)
    elif change == "newline":
        _flip(log, -1)
    else:
        log.unlink()
        os.mkfifo(log) if change == "fifo" else log.symlink_to("/etc/hostname")
    assert any("log" in problem for problem in check_store(store).problems)


def test_a_log_cut_short_or_missing_is_no_damage(store: Path) -> None:
    log = store / "log.txt"
    log.write_bytes(log.read_bytes()[:-20])
    assert check_store(store).ok
    log.unlink()
    assert check_store(store).ok


def test_nothing_to_check(tmp_path: Path, store: Path) -> None:
    assert "No store at" in check_store(tmp_path / "none").problems[0]
    for path in (store / "commits").iterdir():
        path.unlink()
    assert "has no commit" in check_store(store).problems[0]
