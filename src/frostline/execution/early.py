"""The part of a pipeline that works on single samples: threads and worker processes run it ahead."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from frostline.errors import StageFailed
from frostline.execution.call import Ready, described
from frostline.execution.columns import Column, joined, taken
from frostline.source import Source
from frostline.stage import Stage

Values = dict[str, Any]
SOURCE = "source"
"""What a failure names as its stage when the raw fields of a sample could not be had."""


@dataclass
class Block:
    """Fields of the samples that came through, and why others did not."""

    keys: list[str]
    columns: dict[str, Column]
    failed: dict[str, StageFailed] = field(default_factory=dict)

    def leave_out(self, bad: Mapping[str, StageFailed]) -> None:
        self.failed |= bad
        kept = [i for i, key in enumerate(self.keys) if key not in bad]
        self.keys = [self.keys[i] for i in kept]
        self.columns = {name: taken(column, kept) for name, column in self.columns.items()}


def together(blocks: Sequence[Block]) -> Block:
    """Several blocks as one, in their order."""
    if len(blocks) == 1:
        return blocks[0]
    full = [block for block in blocks if block.keys]
    names = full[0].columns if full else {}
    columns = {name: joined([block.columns[name] for block in full]) for name in names}
    failed = {key: error for block in blocks for key, error in block.failed.items()}
    return Block([key for block in full for key in block.keys], columns, failed)


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch computes single samples with one thread: there is a worker a core, and bits must not differ."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Loaded:
    """Stages that are loaded at their first use, by whichever thread comes first."""

    def __init__(self, stages: Sequence[Stage], device: torch.device) -> None:
        self._stages = {stage.name: stage for stage in stages}
        self._device = device
        self._ready: dict[str, Ready] = {}
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> Ready:
        if name not in self._ready:
            with self._lock:
                if name not in self._ready:
                    self._ready[name] = Ready(self._stages[name], self._device)
        return self._ready[name]


class Early:
    """Raw fields and the stages of single samples, for blocks of samples.

    between: the fields that go on from here.
    """

    def __init__(
        self, source: Source, stages: Sequence[Stage], raw_fields: Sequence[str], between: Sequence[str]
    ) -> None:
        self.source, self.stages = source, tuple(stages)
        self.raw_fields, self.between = tuple(raw_fields), tuple(between)
        self._loaded = Loaded(self.stages, torch.device("cpu"))

    def __reduce__(self) -> tuple[Any, ...]:
        return (Early, (self.source, self.stages, self.raw_fields, self.between))

    @property
    def called(self) -> dict[str, Any]:
        """What runs here: the stages' functions by their names, and the class of a data set."""
        dataset = getattr(self.source.finder, "dataset", None)
        read = {} if dataset is None else {SOURCE: type(dataset)}
        return read | {stage.name: stage.fn for stage in self.stages}

    def raw(self, key: str, place: int) -> Values | StageFailed:
        """The raw fields that are needed of a sample, or why they could not be had."""
        if not self.raw_fields:
            return {}
        try:
            raw = self.source.raw(place)
            return {name: raw[name] for name in self.raw_fields}
        except Exception as e:  # noqa: BLE001 - anybody's data set: whatever it raises is told with the sample
            return StageFailed(SOURCE, [key], described(e))

    def block(
        self,
        keys: Sequence[str],
        raws: Sequence[Values | StageFailed],
        given: Mapping[str, Column] | None = None,
    ) -> Block:
        """Samples through the stages; given: columns of fields that are not computed."""
        rows: list[Values] = []
        good: list[int] = []
        failed: dict[str, StageFailed] = {}
        given = given or {}
        for n, (key, raw) in enumerate(zip(keys, raws, strict=True)):
            values = raw if isinstance(raw, StageFailed) else self._values(key, raw, given, n)
            if isinstance(values, StageFailed):
                failed[key] = values
            else:
                rows.append(values)
                good.append(n)
        names = self.between if rows else ()
        columns: dict[str, Column] = {n: [row[n] for row in rows] for n in names if n not in given}
        columns |= {n: given[n] if not failed else taken(given[n], good) for n in names if n in given}
        return Block([keys[n] for n in good], columns, failed)

    def _values(self, key: str, raw: Values, given: Mapping[str, Column], n: int) -> Values | StageFailed:
        values = dict(raw)
        if self.stages:
            values |= {name: column[n] for name, column in given.items()}
        try:
            for stage in self.stages:
                inputs = [values[name] for name in stage.reads]
                values |= self._loaded[stage.name].one(key, inputs)
        except StageFailed as e:
            return e
        return values
