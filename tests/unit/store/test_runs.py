from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frostline.errors import StoreCorrupt
from frostline.store import runs
from frostline.store.manifest import RunRef
from frostline.store.runs import FILE_TABLE, Run, build, file_table, merge, open_run, run_problems


def _run(rows: dict[int, str], dead: tuple[int, ...] = (), files: Any = (), quarantine: bytes = b"") -> Run:
    ids = np.array(list(rows), np.int64)
    return build(
        ids,
        [k.encode() for k in rows.values()],
        np.array(dead, np.int64),
        file_table(list(files)),
        quarantine,
    )


def _find(run: Run, key: str) -> list[int]:
    return run.find(runs.key_hash(key.encode()), key.encode())


def _save(root: Path, run: Run) -> RunRef:
    (root / "runs").mkdir(exist_ok=True)
    data = b"".join(bytes(memoryview(c).cast("B")) for c in run.chunks())
    ref = RunRef(1, 1, 0, len(run), len(data), "")
    (root / "runs" / ref.file).write_bytes(data)
    return ref


@settings(max_examples=40)
@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=20), unique=True, max_size=30))
def test_keys_are_found_and_others_not(keys: list[str]) -> None:
    run = _run({i * 3: key for i, key in enumerate(keys)})
    assert [_find(run, key) for key in keys] == [[i * 3] for i in range(len(keys))]
    assert _find(run, "no such key, surely") == []
    assert run_problems(run) == []


def test_keys_of_one_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "key_hash", lambda key: 7)
    run = _run({0: "a", 1: "b", 2: "c", 3: "b"})
    assert _find(run, "b") == [1, 3]
    assert _find(run, "a") == [0]
    assert _find(run, "d") == []


@settings(max_examples=40)
@given(st.data())
def test_merging_gives_what_the_parts_give_one_after_the_other(data: st.DataObject) -> None:
    alive: dict[int, str] = {}
    old_dead: set[int] = set()
    parts, row = [], 100
    for i in range(data.draw(st.integers(1, 5))):
        rows = {row + j: f"key {i} {j}" for j in range(data.draw(st.integers(0, 6)))}
        row += len(rows) + data.draw(st.integers(0, 3))
        dead = data.draw(st.sets(st.sampled_from([1, 2, 3, *alive]), max_size=4)) - old_dead
        old_dead |= {d for d in dead if d < 100}
        alive = {r: k for r, k in {**alive, **rows}.items() if r not in dead}
        parts.append(_run(rows, tuple(sorted(dead)), quarantine=f"{i}\n".encode()))
    merged = merge(parts)
    assert {int(r): merged.text(i) for i, r in enumerate(merged.rows)} == alive
    assert set(merged.tombstones.tolist()) == old_dead  # those of rows that lie in older runs
    assert run_problems(merged) == []
    assert merged.quarantine.tobytes() == b"".join(p.quarantine.tobytes() for p in parts)
    for r, key in alive.items():
        assert _find(merged, key) == [r]


def test_merging_keeps_the_newest_file_and_drops_retired_columns() -> None:
    old = _run({0: "a"}, files=[(0, 0, 1, 4, True, 10, 1), (1, 0, 1, 4, True, 10, 2)])
    new = _run({}, files=[(0, 0, 5, 3, False, 8, 3), (0, 1, 5, 4, True, 10, 4)])
    merged = merge([old, new], keep_columns={0})
    table = list(zip(*(merged.arrays[name].tolist() for name in FILE_TABLE), strict=True))
    assert table == [(0, 0, 5, 3, 0, 8, 3), (0, 1, 5, 4, 1, 10, 4)]
    assert len(merge([old, new]).file_shard) == 3


def test_a_run_comes_back_from_its_file(tmp_path: Path) -> None:
    run = _run({4: "ключ", 9: ""}, (1, 2), [(0, 0, 1, 4, True, 10, 1 << 63)], b"{}\n")
    found = open_run(tmp_path, _save(tmp_path, run))
    assert {k: v.tolist() for k, v in found.arrays.items()} == {k: v.tolist() for k, v in run.arrays.items()}


@pytest.mark.parametrize(
    "change",
    [
        {"hashes": np.zeros(1, np.uint64)},
        {"key_offsets": np.array([0, 5], np.int64)},
        {"key_offsets": np.array([1, 1, 2], np.int64)},
        {"key_offsets": np.array([0, 1, 99], np.int64)},
        {"file_rows": np.zeros(7, np.int64)},
    ],
)
def test_arrays_that_do_not_belong_together_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    run = Run({**_run({0: "a", 1: "b"}).arrays, **change})
    with pytest.raises(StoreCorrupt):
        open_run(tmp_path, _save(tmp_path, run))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rows": np.array([1, 1], np.int64)}, "not ascending"),
        ({"key_offsets": np.array([0, 9, 2], np.int64)}, "backwards"),
        ({"hash_order": np.array([0, 7], np.int64)}, "not an order"),
        ({"key_bytes": np.frombuffer(b"xy", np.uint8)}, "do not belong to their keys"),
    ],
)
def test_a_deep_look_finds_what_is_out_of_order(change: dict[str, Any], says: str) -> None:
    assert any(says in problem for problem in run_problems(Run({**_run({0: "a", 1: "b"}).arrays, **change})))


@pytest.mark.parametrize("places", [[-5, 3], [0, 1 << 40], [2, 1]])
def test_offsets_and_places_from_a_file_are_checked_when_used(places: list[int]) -> None:
    run = Run({**_run({0: "a", 1: "b"}).arrays, "key_offsets": np.array([*places, 2], np.int64)})
    with pytest.raises(StoreCorrupt):
        run.key(0)
    order = Run({**_run({0: "a", 1: "b"}).arrays, "hash_order": np.array([9, -9], np.int64)})
    with pytest.raises(StoreCorrupt):
        _find(order, "a")
    odd = Run({**_run({0: "a"}).arrays, "key_bytes": np.array([255], np.uint8)})
    with pytest.raises(StoreCorrupt, match="not UTF-8"):
        odd.text(0)
