"""Which rows belong to a split: by each sample's key or group, never by position."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from frostline import keyed
from frostline.errors import UsageError
from frostline.execution.call import described
from frostline.source import Source
from frostline.store import Table
from frostline.store.runs import Array
from frostline.tables import nearest
from frostline.wording import many
from frostline.workload import Workload

_EXACT = ("str", "int64", "bool")
"""Types whose stored values read as the source's do."""


def rows_of_split(
    workload: Workload, keys: Mapping[str, Sequence[str]], split: str | None, stores: Mapping[str, Table]
) -> dict[str, Array | None]:
    """Positions of a split's rows among the keys of each pipeline, in their order; None: all of them."""
    if split is None:
        return dict.fromkeys(keys)
    if workload.splits is None:
        raise UsageError(
            f"split={split!r} was asked for, but this workload has no splits. Give it some, as "
            f"Workload(…, splits={{'train': 0.9, 'val': 0.1}})."
        )
    found = {name: _splits(workload, name, keys[name], stores) for name in keys}
    counts = Counter(one for splits in found.values() for one in splits)
    _refuse_unknown(workload, split, counts)
    return {
        name: np.flatnonzero(np.fromiter((one == split for one in splits), bool, count=len(splits)))
        for name, splits in found.items()
    }


def fewer(
    rows: Mapping[str, Array | None], keys: Mapping[str, Sequence[str]], most: int | None
) -> dict[str, Array | None]:
    """Those of no more than so many keys that every pipeline has: always the same ones of the same keys."""
    if most is None:
        return dict(rows)
    places = {name: np.arange(len(keys[name])) if at is None else at for name, at in rows.items()}
    common = set.intersection(*({keys[name][i] for i in at.tolist()} for name, at in places.items()))
    if len(common) <= most:
        return dict(rows)
    named = sorted(common)
    chosen = {named[i] for i in np.argsort(keyed.derive_many(0, 0, named, "fewer"))[:most].tolist()}
    return {
        name: at[np.fromiter((keys[name][i] in chosen for i in at.tolist()), bool, count=len(at))]
        for name, at in places.items()
    }


def _refuse_unknown(workload: Workload, split: str, counts: Mapping[str, int]) -> None:
    named = [*workload.splits] if isinstance(workload.splits, Mapping) else sorted(counts)
    told = ", ".join(f"{name!r} ({many(counts.get(name, 0), 'sample')})" for name in named)
    if split not in named:
        raise UsageError(f"There is no split {split!r}{nearest(split, named)}; there are {told}.")
    if not counts.get(split):
        raise UsageError(
            f"The split {split!r} has no sample; there are {told}. Splits are drawn for each "
            f"{workload.group or 'sample'}: use more samples, or give this split a larger share."
        )


def _splits(workload: Workload, name: str, keys: Sequence[str], stores: Mapping[str, Table]) -> list[str]:
    groups = _groups(workload, name, keys, stores)
    of_group = {group: str(workload.split_of(group)) for group in dict.fromkeys(groups)}
    return [of_group[group] for group in groups]


def _groups(workload: Workload, name: str, keys: Sequence[str], stores: Mapping[str, Table]) -> list[str]:
    """What decides about each sample, as text: its key, or the value of the field that groups them."""
    field = workload.splits if isinstance(workload.splits, str) else workload.group
    if field is None:
        return list(keys)
    pipelines = workload.pipelines
    table = stores.get(name)
    if field in pipelines[name].source.fields:
        source = pipelines[name].source
        spec = table.fields.get(field) if table is not None else None
        if table is not None and spec is not None and spec.dtype in _EXACT and not source.cheap:
            return [_text(value) for value in table.column(field)]
        return _from_source(source, field, keys)
    owner = next(p for p in pipelines.values() if field in p.source.fields)
    return _from_source(owner.source, field, keys)  # other fields of the same samples


def _from_source(source: Source, field: str, keys: Sequence[str]) -> list[str]:
    places = {key: i for i, key in enumerate(source.keys)}
    missing = [key for key in keys if key not in places]
    if missing:
        raise UsageError(
            f"{many(len(missing), 'row')} cannot be put into a split: {source.what}, which has {field!r}, "
            f"does not list them. Freeze again, so that rows that are gone are deleted:",
            problems=[repr(key) for key in missing[:5]],
        )
    found = []
    for key in keys:
        try:
            found.append(_text(source.raw(places[key])[field]))
        except Exception as e:
            raise UsageError(
                f"{key!r} cannot be put into a split: {field!r} could not be read from {source.what}: "
                f"{described(e)}."
            ) from e
    return found


def _text(value: Any) -> str:
    plain = value.item() if isinstance(value, torch.Tensor | np.generic | np.ndarray) else value
    return str(plain)
