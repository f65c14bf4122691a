from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from frostline.errors import StoreCorrupt
from frostline.store import quarantine


@pytest.mark.parametrize(
    "given", [None, "clip.mp4", {"a": [1, 2]}, Path("a/b"), math.nan, {1: object()}, b"\xff", "\ud800\n"]
)
def test_any_input_can_be_recorded(given: Any) -> None:
    line = quarantine.dump([quarantine.entry("k\n", ValueError("no"), given)])
    assert line.count(b"\n") == 1
    (found,) = quarantine.parse(line, "run")
    assert (found["key"], found["reason"]) == ("k\n", "no")
    json.dumps(found, allow_nan=False)


def test_later_lines_replace_and_release() -> None:
    lines = [
        quarantine.entry("a", "one", None),
        quarantine.entry("b", "one", None),
        quarantine.entry("a", "two", None),
        quarantine.entry("a", "field", None, field="y", column=3, row=1, shard=0),
        quarantine.released("b"),
    ]
    assert [(e["key"], e["reason"]) for e in quarantine.standing(lines).values()] == [
        ("a", "two"),
        ("a", "field"),
    ]


@pytest.mark.parametrize(
    "line",
    [
        b"x",
        b"[]",
        b"3",
        b"{}",
        b'{"key": 3}',
        b'{"key": "a", "column": "3"}',
        b'{"key": "a", "column": 3}',
        b"[" * 50_000,
    ],
)
def test_lines_that_cannot_be_read_are_refused(line: bytes) -> None:
    with pytest.raises(StoreCorrupt, match="the run"):
        list(quarantine.parse(line + b"\n", "the run"))
