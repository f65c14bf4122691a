"""Where a line can be drawn: for every frozen stage, whether its fields are stored or computed anew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from frostline.pipeline import Pipeline

MOST_STAGES = 10
"""The dearest so many frozen stages may be stored; the others are computed anew, which costs little."""
MOST_OPTIONS = 24
"""Of all cuts, those that save the most seconds of stages; the pipeline's own cut is always among them."""


def possible_cuts(pipeline: Pipeline, seconds: Mapping[str, float]) -> list[tuple[str, ...]]:
    """Fields to store, for each cut: none first. Every field of a cut is needed above it, and everything that
    is needed above is stored or can be computed. Raw fields that leave the pipeline come along.

    seconds: what each stage takes for a sample.

    >>> import frostline as fl
    >>> data = fl.Pipeline(
    ...     fl.Source.table([{"key": "a", "path": "a.jpg", "caption": "a cat"}]),
    ...     fl.Stage("frames", len, reads="path"),
    ...     fl.Stage("features", float, reads="frames"),
    ... )
    >>> possible_cuts(data, {"frames": 2.0, "features": 1.0})
    [(), ('caption', 'features'), ('caption', 'frames')]
    """
    frozen = sorted(pipeline.frozen, key=lambda stage: -seconds.get(stage.name, 0.0))
    storable = {stage.name for stage in frozen[:MOST_STAGES]}
    found = {_with_raw(pipeline, stored) for stored in _choices(pipeline, frozenset(pipeline.cut), storable)}
    found |= {pipeline.cut}
    found -= {()}

    def saved(cut: tuple[str, ...]) -> float:
        run = {stage.name for stage in pipeline.needed(pipeline.outputs, given=cut)}
        return sum(s for name, s in seconds.items() if name not in run)

    ranked = sorted(found, key=lambda cut: (-saved(cut), len(cut), cut))
    kept = [cut for i, cut in enumerate(ranked) if i < MOST_OPTIONS or cut == pipeline.cut]
    return [(), *kept]


def _choices(pipeline: Pipeline, wanted: frozenset[str], storable: set[str]) -> Iterator[frozenset[str]]:
    """Every set of fields of frozen stages from which `wanted` can be had, each of them needed for it."""
    # from the last stage to the first: what a later one wants is then known
    stages = [stage for stage in reversed(pipeline.stages) if pipeline.is_frozen(stage.writes[0])]
    todo: list[tuple[int, frozenset[str], frozenset[str]]] = [(0, wanted, frozenset())]
    while todo:
        place, asked, stored = todo.pop()
        while place < len(stages) and not asked & {*stages[place].writes}:
            place += 1
        if place == len(stages):
            yield stored
            continue
        stage = stages[place]
        written = asked & {*stage.writes}
        todo.append((place + 1, asked - written | {*stage.reads}, stored))
        if stage.name in storable:
            todo.append((place + 1, asked - written, stored | written))


def _with_raw(pipeline: Pipeline, stored: frozenset[str]) -> tuple[str, ...]:
    """The fields of a cut in the pipeline's order, with the raw ones that are wanted above the line. Those
    that only frozen stages read are not stored: a stage that runs again reads them at the source."""
    if not stored:
        return ()
    raw = {*pipeline.cut} & {*pipeline.source.fields}
    return tuple(name for name in pipeline.fields if name in stored or name in raw)
