"""The format on disk is what src/frostline/store/README.md says.

Stores are written by frostline and read by the reader printed in that page, which knows nothing but json,
numpy and safetensors; checksums are computed here with xxhash. The page's example is made anew and compared.
Longer than other tests because the whole specification is held in one place.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

import frostline as fl

PAGE = Path(__file__).resolve().parents[3] / "src/frostline/store/README.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
READER, EXAMPLE = [block for language, block in BLOCKS if language == "python"]

FILE_TABLE = [f"file_{name}" for name in ("column", "shard", "commit", "rows", "dense", "bytes", "xxh3")]
RUN_TYPES = {
    **dict.fromkeys(("rows", "hash_order", "key_offsets", "tombstones", *FILE_TABLE), "I64"),
    **dict.fromkeys(("hashes", "file_xxh3"), "U64"),
    **dict.fromkeys(("key_bytes", "quarantine"), "U8"),
}
WIDTH = {"BOOL": 1, "BF16": 2, **{f"{kind}{8 * n}": n for kind in "IUF" for n in (1, 2, 4, 8)}}
NUMPY_TYPES = [
    "bool",
    "float16",
    "float32",
    "float64",
    *(f"{u}int{8 * n}" for u in ("", "u") for n in (1, 2, 4, 8)),
]

plain: dict[str, Any] = {}
exec(compile(READER, str(PAGE), "exec"), plain)
tensors = plain["tensors"]


def open_plain(root: Path) -> Any:
    return plain["PlainStore"](root)


def write(
    root: Path, fields: dict[str, fl.Field], rows: dict[str, dict[str, Any]], *, rows_per_shard: int = 4
) -> None:
    with fl.Store.create(root, fields, rows_per_shard=rows_per_shard) as writer:
        for key, values in rows.items():
            writer.append(key, values)


def header_of(path: Path) -> tuple[int, dict[str, Any]]:
    """(where the data begins, the header) of a safetensors file."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return 8 + length, json.loads(data[8 : 8 + length])


def columns_of(table: str) -> list[str]:
    """The names in the first column of the table that follows this line of the page."""
    after = TEXT.split(table, 1)[1].lstrip("\n").split("\n\n", 1)[0]
    return [name for line in after.splitlines()[2:] for name in re.findall(r"`([^`]+)`", line.split("|")[1])]


@pytest.fixture(scope="module")
def varied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Many kinds of fields and a history: merged runs, deletions, replacements, half an extension."""
    root = tmp_path_factory.mktemp("format") / "varied"
    fields = {
        "fixed": fl.Field((3, 5), "bfloat16"),
        "number": fl.Field((), "int64"),
        "tokens": fl.Field((3, 5), "float32", codec="int8/token"),
        "channels": fl.Field((None, 7), "float16", codec="int8/channel"),
        "ragged": fl.Field((None, 5), "float16", codec="int8/token"),
        "caption": fl.Field((), "str"),
    }
    rng = np.random.default_rng(0)
    with fl.Store.create(root, fields, rows_per_shard=3) as writer:
        for i in range(34):
            if i in (4, 33):
                writer.quarantine(f"key {i}", reason="planted", input={"frame": i})
                continue
            writer.append(f"key {i}", _row(rng, i))
    for key in ("key 0", "key 9", "key 31"):
        with fl.Store.append(root) as writer:
            writer.delete(key)
    for i in (1, 10, 30):
        with fl.Store.append(root) as writer:
            writer.replace(f"key {i}", _row(rng, 1000 + i))
    with fl.Store.extend(root, {"late": fl.Field((), "float64")}) as extender:
        for key in list(extender.pending)[:8]:
            extender.append(key, {"late": float(key.split()[1]) / 4})
    return root


def _row(rng: np.random.Generator, i: int) -> dict[str, Any]:
    return {
        "fixed": torch.full((3, 5), float(i), dtype=torch.bfloat16),
        "number": i,
        "tokens": rng.normal(size=(3, 5)).astype("f4"),
        "channels": rng.normal(size=(i % 4, 7)).astype("f2"),
        "ragged": rng.normal(size=(i % 3, 5)).astype("f2"),
        "caption": "ü" * (i % 5),
    }


# the reader of the page


def test_the_reader_imports_nothing_of_frostline() -> None:
    names = {
        n.name for node in ast.walk(ast.parse(READER)) if isinstance(node, ast.Import) for n in node.names
    }
    names |= {str(node.module) for node in ast.walk(ast.parse(READER)) if isinstance(node, ast.ImportFrom)}
    assert names == {"json", "numpy", "pathlib", "safetensors"}


@pytest.mark.parametrize("dtype", NUMPY_TYPES)
def test_raw_values_come_back_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    data = np.random.default_rng(1).integers(
        0, 2 if dtype == "bool" else 256, (5, 2, 3 * np.dtype(dtype).itemsize), np.uint8
    )
    values = data.view(dtype)
    fields = {
        "grid": fl.Field((2, 3), dtype),
        "one": fl.Field((), dtype),
        "ragged": fl.Field((None, 3), dtype),
    }
    rows = {f"k{i}": {"grid": v, "one": v[0, 0], "ragged": v[: i % 3]} for i, v in enumerate(values)}
    write(tmp_path / "s", fields, rows)
    store = open_plain(tmp_path / "s")
    for key, row in rows.items():
        for name, want in row.items():
            got = store.value(key, name)
            assert got.shape == want.shape
            assert got.dtype == np.dtype(dtype)
            assert got.tobytes() == want.tobytes()


def test_bfloat16_is_the_upper_half_of_float32(tmp_path: Path) -> None:
    values = torch.randn(5, 3).to(torch.bfloat16)
    fields = {"x": fl.Field((3,), "bfloat16"), "one": fl.Field((), "bfloat16")}
    write(tmp_path / "s", fields, {f"k{i}": {"x": v, "one": v[0]} for i, v in enumerate(values)})
    store = open_plain(tmp_path / "s")
    for i, v in enumerate(values):
        assert store.value(f"k{i}", "x").tolist() == v.tolist()
        assert float(store.value(f"k{i}", "one")) == float(v[0])


@pytest.mark.parametrize(
    ("dtype", "codec"), [("float32", "float16"), ("float64", "float32"), ("float32", "bfloat16")]
)
def test_casts_round_to_nearest_even(tmp_path: Path, dtype: str, codec: str) -> None:
    values = np.random.default_rng(2).normal(size=(5, 64)).astype(dtype)
    write(
        tmp_path / "s",
        {"x": fl.Field((64,), dtype, codec=codec)},
        {f"k{i}": {"x": v} for i, v in enumerate(values)},
    )
    store = open_plain(tmp_path / "s")
    for i, v in enumerate(values):
        want = _to_bfloat16(v) if codec == "bfloat16" else v.astype(codec).astype(dtype)
        assert store.value(f"k{i}", "x").dtype == np.dtype(dtype)
        assert np.array_equal(store.value(f"k{i}", "x"), want)


def _to_bfloat16(x: np.ndarray) -> np.ndarray:
    bits = x.view("<u4")
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).view("<f4")


@pytest.mark.parametrize("codec", ["int8/token", "int8/channel"])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_int8_follows_the_formula(tmp_path: Path, codec: str, ragged: bool, dtype: str) -> None:
    values = np.random.default_rng(3).normal(size=(6, 4, 3, 8)).astype(dtype)
    values[1, 2] = 0  # zero scales
    values[2, ..., 5] = 0
    values[3] = np.round(values[3] * 127) / 2  # ties
    rows = {f"k{i}": {"x": v[: i % 4] if ragged else v} for i, v in enumerate(values)}
    write(
        tmp_path / "s",
        {"x": fl.Field((None if ragged else 4, 3, 8), dtype, codec=codec)},
        rows,
        rows_per_shard=8,
    )
    stored = tensors(tmp_path / "s/data/000-x/00000000.00000002.safetensors")
    at = stored.get("offsets", np.arange(7))
    store = open_plain(tmp_path / "s")
    for i, (key, row) in enumerate(rows.items()):
        q, s = _int8(row["x"], codec)
        lines = slice(at[i], at[i + 1]) if ragged else i
        assert np.array_equal(stored["values"][lines], q)
        assert np.array_equal(stored["scales"][lines if codec == "int8/token" else i], s)
        spread = s[..., None] if codec == "int8/token" else s
        assert np.array_equal(store.value(key, "x"), (q.astype("f4") * spread).astype(dtype))


def _int8(x: np.ndarray, codec: str) -> tuple[np.ndarray, np.ndarray]:
    """The page's formula: (values, scales)."""
    x = x.astype("f4")
    over = -1 if codec == "int8/token" else tuple(range(x.ndim - 1))
    s = np.abs(x).max(over, initial=0) / np.float32(127)
    spread = np.broadcast_to(s[..., None] if codec == "int8/token" else s, x.shape)
    q = np.divide(x, spread, out=np.zeros_like(x), where=spread > 0)
    return np.clip(np.rint(q), -127, 127).astype("i1"), s


def test_texts(tmp_path: Path) -> None:
    fields = {"s": fl.Field((), "str"), "j": fl.Field((), "json"), "b": fl.Field((), "bytes")}
    rows = {
        "": {"s": "", "j": None, "b": b""},
        "\n\0é😀": {"s": "a\0\n😀", "j": {"b": [1, 2.5, "é"], "a": 2**70}, "b": bytes(range(256))},
        "x" * 5000: {"s": "s" * 5000, "j": "😀", "b": b"\xff"},
    }
    write(tmp_path / "s", fields, rows, rows_per_shard=2)
    store = open_plain(tmp_path / "s")
    assert list(store.row_of) == list(rows)
    for key, row in rows.items():
        assert {name: store.value(key, name) for name in row} == row
    stored = tensors(tmp_path / "s/data/001-j/00000000.00000002.safetensors")
    assert stored["values"].tobytes() == 'null{"b":[1,2.5,"é"],"a":1180591620717411303424}'.encode()


def test_history_is_read_as_frostline_reads_it(varied: Path) -> None:
    store, ours = open_plain(varied), fl.Store.open(varied)
    assert list(store.row_of) == list(ours.keys)
    assert not {"key 0", "key 4", "key 9", "key 31"} & set(store.row_of)
    assert [store.value(f"key {i}", "number") for i in (1, 10, 30, 11)] == [1001, 1010, 1030, 11]
    for key in store.row_of:
        want = ours.rows([key], [name for name in ours.fields if name != "late"])
        for name, value in want.items():
            got = store.value(key, name)
            if isinstance(value, list):
                assert got == value[0]
            else:
                assert np.array_equal(got, value[0].float().numpy() if name == "fixed" else value[0].numpy())


def test_a_late_field_is_absent_where_it_is_not_complete(varied: Path) -> None:
    store = open_plain(varied)
    have = {key for key in store.row_of if _has(store, key, "late")}
    assert {"key 2", "key 3", "key 5", "key 6"} <= have < set(store.row_of)
    assert all(store.value(key, "late") == float(key.split()[1]) / 4 for key in have)


def _has(store: Any, key: str, name: str) -> bool:
    try:
        store.value(key, name)
    except (LookupError, ValueError):
        return False
    return True


# the index


def test_keys_are_found_by_hash(varied: Path) -> None:
    store = open_plain(varied)
    dead = {row for run in store.runs for row in run["tombstones"].tolist()}
    for key in [*store.row_of, "key 0", "key 4", "nobody"]:
        assert _look_up(store.runs, dead, key.encode()) == store.row_of.get(key)


def _look_up(runs: list[dict[str, np.ndarray]], dead: set[int], key: bytes) -> int | None:
    wanted = np.uint64(xxhash.xxh3_64_intdigest(key))
    for run in reversed(runs):
        place = int(np.searchsorted(run["hashes"], wanted))
        while place < len(run["hashes"]) and run["hashes"][place] == wanted:
            i = run["hash_order"][place]
            row = int(run["rows"][i])
            if (
                run["key_bytes"][run["key_offsets"][i] : run["key_offsets"][i + 1]].tobytes() == key
                and row not in dead
            ):
                return row
            place += 1
    return None


def test_runs_are_sorted_and_their_hashes_are_those_of_the_keys(varied: Path) -> None:
    rows: list[int] = []
    for run in open_plain(varied).runs:
        rows += run["rows"].tolist()
        assert np.all(run["hashes"][1:] >= run["hashes"][:-1])
        assert np.all(np.diff(run["tombstones"]) > 0)
        ends = run["key_offsets"][run["hash_order"]], run["key_offsets"][1:][run["hash_order"]]
        keys = [run["key_bytes"][a:b].tobytes() for a, b in zip(*ends, strict=True)]
        assert [xxhash.xxh3_64_intdigest(key) for key in keys] == run["hashes"].tolist()
    assert rows == sorted(set(rows))


def test_eight_runs_of_a_level_become_one(tmp_path: Path) -> None:
    root = tmp_path / "s"
    write(root, {"x": fl.Field((), "int64")}, {f"k{i}": {"x": i} for i in range(74)}, rows_per_shard=1)
    for path in sorted((root / "commits").glob("*.json")):
        commit = json.loads(path.read_text())
        runs = commit["runs"]
        assert len(runs) == sum(int(digit) for digit in f"{commit['commit']:o}")
        assert [run["last"] - run["first"] + 1 for run in runs] == [8 ** run["level"] for run in runs]
        assert [1, *(run["last"] + 1 for run in runs)] == [
            *(run["first"] for run in runs),
            commit["commit"] + 1,
        ]
        assert sum(run["rows"] for run in runs) == commit["rows"]


def test_merging_drops_dead_rows_with_their_tombstones(tmp_path: Path) -> None:
    root = tmp_path / "s"
    write(
        root, {"x": fl.Field((), "int64")}, {f"k{i}": {"x": i} for i in range(9)}, rows_per_shard=1
    )  # commits 1 … 10
    for key in ("k0", "k8"):  # k0 lies in the merged run of commits 1 … 8, k8 in commit 10
        with fl.Store.append(root) as writer:
            writer.delete(key)
    with fl.Store.append(root) as writer:
        for i in range(4):
            writer.append(f"more{i}", {"x": i})
    merged, young = open_plain(root).runs
    assert merged["rows"].tolist() == list(range(7))
    assert young["rows"].tolist() == [7, 9, 10, 11, 12]
    assert young["tombstones"].tolist() == [0]


def test_quarantined_keys_use_up_a_row_number(tmp_path: Path) -> None:
    root = tmp_path / "s"
    with fl.Store.create(root, {"x": fl.Field((), "int64")}, rows_per_shard=4) as writer:
        writer.append("a", {"x": 0})
        writer.quarantine("b", reason="cut short", input={"path": "b.png"})
        writer.append("c", {"x": 2})
        writer.commit()
        writer.append("d", {"x": 3})
    store = open_plain(root)
    assert store.row_of == {"a": 0, "c": 2, "d": 4}
    assert store.commit["quarantined"] == 1
    lines = b"".join(run["quarantine"].tobytes() for run in store.runs)
    assert lines == b'{"input": {"path": "b.png"}, "key": "b", "reason": "cut short"}\n'
    files = np.stack(
        [np.concatenate([run[f"file_{name}"] for run in store.runs]) for name in ("shard", "rows", "dense")]
    )
    assert files.T.tolist() == [[0, 2, 0], [1, 1, 1]]


def test_quarantine_lines_of_released_keys_and_of_fields(tmp_path: Path) -> None:
    root = tmp_path / "s"
    write(root, {"x": fl.Field((), "int64")}, {"a": {"x": 0}, "b": {"x": 1}})
    for failed in (True, False):
        with fl.Store.append(root) as writer:
            if failed:
                writer.quarantine("c", reason="planted")
            else:
                writer.append("c", {"x": 2})
        assert open_plain(root).commit["quarantined"] == failed
    with fl.Store.extend(root, {"y": fl.Field((), "str")}) as extender:
        extender.append("a", {"y": "one"})
        extender.quarantine("b", reason="no text")
    store = open_plain(root)
    lines = [json.loads(line) for run in store.runs for line in run["quarantine"].tobytes().splitlines()]
    late = {"key": "b", "reason": "no text", "input": None, "field": "y", "column": 1, "row": 1, "shard": 0}
    assert lines == [{"key": "c", "reason": "planted", "input": None}, {"key": "c", "released": True}, late]
    assert store.commit["quarantined"] == 1
    with pytest.raises(ValueError, match="not in list"):
        store.value("b", "y")


def test_retired_fields_come_back_under_a_new_number(tmp_path: Path) -> None:
    root = tmp_path / "s"
    write(root, {"x": fl.Field((), "int64"), "y": fl.Field((), "int64")}, {"a": {"x": 1, "y": 2}})
    fl.Store.retire(root, "y")
    with fl.Store.extend(root, {"y": fl.Field((), "str")}) as extender:
        extender.append("a", {"y": "two"})
    store = open_plain(root)
    assert [(f["name"], f["column"]) for f in store.commit["fields"]] == [("x", 0), ("y", 2)]
    assert store.commit["next_column"] == 3
    assert store.value("a", "y") == "two"
    assert (root / "data/001-y").is_dir()


def test_collection_leaves_one_run_and_the_same_row_numbers(varied: Path, tmp_path: Path) -> None:
    varied = Path(shutil.copytree(varied, tmp_path / "copy"))
    before = open_plain(varied)
    values = {key: before.value(key, "number") for key in before.row_of}
    _collect(varied)
    after = open_plain(varied)
    assert after.row_of == before.row_of
    assert {key: after.value(key, "number") for key in after.row_of} == values
    assert [(run["first"], run["last"]) for run in after.commit["runs"]] == [(1, after.commit["commit"])]
    assert not len(after.runs[0]["tombstones"])
    assert [p.name for p in (varied / "commits").iterdir()] == [f"{after.commit['commit']:08d}.json"]
    assert set((varied / "data").rglob("*.safetensors")) == _named_files(after)


def _collect(root: Path) -> None:
    from frostline.store.gc import collect

    collect(root, min_dead=0.3)


def _named_files(store: Any) -> set[Path]:
    folders = {f["column"]: f"{f['column']:03d}-{f['name']}" for f in store.commit["fields"]}
    return {
        store.root / "data" / folders[column] / f"{shard:08d}.{commit:08d}.safetensors"
        for (column, shard), commit in store.file_of.items()
        if column in folders
    }


# layout and checksums


def test_shard_files_have_the_tensors_order_and_alignment_of_the_page(varied: Path) -> None:
    order = columns_of("The tensors, in this order:")
    assert order == ["checksums", "rows", "offsets", "scales", "pad", "values"]
    padded = set()
    for path in varied.glob("data/*/*.safetensors"):
        base, header = header_of(path)
        meta = header.pop("__metadata__")
        assert path.parent.name.endswith("-" + meta["field"])
        assert int(meta["shard"]) == int(path.name.split(".")[0])
        assert list(header) == [name for name in order if name in header]
        _check_places(header, base, path.stat().st_size)
        assert (base + header["values"]["data_offsets"][0]) % 4096 == 0
        if "scales" in header:
            start, stop = header["scales"]["data_offsets"]
            assert ("pad" in header) == ((stop - start) % 8 != 0)
            padded.add("pad" in header)
        assert not tensors(path).get("pad", np.zeros(4)).any()
    assert padded == {True, False}


def test_runs_have_the_tensors_order_and_alignment_of_the_page(varied: Path) -> None:
    order = columns_of("## Index runs: `runs/A-B.safetensors`")
    assert set(order) == set(RUN_TYPES)
    for path in varied.glob("runs/*.safetensors"):
        base, header = header_of(path)
        assert {name: entry["dtype"] for name, entry in header.items()} == RUN_TYPES
        assert list(header) == order
        assert base % 4096 == 0
        _check_places(header, base, path.stat().st_size)


def _check_places(header: dict[str, Any], base: int, size: int) -> None:
    """End to end, aligned to the element, nothing left over."""
    place = 0
    for entry in header.values():
        start, stop = entry["data_offsets"]
        assert start == place
        assert (base + start) % WIDTH[entry["dtype"]] == 0
        assert stop - start == int(np.prod(entry["shape"])) * WIDTH[entry["dtype"]]
        place = stop
    assert base + place == size


def test_every_row_and_file_has_its_checksum(varied: Path) -> None:
    store = open_plain(varied)
    for ref in store.commit["runs"]:
        data = (varied / "runs" / f"{ref['first']:08d}-{ref['last']:08d}.safetensors").read_bytes()
        assert (len(data), xxhash.xxh3_64_hexdigest(data)) == (ref["bytes"], ref["xxh3"])
    claims = {}
    for run in store.runs:
        for column, shard, *claim in zip(*(run[name].tolist() for name in FILE_TABLE), strict=True):
            claims[column, shard] = claim
    for path in _named_files(store):
        column, shard = int(path.parent.name.split("-")[0]), int(path.name.split(".")[0])
        commit, rows, dense, size, digest = claims[column, shard]
        data, t = path.read_bytes(), tensors(path)
        assert (commit, size) == (int(path.name.split(".")[1]), len(data))
        assert (rows, dense) == (len(t["rows"]), int(t["rows"].tolist() == list(range(rows))))
        assert digest == xxhash.xxh3_64_intdigest(data)
        assert [xxhash.xxh3_64_intdigest(piece) for piece in _row_bytes(t)] == t["checksums"].tolist()


def _row_bytes(t: dict[str, np.ndarray]) -> list[bytes]:
    """Each row's scales, then its values."""
    out = []
    for i in range(len(t["rows"])):
        items = slice(t["offsets"][i], t["offsets"][i + 1]) if "offsets" in t else i
        per_row = (
            "scales" in t
            and t["scales"].shape[0] == len(t["rows"])
            and t["scales"].shape[1:] == t["values"].shape[-1:]
        )
        scales = t["scales"][i if per_row else items].tobytes() if "scales" in t else b""
        out.append(scales + t["values"][items].tobytes())
    return out


def test_records_are_sorted_sealed_and_chained(varied: Path) -> None:
    parent = None
    for path in [varied / "manifest.json", *sorted((varied / "commits").glob("*.json"))]:
        text = path.read_text("ascii")
        body, tail = text[:-3].rsplit(",\n", 1)
        assert text[-3:] == "\n}\n"
        assert tail == f' "checksum": "{xxhash.xxh3_128_hexdigest(body.encode())}"'
        record = json.loads(text)
        assert list(record)[-1] == "checksum"
        del record["checksum"]
        assert body + "\n}" == json.dumps(record, sort_keys=True, indent=1)
        if path.parent.name == "commits":
            assert record["commit"] == int(path.stem)
            assert record["parent"] == parent
            parent = xxhash.xxh3_128_hexdigest(path.read_bytes())


def test_commits_have_the_keys_of_the_page(varied: Path) -> None:
    store = open_plain(varied)
    commit = store.commit
    assert sorted(columns_of("A commit:\n")) == sorted(commit)
    assert sorted(columns_of("A member of `fields`:")) == sorted(commit["fields"][0])
    runs = re.search(r"A member of `runs`:(.*?)\n\n", TEXT, re.DOTALL)
    assert runs
    assert set(commit["runs"][0]) <= set(re.findall(r"`(\w+)`", runs[1]))
    error = next(f["error"] for f in commit["fields"] if f["name"] == "tokens")
    assert all(f"`{key}`" in TEXT for key in error)
    assert len(error["bins"]) == 105
    for field in commit["fields"]:
        mine = [
            path
            for path in _named_files(store)
            if path.parent.name == f"{field['column']:03d}-{field['name']}"
        ]
        assert field["bytes"] == sum(path.stat().st_size for path in mine)
        assert field["rows"] == sum(len(tensors(path)["rows"]) for path in mine)
    manifest = json.loads((varied / "manifest.json").read_text())
    assert set(manifest) == {"format", "version", "rows_per_shard", "checksum"}


def test_log_lines(varied: Path) -> None:
    numbers = []
    for line in (varied / "log.txt").read_bytes().splitlines():
        digest, _, text = line.partition(b" ")
        assert digest.decode() == xxhash.xxh3_64_hexdigest(text)
        entry = json.loads(text)
        assert set(entry) == {"commit", "time", "host", "pid", "rows", "seconds"}
        numbers.append(entry["commit"])
    assert numbers == sorted(int(path.stem) for path in (varied / "commits").iterdir())


# the example


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    exec(compile(EXAMPLE, str(PAGE), "exec"), {})
    return tmp_path / "tiny"


def example(root: Path) -> dict[str, str]:
    """What the page prints of its example."""
    places = sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file())
    tree = [f"{'' if p in ('.lock', 'log.txt') else (root / p).stat().st_size:>6}  {p}" for p in places]
    runs = [p for p in places if p.startswith("runs/")][-2:]
    shards = [p for p in places if p.startswith("data/") and "/00000001." in p]
    return {
        "tree": "\n".join(tree),
        "commit": re.sub(
            r'("bins": \[)[^]]+\]', r"\1…]", (root / "commits/00000004.json").read_text()
        ).rstrip(),
        "dump": "\n\n".join(dump(root, place) for place in [*runs, *shards]),
    }


def dump(root: Path, place: str) -> str:
    base, header = header_of(root / place)
    content = tensors(root / place)
    lines = [place + (f"  {json.dumps(header['__metadata__'])}" if "__metadata__" in header else "")]
    for name, entry in header.items():
        if name != "__metadata__":
            shape = "×".join(map(str, entry["shape"]))
            values = content[name]
            shown = [f"{v:016x}" for v in values.tolist()] if entry["dtype"] == "U64" else values.tolist()
            text = (
                repr(values.tobytes())
                if name in ("key_bytes", "quarantine")
                else json.dumps(shown).replace('"', "")
            )
            lines.append(
                f"  {name:<12}{entry['dtype']:<4} {shape:<4} @{base + entry['data_offsets'][0]:<6}{text}"
            )
    return "\n".join(lines)


def test_the_example_is_what_is_written(tiny: Path) -> None:
    printed = {block.rstrip() for language, block in BLOCKS if language == "text"}
    for name, made in example(tiny).items():
        assert made in printed, f"the page's {name} should be:\n{made}"


def test_the_example_reads_back(tiny: Path) -> None:
    store = open_plain(tiny)
    assert store.row_of == {"a": 0, "c": 3}
    assert store.value("a", "caption") == "one"
    assert np.allclose(store.value("a", "x"), [1, -2], atol=2 / 254)
    assert store.value("c", "x").tolist() == [127, 64]
