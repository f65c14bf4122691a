"""The quarantine list: inputs that failed, and why, as lines of JSON in the index runs.

A line is `key`, `reason`, `input`; one about a field that could not be added to a row has also `field`,
`column`, `row` and `shard`. Later lines about the same (key, column) replace earlier ones.
`{"key": …, "released": true}` ends a line without a column: the key came in after all. A line with a
column stands as long as its row and its column do.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from frostline.errors import StoreCorrupt

Id = tuple[str, int | None]


def id_of(entry: dict[str, Any]) -> Id:
    return entry["key"], entry.get("column")


def entry(key: str, reason: object, input: object, **where: Any) -> dict[str, Any]:
    """One line. What is not JSON becomes text: a failure must never be lost because its input is odd."""
    return {"key": key, "reason": str(reason), "input": _plain(input), **where}


def released(key: str) -> dict[str, Any]:
    return {"key": key, "released": True}


def _plain(value: object) -> Any:
    try:
        return json.loads(json.dumps(value, default=str, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        return repr(value)


def dump(entries: Iterable[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(e, sort_keys=True) + "\n" for e in entries).encode()


def parse(data: bytes, name: str) -> Iterator[dict[str, Any]]:
    for line in data.splitlines():
        try:
            found = json.loads(line)
            if type(found["key"]) is not str or type(found.get("column", 0)) is not int:
                raise ValueError("key or column is of the wrong kind")
            if "column" in found and not all(type(found[n]) is int for n in ("row", "shard")):
                raise ValueError("row or shard is of the wrong kind")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
            raise StoreCorrupt(f"{name}: a line of the quarantine list cannot be read ({e}).") from e
        yield found


def standing(
    entries: Iterable[dict[str, Any]], held: Mapping[Id, dict[str, Any]] | None = None
) -> dict[Id, dict[str, Any]]:
    """What is left when later lines replace earlier ones and released keys are gone; oldest first.

    held: what stood before these lines.
    """
    out: dict[Id, dict[str, Any]] = dict(held or {})
    for e in entries:
        out.pop(id_of(e), None)
        if not e.get("released"):
            out[id_of(e)] = e
    return out
