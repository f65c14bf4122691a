from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import frostline as fl
from frostline.errors import StoreCorrupt
from frostline.store.building import Block, checked, encode_rows
from frostline.store.codecs import Error
from frostline.store.manifest import Column
from frostline.store.shard import open_shard, write
from frostline.store.snapshot import FileTable

SPECS = {
    "fixed": fl.Field((2, 3), "bfloat16"),
    "number": fl.Field((), "int64"),
    "flag": fl.Field((), "bool"),
    "empty": fl.Field((0, 3), "float32"),
    "ragged": fl.Field((None, 3), "float16"),
    "text": fl.Field((), "str"),
    "token": fl.Field((5, 3), "float32", "int8/token"),
    "channel": fl.Field((5, 3), "float32", "int8/channel"),
    "ragged-token": fl.Field((None, 3), "float32", "int8/token"),
    "ragged-channel": fl.Field((None, 3), "float32", "int8/channel"),
}


def _values(spec: fl.Field, n: int) -> list[Any]:
    make = torch.Generator().manual_seed(3)
    if spec.dtype == "str":
        return ["é" * i for i in range(n)]
    shapes: list[Any] = [(i % 3, *spec.shape[1:]) if spec.ragged else spec.shape for i in range(n)]
    return [(torch.randn(shape, generator=make) * 9).to(getattr(torch, spec.dtype)) for shape in shapes]


def _write(root: Path, spec: fl.Field, rows: list[int]) -> tuple[Column, FileTable]:
    column = Column("f", 0, spec, Error(), 0, 0)
    (root / "data" / column.folder).mkdir(parents=True, exist_ok=True)
    keys = [str(i) for i in rows]
    block = Block("f", spec)
    block.add(encode_rows("f", spec, keys, checked("f", spec, keys, _values(spec, len(rows))), sample=0))
    entry = write(root, column, 6, 9, np.array(rows), block.pieces, block.checksums, block.offsets())
    _, shard, commit, n, dense, size, digest = entry
    return column, FileTable(*(np.array([v]) for v in (shard, n, dense, size, np.uint64(digest), commit)))


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("rows", [[0], [0, 1, 2], [1, 4, 7]])
def test_every_kind_of_field_is_written_read_and_verified(tmp_path: Path, name: str, rows: list[int]) -> None:
    column, table = _write(tmp_path, SPECS[name], rows)
    shard = open_shard(tmp_path, column, table, 6, 8)
    assert shard.rows.tolist() == rows
    assert bool(table.dense[0]) == (rows == list(range(len(rows))))
    for place in range(len(rows)):
        shard.verify(place)
    file = tmp_path / "data" / "000-f" / "00000006.00000009.safetensors"
    assert load_file(file)["rows"].tolist() == rows  # anybody's safetensors reads it


@pytest.mark.parametrize("name", ["fixed", "token", "ragged", "text"])
def test_a_changed_byte_is_noticed_at_its_row(tmp_path: Path, name: str) -> None:
    column, table = _write(tmp_path, SPECS[name], [0, 1, 2])
    shard = open_shard(tmp_path, column, table, 6, 8)
    entry = shard.entries["values"]
    place = tmp_path / "data" / "000-f" / "00000006.00000009.safetensors"
    data = bytearray(place.read_bytes())
    data[entry.stop - 1] ^= 1  # in the last row
    place.write_bytes(data)
    shard = open_shard(tmp_path, column, table, 6, 8)
    shard.verify(0)
    with pytest.raises(StoreCorrupt, match="row 2 of the shard does not have its checksum"):
        shard.verify(2)


def test_what_the_index_says_is_compared_with_the_file(tmp_path: Path) -> None:
    column, table = _write(tmp_path, SPECS["fixed"], [0, 1, 2])
    wrong = {"rows": 2, "bytes": 5, "dense": 0, "commit": 8, "shard": 5}
    for name, value in wrong.items():
        changed = FileTable(**{**vars(table), name: np.array([value])})
        with pytest.raises(StoreCorrupt):
            open_shard(tmp_path, column, changed, 6, 8)
    other = Column("f", 0, fl.Field((3, 2), "bfloat16"), Error(), 0, 0)
    with pytest.raises(StoreCorrupt, match="the store's index says"):
        open_shard(tmp_path, other, table, 6, 8)
    with pytest.raises(StoreCorrupt, match="not ascending within 0 … 1"):
        open_shard(tmp_path, column, table, 6, 2)


def test_a_file_written_again_is_the_same_bytes(tmp_path: Path) -> None:
    for name, spec in SPECS.items():
        _write(tmp_path / "a" / name, spec, [0, 2, 3])
        _write(tmp_path / "b" / name, spec, [0, 2, 3])
        (a,), (b,) = ((tmp_path / side / name).rglob("*.safetensors") for side in "ab")
        assert a.read_bytes() == b.read_bytes()
