"""Rows of a batch through the stages that are left: first ahead, in threads, then where they are consumed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

import torch
from torch import Tensor

from frostline import keyed
from frostline.batch import Batch
from frostline.draws import Draws
from frostline.errors import StageFailed, UsageError
from frostline.execution.call import Ready, Rng, described
from frostline.execution.columns import Column, Uneven, joined, taken
from frostline.execution.early import SOURCE
from frostline.pipeline import Pipeline
from frostline.stage import Stage
from frostline.supply.ahead import Pool
from frostline.supply.layout import Layout, Step, evaluated
from frostline.supply.values import cut_to_none, moved, pinned, rows_of, stacked
from frostline.supply.work import View, Work, on_host

_TASKS_A_THREAD = 4
_HINT = "Freeze this pipeline first: samples that fail are then left out, and listed (`frostline freeze`)"


class Route:
    """The stages of one pipeline that run for every batch, ready to be called."""

    def __init__(
        self, layout: Layout, *, device: torch.device, train: bool, seed: int, pick_seed: int
    ) -> None:
        self.layout, self.device, self.train = layout, device, train
        self.pipeline: Pipeline = layout.pipeline
        self.view = View(layout, train=train, pick_seed=pick_seed)
        self._seed = seed
        self._ready: dict[str, Ready] = {}
        self._lock = threading.Lock()
        self._places: dict[str, int] | None = None
        self._pin = device.type == "cuda"

    # ahead

    def begin(self, work: Work, pool: Pool) -> list[Future[Work]]:
        """Raw fields and the first stages of single samples, in the pool."""
        first = self.layout.ahead[0] if self.layout.ahead and self.layout.ahead[0].pooled else Step(True)
        if not self.layout.raw and not first.stages:
            return []
        if self.layout.raw and work.places is None:
            work.places = self._places_of(work.keys)
        return self._spread(work, first, pool, raw=True)

    def prepare(self, work: Work, begun: list[Future[Work]], pool: Pool | None) -> Work:
        """Wait for what was begun, and go on until the device is needed."""
        steps = self.layout.ahead
        if begun:
            self._gather(work, begun)
            steps = steps[1:] if steps and steps[0].pooled else steps
        for step in steps:
            self._run(step, work, pool)
        written = {name for step in self.layout.late for stage in step.stages for name in stage.writes}
        later = self.layout.read_late
        twice = later & {*work.fed}  # taken to the device once, for the stage and for the batch
        for name in self.layout.outputs:
            if name not in written | twice:
                work.done[name] = self.view.output(work, name, pin=self._pin)
        work.fed = {name: pinned(work.fed[name]) if self._pin else work.fed[name] for name in twice}
        work.exact = {name: self._whole(c) for name, c in work.exact.items() if name in later}
        if self._pin:
            work.picked = {name: pinned(column) for name, column in work.picked.items() if name in later}
        return work

    def _whole(self, column: Column) -> Column:
        """One tensor, where that is what a call of several samples would make of it."""
        rows = [row for row in column if isinstance(row, Tensor)] if isinstance(column, list) else []
        if not rows or len(rows) < len(column) or len({(row.shape, row.dtype) for row in rows}) > 1:
            return column
        return stacked(rows, pin=self._pin)

    def _places_of(self, keys: Sequence[str]) -> list[int]:
        if self._places is None:
            self._places = {key: i for i, key in enumerate(self.pipeline.source.keys)}
        missing = [key for key in keys if key not in self._places]
        if missing:
            raise UsageError(
                f"The store has {missing[0]!r}, which {self.pipeline.source.what} does not list (any more), "
                f"and {', '.join(self.layout.raw)} must be read there. Freeze again: rows that are gone are "
                f"deleted."
            )
        return [self._places[key] for key in keys]

    # where it is consumed

    def finish(self, work: Work, pool: Pool | None) -> Batch:
        """The stages that are left; the outputs on the device."""
        work.fed = {name: moved(column, self.device) for name, column in work.fed.items()}
        for step in self.layout.late:
            self._run(step, work, pool)
        fields = {
            name: moved(
                work.done[name] if name in work.done else self.view.output(work, name, pin=False), self.device
            )
            for name in self.layout.outputs
        }
        if work.hidden:
            return Batch({name: cut_to_none(value) for name, value in fields.items()}, [])
        return Batch(fields, work.names)

    # running

    def _run(self, step: Step, work: Work, pool: Pool | None) -> None:
        if step.pooled and pool is not None:
            self._gather(work, self._spread(work, step, pool, raw=False))
            return
        for stage in step.stages:
            work.exact |= self._many(stage, work) if stage.chunk else self._one_by_one(stage, work)

    def _spread(self, work: Work, step: Step, pool: Pool, *, raw: bool) -> list[Future[Work]]:
        """The rows over the threads. Each task gets the columns that its stages read, and no others."""
        read = {name for stage in step.stages for name in stage.reads}
        read |= {n for pick in self.pipeline.picks if {*pick.fields} & read for n in pick.fields}
        # to the host here: the pool's threads do not know the stream that the columns are computed on
        fed, exact, picked = (
            {name: on_host(rows_of(column)) for name, column in columns.items() if name in read}
            for columns in (work.fed, work.exact, work.picked)
        )
        narrow = Work(work.keys, work.epoch, fed, exact, picked, places=work.places)
        n = len(work.keys)
        size = max(1, -(-n // (_TASKS_A_THREAD * pool.n)))
        parts = [narrow.part(s, s + size) for s in range(0, n, size)]
        return [pool.submit(partial(self._samples, part, step.stages, raw)) for part in parts]

    def _samples(self, work: Work, stages: Sequence[Stage], raw: bool) -> Work:
        """A few rows, in a thread of the pool: what is new of them."""
        found, fed = Work(work.keys, work.epoch), {*work.picked}
        if raw and self.layout.raw:
            found.exact |= self._raw(work)
        work.exact |= found.exact
        for stage in stages:
            new = self._one_by_one(stage, work)
            work.exact |= new
            found.exact |= new
        found.picked = {name: column for name, column in work.picked.items() if name not in fed}
        return found

    @staticmethod
    def _gather(work: Work, futures: Sequence[Future[Work]]) -> None:
        parts = [future.result() for future in futures]
        for mine, theirs in (
            (work.exact, [p.exact for p in parts]),
            (work.picked, [p.picked for p in parts]),
        ):
            mine |= {name: joined([part[name] for part in theirs]) for name in (theirs[0] if theirs else ())}

    def _raw(self, work: Work) -> dict[str, Column]:
        rows = []
        for key, place in zip(work.keys, work.places or (), strict=True):
            try:
                raw = self.pipeline.source.raw(place)
                rows.append([raw[name] for name in self.layout.raw])
            except Exception as e:
                raise self._told(StageFailed(SOURCE, [key], described(e))) from e
        return {name: [row[i] for row in rows] for i, name in enumerate(self.layout.raw)}

    def _one_by_one(self, stage: Stage, work: Work) -> dict[str, Column]:
        ready, rng = self._loaded(stage), self._rng(stage, work.epoch)
        columns = [self.view.input(work, stage, name) for name in stage.reads]
        try:
            rows = [ready.one(key, [c[i] for c in columns], rng) for i, key in enumerate(work.keys)]
        except StageFailed as e:
            raise self._told(e) from e
        return {name: [row[name] for row in rows] for name in stage.writes}

    def _many(self, stage: Stage, work: Work) -> dict[str, Column]:
        ready, rng = self._loaded(stage), self._rng(stage, work.epoch)
        columns = [self.view.input(work, stage, name) for name in stage.reads]
        try:
            return ready.many(work.keys, columns, rng)
        except StageFailed as whole:
            raise self._told(_culprit(ready, work.keys, columns, rng, whole)) from whole

    def _told(self, error: StageFailed) -> StageFailed:
        """With what to do, where a store would have kept such a sample out."""
        above = error.stage in self.pipeline.why_not_frozen
        if not self.layout.live or above or _HINT in error.reason:
            return error
        return StageFailed(error.stage, error.keys, f"{error.reason.rstrip('.')}. {_HINT}")

    def _loaded(self, stage: Stage) -> Ready:
        """Loaded at its first use, by whichever thread comes first; in evaluation with its eval=."""
        if stage.name not in self._ready:
            with self._lock:
                if stage.name not in self._ready:
                    used = stage if self.train else evaluated(stage)
                    self._ready[stage.name] = Ready(used, self.device, inference=False)
        return self._ready[stage.name]

    def _rng(self, stage: Stage, epoch: int) -> Rng | None:
        if not stage.random or not self.train:
            return None
        if not stage.chunk:
            return lambda keys: keyed.generator(self._seed, epoch, keys[0], stage.name)
        device = self._loaded(stage).device
        return lambda keys: Draws(self._seed, epoch, keys, stage.name, device=device)


def _culprit(
    ready: Ready, keys: Sequence[str], columns: Sequence[Column], rng: Rng | None, whole: StageFailed
) -> StageFailed:
    """The first sample that fails alone; the failure of the whole call where none does."""
    if isinstance(whole, Uneven):
        return whole
    for i, key in enumerate(keys):
        try:
            ready.many([key], [taken(column, [i]) for column in columns], rng)
        except StageFailed as alone:
            return alone
    return whole
