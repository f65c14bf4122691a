"""Stores made to do harm: checksums are right, the content is not. Refused before memory is taken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

import frostline as fl
from frostline.errors import StoreError
from frostline.store.check import check_store
from frostline.store.container import PAGE
from frostline.store.gc import collect
from frostline.store.manifest import seal

HUGE = 1 << 60
Change = Callable[[dict[str, Any]], Any]


def _set(name: str, at: Any, value: Any) -> Change:
    def change(arrays: dict[str, Any]) -> None:
        arrays[name][at] = value

    return change


def _field(**changes: Any) -> Change:
    return lambda record: record["fields"][0].update(changes)


@pytest.fixture
def store(tmp_path: Path, faults: Any) -> Path:
    """With one commit only: an older one would notice that a run of its own was changed."""
    root: Path = faults.write(tmp_path / "store")
    for old in sorted((root / "commits").iterdir())[:-1]:
        old.unlink()
    return root


def _refused(faults: Any, root: Path) -> None:
    """Reading everything, and checking: a StoreError, and nothing else, with little memory."""
    with faults.little_memory():
        with pytest.raises(StoreError):
            faults.read_all(root)
        assert not check_store(root, deep=True).ok


@pytest.mark.parametrize("rows", [0, -4, HUGE, 2.0, "4", None])
def test_manifest(store: Path, faults: Any, rows: Any) -> None:
    record = json.loads((store / "manifest.json").read_bytes())
    (store / "manifest.json").write_bytes(seal({**record, "rows_per_shard": rows}))
    _refused(faults, store)
    with pytest.raises(StoreError):
        fl.Store.append(store)


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r.update(rows=HUGE),
        lambda r: r.update(rows=9),
        lambda r: r.update(next_shard=1),
        lambda r: r.update(next_shard=-1),
        lambda r: r.update(next_column=1),
        _field(name="../../../tmp/x"),
        _field(name="/etc/passwd"),
        _field(name="h"),
        _field(column=3),
        _field(column=-1),
        lambda r: r["fields"][1].update(dtype="bfloat16"),
        lambda r: r["fields"][1].update(dtype="float64"),
        _field(dtype="pickle"),
        _field(codec="raw"),
        _field(codec="int8/channel"),
        _field(shape=[1 << 37, 1]),
        _field(shape=[1 << 50, 1 << 50]),
        _field(shape=[4, 1 << 30]),
        _field(shape=[None, 3]),
        _field(shape=[0, 3]),
        _field(shape=[4, -3]),
        lambda r: r["runs"][-1].update(bytes=5),
        lambda r: r["runs"][-1].update(rows=HUGE),
        lambda r: r["runs"][-1].update(rows=0),
        lambda r: r["runs"][-1].update(last=HUGE),
        lambda r: r["runs"][-1].update(first=1),
        lambda r: r["runs"][-1].update(first=-1),
        lambda r: r["runs"].append({**r["runs"][-1], "file": "../../etc/passwd"}),
        lambda r: r.update(runs=r["runs"] * 4_000),
        lambda r: r.update(fields=r["fields"] * 1000),
    ],
)
def test_commit(store: Path, faults: Any, change: Change) -> None:
    faults.change_commit(store, change)
    _refused(faults, store)


def test_a_commit_may_claim_any_number_of_shards_and_no_memory_is_taken_for_them(
    store: Path, faults: Any
) -> None:
    want = faults.read_all(store)
    faults.change_commit(store, lambda record: record.update(next_shard=HUGE))
    with faults.little_memory():
        assert faults.read_all(store) == want
        collect(store, dry_run=True)


@pytest.mark.parametrize(
    "change",
    [
        _set("file_shard", 0, HUGE),
        _set("file_shard", 0, -1),
        _set("file_shard", 0, 2),
        _set("file_rows", 0, HUGE),
        _set("file_rows", 0, 5),
        _set("file_rows", 0, 3),
        _set("file_rows", 0, 0),
        _set("file_rows", 0, -1),
        _set("file_dense", 0, 0),
        _set("file_bytes", 0, HUGE),
        _set("file_bytes", 0, -1),
        _set("file_commit", 0, HUGE),
        _set("file_commit", 0, -1),
        _set("file_column", slice(None), 77),
        _set("rows", 3, HUGE),
        _set("rows", 0, -5),
        _set("rows", slice(None), 0),
        _set("key_offsets", 1, HUGE),
        _set("key_offsets", 1, -1),
        _set("hash_order", 0, HUGE),
        _set("hash_order", 0, -1),
        _set("key_bytes", slice(None), 255),
        lambda a: a.update(tombstones=np.arange(4)),
        lambda a: a.update(rows=np.arange(1 << 16)),
        lambda a: a.update(key_bytes=np.zeros(1 << 20, np.uint8)),
        lambda a: a.update(quarantine=np.frombuffer(b"not json\n", np.uint8)),
        lambda a: a.update(
            quarantine=np.frombuffer(b'{"key": "a", "column": 0, "row": "x", "shard": 0}\n', np.uint8)
        ),
        lambda a: a.update(quarantine=np.frombuffer(b"[" * 100_000, np.uint8)),
    ],
)
def test_run(store: Path, faults: Any, change: Change) -> None:
    faults.change_run(store, 1, change)  # of the first whole shard
    _refused(faults, store)


def test_hashes_of_other_keys_hide_rows_and_a_deep_check_says_so(store: Path, faults: Any) -> None:
    faults.change_run(store, 1, _set("hashes", slice(None), 0))
    assert "k0" not in fl.Store.open(store)
    assert any("hashes do not belong" in problem for problem in check_store(store, deep=True).problems)


def _change_shard(
    root: Path, field: str, faults: Any, change: Callable[[dict[str, Any], bytearray], Any]
) -> None:
    """Change a shard's header and bytes; length, checksum, index and commit are made to fit."""
    place = next((root / "data").glob(f"*-{field}/00000000.*"))
    data = place.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), bytearray(data[8 + length :])
    change(header, body)
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text) + _anchor(header)) % PAGE)  # where a writer would put it
    new = len(text).to_bytes(8, "little") + text + bytes(body)
    place.write_bytes(new)
    column = int(place.parent.name[:3])

    def index(arrays: dict[str, Any]) -> None:
        (at,) = np.flatnonzero(arrays["file_column"] == column)
        arrays["file_bytes"][at] = len(new)
        arrays["file_xxh3"][at] = xxhash.xxh3_64_intdigest(new)

    faults.change_run(root, 1, index)


def _anchor(header: dict[str, Any]) -> int:
    try:
        return int(header["values"]["data_offsets"][0])
    except (KeyError, TypeError, ValueError, IndexError):
        return 0  # what was changed is just that


def _words(name: str, *values: int) -> Callable[[dict[str, Any], bytearray], None]:
    def change(header: dict[str, Any], body: bytearray) -> None:
        start = header[name]["data_offsets"][0]
        body[start : start + 8 * len(values)] = np.array(values, np.int64).tobytes()

    return change


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("r", _words("offsets", 0, HUGE)),
        ("r", _words("offsets", 0, -5)),
        ("r", _words("offsets", 1)),
        ("r", _words("offsets", 0, 2, 1)),
        ("t", _words("offsets", 0, HUGE)),
        ("h", _words("rows", 0, 0)),
        ("h", _words("rows", -1)),
        ("h", _words("rows", 0, 1, 2, HUGE)),
        ("h", lambda h, b: h["values"].update(shape=[HUGE, 5])),
        ("h", lambda h, b: h["values"].update(shape=[1 << 40, 1 << 40])),
        ("h", lambda h, b: h["values"].update(shape=[5, 4])),
        ("h", lambda h, b: h["values"].update(shape=[20])),
        ("h", lambda h, b: h["values"].update(shape=[])),
        ("h", lambda h, b: h["values"].update(dtype="BF16")),
        ("h", lambda h, b: h["values"].update(dtype="F64")),
        ("h", lambda h, b: h["values"].update(data_offsets=[0, HUGE])),
        ("h", lambda h, b: h["values"].update(data_offsets=[-40, 0])),
        ("h", lambda h, b: h.pop("values")),
        ("h", lambda h, b: h.pop("checksums")),
        ("h", lambda h, b: h.update(more={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]})),
        ("h", lambda h, b: b.extend(b"more")),
        ("x", lambda h, b: h["scales"].update(dtype="I32")),
        ("x", lambda h, b: h["values"].update(dtype="U8")),
    ],
)
def test_shard(store: Path, faults: Any, field: str, change: Any) -> None:
    _change_shard(store, field, faults, change)
    _refused(faults, store)


def test_the_ways_to_change_a_store_change_nothing_by_themselves(store: Path, faults: Any) -> None:
    """Else every test above would pass for the wrong reason."""
    want = faults.read_all(store)
    faults.change_commit(store, lambda record: None)
    faults.change_run(store, 1, lambda arrays: None)
    _change_shard(store, "h", faults, lambda header, body: None)
    assert faults.read_all(store) == want
    assert check_store(store, deep=True).ok


def test_little_memory_is_little(faults: Any) -> None:
    with faults.little_memory(), pytest.raises(MemoryError):
        np.zeros(1 << 30)
