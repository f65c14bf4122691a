"""`supply`: a workload, and stores or none, become batches to train or to evaluate on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from frostline.errors import UsageError
from frostline.feed.order import Sequential, Shuffle
from frostline.pipeline import Pipeline
from frostline.store import Table
from frostline.store.runs import Array
from frostline.supply.batches import Supply
from frostline.supply.layout import Layout
from frostline.supply.route import Route
from frostline.supply.rows import Asked, Live, Rows, Stored
from frostline.supply.splits import fewer, rows_of_split
from frostline.wording import many
from frostline.workload import Workload


def supply(
    workload: Workload,
    stores: Mapping[str, Table] | None,
    *,
    split: str | None,
    batch_size: int,
    device: str | torch.device,
    most: int | None = None,
    seed: int = 0,
    train: bool = True,
    rank: int = 0,
    world_size: int = 1,
    tier: str | Mapping[str, str] = "auto",
    budget_bytes: int | None = None,
) -> Supply:
    """Batches with the outputs of a workload's pipeline, or of each of its pipelines by name.

    stores:     a store for every pipeline, by its name (a single one is "data"); None: live, from the source.
    split:      whose samples; None: all.
    most:       of these no more than so many, chosen by a hash of their keys; None: all.
    batch_size: rows of a global batch, of which rank r of world_size takes its share, as `fl.Feed` does.
    seed:       what random stages draw from, and the order where the workload names none.
    train:      False: rows in order, random stages with their eval=, the same every time.
    tier, budget_bytes: where the feed keeps stored fields; see `fl.Feed`.
    """
    _check(workload, stores, batch_size, rank, world_size)
    asked_for = Shuffle(seed) if workload.order is None else workload.order
    order = asked_for if train else Sequential()
    where = torch.device(device)
    asked = Asked(order, batch_size, where, train, rank, world_size, tier, budget_bytes)
    routes = _routes(workload, stores, asked, seed)
    one = isinstance(workload.data, Pipeline)
    rows: Rows
    if stores is None:
        rows = Live(_places(workload, split, most, order), routes, asked, one=one)
    else:
        rows = Stored(_tables(workload, stores, split, most), routes, asked, one=one)
    if not rows.n_batches(0):
        raise _no_batches(rows.counts, asked, split)
    identity = {
        "order": _described(order), "batch_size": batch_size, "rows": rows.counts, "seed": seed,
        "split": split, "train": train,
    }  # fmt: skip
    return Supply(rows, train=train, identity=identity)


def _check(
    workload: Workload, stores: Mapping[str, Any] | None, batch_size: int, rank: int, world_size: int
) -> None:
    problems = []
    if type(batch_size) is not int or batch_size < 1:
        problems.append(f"batch_size is {batch_size!r}; a whole number from 1")
    if not 0 <= rank < world_size:
        problems.append(f"rank {rank} of world_size {world_size}; ranks run from 0 to world_size - 1")
    names = [*workload.pipelines]
    for name in names if stores is not None else ():
        given = (stores or {}).get(name)
        if given is None:
            problems.append(f"no store for the pipeline {name!r}; give stores={{{name!r}: fl.freeze(…)}}")
        elif not isinstance(given, Table):
            problems.append(
                f"the store of {name!r} is {type(given).__name__}; open it with fl.Store.open(path)"
            )
    problems += [
        f"a store is given for {name!r}, which is no pipeline here; there are {', '.join(names)}"
        for name in (stores or {})
        if name not in names
    ]
    if problems:
        raise UsageError("Batches cannot be supplied:", problems=problems)


def _routes(
    workload: Workload, stores: Mapping[str, Table] | None, asked: Asked, seed: int
) -> dict[str, Route]:
    layouts = {
        name: Layout(pipeline, None if stores is None else stores[name].fields)
        for name, pipeline in workload.pipelines.items()
    }
    problems = [p for layout in layouts.values() for p in ([] if asked.train else layout.refuse_random())]
    if problems:
        raise UsageError("This cannot be evaluated:", problems=problems)
    options: dict[str, Any] = {"device": asked.device, "train": asked.train}
    return {
        name: Route(layout, seed=seed, pick_seed=asked.pick_seed, **options)
        for name, layout in layouts.items()
    }


def _tables(
    workload: Workload, stores: Mapping[str, Table], split: str | None, most: int | None
) -> dict[str, Table]:
    """The rows of the split, of every store."""
    tables = {name: stores[name] for name in workload.pipelines}
    empty = [
        f"the store of {name!r} has no rows: freeze it first" for name, t in tables.items() if not len(t)
    ]
    if empty:
        raise UsageError("There is nothing to supply:", problems=empty)
    keys = {name: table.keys for name, table in tables.items()}
    rows = fewer(rows_of_split(workload, keys, split, tables), keys, most)
    out = {}
    for name, table in tables.items():
        mine = rows[name]
        out[name] = table if mine is None else table.at(mine)
    return out


def _places(workload: Workload, split: str | None, most: int | None, order: Any) -> dict[str, Array]:
    """Which samples of every source: those of the split; of several sources, those that are in each."""
    sources = {name: pipeline.source for name, pipeline in workload.pipelines.items()}
    keys = {name: source.keys for name, source in sources.items()}
    rows = fewer(rows_of_split(workload, keys, split, {}), keys, most)
    places = {}
    for name, source in sources.items():
        mine = rows[name]
        places[name] = np.arange(len(source)) if mine is None else mine
    if len(sources) == 1 or not isinstance(order, Shuffle | Sequential):
        return places
    return _aligned(
        {name: [sources[name].keys[i] for i in at.tolist()] for name, at in places.items()}, places
    )


def _aligned(keys: Mapping[str, Sequence[str]], places: Mapping[str, Array]) -> dict[str, Array]:
    """Samples whose key is in every source, in the order of the first, as a feed aligns stores."""
    at = {name: {key: i for i, key in enumerate(some)} for name, some in keys.items()}
    common = [key for key in next(iter(keys.values())) if all(key in one for one in at.values())]
    if not common:
        raise UsageError(f"The sources of {', '.join(map(repr, keys))} have no key in common.")
    return {name: places[name][np.array([at[name][key] for key in common])] for name in keys}


def _no_batches(counts: Mapping[str, int], asked: Asked, split: str | None) -> UsageError:
    rows = min(counts.values())
    whose = "" if split is None else f" of the split {split!r}"
    return UsageError(
        f"There is no batch: {many(rows, 'sample')}{whose}, a batch has {asked.batch_size}, and "
        f"{_described(asked.order)} leaves out one that is not full. Use a batch_size of at most {rows}, "
        f"drop_last=False, or more samples."
    )


def _described(order: Any) -> str:
    """The order in words, without the address that the default repr of somebody's own class has."""
    text = repr(order)
    return type(order).__qualname__ if " object at 0x" in text else text
