"""A few samples through every stage of a pipeline, one stage at a time, with a clock.

The samples are spread over the source by a hash of their keys: the first ones are often alike. Each stage is
run once to load and warm up, which also finds samples that fail, and then as often as a steady figure takes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from frostline import keyed
from frostline.cut.costs import Cost
from frostline.draws import Draws
from frostline.errors import StageFailed
from frostline.execution import Block, Execution, Ready
from frostline.execution.columns import Column, taken
from frostline.freezer.choice import group_size
from frostline.freezer.stream import column_bytes
from frostline.freezer.workers import Threads
from frostline.pipeline import Pipeline
from frostline.stage import Stage

FEWEST, MOST = 8, 256
_HELD_BYTES = 2 << 30
"""What the fields of the samples may take in memory; with larger rows there are fewer samples."""
_STAGE_S = 10.0
"""All samples go through a stage once in about so long, or there are fewer samples."""
_ROUNDS = 5
_LEAST_S = 0.1
"""A round of quick calls takes at least so long: a step of some milliseconds is made many times."""
_ROUNDS_S = 4.0
"""After so long one round is enough."""
_ROUND_S = 0.5
"""A round takes about so long, where there are samples enough; a chunk or eight samples at least."""


def chosen_places(pipeline: Pipeline, share: float, limit: int | None = None) -> list[int]:
    """Where the samples to measure stand, by the hashes of their keys: any first few are spread too."""
    keys = list(pipeline.source.keys)[:limit]
    n = min(len(keys), max(FEWEST, min(MOST, int(share * len(keys)))))
    order = np.argsort(keyed.derive_many(0, 0, keys, "cut"), kind="stable")
    return [int(i) for i in order[:n]]


class Drawn:
    """A random function that brings its own generator, made anew for each call as in training."""

    def __init__(self, stage: Stage, device: torch.device) -> None:
        ready = Ready(stage, device)  # a network on its device, in its precision
        self._fn, self._device = ready.fn, ready.device
        self._name, self._chunk = stage.name, stage.chunk
        self._calls = 0

    def __call__(self, *values: Any) -> Any:
        self._calls += 1
        key = str(self._calls)
        if self._chunk is None:
            return self._fn(*values, rng=keyed.generator(0, 0, key, self._name))
        keys = [f"{key}/{i}" for i in range(self._chunk)]
        return self._fn(*values, rng=Draws(0, 0, keys, self._name, device=self._device))


def without_rng(pipeline: Pipeline, device: torch.device) -> Pipeline:
    """The same pipeline with random stages that can be called like any other."""
    changed = {
        s.name: s.with_options(fn=Drawn(s, device), random=False, eval=None)
        for s in pipeline.stages
        if s.random
    }
    if not changed:
        return pipeline
    # picks are left out: what is picked here is picked by the walk itself
    picked = [name for pick in pipeline.picks for name in pick.fields]
    steps = [changed.get(s.name, s) for s in pipeline.stages]
    return Pipeline(pipeline.source, *steps, outputs=[*dict.fromkeys((*pipeline.outputs, *picked))])


@dataclass(frozen=True)
class Taken:
    """What a stage took: alone, and where it runs."""

    alone: float
    together: Cost


class Walk:
    """The samples' fields, and what it took to get them.

    values: field → a list of one value a sample, or a tensor, of the samples that came through all stages.
    """

    def __init__(
        self, pipeline: Pipeline, places: Sequence[int], device: torch.device, n_workers: int
    ) -> None:
        self.pipeline, self.device, self.n_workers = pipeline, device, n_workers
        self.runs = without_rng(pipeline, device)
        self.places = [*places]
        self.values: dict[str, Column] = {}
        self.took: dict[str, Taken] = {}
        self.failed: dict[str, StageFailed] = {}
        picked = [name for pick in pipeline.picks for name in pick.fields]
        self.wanted = (*pipeline.outputs, *picked)
        self.stages = pipeline.needed(self.wanted)
        self.raw = pipeline.raw_needed(self.wanted)

    def run(self, progress: Callable[[str], None] | None = None) -> None:
        execution = Execution(self.runs, self.raw, device=self.device)
        self._through(execution, {})
        self.source = self._singly(execution, {}, 1e-5)
        for stage in self.stages:
            if progress is not None:
                progress(f"measuring {stage.name} on {len(self.places):,} samples")
            execution = Execution(self.runs, stage.writes, device=self.device, given=stage.reads)
            each = self._through(execution, self._inputs(stage))
            measure = self._in_chunks if stage.chunk else self._singly
            self.took[stage.name] = measure(execution, self._inputs(stage), each)

    @property
    def keys(self) -> list[str]:
        return [self.pipeline.source.keys[i] for i in self.places]

    def _through(self, execution: Execution, given: Mapping[str, Column]) -> float:
        """The samples once through a stage; those that fail leave. Seconds each took, once it was loaded."""
        if given:
            self._warm(execution, given)
            given = {name: column[: len(self.places)] for name, column in given.items()}
        began = time.perf_counter()
        block = execution.finish(execution.begin(self.places, given))
        _synchronize(self.device)
        each = (time.perf_counter() - began) / len(self.places)
        self.failed |= block.failed
        if not block.keys:
            raise next(iter(block.failed.values()))
        if block.failed:
            kept = [i for i, key in enumerate(self.keys) if key not in block.failed]
            self._keep(kept)
        self.values |= block.columns
        while len(self.places) > FEWEST and sum(map(column_bytes, self.values.values())) > _HELD_BYTES:
            self._keep(range(max(FEWEST, len(self.places) // 2)))
        return each

    def _warm(self, execution: Execution, given: Mapping[str, Column]) -> None:
        """One call, so that what comes after does not count loading; and another, to see how many samples
        there is time for."""
        n = 1 if not execution.late else min(len(self.places), execution.block_size)
        for _ in range(2):
            began = time.perf_counter()
            some = {name: column[:n] for name, column in given.items()}
            execution.finish(execution.begin(self.places[:n], some))
            _synchronize(self.device)
        most = int(_STAGE_S / max((time.perf_counter() - began) / n, 1e-9))
        if most < len(self.places):
            self._keep(range(min(len(self.places), max(FEWEST, most))))

    def _keep(self, kept: Sequence[int]) -> None:
        self.places = [self.places[i] for i in kept]
        self.values = {name: taken(column, kept) for name, column in self.values.items()}

    def _inputs(self, stage: Stage) -> dict[str, Column]:
        """What a stage reads; only the picked entries, where it stands behind a Pick."""
        found = {name: self.values[name] for name in stage.reads}
        steps = self.pipeline.steps
        for place, pick in enumerate(steps):
            if isinstance(pick, Stage) or steps.index(stage) < place:
                continue
            for name in {*pick.fields} & {*found}:
                rows = pick.indices(0, 0, self.keys, [len(v) for v in found[name]], train=True)
                found[name] = [value[rows[i]] for i, value in enumerate(found[name])]
        return found

    # the clock

    def _singly(self, execution: Execution, given: Mapping[str, Column], each: float) -> Taken:
        """A stage of single samples: in one thread, and in all workers."""
        n = self._rows(each, FEWEST)
        places = [self.places[i % len(self.places)] for i in range(n)]
        rows = {name: [column[i % len(self.places)] for i in range(n)] for name, column in given.items()}
        alone = clocked(lambda: execution.begin(places, rows), n, self.device)
        of_key = dict(zip((self.pipeline.source.keys[i] for i in places), range(n), strict=True))

        def some(keys: Sequence[str]) -> dict[str, Column]:
            return {name: [column[of_key[key]] for key in keys] for name, column in rows.items()}

        workers = Threads(execution.early, self.n_workers, some if given else None)
        group = group_size(alone.wall, n, early=True)
        try:
            together = clocked(lambda: workers.begin(places, group=group).result(), n, self.device)  # type: ignore[union-attr]
        finally:
            workers.close()
        return Taken(alone.wall, together)

    def _in_chunks(self, execution: Execution, given: Mapping[str, Column], each: float) -> Taken:
        """A stage that takes chunks: whole ones, since the last call of many is no rule."""
        chunk = execution.block_size
        n = max(1, self._rows(each, chunk) // chunk) * chunk
        index = [i % len(self.places) for i in range(n)]
        rows = {name: taken(column, index) for name, column in given.items()}
        block = Block([self.keys[i] for i in index], rows)
        cost = clocked(lambda: execution.finish(block), n, self.device)
        return Taken(cost.wall, cost)

    def _rows(self, each: float, fewest: int) -> int:
        """How many samples a round takes. Few are taken more than once, or starting would be measured."""
        return max(fewest, min(4 * len(self.places), int(_ROUND_S / max(each, 1e-7))))


def clocked(call: Callable[[], Any], rows: int, device: torch.device, *, rounds: int = _ROUNDS) -> Cost:
    """Seconds a row: the middle of a few rounds, after a call that is not counted."""
    call()
    _synchronize(device)
    found = [_round(call, 1, rows, device)]
    first, calls = time.perf_counter(), max(1, int(_LEAST_S / max(found[0].wall * rows, 1e-7)))
    if calls > 1:
        found.clear()
    while not found or (len(found) < rounds and time.perf_counter() - first < _ROUNDS_S):
        found.append(_round(call, calls, rows, device))
    return Cost(statistics.median(c.wall for c in found), statistics.median(c.cores for c in found))


def _round(call: Callable[[], Any], calls: int, rows: int, device: torch.device) -> Cost:
    began, spent = time.perf_counter(), time.process_time()
    for _ in range(calls):
        call()
    _synchronize(device)
    wall, cores = time.perf_counter() - began, time.process_time() - spent
    return Cost(wall / (calls * rows), cores / (calls * rows))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def on_cpu(column: Column) -> Column:
    return column.cpu() if isinstance(column, Tensor) else column
