"""The first samples of a pipeline: what its frozen stages read, and a batch to train on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from frostline import keyed
from frostline.batch import Batch, Ragged
from frostline.draws import Draws
from frostline.errors import StageFailed, UsageError
from frostline.execution import Block, Execution, Ready
from frostline.execution.columns import Column, as_value, stackable, taken
from frostline.pipeline import Pipeline
from frostline.stage import Stage

_TRIED = 4
"""Times as many samples are tried as are asked for, when the first ones fail."""
MOST_TRIED = 256
"""Samples that are tried when none of those worked."""


class NoneWorked(StageFailed):
    """Of the samples that were tried, none came through. failed: why, for each."""

    def __init__(self, failed: Mapping[str, StageFailed]) -> None:
        first = next(iter(failed.values()))
        super().__init__(first.stage, first.keys, first.reason)
        self.failed = dict(failed)

    def __reduce__(self) -> tuple[Any, ...]:
        return (NoneWorked, (self.failed,))


def frozen_values(pipeline: Pipeline, samples: int, device: torch.device, tries: int = MOST_TRIED) -> Block:
    """All fields of frozen stages and what they read, for the first samples that come through.

    tries: samples that are tried when none comes through; `_TRIED` times `samples` at least.
    """
    stages = pipeline.frozen
    wanted = [name for stage in stages for name in (*stage.reads, *stage.writes)]
    wanted += [*pipeline.cut, *(n for n in pipeline.source.fields if n != pipeline.source.key)]
    fields = tuple(dict.fromkeys(wanted))
    total = len(pipeline.source)
    if not total:
        raise UsageError(f"fl.audit needs samples to look at, and {pipeline.source.what} has none.")
    execution = Execution(pipeline, fields, device=device)
    block = execution.finish(execution.begin(range(min(samples, total))))
    if len(block.keys) < min(samples, total) and total > samples:
        again = execution.finish(execution.begin(range(min(_TRIED * samples, total))))
        block = _first(again, samples)
    tried, most = len(block.keys) + len(block.failed), min(tries, total)
    while not block.keys and tried < most:
        more = execution.finish(execution.begin(range(tried, min(tried + _TRIED * samples, most))))
        tried += len(more.keys) + len(more.failed)
        block = Block(more.keys, more.columns, block.failed | more.failed)
    if not block.keys:
        raise NoneWorked(block.failed)
    return _first(block, samples) if len(block.keys) > samples else block


def _first(block: Block, samples: int) -> Block:
    few = range(min(samples, len(block.keys)))
    columns = {name: taken(column, few) for name, column in block.columns.items()}
    return Block([block.keys[i] for i in few], columns, block.failed)


def training_batch(pipeline: Pipeline, block: Block, device: torch.device) -> Batch:
    """The fields that leave the pipeline in epoch 0, as a feed would give them."""
    columns = dict(block.columns)
    picked = _picked(pipeline, block.keys, columns)
    for stage in pipeline.needed(pipeline.outputs, given=columns):
        seen = columns | {name: column for name, column in picked.items() if _after(pipeline, stage, name)}
        columns |= _random(stage, block.keys, seen, device)
        picked |= _picked(pipeline, block.keys, {n: columns[n] for n in stage.writes})
    final = columns | picked
    ragged = {n for n in final if n not in picked and _is_ragged(pipeline, n)}
    fields = {n: collated(final[n], device, ragged=n in ragged) for n in pipeline.outputs if n in final}
    return Batch(fields, block.keys)


def _is_ragged(pipeline: Pipeline, field: str) -> bool:
    """Declared so: these few rows may all have one length."""
    writer = pipeline.writer_of(field)
    spec = writer.fields.get(field) if writer is not None else None
    return spec is not None and spec.ragged


def _after(pipeline: Pipeline, stage: Stage, field: str) -> bool:
    """Whether a stage stands behind the Pick of a field, and so reads the picked entries."""
    place = next(i for i, step in enumerate(pipeline.steps) if step is stage)
    return any(field in pick.fields and pipeline.steps.index(pick) < place for pick in pipeline.picks)


def _picked(pipeline: Pipeline, keys: Sequence[str], columns: Mapping[str, Column]) -> dict[str, Column]:
    found: dict[str, Column] = {}
    for pick in pipeline.picks:
        names = [name for name in pick.fields if name in columns]
        if names:
            rows = pick.indices(0, 0, keys, [len(value) for value in columns[names[0]]], train=True)
            for name in names:
                found[name] = [value[rows[i]] for i, value in enumerate(columns[name])]
    return found


def _random(
    stage: Stage, keys: Sequence[str], columns: Mapping[str, Column], device: torch.device
) -> dict[str, Column]:
    """What a stage above the line gives for these samples, drawn as in epoch 0 of seed 0."""
    ready = Ready(stage.with_options(compile=False), device)
    given = [columns[name] for name in stage.reads]
    if stage.chunk:
        draws = partial(Draws, 0, 0, stage=stage.name, device=ready.device)
        return ready.many(keys, given, draws if stage.random else None)
    rng = (lambda one: keyed.generator(0, 0, one[0], stage.name)) if stage.random else None
    rows = [ready.one(key, [column[i] for column in given], rng) for i, key in enumerate(keys)]
    return {name: [row[name] for row in rows] for name in stage.writes}


def collated(column: Column, device: torch.device, *, ragged: bool = False) -> Any:
    """A column as a feed delivers it: one tensor, a Ragged, or a list."""
    if not isinstance(column, Tensor) and not stackable(column):
        return column
    rows = [torch.as_tensor(as_value(row)).to(device) for row in column]
    # inference tensors cannot take part in training: a copy made out here can
    rows = [row.clone() for row in rows]
    if len({row.shape for row in rows}) == 1 and not ragged:
        return torch.stack(rows)
    if len({row.shape[1:] for row in rows}) > 1:
        return rows
    ends = torch.tensor([0, *(len(row) for row in rows)], device=device).cumsum(0)
    return Ragged(torch.cat(rows), ends)


def left_out(failed: Mapping[str, StageFailed], stage: str) -> list[str]:
    """A note about samples that this stage could not take."""
    mine = [error for error in failed.values() if error.stage == stage]
    if not mine:
        return []
    told = "1 sample was" if len(mine) == 1 else f"{len(mine)} samples were"
    return [f"{told} left out, failing with: {mine[0].reason}"]
