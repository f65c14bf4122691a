"""Where the rows of a batch come from: a feed over stores, or the source itself, in the same order."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import numpy as np
import torch

from frostline.batch import Batch
from frostline.errors import UsageError
from frostline.execution import Execution
from frostline.feed import Feed
from frostline.feed.schedule import Schedule
from frostline.stage import Pick
from frostline.store import Table
from frostline.store.runs import Array
from frostline.supply.route import Route
from frostline.supply.values import kind_in_store
from frostline.supply.work import Work

_LOOKED_AT = 8
"""Samples that show how a field would be stored: whether its lengths differ, whether it is text."""

Parts = dict[str, Work]
"""A batch by its parts; one that is not in parts is called ""."""


@dataclass(frozen=True)
class Asked:
    """Which batches: the same for a store and for the source."""

    order: Any
    batch_size: int
    device: torch.device
    train: bool
    rank: int
    world_size: int
    tier: str | Mapping[str, str] = "auto"
    budget_bytes: int | None = None

    @property
    def pick_seed(self) -> int:
        """What a feed draws picks from."""
        return int(getattr(self.order, "seed", 0))


class Rows(Protocol):
    """Batches of rows, begun at any place of any epoch."""

    @property
    def counts(self) -> dict[str, int]:
        """Rows of every pipeline."""

    def n_batches(self, epoch: int) -> int: ...

    def start(self) -> None:
        """Whatever has to be known before the first batch."""

    def works(self, epoch: int, first: int) -> Generator[Parts, None, None]: ...

    def route_of(self, part: str) -> Route: ...


class Stored:
    """Rows of stores, through a feed. one: the workload has one pipeline, and batches are plain."""

    def __init__(
        self, tables: Mapping[str, Table], routes: Mapping[str, Route], asked: Asked, *, one: bool
    ) -> None:
        self._tables, self._routes, self._one = dict(tables), dict(routes), one
        direct = all(route.layout.direct for route in routes.values())
        fields = {name: route.layout.read_from_feed() for name, route in routes.items()}
        self._picked = {
            name: {n for f in some if isinstance(f, Pick) for n in f.fields} for name, some in fields.items()
        }
        only = next(iter(tables))
        self.feed = Feed(
            tables[only] if one else self._tables, asked.batch_size, order=asked.order,
            device=asked.device if direct else "cpu", fields=fields[only] if one else fields,
            tier=asked.tier, rank=asked.rank, world_size=asked.world_size, train=asked.train,
            budget_bytes=asked.budget_bytes,
        )  # fmt: skip

    @property
    def counts(self) -> dict[str, int]:
        rows: dict[str, int] = self.feed.state_dict()["rows"]
        return {next(iter(self._tables)) if self._one else name: n for name, n in rows.items()}

    def n_batches(self, epoch: int) -> int:
        return self.feed.n_batches(epoch)

    def start(self) -> None:
        """A store says how its fields are held."""

    def route_of(self, part: str) -> Route:
        return next(iter(self._routes.values())) if self._one else self._routes[part]

    def works(self, epoch: int, first: int) -> Generator[Parts, None, None]:
        self.feed.load_state_dict({**self.feed.state_dict(), "epoch": epoch, "cursor": first})
        batches: Any = iter(self.feed)
        with closing(batches):
            for batch in batches:
                in_parts = bool(batch) and all(isinstance(value, Batch) for value in batch.values())
                parts = batch if in_parts else {"": batch}
                yield {part: self._work(part, rows, epoch) for part, rows in parts.items()}

    def _work(self, part: str, rows: Batch, epoch: int) -> Work:
        name = next(iter(self._tables)) if self._one else part
        hidden = not _n_rows(rows)
        if hidden:
            rows = self._tables[name].with_fields([*rows]).rows([0], [*rows])
        picked = set() if hidden else self._picked[name]
        keys = Batch({}, rows._keys)  # without the rows: who keeps a batch's keys need not keep its memory
        work = Work(lambda: keys.keys_of_rows, epoch, hidden=hidden)
        for field, column in rows.items():
            (work.picked if field in picked else work.fed)[field] = column
        return work


def _n_rows(batch: Batch) -> int:
    return len(next(iter(batch.values())))


class Listed:
    """A source as an order sees it: how many samples there are. What they hold is not computed yet."""

    def __init__(self, what: str, keys: Sequence[str], order: Any) -> None:
        self.keys, self.fields = keys, dict[str, Any]()
        self._what, self._order = what, type(order).__name__

    def __len__(self) -> int:
        return len(self.keys)

    def _refuse(self, field: str) -> NoReturn:
        raise UsageError(
            f"The order {self._order} needs a store: it looks at {field!r} of every sample of {self._what} "
            f"before the first batch. Freeze first, or use fl.Shuffle in a live run."
        )

    def is_ragged(self, field: str) -> bool:
        self._refuse(field)

    def column(self, field: str) -> Any:
        self._refuse(field)

    def lengths(self, field: str) -> Any:
        self._refuse(field)


class Live:
    """Samples of the sources, computed each time. places: which, for every pipeline, in their order."""

    def __init__(
        self, places: Mapping[str, Array], routes: Mapping[str, Route], asked: Asked, *, one: bool
    ) -> None:
        self._places, self._routes, self._one = dict(places), dict(routes), one
        self._looked = False
        tables: dict[str, Any] = {}
        for name, route in routes.items():
            source = route.pipeline.source
            keys = [source.keys[i] for i in places[name].tolist()]
            tables["" if one else name] = Listed(source.what, keys, asked.order)
        self._tables = tables
        self._schedule = Schedule(
            asked.order, tables, asked.batch_size, rank=asked.rank, world_size=asked.world_size
        )

    @property
    def counts(self) -> dict[str, int]:
        return {name: len(places) for name, places in self._places.items()}

    def n_batches(self, epoch: int) -> int:
        return self._schedule.n_batches(epoch)

    def start(self) -> None:
        """Look at a few samples: one batch does not tell whether a field is ragged, as its store would be."""
        if self._looked:
            return
        self._looked = True
        for route in self._routes.values():
            layout, pipeline = route.layout, route.pipeline
            read = {name for s in layout.stages if layout.is_above(s) for name in s.reads}
            names = [n for n in pipeline.fields if n in read | {*layout.outputs} and pipeline.is_frozen(n)]
            names = [n for n in names if not any(s.on == "device" for s in pipeline.needed([n]))]
            some = range(min(_LOOKED_AT, len(pipeline.source)))
            execution = Execution(pipeline, names)
            columns = execution.finish(execution.begin(some)).columns
            route.view.kinds = {name: kind_in_store(column) for name, column in columns.items()}

    def route_of(self, part: str) -> Route:
        return next(iter(self._routes.values())) if self._one else self._routes[part]

    def works(self, epoch: int, first: int) -> Generator[Parts, None, None]:
        for group in self._schedule.groups(epoch, first, 0):
            yield {part: self._work(part, rows, epoch) for part, rows in group.rows.items()}

    def _work(self, part: str, rows: Array, epoch: int) -> Work:
        route = self.route_of(part)
        hidden = not len(rows)
        name = next(iter(self._places)) if self._one else part
        places = self._places[name][np.zeros(1, np.int64) if hidden else rows].tolist()
        return Work([route.pipeline.source.keys[i] for i in places], epoch, places=places, hidden=hidden)
