from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import frostline as fl
from frostline.errors import FieldError
from frostline.store.codecs import decode
from frostline.store.read import Read

N = 11
FIELDS = {
    "fixed": fl.Field((4, 3), "bfloat16"),
    "big": fl.Field((4, 3000), "float32"),
    "number": fl.Field((), "float64"),
    "cast": fl.Field((4, 3), "float32", "float16"),
    "token": fl.Field((4, 3), "float32", "int8/token"),
    "channel": fl.Field((4, 3), "float16", "int8/channel"),
    "ragged": fl.Field((None, 3), "float32"),
    "ragged_token": fl.Field((None, 3), "float32", "int8/token"),
    "ragged_channel": fl.Field((None, 2, 3), "float32", "int8/channel"),
    "nothing": fl.Field((0,), "int32"),
    "text": fl.Field((), "str"),
    "blob": fl.Field((), "bytes"),
    "json": fl.Field((), "json"),
}


def _value(name: str, spec: fl.Field, i: int) -> Any:
    make = torch.Generator().manual_seed(i)
    match name:
        case "text":
            return "ä" * i
        case "blob":
            return bytes([i]) * (i % 3)
        case "json":
            return {"i": i, "list": [None, True, "x\n"]}
    shape: Any = (4 + i % 3, *spec.shape[1:]) if spec.ragged else spec.shape
    return torch.randn(shape, generator=make).to(getattr(torch, spec.dtype))


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> fl.Store:
    path = tmp_path_factory.mktemp("read") / "s"
    with fl.Store.create(path, FIELDS, rows_per_shard=4) as writer:
        for i in range(N):
            writer.append(str(i), {name: _value(name, spec, i) for name, spec in FIELDS.items()})
    return fl.Store.open(path)


def _close(spec: fl.Field, got: Any, want: Any) -> bool:
    if not isinstance(got, torch.Tensor):
        return bool(got == want)
    tolerance = {"raw": 0.0, "float16": 2e-3}.get(spec.codec, 0.03)
    return got.dtype == want.dtype and torch.allclose(got.double(), want.double(), rtol=0, atol=tolerance)


@settings(max_examples=40)
@given(
    rows=st.lists(st.integers(0, N - 1), max_size=8),
    names=st.sets(st.sampled_from(sorted(FIELDS)), min_size=1),
)
def test_any_fields_of_any_rows(everything: fl.Store, rows: list[int], names: set[str]) -> None:
    fields = sorted(names)
    batch = everything.rows(rows, fields)
    assert list(batch) == fields
    assert batch.keys_of_rows == [str(r) for r in rows]
    for name in fields:
        assert len(batch[name]) == len(rows)
        for got, r in zip(batch[name], rows, strict=True):
            assert _close(FIELDS[name], got, _value(name, FIELDS[name], r)), name


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize(
    "name", ["fixed", "big", "cast", "token", "channel", "ragged", "ragged_token", "ragged_channel"]
)
def test_a_pick_reads_the_lines_it_names(everything: fl.Store, name: str, direct: bool) -> None:
    positions, chosen = np.array([7, 0, 7]), np.array([[0, 3], [2, 1], [3, 3]])
    sources = everything.sources([name], positions, chosen={name: chosen}, direct=[name] if direct else [])
    read = Read(sources, 3)
    buffer = np.empty(read.n_bytes, np.uint8)
    for task in read.tasks(buffer):
        task()
    got = read.finish(torch.from_numpy(buffer), buffer)[name]
    whole = everything.rows(positions, [name])[name]
    for i in range(3):
        assert torch.equal(got[i], whole[i][chosen[i]])


def test_decoding_into_given_room_is_the_same(everything: fl.Store) -> None:
    names = [n for n in FIELDS if n not in ("text", "blob", "json")]
    read = Read(everything.sources(names, np.arange(N)), N)
    buffer = np.empty(read.n_bytes, np.uint8)
    for task in reversed(list(read.tasks(buffer))):  # in any order
        task()
    room = torch.empty(read.decoded_bytes, dtype=torch.uint8)
    got = read.finish(torch.from_numpy(buffer), buffer, room)
    want = everything.rows(np.arange(N), names)
    for name in names:
        a, b = got[name], want[name]
        assert torch.equal(a.values, b.values) if isinstance(a, fl.Ragged) else torch.equal(a, b)


def test_texts_stay_behind_the_part_that_goes_to_the_device(everything: fl.Store) -> None:
    read = Read(everything.sources(["text", "fixed"], np.arange(3)), 3)
    assert read.device_bytes < read.n_bytes
    assert Read(everything.sources(["text"], np.arange(3)), 3).device_bytes == 0


def test_what_is_read_is_fresh_memory(everything: fl.Store) -> None:
    first = everything.rows([0], ["fixed"])["fixed"]
    first.zero_()
    assert not torch.equal(everything.rows([0], ["fixed"])["fixed"], first)


def test_ragged_channel_scales_need_lengths() -> None:
    spec = FIELDS["ragged_channel"]
    with pytest.raises(FieldError, match="lengths"):
        decode({"values": torch.zeros(2, 2, 3, dtype=torch.int8), "scales": torch.ones(1, 3)}, spec)
