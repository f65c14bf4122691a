"""A workload whose source has only a few samples, each as often as it takes: what a run is rehearsed with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from frostline.pipeline import Pipeline
from frostline.source import Raw, Source
from frostline.workload import Workload


def key_of(i: int) -> str:
    """The key of the i-th row: the samples' own would stand there more than once."""
    return f"{i:08d}"


@dataclass(frozen=True)
class _Again:
    source: Source
    places: tuple[int, ...]
    rows: int

    def find(self) -> _Again:
        return self

    @cached_property
    def keys(self) -> list[str]:
        return [key_of(i) for i in range(self.rows)]

    def raw(self, i: int) -> Raw:
        return self.source.raw(self.places[i % len(self.places)])


def sampled(pipeline: Pipeline, places: Sequence[int], rows: int) -> Workload:
    """The same stages for so many rows, which are these samples over and over."""
    source = pipeline.source
    again = Source(
        f"{len(places)} samples of {source.what}",
        source.fields,
        _Again(source, tuple(places), rows),
        source.key,
        source.paths,
        source.cheap,
        source.version,
    )
    return Workload(Pipeline(again, *pipeline.steps, outputs=pipeline.outputs), run=_unused)


def _unused() -> None:
    """What the rehearsed workload would run: nothing."""
