"""`Feed`: batches of a store on the device, in an order that can be resumed."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from numbers import Integral
from typing import Any

import torch

from frostline.batch import Batch
from frostline.errors import FeedError, UsageError
from frostline.feed import memory, tiers
from frostline.feed.order import Shuffle
from frostline.feed.order.base import BoundOrder
from frostline.feed.portion import Portion, split_fields
from frostline.feed.prefetch import Prefetch
from frostline.feed.resident import Resident
from frostline.feed.ring import Ring
from frostline.feed.schedule import Schedule, aligned
from frostline.stage import Pick
from frostline.store import Table

log = logging.getLogger("frostline")

_DEPTH = 2
_GROUP_BYTES = {"cpu": 16 << 20, "cuda": 32 << 20}
_ONE = ""
_STAYS = ("_schedule", "_ring", "_portions", "_active", "_totals", "_pid")  # in this process

Fields = str | Pick | Sequence[str | Pick]


class Feed:
    """Batches from one or more stores.

    >>> import tempfile, torch, frostline as fl
    >>> path = tempfile.mkdtemp() + "/feats"
    >>> with fl.Store.create(path, fields={"x": fl.Field((2,), "float32")}) as writer:
    ...     writer.append_batch([f"k{i}" for i in range(10)], {"x": torch.arange(20.0).view(10, 2)})
    >>> feed = fl.Feed(fl.Store.open(path), batch_size=4, order=fl.Shuffle(seed=1))
    >>> [tuple(batch["x"].shape) for batch in feed], feed.epoch
    ([(4, 2), (4, 2), (2, 2)], 1)

    Iterating once is one epoch and advances `feed.epoch`. An iteration that is left early leaves
    `state_dict()` where it stopped; the next `iter(feed)` begins the next epoch.

    batch_size: rows of a *global* batch; rank r of W takes [n·r // W, n·(r+1) // W) of its n rows, so
    shares of a short last batch differ by at most one row and may be empty (an order's drop_last leaves
    that batch out). order: fl.Shuffle() if None.
    fields: names and fl.Pick's (None: all); {store: fields} for several stores. tier: "auto", one of
    "device", "pinned", "mmap", "disk", or {field: tier}. train=False makes fl.Pick choose as evaluation does.
    budget_bytes: what the device and pinned tiers may take together.
    """

    def __init__(
        self,
        store: Table | Mapping[str, Table],
        batch_size: int,
        *,
        order: Any = None,
        device: str | torch.device = "cpu",
        fields: Fields | Mapping[str, Fields] | None = None,
        tier: str | Mapping[str, str] = "auto",
        rank: int = 0,
        world_size: int = 1,
        train: bool = True,
        budget_bytes: int | None = None,
    ) -> None:
        self.batch_size, self.rank, self.world_size, self.train = batch_size, rank, world_size, train
        self.order: Any = Shuffle() if order is None else order
        self.device = _device(device)
        self.epoch = 0
        self._cursor = 0
        self._left_early = False
        self._check_arguments(store, fields, tier, budget_bytes)
        given = dict(store) if isinstance(store, Mapping) else {_ONE: store}
        wanted = fields if isinstance(fields, Mapping) else dict.fromkeys(given, fields)
        self._wanted = wanted
        self._several = isinstance(store, Mapping)
        self._tables = aligned(self.order, _complete(given, wanted))
        self._schedule = self._bind()
        names = {name: split_fields(table, wanted.get(name))[0] for name, table in self._tables.items()}
        self._tiers = tiers.choose(self._tables, names, self.device, tier, budget_bytes)
        self._reset()
        log.info("%r", self)

    def _reset(self) -> None:
        """What does not travel to another process: buffers, threads, loaded columns."""
        self._pid = os.getpid()
        self._ring = Ring(depth=_DEPTH, pinned=self.device.type == "cuda")
        shared = {name: self._portion(name) for name in self._tables}  # two parts of one table load it once
        self._portions = {part: shared[name] for part, name in self._schedule.parts.items()}
        self._active: Prefetch | Resident | None = None
        self._totals = {"batches": 0, "rows": 0, "wait_s": 0.0, "seconds": 0.0}

    def _check_arguments(self, store: Any, fields: Any, tier: Any, budget: Any) -> None:
        problems = []
        if type(self.batch_size) is not int or self.batch_size < 1:
            problems.append(f"batch_size is {self.batch_size!r}; a whole number from 1")
        if not _is_whole(self.rank) or not _is_whole(self.world_size) or self.rank >= self.world_size:
            problems.append(
                f"rank {self.rank!r} of world_size {self.world_size!r}; "
                f"whole numbers, ranks run from 0 to world_size - 1"
            )
        stores = list(store.values()) if isinstance(store, Mapping) else [store]
        problems += [
            f"a store is expected, got {type(s).__name__}; open it with fl.Store.open(path)"
            for s in stores
            if not isinstance(s, Table)
        ]
        problems += ["no store was given"] if not stores else []
        if not isinstance(tier, str | Mapping):
            problems.append(
                f"tier is {tier!r}; 'auto', {', '.join(map(repr, tiers.TIERS))}, or {{field: tier}}"
            )
        if budget is not None and not _is_whole(budget):
            problems.append(f"budget_bytes is {budget!r}; a whole number of bytes")
        each = fields.values() if isinstance(fields, Mapping) else [fields]
        problems += [
            f"fields is {some!r}; a list of names and fl.Pick's"
            for some in each
            if some is not None and not isinstance(some, str | Pick | Iterable)
        ]
        if isinstance(fields, Mapping) and not isinstance(store, Mapping):
            problems.append("fields by store need several stores: Feed({'a': a, 'b': b}, …)")
        elif isinstance(fields, Mapping):
            problems += [
                f"fields are given for {name!r}, which is no store here"
                for name in fields
                if name not in store
            ]
        if not hasattr(self.order, "over") and not isinstance(self.order, BoundOrder):
            problems.append(
                f"order is {type(self.order).__name__}; an order has n_batches(epoch) and batch(epoch, i)"
            )
        if problems:
            raise UsageError("Feed(…) cannot start:", problems=problems)

    def _bind(self) -> Schedule:
        return Schedule(self.order, self._tables, self.batch_size, rank=self.rank, world_size=self.world_size)

    def _portion(self, name: str) -> Portion:
        tiers_of = {field: tier for (table, field), tier in self._tiers.items() if table == name}
        return Portion(self._tables[name], self._wanted.get(name), tiers_of, self.device, self._ring)

    def n_batches(self, epoch: int | None = None) -> int:
        """Batches of an epoch (this one, when none is named); the same for every rank."""
        return self._schedule.n_batches(self.epoch if epoch is None else epoch)

    def __len__(self) -> int:
        return self.n_batches()

    def _rows_at_once(self) -> float:
        """How many rows make up what is worth a hand-over between threads, or a copy to the device."""
        aim = _GROUP_BYTES.get(self.device.type, _GROUP_BYTES["cpu"])
        return aim * len(self._portions) / sum(p.row_bytes() for p in self._portions.values())

    # iterating

    def __iter__(self) -> Iterator[Batch]:
        """One epoch. Threads start with its first batch, and the iteration before it is then over."""
        if self._left_early:
            self.set_epoch(self.epoch + 1)
        self._end_iteration()
        prefetch = self._begin()
        self._active, self._left_early = prefetch, True
        began = time.perf_counter()
        try:
            for parts in prefetch.batches():
                self._cursor += 1
                self._totals["batches"] += 1
                yield self._outer(parts)
            self.epoch, self._cursor, self._left_early = self.epoch + 1, 0, False
        finally:
            prefetch.close()
            self._totals["rows"] += prefetch.rows
            self._totals["wait_s"] += prefetch.wait_s
            self._totals["seconds"] += time.perf_counter() - began
            if self._active is prefetch:  # otherwise the state is no longer this iteration's
                self._active = None
                self._left_early = self._left_early and self._cursor > 0

    def _begin(self) -> Prefetch | Resident:
        groups = self._schedule.groups(self.epoch, self._cursor, self._rows_at_once())
        seed = int(getattr(self.order, "seed", 0))
        draw: dict[str, Any] = {"seed": seed, "epoch": self.epoch, "train": self.train}
        if all(portion.resident for portion in self._portions.values()):
            return Resident(groups, self._portions, **draw)
        n_threads = _threads(any(t == "disk" for t in self._tiers.values()))
        return Prefetch(groups, self._portions, self._ring, n_threads=n_threads, **draw)

    def _end_iteration(self) -> None:
        if self._pid != os.getpid():  # forked: buffers and locks are the parent's
            self._reset()
        elif self._active is not None:
            self._active.close()
        self._active = None

    def _outer(self, parts: dict[str, Batch]) -> Batch:
        if not self._several and _ONE in parts:
            return parts[_ONE]
        first = Batch({}, next(iter(parts.values()))._keys)  # the keys alone
        return Batch(parts, lambda: first.keys_of_rows)

    # state

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch, from its first batch, at the next iteration; one that is under way is over."""
        if not _is_whole(epoch):
            raise UsageError(f"feed.set_epoch({epoch!r}): an epoch is a whole number from 0.")
        self._end_iteration()
        self.epoch, self._cursor, self._left_early = int(epoch), 0, False  # a plain int: it is saved

    def state_dict(self) -> dict[str, Any]:
        """Where the feed is, in plain values: goes into a checkpoint, fits any number of ranks."""
        return {"epoch": self.epoch, "cursor": self._cursor, **self._identity()}

    def _identity(self) -> dict[str, Any]:
        return {
            "version": 1, "order": _described(self.order), "batch_size": self.batch_size,
            "rows": {name: len(table) for name, table in self._tables.items()}, "keys": self._digests,
        }  # fmt: skip

    @cached_property
    def _digests(self) -> dict[str, str]:
        """Of the keys in order: a row that was replaced stands elsewhere, and as many rows as before."""
        return {name: table.keys.digest() for name, table in self._tables.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where `state` was taken, also with another number of ranks."""
        mine = self._identity()
        if "keys" not in state:
            del mine["keys"]  # states were written without them before
        differ = [f"{k}: then {state.get(k)!r}, now {v!r}" for k, v in mine.items() if state.get(k) != v]
        whole = all(type(state.get(k)) is int and state[k] >= 0 for k in ("epoch", "cursor"))
        if state.get("version") != 1 or not whole:
            raise FeedError(f"This is no state of a feed of this version: {dict(state)!r}.")
        if differ and state["cursor"]:
            raise FeedError(
                "This state cannot be continued in the middle of an epoch, the feed has changed: "
                + "; ".join(differ)
                + ". Use the same order, batch_size, rows and keys, or begin the next epoch with "
                + "feed.set_epoch(state['epoch'] + 1)."
            )
        self.set_epoch(state["epoch"])
        self._cursor = state["cursor"]

    def stats(self) -> dict[str, Any]:
        """Since the feed was made: batches, rows, seconds iterated and waited for data; tiers; buffers."""
        totals = dict(self._totals)
        if self._active is not None:  # of an epoch under way
            totals["rows"] += self._active.rows
            totals["wait_s"] += self._active.wait_s
        return {
            **totals, "tiers": {f"{t}.{f}" if t else f: tier for (t, f), tier in self._tiers.items()},
            "ring_depth": self._ring.depth, "buffers_made": self._ring.made,
        }  # fmt: skip

    def __repr__(self) -> str:
        placed: dict[str, list[str]] = {}
        for (table, field), tier in self._tiers.items():
            size = memory.in_words(tiers.field_bytes(self._tables[table], field))
            placed.setdefault(tier, []).append(f"{field} ({size})")
        where = "; ".join(f"{tier}: {', '.join(fields)}" for tier, fields in placed.items())
        rows = ", ".join(f"{len(t):,}" for t in self._tables.values())
        return f"<frostline.Feed: {rows} rows, batches of {self.batch_size} on {self.device}; {where}>"

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in _STAYS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._schedule = self._bind()
        self._reset()


def _is_whole(n: Any) -> bool:
    return isinstance(n, Integral) and int(n) >= 0


def _described(order: Any) -> str:
    """The order in words, without the address that the default repr of somebody's own class has."""
    text = repr(order)
    return type(order).__qualname__ if " object at 0x" in text else text


def _device(device: str | torch.device) -> torch.device:
    try:
        found = torch.device(device)
    except (TypeError, RuntimeError) as e:
        raise UsageError(f"Feed(device={device!r}): expected 'cpu', 'cuda' or 'cuda:1', say.") from e
    if found.type == "cuda":
        if not torch.cuda.is_available():
            raise UsageError(
                f"Feed(device={str(device)!r}): torch sees no CUDA device here. Use device='cpu'."
            )
        if str(found) == "cuda":  # without a number
            found = torch.device("cuda", torch.cuda.current_device())
    return found


def _threads(cold: bool) -> int:
    """As many as there are cores; cold disks want several reads in flight whatever the cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(8, min(16, cores)) if cold else min(16, cores)


def _complete(tables: dict[str, Table], wanted: Mapping[str, Any]) -> dict[str, Table]:
    """Only rows that have every field asked for; says how many have not."""
    out = {}
    for name, table in tables.items():
        names = split_fields(table, wanted.get(name))[0]
        out[name] = table.with_fields(names)
        if len(out[name]) < len(table):
            log.warning(
                "%d of %d rows lack one of %s and are left out.",
                len(table) - len(out[name]),
                len(table),
                ", ".join(names),
            )
        if not len(out[name]):
            raise UsageError(f"Feed(…): the store {name or ''} has no row with all of {', '.join(names)}.")
    return out
