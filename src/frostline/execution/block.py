"""Samples through the stages of a pipeline, block by block.

`begin` runs what works on single samples, which workers can do ahead; `finish` runs the stages from the first
one on that takes chunks. A row's bits do not depend on its block: every call of a chunked stage has the
size that its stage names, and an audit shows that rows do not depend on each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from frostline.errors import StageFailed
from frostline.execution.call import Ready
from frostline.execution.columns import Column, Uneven, taken
from frostline.execution.early import Block, Early, Loaded, one_thread, together
from frostline.pipeline import Pipeline
from frostline.stage import Stage

_LARGEST_BLOCK = 1024
_DEFAULT_BLOCK = 32


def whole_chunks(stages: Iterable[Stage]) -> int:
    """Samples that are whole chunks of every stage, where that is not too many; 0 where none takes chunks."""
    chunks = [stage.chunk for stage in stages if stage.chunk]
    common = math.lcm(*chunks) if chunks else 0
    return common if common <= _LARGEST_BLOCK else max(chunks)


class Execution:
    """Computes fields of a pipeline for samples.

    >>> import frostline as fl
    >>> data = fl.Pipeline(
    ...     fl.Source.table([{"key": "a", "x": 1.0}, {"key": "b", "x": 2.0}]),
    ...     fl.Stage("doubled", lambda x: 2 * x, reads="x", on="device", batch_size=4),
    ... )
    >>> Execution(data, ["doubled"]).compute([0, 1]).columns["doubled"].tolist()
    [2.0, 4.0]

    given: fields that come with the samples and are not computed, as from a store.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        fields: Sequence[str],
        *,
        device: torch.device | str = "cpu",
        given: Iterable[str] = (),
    ) -> None:
        self.pipeline, self.fields, self.given = pipeline, tuple(fields), tuple(given)
        self.device = torch.device(device)
        stages = pipeline.needed(fields, given=self.given)
        late: set[str] = set()
        for stage in stages:
            if stage.chunk or late & {*stage.reads}:
                late |= {*stage.writes}
        self.late = tuple(stage for stage in stages if late & {*stage.writes})
        before = [stage for stage in stages if not late & {*stage.writes}]
        wanted = {*self.fields}.union(*(stage.reads for stage in self.late))
        raw = pipeline.raw_needed(fields, given=self.given)
        self.early = Early(pipeline.source, before, raw, sorted(wanted - late))
        self._loaded = Loaded(self.late, self.device)

    @property
    def block_size(self) -> int:
        return whole_chunks(self.late) or _DEFAULT_BLOCK

    def begin(self, places: Sequence[int], given: Mapping[str, Column] | None = None) -> Block:
        """Raw fields, and what is computed from single samples, here and now.

        given: columns of the fields that are given.
        """
        keys = [self.pipeline.source.keys[i] for i in places]
        with one_thread():
            raws = [self.early.raw(key, i) for key, i in zip(keys, places, strict=True)]
            return self.early.block(keys, raws, given)

    def finish(self, block: Block) -> Block:
        """The other stages. A sample that one of them cannot take is left out, with the reason."""
        out = Block([*block.keys], dict(block.columns), dict(block.failed))
        for stage in self.late:
            if out.keys:
                self._through(self._loaded[stage.name], out)
        out.columns = {name: out.columns[name] for name in self.fields if name in out.columns}
        return out

    def _through(self, ready: Ready, block: Block) -> None:
        while block.keys:
            try:
                columns = [block.columns[name] for name in ready.stage.reads]
                block.columns |= self._call(ready, block.keys, columns)
                return
            except StageFailed as whole:  # leaves out one sample at least, or raises
                block.leave_out(self._culprits(ready, block, whole))

    def _culprits(self, ready: Ready, block: Block, whole: StageFailed) -> dict[str, StageFailed]:
        """The samples that fail alone. When none of them does, it is the stage that fails: raised."""
        if isinstance(whole, Uneven):
            return {key: Uneven(whole.stage, [key], whole.reason) for key in whole.keys}
        bad = {}
        for i, key in enumerate(block.keys):
            try:
                self._call(ready, [key], [taken(block.columns[name], [i]) for name in ready.stage.reads])
            except StageFailed as e:
                bad[key] = e
        if not bad:
            raise whole
        return bad

    @staticmethod
    def _call(ready: Ready, keys: Sequence[str], columns: Sequence[Column]) -> dict[str, Column]:
        if ready.stage.chunk:
            return ready.many(keys, columns)
        rows = [ready.one(key, [column[i] for column in columns]) for i, key in enumerate(keys)]
        return {name: [row[name] for row in rows] for name in ready.stage.writes}

    def compute(self, places: Iterable[int]) -> Block:
        """Samples of the source, here and now: the live pipeline. Raises the first failure."""
        places, size = list(places), self.block_size
        begun = [self.begin(places[s : s + size]) for s in range(0, len(places), size)]
        whole = together([self.finish(block) for block in begun])
        if whole.failed:
            raise next(iter(whole.failed.values()))
        return whole
