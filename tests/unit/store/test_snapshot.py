from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import frostline as fl
from frostline.store import runs, snapshot
from frostline.store.manifest import commit_numbers
from frostline.store.snapshot import FileTable, Snapshot

Row = Callable[[int], dict[str, Any]]

KEYS = ["", "a", "a\nb", "\0", "ключ", "🦊" * 3, "x" * 100_000, "../../etc/passwd", "a\u0301", "\u00e1", " "]


def _latest(root: Path) -> Snapshot:
    return Snapshot(root, 4, commit_numbers(root)[-1])


def _write(root: Path, row: Row, keys: list[str]) -> None:
    with fl.Store.create(root, {"n": fl.Field((), "int64")}, rows_per_shard=4) as writer:
        for i, key in enumerate(keys):
            writer.append(key, {"n": i})


def test_any_text_is_a_key(tmp_path: Path, row: Row) -> None:
    _write(tmp_path / "s", row, KEYS)
    found = fl.Store.open(tmp_path / "s")
    assert list(found.keys) == KEYS
    assert [int(found[key]["n"]) for key in KEYS] == list(range(len(KEYS)))
    assert "\ud800" not in found
    assert 3 not in found


def test_keys_of_one_hash(tmp_path: Path, row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "key_hash", lambda key: 1)
    monkeypatch.setattr(snapshot, "key_hash", lambda key: 1)
    _write(tmp_path / "s", row, KEYS)
    with fl.Store.append(tmp_path / "s") as writer:
        writer.replace("a", {"n": 100})
        writer.delete("")
    found = fl.Store.open(tmp_path / "s")
    assert {key: int(found[key]["n"]) for key in found} == {
        **{k: i for i, k in enumerate(KEYS) if k},
        "a": 100,
    }
    assert found.check(deep=True).ok


def test_positions_rows_and_keys_agree_with_dead_rows_between(store: Path, row: Row) -> None:
    with fl.Store.append(store) as writer:
        for key in ("k0", "k5", "k9"):
            writer.delete(key)
        writer.replace("k6", row(66))
        writer.commit()
        writer.append("k10", row(10))
    view = _latest(store)
    keys = ["k1", "k2", "k3", "k4", "k7", "k8", "k6", "k10"]
    everything = np.arange(len(view))
    assert view.keys(everything) == keys
    rows = view.row_ids(everything)
    assert view.positions_of_rows(rows).tolist() == everything.tolist()
    assert [view.find(key) for key in keys] == rows.tolist()
    assert view.find("k0") == -1
    assert view.keys(everything[::-1]) == keys[::-1]
    assert [view.live_rows(shard).tolist() for shard in range(3)] == [[1, 2, 3], [4, 7], [8]]
    assert [view.is_live(r) for r in (0, 1, 10**12, -1)] == [False, True, False, False]


def test_an_older_commit_is_what_it_was(store: Path, row: Row) -> None:
    before = _latest(store)
    with fl.Store.append(store) as writer:
        writer.delete("k1")
        writer.append("new", row(1))
    assert len(before) == 10
    assert before.keys(np.arange(10)) == [f"k{i}" for i in range(10)]
    assert len(_latest(store)) == 10
    assert _latest(store).find("k1") == -1


@given(st.sets(st.integers(0, 30)), st.lists(st.integers(-5, 40), max_size=20))
def test_the_file_table_finds_what_it_has(shards: set[int], wanted: list[int]) -> None:
    have = np.array(sorted(shards), np.int64)
    table = FileTable(have, *[np.ones(len(have), np.int64)] * 5)
    places = table.at(np.array(wanted, np.int64))
    assert [int(have[p]) if p >= 0 else None for p in places] == [w if w in shards else None for w in wanted]


def test_which_keys_may_be_there_is_said_for_all_at_once(tmp_path: Path, row: Row) -> None:
    _write(tmp_path / "s", row, KEYS)  # in shards of four: several runs
    asked = ["new", *KEYS, "\ud800", "other"]
    told = dict(zip(asked, _latest(tmp_path / "s").may_have(asked), strict=True))
    assert all(told[key] for key in [*KEYS, "\ud800"])
    assert not told["new"]
    assert not told["other"]
    assert _latest(tmp_path / "s").may_have([]) == []
