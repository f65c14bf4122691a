"""Stores into folders: the files are what they say, and importing them gives the same rows and keys."""

from __future__ import annotations

import builtins
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import frostline as fl
from frostline.errors import FieldError, MissingExtra, UsageError
from frostline.store.convert import import_folder
from frostline.store.export import export_folder
from frostline.store.folder import SIDECAR

KEYS = [
    "a",
    "b/c",
    "../x",
    "/abs",
    "a/../b",
    "",
    "con",
    "k" * 400,
    "a.pt/b",
    "A b",
    "ключ",
    "x\ny",
    "%",
    ".hid",
]
DTYPES = [
    "bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
    "float16", "bfloat16", "float32", "float64",
]  # fmt: skip


def make(path: Path, *, keys=KEYS, numpy: bool = False) -> fl.Store:
    fields = {d: fl.Field((2, 3), d) for d in DTYPES if not (numpy and d == "bfloat16")}
    fields |= {
        "file": fl.Field((), "float32"),  # also the name of np.savez's first argument
        "ragged": fl.Field((None, 2), "float32"),
        "small": fl.Field(
            (4,), "float32", codec="float16", fingerprint="abc", provenance={"weights": "9f3a"}
        ),
        "text": fl.Field((), "str"),
        "json": fl.Field((), "json"),
        "bytes": fl.Field((), "bytes"),
    }
    with fl.Store.create(path, fields, rows_per_shard=5) as writer:
        for i, key in enumerate(keys):
            tensors = {d: torch.full((2, 3), i).to(getattr(torch, d)) for d in DTYPES if d in fields}
            writer.append(
                key,
                {
                    **tensors,
                    "file": i / 3,
                    "ragged": torch.full((i % 3, 2), float(i)),
                    "small": torch.full((4,), i / 8),
                    "text": f"é {i}\n" if i else "",
                    "json": [None, {"a": i}] if i else "text",
                    "bytes": bytes([i, 0]) * (i % 3),
                },
            )
    return fl.Store.open(path)


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("format", ["pt", "npz", "safetensors"])
def test_there_and_back(tmp_path: Path, format: str) -> None:
    store = make(tmp_path / "s", numpy=format == "npz")
    done = export_folder(store, tmp_path / "out", format=format)
    assert done.rows == len(KEYS)
    inside = [p for p in (tmp_path / "out").rglob("*") if p.is_file()]
    assert len(inside) == len(KEYS) + 1
    assert {p.name for p in tmp_path.iterdir()} == {"s", "out"}  # nothing left the folder
    again = import_folder(tmp_path / "out", tmp_path / "t")
    assert again.fields == store.fields
    back = fl.Store.open(tmp_path / "t")
    assert sorted(back.keys) == sorted(KEYS)
    for key in KEYS:
        row, other = store[key], back[key]
        assert [name for name in row if not same(row[name], other[name])] == []


def test_files_are_what_people_expect(tmp_path: Path) -> None:
    store = make(tmp_path / "s", keys=["cats/tom"])
    export_folder(store, tmp_path / "pt", format="pt", fields=["float16", "text", "json"])
    loaded = torch.load(tmp_path / "pt" / "cats" / "tom.pt", weights_only=True)
    assert (loaded["float16"].shape, loaded["text"], loaded["json"]) == ((2, 3), "", "text")
    assert (
        tmp_path / "pt" / "cats" / "tom.pt"
    ).stat().st_size < 4000  # a row, not the buffer it was read into
    export_folder(store, tmp_path / "npz", format="npz", fields=["float16", "text"])
    with np.load(tmp_path / "npz" / "cats" / "tom.npz") as arrays:
        assert (arrays["float16"].dtype, str(arrays["text"])) == (np.float16, "")
    export_folder(store, tmp_path / "st", format="safetensors", fields=["bfloat16"])
    assert load_file(tmp_path / "st" / "cats" / "tom.safetensors")["bfloat16"].dtype == torch.bfloat16
    export_folder(store, tmp_path / "npy", format="npy", fields=["int16"])
    assert np.load(tmp_path / "npy" / "cats" / "tom.npy").dtype == np.int16


def test_bfloat16_has_no_numpy(tmp_path: Path) -> None:
    store = make(tmp_path / "s", keys=["a", "b"])
    with pytest.raises(FieldError, match=r"numpy has no bfloat16.*--cast"):
        export_folder(store, tmp_path / "out", format="npz")
    assert not (tmp_path / "out").exists()
    done = export_folder(store, tmp_path / "out", format="npz", cast=True)
    assert "bfloat16 was written as float32" in done.notes[0]
    with np.load(tmp_path / "out" / "b.npz") as arrays:
        assert arrays["bfloat16"].dtype == np.float32
    import_folder(tmp_path / "out", tmp_path / "t")
    assert fl.Store.open(tmp_path / "t")["b"]["bfloat16"].tolist() == [[1.0] * 3] * 2


def test_a_text_that_numpy_would_shorten_is_refused(tmp_path: Path) -> None:
    with fl.Store.create(tmp_path / "s", {"text": fl.Field((), "str")}) as writer:
        writer.append("a", {"text": "ends\0"})
    store = fl.Store.open(tmp_path / "s")
    with pytest.raises(FieldError, match="ends in NUL"):
        export_folder(store, tmp_path / "out", format="npz")
    export_folder(store, tmp_path / "st", format="safetensors")
    import_folder(tmp_path / "st", tmp_path / "t")
    assert fl.Store.open(tmp_path / "t")["a"]["text"] == "ends\0"


def test_int8_is_not_quantised_a_second_time(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with fl.Store.create(tmp_path / "s", {"x": fl.Field((5, 8), "float32", codec="int8/token")}) as writer:
        writer.append("a", {"x": torch.randn(5, 8)})
    store = fl.Store.open(tmp_path / "s")
    export_folder(store, tmp_path / "out")
    done = import_folder(tmp_path / "out", tmp_path / "t")
    assert done.fields["x"].codec == "raw"
    assert "int8/token" in done.notes[0]
    assert torch.equal(fl.Store.open(tmp_path / "t")["a"]["x"], store["a"]["x"])


def test_some_rows_and_fields(tmp_path: Path) -> None:
    store = make(tmp_path / "s")
    done = export_folder(store, tmp_path / "out", fields=["text"], limit=3)
    assert (done.rows, done.fields) == (3, ("text",))
    assert "first 3 of 14" in done.notes[0]


def test_what_cannot_work(tmp_path: Path) -> None:
    store = make(tmp_path / "s", keys=["a"])
    with pytest.raises(UsageError, match="expected one of pt") as error:
        export_folder(store, tmp_path / "out", format="zip", limit=0)
    assert len(error.value.problems) == 2
    with pytest.raises(FieldError, match="no field 'nope'"):
        export_folder(store, tmp_path / "out", fields=["nope"])
    for fields in (None, ["text"]):
        with pytest.raises(UsageError, match=r"An \.npy file holds one array"):
            export_folder(store, tmp_path / "out", format="npy", fields=fields)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()
    with pytest.raises(UsageError, match="something is there already"):
        export_folder(store, tmp_path / "out")


def test_an_interrupted_export_has_no_record(tmp_path: Path) -> None:
    store = make(tmp_path / "s")

    def stop(what: str, done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_folder(store, tmp_path / "out", progress=stop)
    assert not (tmp_path / "out" / SIDECAR).exists()


def test_parquet(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    store = make(tmp_path / "s")
    done = export_folder(store, tmp_path / "out", format="parquet")
    assert done.place == tmp_path / "out" / "rows.parquet"
    table = pq.read_table(done.place)
    rows = table.to_pylist()
    assert [row["key"] for row in rows] == list(store.keys)
    assert [row["row"] for row in rows] == list(range(len(KEYS)))
    assert rows[2]["bfloat16"] == [[2.0] * 3] * 2
    assert rows[2]["ragged"] == [[2.0, 2.0]] * 2
    assert (rows[2]["text"], json.loads(rows[2]["json"]), rows[2]["bytes"]) == (
        "é 2\n",
        [None, {"a": 2}],
        b"\x02\0" * 2,
    )
    about = json.loads(table.schema.metadata[b"frostline"])
    assert about["fields"]["small"]["fingerprint"] == "abc"
    with pytest.raises(UsageError, match="already"):
        export_folder(store, tmp_path / "out", format="parquet")


def test_parquet_leaves_large_values_out_and_names_them(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    fields = {
        "key": fl.Field((), "int64"),
        "big": fl.Field((2000,), "float32"),
        "long": fl.Field((None,), "float64"),
    }
    with fl.Store.create(tmp_path / "s", fields) as writer:
        writer.append(
            "gone", {"key": 6, "big": torch.zeros(2000), "long": torch.zeros(1, dtype=torch.float64)}
        )
        writer.append(
            "a", {"key": 7, "big": torch.zeros(2000), "long": torch.zeros(600, dtype=torch.float64)}
        )
        writer.commit()
        writer.delete("gone")
    done = export_folder(fl.Store.open(tmp_path / "s"), tmp_path / "x.parquet", format="parquet")
    assert "big, long" in done.notes[0]
    assert pq.read_table(tmp_path / "x.parquet").to_pylist() == [{"key": "a", "row": 1, "field.key": 7}]


def test_parquet_is_an_extra(tmp_path: Path, monkeypatch) -> None:
    store = make(tmp_path / "s", keys=["a"])
    real = builtins.__import__

    def without(name: str, *args, **kwargs):
        if name.split(".")[0] == "pyarrow":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtra, match=r"pip install 'frostline\[parquet\]'"):
        export_folder(store, tmp_path / "out", format="parquet")
    assert not (tmp_path / "out").exists()
