from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from frostline.errors import StoreCorrupt, StoreError, StoreVersion
from frostline.store.manifest import commit_numbers, dump_manifest, load_commit, load_manifest, seal, unseal


def test_a_sealed_record_comes_back_and_is_the_same_bytes_again() -> None:
    record = {"format": "frostline-store", "version": 1, "name": "ключ ✓", "n": 3}
    data = seal(record)
    found = unseal(data, "r")
    assert {k: v for k, v in found.items() if k != "checksum"} == record
    assert seal(found) == data


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        b"[" * 200_000,
        b'{"format": "frostline-store", "version": 1, "x": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"format": "frostline-store", "version": 1, "x": NaN}',
        b'{"format": "frostline-store", "version": 1, "x": 1e999}',
        seal({"format": "other", "version": 1}),
        seal({"format": "frostline-store", "version": 1}) + b" ",
        seal({"format": "frostline-store", "version": 1}).replace(b"\n", b"\n\n", 1),
    ],
)
def test_what_seal_did_not_write_is_refused(data: bytes) -> None:
    with pytest.raises(StoreCorrupt, match="name of the file"):
        unseal(data, "name of the file")


def test_another_version_is_named() -> None:
    with pytest.raises(StoreVersion, match="is of store version 7; this frostline reads version 1"):
        unseal(seal({"format": "frostline-store", "version": 7}), "r")


@pytest.mark.parametrize("rows", [0, -1, True, 1.5, "4", None, 1 << 40])
def test_rows_per_shard_from_a_file_is_checked(tmp_path: Path, rows: Any) -> None:
    (tmp_path / "manifest.json").write_bytes(dump_manifest(rows))
    with pytest.raises(StoreCorrupt, match="rows_per_shard"):
        load_manifest(tmp_path)


def test_no_store_there(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"No store at .*fl\.Store\.create"):
        load_manifest(tmp_path)


def test_only_names_that_are_written_count_as_commits(tmp_path: Path) -> None:
    (tmp_path / "commits").mkdir()
    for name in (
        "00000002.json",
        "00000010.json",
        "123456789.json",
        "000000003.json",
        "٠٠٠٠٠٠٠٤.json",
        "5.json",
        "00000006.json.aside",
    ):
        (tmp_path / "commits" / name).touch()
    assert commit_numbers(tmp_path) == [2, 10, 123456789]
    assert commit_numbers(tmp_path / "none") == []


def _changed(store: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    place = store / "commits" / f"{commit_numbers(store)[-1]:08d}.json"
    record = json.loads(place.read_bytes())
    change(record)
    place.write_bytes(seal(record))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda r: r.pop("rows"), "missing or of the wrong kind"),
        (lambda r: r.update(rows=-1), "not a whole number"),
        (lambda r: r.update(rows=1 << 70), "not a whole number"),
        (lambda r: r.update(rows="10"), "not a whole number"),
        (lambda r: r.update(commit=77), "calls itself commit 77"),
        (lambda r: r.update(parent=5), "checksum is not a string"),
        (lambda r: r["fields"][0].update(name="../../etc"), "a name is a letter"),
        (lambda r: r["fields"][0].update(name=["x"]), "wrong kind"),
        (lambda r: r["fields"][0].update(dtype="object"), "dtype must be one of"),
        (lambda r: r["fields"][0].update(codec="pickle"), "codec must be one of"),
        (lambda r: r["fields"][0].update(codec=[]), "wrong kind"),
        (lambda r: r["fields"][0].update(shape=[1 << 50]), "1 TiB"),
        (lambda r: r["fields"][0].update(shape=["3"]), "whole numbers"),
        (lambda r: r["fields"][0].update(shape=None), "wrong kind"),
        (lambda r: r["fields"][0].update(column=99), "never given out"),
        (lambda r: r["fields"][0].update(column="../0"), "not a whole number"),
        (lambda r: r["fields"][0].update(error={"rows": "x"}), "wrong kind"),
        (lambda r: r["fields"][0].update(error={"lines": 1}), "wrong kind"),
        (lambda r: r["fields"].append(r["fields"][0]), "stands twice"),
        (lambda r: r["fields"][1].update(column=r["fields"][0]["column"]), "stands twice"),
        (lambda r: r.update(runs=[]), "do not cover"),
        (lambda r: r["runs"][0].update(first=2), "do not cover|do not follow"),
        (lambda r: r["runs"].pop(), "do not cover"),
        (lambda r: r["runs"].reverse(), "do not follow"),
        (lambda r: r["runs"][0].update(first="../../x"), "not a whole number"),
        (lambda r: r["runs"][0].update(xxh3=5), "checksum is not a string"),
    ],
)
def test_a_commit_is_not_believed_even_with_a_valid_checksum(store: Path, change: Any, says: str) -> None:
    number = commit_numbers(store)[-1]
    load_commit(store, number)
    _changed(store, change)
    with pytest.raises(StoreCorrupt, match=says):
        load_commit(store, number)


def test_unknown_keys_are_left_alone(store: Path) -> None:
    """A later version may say more; what must not be ignored raises the version."""
    number = commit_numbers(store)[-1]
    before = load_commit(store, number)[0]
    _changed(
        store,
        lambda r: (
            r.update(more=1),
            r["fields"][0].update(more=[2]),
            r["runs"][0].update(path="/etc/passwd"),
        ),
    )
    assert load_commit(store, number)[0] == before


def test_all_problems_are_named_at_once(store: Path) -> None:
    def change(record: dict[str, Any]) -> None:
        record["fields"][0]["dtype"] = "object"
        record["fields"][1]["codec"] = "pickle"
        record["commit"] = 3000

    number = commit_numbers(store)[-1]
    _changed(store, change)
    with pytest.raises(StoreCorrupt) as caught:
        load_commit(store, number)
    for word in ("object", "pickle", "3000"):
        assert word in str(caught.value)
