"""What a store is, and what a row holds, as plain values: what `store inspect` shows and `--json` prints."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from frostline.errors import KeyMissing
from frostline.store.field import Field
from frostline.store.manifest import VERSION, Column, commit_numbers
from frostline.store.picture import is_picture
from frostline.store.reader import Store

_MOST_TEXT = 2000  # characters of a string that are shown
_MOST_KEYS = 50_000  # keys among which a misspelt one is looked for


def describe(store: Store) -> dict[str, Any]:
    """Everything about a store but its rows.

    >>> import tempfile, frostline as fl
    >>> path = tempfile.mkdtemp() + "/feats"
    >>> with fl.Store.create(path, fields={"x": fl.Field((4,), "float32", codec="int8/token")}) as writer:
    ...     writer.append("a", {"x": [1.0, 2.0, 3.0, 4.0]})
    >>> about = describe(fl.Store.open(path))
    >>> about["rows"], about["fields"][0]["codec"], about["fields"][0]["error"]["rows_sampled"]
    (1, 'int8/token', 1)
    """
    commit = store.commit
    bad = store.quarantine
    return {
        "path": str(store.path),
        "version": VERSION,
        "rows": len(store),
        "rows_per_shard": store.rows_per_shard,
        "shards": commit.next_shard,
        "bytes": sum(c.bytes for c in commit.columns) + sum(r.bytes for r in commit.runs),
        "commit": commit.number,
        "commits_on_disk": len(commit_numbers(store.path)),
        "fields": [_field(store, column) for column in commit.columns],
        "runs": [{"file": run.file, **asdict(run)} for run in commit.runs],
        "quarantined": len(bad),
        "quarantine": bad,
    }


def _field(store: Store, column: Column) -> dict[str, Any]:
    spec = column.field
    lossy = spec.codec != "raw" and column.error.rows
    return {
        "name": column.name,
        "shape": list(spec.shape),
        "dtype": spec.dtype,
        "codec": spec.codec,
        "ragged": spec.ragged,
        "rows": column.rows,
        "bytes": column.bytes,
        "shards": len(store.reader(column.name).table.shard),
        "folder": column.folder,
        "fingerprint": spec.fingerprint,
        "provenance": spec.provenance,
        "error": column.error.summary() if lossy else None,
    }


def describe_row(store: Store, key: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """One row: a summary of each field, and the values that can be shown as a picture."""
    require_keys(store, [key])
    position = store.keys.position(key)
    at = np.array([position])
    fields: dict[str, Any] = {}
    pictures: dict[str, Tensor] = {}
    for name, spec in store.fields.items():
        source = store.sources([name], at)[name]
        if not bool(source.reader.present(source.rows)[0]):
            fields[name] = {"absent": True}
            continue
        value = store.rows(at, [name])[name][0]
        fields[name] = summarise(value, spec)
        if isinstance(value, Tensor) and is_picture(tuple(value.shape), spec.dtype):
            pictures[name] = value
    return {"key": key, "position": position, "row": int(source.rows[0]), "fields": fields}, pictures


def require_keys(store: Store, keys: Sequence[str]) -> None:
    """KeyMissing, with the nearest keys there are, unless the store has them all."""
    missing = [key for key in keys if key not in store]
    if missing:
        more = f" (nor {len(missing) - 1:,} more of those given)" if missing[1:] else ""
        raise KeyMissing(
            f"Store {str(store.path)!r} has no key {missing[0]!r}{more}{_nearest_key(store, missing[0])}"
        )


def _nearest_key(store: Store, key: str) -> str:
    close = difflib.get_close_matches(key, list(islice(store.keys, _MOST_KEYS)), 3)
    if close:
        return f"; did you mean {' or '.join(map(repr, close))}?"
    bad = next((entry for entry in store.quarantine if entry["key"] == key), None)
    if bad:
        return f": it is in quarantine ({bad['reason']})."
    first = ", ".join(repr(k) for k in store.keys[:3])
    return f". Its first keys are {first}." if first else ": it has no rows."


def summarise(value: Any, spec: Field) -> dict[str, Any]:
    """A value in a few figures, or the beginning of a text."""
    if isinstance(value, bytes):
        return {"dtype": "bytes", "length": len(value), "start": value[:16].hex(" ")}
    if not isinstance(value, Tensor):
        text = value if spec.dtype == "str" else None
        if text is None:
            return {"dtype": spec.dtype, "value": value}
        return {"dtype": "str", "length": len(text), "text": text[:_MOST_TEXT]}
    out: dict[str, Any] = {"dtype": spec.dtype, "shape": list(value.shape)}
    if value.dim() == 0:
        return {**out, "value": _plain(value.item())}
    return {**out, **_statistics(value)}


def _statistics(value: Tensor) -> dict[str, Any]:
    if not value.numel():
        return {"min": None, "mean": None, "max": None, "nan": 0, "infinite": 0}
    # float64 holds every integer a mean or an extreme is shown to; uint64 has no reductions of its own
    wide = value.to(torch.float64)
    nan, infinite = int(wide.isnan().sum()), int(wide.isinf().sum())
    finite = wide[wide.isfinite()]
    if not finite.numel():
        return {"min": None, "mean": None, "max": None, "nan": nan, "infinite": infinite}
    low, mean, high = (float(f) for f in (finite.min(), finite.mean(), finite.max()))
    if not value.is_floating_point():
        low, high = int(low), int(high)
    return {"min": low, "mean": mean, "max": high, "nan": nan, "infinite": infinite}


def _plain(number: Any) -> Any:
    """JSON has no NaN and no infinity: as text."""
    return str(number) if isinstance(number, float) and not math.isfinite(number) else number
