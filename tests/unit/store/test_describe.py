"""What is said about a store and a row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import frostline as fl
from frostline.errors import KeyMissing
from frostline.store.describe import describe, describe_row, require_keys, summarise


@pytest.fixture
def store(tmp_path: Path) -> fl.Store:
    fields = {
        "image": fl.Field((3, 8, 8), "uint8"),
        "x": fl.Field(
            (5, 16), "float32", codec="int8/token", fingerprint="77c1", provenance={"weights": "9f3a"}
        ),
        "text": fl.Field((), "str"),
    }
    torch.manual_seed(0)
    with fl.Store.create(tmp_path / "s", fields, rows_per_shard=2) as writer:
        for i in range(5):
            image = torch.full((3, 8, 8), i, dtype=torch.uint8)
            writer.append(f"clip-{i}", {"image": image, "x": torch.randn(5, 16), "text": f"text {i}"})
        writer.quarantine("broken", reason="moov atom not found", input="broken.mp4")
    with fl.Store.extend(tmp_path / "s", {"late": fl.Field((), "int64")}) as extender:
        extender.append("clip-0", {"late": 1})
        extender.append("clip-1", {"late": 2})
    return fl.Store.open(tmp_path / "s")


def test_a_store(store: fl.Store) -> None:
    about = json.loads(json.dumps(describe(store), allow_nan=False))
    assert (about["rows"], about["rows_per_shard"], about["quarantined"]) == (5, 2, 1)
    assert about["quarantine"] == [{"key": "broken", "reason": "moov atom not found", "input": "broken.mp4"}]
    assert about["bytes"] == sum(f["bytes"] for f in about["fields"]) + sum(r["bytes"] for r in about["runs"])
    fields = {f["name"]: f for f in about["fields"]}
    assert list(fields) == ["image", "x", "text", "late"]
    assert (fields["image"]["shape"], fields["image"]["error"], fields["image"]["shards"]) == (
        [3, 8, 8],
        None,
        3,
    )
    assert (fields["x"]["fingerprint"], fields["x"]["provenance"]) == ("77c1", {"weights": "9f3a"})
    error = fields["x"]["error"]
    assert 0 < error["relative_l2"] < 0.02
    assert 0.99 < error["cosine_min"] <= error["cosine_p01"] <= error["cosine_median"] < 1
    assert (fields["late"]["rows"], fields["late"]["shards"]) == (2, 1)


def test_a_row(store: fl.Store) -> None:
    about, pictures = describe_row(store, "clip-3")
    json.dumps(about, allow_nan=False)
    assert (about["position"], about["fields"]["late"]) == (3, {"absent": True})
    assert about["fields"]["image"] == {
        "dtype": "uint8", "shape": [3, 8, 8], "min": 3, "mean": 3.0, "max": 3, "nan": 0, "infinite": 0,
    }  # fmt: skip
    assert about["fields"]["text"] == {"dtype": "str", "length": 6, "text": "text 3"}
    assert list(pictures) == ["image"]
    assert describe_row(store, "clip-1")[0]["fields"]["late"]["value"] == 2


def test_a_key_that_is_not_there(store: fl.Store) -> None:
    with pytest.raises(KeyMissing, match="no key 'clip-33'; did you mean 'clip-3'"):
        describe_row(store, "clip-33")
    with pytest.raises(KeyMissing, match=r"in quarantine \(moov atom not found\)"):
        describe_row(store, "broken")
    with pytest.raises(KeyMissing, match="first keys are 'clip-0', 'clip-1', 'clip-2'"):
        describe_row(store, "zebra")
    with pytest.raises(KeyMissing, match=r"nor 1 more"):
        require_keys(store, ["clip-0", "zebra", "yak"])


@pytest.mark.parametrize(
    ("value", "dtype", "want"),
    [
        (
            torch.tensor([1.0, float("nan"), float("inf")]),
            "float32",
            {"min": 1.0, "max": 1.0, "nan": 1, "infinite": 1},
        ),
        (torch.tensor([float("nan")]), "float16", {"min": None, "nan": 1}),
        (torch.zeros(0, 3), "float32", {"min": None, "mean": None}),
        (torch.tensor([True, False]), "bool", {"min": 0, "mean": 0.5, "max": 1}),
        (torch.tensor([1, 2**63 - 1]).to(torch.uint64), "uint64", {"min": 1}),
        (torch.tensor(float("nan")), "float32", {"value": "nan"}),
        (b"\x00\xff", "bytes", {"length": 2, "start": "00 ff"}),
        ({"a": 1}, "json", {"value": {"a": 1}}),
    ],
)
def test_summaries(value, dtype, want) -> None:
    shape = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
    got = summarise(value, fl.Field(shape, dtype))
    assert {name: got[name] for name in want} == want
    json.dumps(got, allow_nan=False)
