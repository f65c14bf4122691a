"""`Pipeline`: a Source and its Stages, a graph by field names; and the line below which nothing changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from frostline.errors import UsageError
from frostline.source import Source
from frostline.stage import Pick, Stage
from frostline.tables import nearest


@dataclass(frozen=True, init=False, eq=False)
class Pipeline:
    """A Source and what is computed from it, in any order: names of fields tie the stages together.

    >>> import frostline as fl
    >>> data = fl.Pipeline(
    ...     fl.Source.table([{"key": "a", "text": "one two"}]),
    ...     fl.Stage("words", str.split, reads="text"),
    ...     fl.Stage("mixed", lambda words, rng: rng.permutation(words), reads="words", random=True),
    ... )
    >>> data.why_not_frozen
    {'mixed': "stage 'mixed' is random"}
    >>> data.cut
    ('words',)

    outputs: the fields that leave the pipeline, for the model; by default those that no stage reads. With
             it, a stage that leads to none of them is an error.
    """

    source: Source
    steps: tuple[Stage | Pick, ...]
    outputs: tuple[str, ...]

    def __init__(self, source: Source, *steps: Stage | Pick, outputs: Sequence[str] | None = None) -> None:
        wrong = _strangers(source, steps)
        if wrong:
            raise UsageError("This pipeline cannot work:", problems=wrong)
        object.__setattr__(self, "source", source)
        object.__setattr__(self, "steps", steps)
        given = (outputs,) if isinstance(outputs, str) else outputs
        chosen = tuple(given) if given is not None else self._unread()
        object.__setattr__(self, "outputs", chosen)
        problems = _problems(self, explicit=outputs is not None)
        if problems:
            raise UsageError("This pipeline cannot work:", problems=problems)

    def _unread(self) -> tuple[str, ...]:
        read = {name for stage in self._all_stages for name in stage.reads}
        picked = {name for pick in self.picks for name in pick.fields}
        unread = (name for name in self.fields if name not in read or name in picked)
        return tuple(name for name in unread if name != self.source.key)  # the store has the keys anyway

    @property
    def _all_stages(self) -> list[Stage]:
        return [step for step in self.steps if isinstance(step, Stage)]

    @property
    def picks(self) -> tuple[Pick, ...]:
        return tuple(step for step in self.steps if isinstance(step, Pick))

    @property
    def fields(self) -> tuple[str, ...]:
        """Every field: the source's, then those of the stages."""
        written = [name for stage in self._all_stages for name in stage.writes]
        return tuple(dict.fromkeys((*self.source.fields, *written)))

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The stages, each after those whose fields it reads."""
        ordered, rest = _ordered(self._all_stages)
        return (*ordered, *rest)

    @cached_property
    def _writers(self) -> dict[str, Stage]:
        return {name: stage for stage in self._all_stages for name in stage.writes}

    def writer_of(self, field: str) -> Stage | None:
        """The stage that writes a field; None for one of the source's."""
        return self._writers.get(field)

    def needed(self, fields: Iterable[str], *, given: Iterable[str] = ()) -> tuple[Stage, ...]:
        """The stages that these fields are computed by, in order, when the fields `given` are at hand."""
        have, todo, found = set(given), list(fields), set()
        while todo:
            stage = self.writer_of(name := todo.pop())
            if stage is not None and name not in have and stage.name not in found:
                found.add(stage.name)
                todo += stage.reads
        return tuple(stage for stage in self.stages if stage.name in found)

    def raw_needed(self, fields: Iterable[str], *, given: Iterable[str] = ()) -> tuple[str, ...]:
        """The source's fields that these are computed from, or are."""
        given, fields = set(given), list(fields)
        read = {name for stage in self.needed(fields, given=given) for name in stage.reads}
        wanted = ({*fields} | read) - given
        return tuple(name for name in self.source.fields if name in wanted and name not in self._writers)

    # the line

    @cached_property
    def why_not_frozen(self) -> dict[str, str]:
        """Why a stage lies above the line, for each that does, by what is declared (see `fl.audit`)."""
        cause_of: dict[str, str] = {}  # of the fields that stages above the line write
        why: dict[str, str] = {}
        for stage in self.stages:
            picked = {n: f"{n!r} is picked at random" for n in stage.reads if self._sees_picked(stage, n)}
            causes = picked | cause_of  # a field of a random stage moves whether or not it is picked later
            moving = [name for name in stage.reads if name in causes]
            if stage.random:
                why[stage.name] = cause = f"stage {stage.name!r} is random"
            elif moving:
                cause = causes[moving[0]]
                why[stage.name] = f"it reads {moving[0]!r}, and {cause}"
            else:
                continue
            cause_of |= dict.fromkeys(stage.writes, cause)
        return why

    @cached_property
    def _picked_at(self) -> dict[str, int]:
        """Where in the pipeline each picked field is picked: stages after that read the picked entries."""
        return {
            name: place
            for place, step in enumerate(self.steps)
            if isinstance(step, Pick)
            for name in step.fields
        }

    def _sees_picked(self, stage: Stage, field: str) -> bool:
        """Whether a stage comes after a pick of this field, and so reads the picked entries."""
        picked = self._picked_at.get(field)
        return picked is not None and self.steps.index(stage) > picked

    @property
    def frozen(self) -> tuple[Stage, ...]:
        """The stages below the line."""
        return tuple(stage for stage in self.stages if stage.name not in self.why_not_frozen)

    def is_frozen(self, field: str) -> bool:
        """Whether a field is the same in every epoch."""
        stage = self.writer_of(field)
        return stage is None or stage.name not in self.why_not_frozen

    @property
    def cut(self) -> tuple[str, ...]:
        """The last frozen fields: those that leave the pipeline, or that something above the line reads."""
        above = [stage for stage in self.stages if stage.name in self.why_not_frozen]
        read = {name for stage in above for name in stage.reads}
        picked = {name for pick in self.picks for name in pick.fields}
        wanted = {*self.outputs} | read | picked
        return tuple(name for name in self.fields if name in wanted and self.is_frozen(name))

    def with_stages(self, change: dict[str, Stage]) -> Pipeline:
        """The same pipeline with other stages under the same names."""
        steps = [change.get(s.name, s) if isinstance(s, Stage) else s for s in self.steps]
        return Pipeline(self.source, *steps, outputs=self.outputs)

    def listed_again(self) -> Pipeline:
        """The same pipeline, whose source will be listed anew: files come and go."""
        return Pipeline(self.source.unlisted(), *self.steps, outputs=self.outputs)

    def __repr__(self) -> str:
        return f"<Pipeline {self.source.what}: {' → '.join(stage.name for stage in self.stages)}>"


def _strangers(source: object, steps: Iterable[object]) -> list[str]:
    wrong = [f"{type(s).__name__} is no Stage or Pick" for s in steps if not isinstance(s, Stage | Pick)]
    if not isinstance(source, Source):
        wrong.insert(0, f"it begins with {type(source).__name__}; expected a Source, as Source.files(…)")
    return wrong


def _ordered(stages: Sequence[Stage]) -> tuple[list[Stage], list[Stage]]:
    """Stages in an order in which each can run, and those that wait for each other for ever."""
    done: list[Stage] = []
    rest = list(stages)
    while True:
        waiting_for = {name for stage in rest for name in stage.writes}
        ready = [stage for stage in rest if not waiting_for & {*stage.reads}]
        if not ready:
            return done, rest
        done.append(ready[0])  # one at a time: what is independent keeps the order in which it was written
        rest.remove(ready[0])


def _problems(pipeline: Pipeline, *, explicit: bool) -> list[str]:
    stages, fields = pipeline._all_stages, pipeline.fields
    found = []
    names = [stage.name for stage in stages]
    found += [f"two stages are called {name!r}" for name in sorted({n for n in names if names.count(n) > 1})]
    for field in fields:
        writers = [f"stage {stage.name!r}" for stage in stages if field in stage.writes]
        writers += [f"the source ({pipeline.source.what})"] * (field in pipeline.source.fields)
        if len(writers) > 1:
            found.append(f"field {field!r} is written twice: by {' and by '.join(writers)}")
    for stage in stages:
        found += [
            f"stage {stage.name!r} reads {name!r}, which nothing writes{nearest(name, fields)}; "
            f"there are {', '.join(fields)}"
            for name in stage.reads
            if name not in fields
        ]
    for what, wanted in (
        ("Pick reads", [n for p in pipeline.picks for n in p.fields]),
        ("outputs name", pipeline.outputs),
    ):
        found += [
            f"{what} {n!r}, which nothing writes{nearest(n, fields)}" for n in wanted if n not in fields
        ]
    picked = [name for pick in pipeline.picks for name in pick.fields]
    found += [
        f"{n!r} is picked twice; one Pick a field" for n in sorted({n for n in picked if picked.count(n) > 1})
    ]
    circle = _ordered(stages)[1]
    if circle:
        told = "; ".join(
            f"{s.name!r} reads {', '.join(s.reads)} and writes {', '.join(s.writes)}" for s in circle
        )
        found.append(f"these stages wait for each other in a circle: {told}")
    else:
        found += [
            f"Pick reads {name!r}, which differs from epoch to epoch: only what a store has can be read in "
            f"part. Choose in the stage itself"
            for name in picked
            if name in fields and not pipeline.is_frozen(name)
        ]
    if explicit and not circle:
        wanted_by = [*pipeline.outputs, *(n for p in pipeline.picks for n in p.fields)]
        used = {stage.name for stage in pipeline.needed(wanted_by)}
        found += [
            f"stage {stage.name!r} is not used: nothing that is in outputs ({', '.join(pipeline.outputs)}) "
            f"is computed from {', '.join(stage.writes)}"
            for stage in stages
            if stage.name not in used
        ]
    return found
