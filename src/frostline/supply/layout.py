"""What is left to compute of a pipeline when a store gives some of its fields, and where that runs.

*Ahead* (threads prepare it while the model trains): all that no device stage comes before. *Late* (where the
batch is consumed): device stages and what reads them. In both, stages of single samples go through the pool,
others run where they are, as when they were frozen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from frostline.errors import UsageError
from frostline.pipeline import Pipeline
from frostline.stage import Pick, Stage


@dataclass
class Step:
    """Stages one after the other. pooled: sample by sample, in threads of one core each."""

    pooled: bool
    stages: list[Stage] = field(default_factory=list)


class Layout:
    """Which stages run for the outputs of a pipeline, in which steps, and what they need.

    given: fields of the store; None: there is none, all is computed from the source.
    """

    def __init__(self, pipeline: Pipeline, given: Iterable[str] | None) -> None:
        self.pipeline, self.live = pipeline, given is None
        self.outputs = pipeline.outputs
        held = {*(given or ())} & {*pipeline.fields}
        self.given = frozenset(name for name in held if pipeline.is_frozen(name))
        self.stages = pipeline.needed(self.outputs, given=self.given)
        self.raw = self._raw()
        self.ahead, self.late = self._steps()

    def is_above(self, stage: Stage) -> bool:
        """Whether a stage lies above the line."""
        return stage.name in self.pipeline.why_not_frozen

    def reads_picked(self, stage: Stage, name: str) -> bool:
        """Whether a stage comes after the Pick of a field, and so reads the picked entries."""
        pick = self.pick_of(name)
        steps = self.pipeline.steps
        return pick is not None and steps.index(stage) > steps.index(pick)

    def pick_of(self, name: str) -> Pick | None:
        return next((pick for pick in self.pipeline.picks if name in pick.fields), None)

    def _raw(self) -> tuple[str, ...]:
        """The source's fields to be read: what the store has not, and what frozen stages read.

        Those get the very values that they got when they were frozen: a number, not a tensor of it.
        """
        above = {name for stage in self.stages if self.is_above(stage) for name in stage.reads}
        below = {name for stage in self.stages if not self.is_above(stage) for name in stage.reads}
        wanted = below | ((above | {*self.outputs}) - self.given)
        written = {name for stage in self.pipeline.stages for name in stage.writes}
        return tuple(name for name in self.pipeline.source.fields if name in wanted - written)

    def _steps(self) -> tuple[list[Step], list[Step]]:
        after_chunks: set[str] = set()  # frozen fields that freezing computes where its chunks are
        for stage in self.pipeline.frozen:
            if stage.chunk or after_chunks & {*stage.reads}:
                after_chunks |= {*stage.writes}
        behind: set[str] = set()
        ahead: list[Step] = []
        late: list[Step] = []
        for stage in self.stages:
            is_late = stage.on == "device" or bool(behind & {*stage.reads})
            behind |= {*stage.writes} if is_late else set()
            here = bool(stage.chunk) or (not self.is_above(stage) and bool(after_chunks & {*stage.writes}))
            steps = late if is_late else ahead
            if not steps or steps[-1].pooled == here:
                steps.append(Step(not here))
            steps[-1].stages.append(stage)
        return ahead, late

    @property
    def direct(self) -> bool:
        """Whether a feed can deliver to the device: nothing is left to be computed before."""
        return not (self.ahead or self.raw)

    @property
    def pooled(self) -> bool:
        return bool(self.raw) or any(step.pooled for step in (*self.ahead, *self.late))

    @property
    def read_late(self) -> frozenset[str]:
        """Fields that are needed once what is ahead is done; those of one Pick are picked together."""
        behind = [stage for step in self.late for stage in step.stages]
        wanted = {name for stage in behind for name in stage.reads}
        late_outputs = {*self.outputs} & {name for stage in behind for name in stage.writes}
        together = [
            {*pick.fields} for pick in self.pipeline.picks if {*pick.fields} & (wanted | late_outputs)
        ]
        return frozenset(wanted.union(*together))

    def is_shared(self, name: str) -> bool:
        """Whether a field goes to more than one place: a stage that works in place must not be seen there."""
        readers = sum(name in stage.reads for stage in self.stages)
        return readers + (name in self.outputs) > 1

    def read_from_feed(self) -> list[str | Pick]:
        """What to ask of the feed. A Pick is left to it where nothing reads the field as a whole."""
        reads = [(s, n) for s in self.stages for n in s.reads if n in self.given]
        wanted = {n for s, n in reads if self.is_above(s) or n not in self.raw} | (
            {*self.outputs} & self.given
        )
        if not wanted:
            raise UsageError(
                f"The store has nothing that {', '.join(self.outputs)} can be computed from; it has "
                f"{', '.join(sorted(self.given)) or 'no field of this pipeline'}. Freeze this pipeline again."
            )
        by_feed = [p for p in self.pipeline.picks if {*p.fields} & wanted and self._picked_by_feed(p, reads)]
        picked = {name for pick in by_feed for name in pick.fields}
        return [*sorted(wanted - picked), *by_feed]

    def _picked_by_feed(self, pick: Pick, reads: Sequence[tuple[Stage, str]]) -> bool:
        whole = any(n in pick.fields and not self.reads_picked(s, n) for s, n in reads)
        return {*pick.fields} <= self.given and not whole

    def refuse_random(self) -> list[str]:
        """What is wrong with evaluating this: random stages without eval=, by name."""
        missing = [
            f"stage {stage.name!r} is random and has no eval=: it would be random in evaluation. Give eval=, "
            f"a function of {', '.join(stage.reads)} that is not (for a random crop, the centre)"
            for stage in self.stages
            if stage.random and stage.eval is None
        ]
        wrong = []
        for stage in self.stages:
            try:
                evaluated(stage)
            except UsageError as e:
                wrong += [f"stage {stage.name!r}: eval={problem}" for problem in e.problems]
        return [*missing, *wrong]


def evaluated(stage: Stage) -> Stage:
    """What evaluation runs in a stage's place."""
    if not stage.random or stage.eval is None:
        return stage
    return stage.with_options(fn=stage.eval, random=False, eval=None)
