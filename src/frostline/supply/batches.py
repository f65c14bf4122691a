"""`Supply`: batches with a pipeline's outputs, in an order that can be resumed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from frostline.batch import Batch
from frostline.errors import FeedError
from frostline.supply.ahead import Ahead, Pool, n_threads
from frostline.supply.rows import Parts, Rows
from frostline.supply.work import Work


class Supply:
    """Batches of a workload: what `fl.train` steps through. Made by `supply(workload, stores, …)`.

    >>> import frostline as fl
    >>> from frostline.supply import supply
    >>> data = fl.Pipeline(
    ...     fl.Source.table([{"key": str(i), "x": float(i)} for i in range(10)]),
    ...     fl.Stage("noisy", lambda x, rng: x + rng.random(), reads="x", random=True),
    ... )
    >>> batches = supply(fl.Workload(data, run=print), None, split=None, batch_size=4, device="cpu")
    >>> [len(batch["noisy"]) for batch in batches], batches.epoch
    ([4, 4, 2], 1)

    Iterating gives the rest of the epoch: all of it, or what is left after an iteration that was ended
    early, or after `load_state_dict`. The state says what was handed out, whatever is being prepared.
    """

    def __init__(self, rows: Rows, *, train: bool, identity: Mapping[str, Any]) -> None:
        self.epoch = 0
        self._rows, self._train, self._identity = rows, train, dict(identity)
        self._cursor = 0
        self._active: _Iteration | None = None
        self._totals = {"batches": 0.0, "rows": 0.0, "wait_s": 0.0, "seconds": 0.0}

    @property
    def split(self) -> str | None:
        """Whose samples these are; None: all."""
        split: str | None = self._identity["split"]
        return split

    def n_batches(self, epoch: int | None = None) -> int:
        """Batches of an epoch (this one, when none is named); the same for every rank."""
        return self._rows.n_batches(self.epoch if epoch is None else epoch)

    def __iter__(self) -> Iterator[Batch]:
        self.close()
        # evaluation is the same each time, also where it picks at random
        self._active = mine = _Iteration(self._rows, self.epoch if self._train else 0, self._cursor)
        began = time.perf_counter()
        try:
            while (parts := self._next(mine)) is not None:
                with _as_stored():
                    batch = mine.batch(parts)
                self._cursor += 1
                self._totals["batches"] += 1
                self._totals["rows"] += _n_rows(batch)
                yield batch
                if self._active is not mine:
                    raise FeedError(
                        "This iteration is over: another one of the same supply began, or its state was set."
                    )
            self.epoch, self._cursor = self.epoch + 1, 0
        finally:
            self._totals["seconds"] += time.perf_counter() - began
            mine.close()
            if self._active is mine:
                self._active = None

    def _next(self, iteration: _Iteration) -> Parts | None:
        began = time.perf_counter()
        with _as_stored():
            parts = next(iteration, None)
        self._totals["wait_s"] += time.perf_counter() - began
        return parts

    def state_dict(self) -> dict[str, Any]:
        """What was handed out so far, in plain values; fits any number of ranks, and a live run too."""
        epoch, cursor = self.epoch, self._cursor
        if cursor and cursor >= self.n_batches(epoch):
            epoch, cursor = epoch + 1, 0
        return {"version": 1, "epoch": epoch, "cursor": cursor, **self._identity}

    def differences(self, state: Mapping[str, Any]) -> list[str]:
        """How the data and its order differ from those that `state` was taken of."""
        mine = self._identity.items()
        return [f"{k}: then {state.get(k)!r}, now {v!r}" for k, v in mine if state.get(k) != v]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where `state` was taken, also with another number of ranks."""
        whole = all(type(state.get(k)) is int and state[k] >= 0 for k in ("epoch", "cursor"))
        if state.get("version") != 1 or not whole:
            raise FeedError(f"This is no state of a supply of this version: {dict(state)!r}.")
        differ = self.differences(state)
        if differ and state["cursor"]:
            raise FeedError(
                "This state cannot be continued in the middle of an epoch, the data or its order changed: "
                + "; ".join(differ)
                + ". Use the same data, seed, order and batch size, at least until the epoch ends, or begin "
                "a new run with these weights: `frostline train … --init-from RUN --out NEW`. In a loop of "
                "your own you can also begin the next epoch: set 'epoch' one higher and 'cursor' to 0 in the "
                "state."
            )
        if state["cursor"] > self.n_batches(state["epoch"]):
            raise FeedError(
                f"This state is at batch {state['cursor']} of epoch {state['epoch']}, which has "
                f"{self.n_batches(state['epoch'])}."
            )
        self.close()
        self.epoch, self._cursor = state["epoch"], state["cursor"]

    def stats(self) -> dict[str, float]:
        """Since it was made: batches and rows handed out, seconds waited for them, seconds iterated."""
        return dict(self._totals)

    def close(self) -> None:
        """End an iteration that is under way, and its threads; the state stays."""
        if self._active is not None:
            self._active.close()
        self._active = None


class _Iteration:
    """One pass over the rows, with its threads where some are needed."""

    def __init__(self, rows: Rows, epoch: int, first: int) -> None:
        rows.start()
        self._rows = rows
        self._works = rows.works(epoch, first)
        self._pool: Pool | None = None
        self._ahead: Ahead[Parts] | None = None
        self._closed = False
        layouts = [rows.route_of(name).layout for name in rows.counts]
        if any(layout.pooled for layout in layouts):
            self._pool = Pool(n_threads())
        if not all(layout.direct for layout in layouts):
            self._ahead = Ahead(self._begun())

    def __next__(self) -> Parts:
        return next(self._works if self._ahead is None else self._ahead)

    def __iter__(self) -> _Iteration:
        return self

    def batch(self, parts: Parts) -> Batch:
        """The last stages, where the batch is wanted."""
        done = {part: self._rows.route_of(part).finish(work, self._pool) for part, work in parts.items()}
        if [*done] == [""]:
            return done[""]
        first = Batch({}, next(iter(done.values()))._keys)  # the keys alone
        return Batch(dict(done), lambda: first.keys_of_rows)

    def _begun(self) -> Iterator[Callable[[], Parts]]:
        """Batches whose first stages are under way; runs on the conductor's thread."""
        try:
            for parts in self._works:
                begun = {part: self._begin(part, work) for part, work in parts.items()}
                yield partial(self._prepared, parts, begun)
        finally:
            self._works.close()

    def _begin(self, part: str, work: Work) -> list[Future[Work]]:
        return [] if self._pool is None else self._rows.route_of(part).begin(work, self._pool)

    def _prepared(self, parts: Parts, begun: Mapping[str, list[Future[Work]]]) -> Parts:
        return {
            part: self._rows.route_of(part).prepare(work, begun[part], self._pool)
            for part, work in parts.items()
        }

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._ahead is not None:
            self._ahead.stop()
        if self._pool is not None:
            self._pool.close()  # first: the conductor may be waiting for samples that nobody wants now
        if self._ahead is not None:
            self._ahead.close()
        else:
            self._works.close()


@contextmanager
def _as_stored() -> Iterator[None]:
    """Without the autocast of whoever iterates: frozen networks have to give a store's bits."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    with ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _n_rows(batch: Batch) -> int:
    parts = [value for value in batch.values() if isinstance(value, Batch)]
    return sum(map(_n_rows, parts)) if parts else len(next(iter(batch.values())))
