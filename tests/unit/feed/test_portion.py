"""A table's share of a batch: fields and picks as given, sizes as gathered, errors with their key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import frostline as fl
from frostline.batch import Ragged
from frostline.errors import UsageError
from frostline.feed import portion as portions
from frostline.feed.portion import Portion, split_fields
from frostline.feed.ring import Ring

Same = Callable[[Any, Any], bool]


def portion(store: fl.Store, fields: list[str | fl.Pick], tier: str = "mmap") -> Portion:
    names = split_fields(store, fields)[0]
    made = Portion(
        store, fields, dict.fromkeys(names, tier), torch.device("cpu"), Ring(depth=2, pinned=False)
    )
    made.load()
    return made


def test_split_fields_keeps_the_order_given(all_kinds: fl.Store) -> None:
    pick = fl.Pick(("token", "half"), n=2)
    assert split_fields(all_kinds, ["text", pick, "number"]) == (["text", "token", "half", "number"], [pick])
    assert split_fields(all_kinds, None) == (list(all_kinds.fields), [])
    assert split_fields(all_kinds, pick) == (["token", "half"], [pick])
    with pytest.raises(UsageError, match="there is no field 'nix'; the store has number, flag"):
        split_fields(all_kinds, "nix")


def test_row_bytes_are_those_that_are_read(all_kinds: fl.Store) -> None:
    assert portion(all_kinds, ["wide"]).row_bytes() == 6 * 2000 * 4
    assert portion(all_kinds, [fl.Pick("wide", n=2)]).row_bytes() == 2 * 2000 * 4
    assert portion(all_kinds, ["empty"]).row_bytes() == 1
    assert 1 <= portion(all_kinds, ["ragged"]).row_bytes() < 1000


@pytest.mark.parametrize("tier", ["mmap", "disk", "pinned"])
def test_cuts_are_batches(all_kinds: fl.Store, tier: str) -> None:
    made = portion(all_kinds, ["number", "ragged", "text"], tier)
    positions = np.array([3, 3, 0, 39, 7])
    planned = made.plan(positions, seed=0, epoch=0, train=True)
    for task in made.tasks(planned, 4):
        task()
    batches = made.finish(planned, [0, 2, 2, 5], None)
    assert [b["number"].tolist() for b in batches] == [[3, 3], [], [0, 39, 7]]
    assert [len(b["ragged"]) for b in batches] == [2, 0, 3]
    assert batches[2].keys_of_rows == ["k0", "k39", "k7"]
    assert torch.equal(batches[2]["ragged"][1], all_kinds["k39"]["ragged"])
    assert batches[0]["text"] == [all_kinds["k3"]["text"]] * 2


def test_no_fields_are_keys_alone(all_kinds: fl.Store) -> None:
    batches = list(fl.Feed(all_kinds, 30, fields=[]))
    assert [dict(b) for b in batches] == [{}, {}]
    assert sorted(k for b in batches for k in b.keys_of_rows) == sorted(all_kinds.keys)


@pytest.mark.parametrize("limits", [{"_COPY_BYTES": 1 << 30}, {"_COPY_BYTES": 0}, {"_STAGED_BYTES": 1}])
def test_streaming_gives_what_gathering_gives(
    long_rows: fl.Store, limits: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole rows at once, lines in copies of their own, whole rows one by one: the same bits (on the CPU)."""
    for name, value in limits.items():
        monkeypatch.setattr(portions, name, value)
    names = ("half", "brain", "cast", "token", "channel", "wide")
    for n in (1, 3):
        made = portion(long_rows, [fl.Pick(names, n=n)], "pinned")
        for positions in (np.array([3, 3, 0, 7]), np.zeros(0, np.int64)):
            planned = made.plan(positions, seed=0, epoch=0, train=True)
            for task in made.tasks(planned, 4):
                task()
            want = made.finish(planned, [0, len(positions)], None)[0]
            for name in names:
                got = made._stream(made._host[name], positions, planned.chosen[name])
                assert got.shape == want[name].shape, name
                assert torch.equal(got.view(torch.uint8), want[name].contiguous().view(torch.uint8)), name


def test_whole_rows_where_few_bytes_are_left_out() -> None:
    features = fl.Field((24, 325, 384), "bfloat16")  # 250 KB a line
    assert portions._in_whole_rows(features, 24)
    assert portions._in_whole_rows(features, 16)
    assert not portions._in_whole_rows(features, 4)
    assert not portions._in_whole_rows(features, 1)


@pytest.mark.parametrize("coded", ["token", "ragged_coded"])
def test_encoded_bytes_do_not_outlive_their_decoding_on_a_device(
    tmp_path: Path, is_same: Same, coded: str
) -> None:
    """As on a GPU, where a label that lies beside them in one copy would keep them."""
    shape = (8, 64) if coded == "token" else (None, 64)
    fields = {
        "label": fl.Field((), "int64"),
        "words": fl.Field((None,), "int32"),
        coded: fl.Field(shape, "bfloat16", codec="int8/token"),
    }
    with fl.Store.create(tmp_path / "s", fields) as writer:
        for i in range(6):
            row = {
                "label": i,
                "words": torch.arange(i, dtype=torch.int32),
                coded: torch.randn(8, 64).bfloat16(),
            }
            writer.append(f"k{i}", row)
    store = fl.Store.open(tmp_path / "s")
    made = portion(store, list(fields))
    planned = made.plan(np.array([5, 0, 2]), seed=0, epoch=0, train=True)
    for task in made.tasks(planned, 4):
        task()
    encoded = planned.read.device_bytes
    got = made._on_device(planned, None)
    want = store.rows(["k5", "k0", "k2"])
    assert all(is_same(got[name], want[name]) for name in fields)
    tensors = [t for v in got.values() for t in ((v.values, v.offsets) if isinstance(v, Ragged) else (v,))]
    assert all(t.untyped_storage().nbytes() != encoded for t in tensors)
    plain = portion(store, ["label", "words"])
    assert plain.plan(np.array([5, 0]), seed=0, epoch=0, train=True).read.coded_bytes == 0
