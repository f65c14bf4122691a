"""A table's share of a batch: fields and picks as given, sizes as gathered, errors with their key."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import frostline as fl
from frostline.errors import UsageError
from frostline.feed.portion import Portion, split_fields
from frostline.feed.ring import Ring


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
