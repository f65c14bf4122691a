"""Rows of one batch on their way, and what a stage sees of them: whole or picked, as a store gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from frostline.errors import StageFailed, UsageError
from frostline.execution.columns import Column
from frostline.execution.early import SOURCE
from frostline.stage import Pick, Stage
from frostline.store import Field
from frostline.store.field import TEXT_LIKE
from frostline.supply.layout import Layout
from frostline.supply.values import Kind, collated, column_as_stored, moved, rows_of

_ANYTHING = Field((), "json")
"""How a store holds a field of texts, numbers and the like in turn: none of them becomes a tensor."""


@dataclass
class Work:
    """Rows of one batch on their way. fed: as the store gave them; exact: as their stage returned them."""

    names: list[str] | Callable[[], list[str]]
    epoch: int
    fed: dict[str, Any] = field(default_factory=dict)
    exact: dict[str, Column] = field(default_factory=dict)
    picked: dict[str, Column] = field(default_factory=dict)
    done: dict[str, Any] = field(default_factory=dict)
    places: Sequence[int] | None = None
    """Where the samples stand in the source, when that is known."""
    hidden: bool = False
    """One row that stands for none: it shows the shapes of a share without rows."""

    @cached_property
    def keys(self) -> list[str]:
        """Read when they are first asked for: where nothing is computed, nobody needs them."""
        return self.names() if callable(self.names) else self.names

    def part(self, start: int, stop: int) -> Work:
        cut = slice(start, stop)
        fed, exact, picked = (
            {name: column[cut] for name, column in columns.items()}
            for columns in (self.fed, self.exact, self.picked)
        )
        places = None if self.places is None else self.places[cut]
        return Work(self.keys[cut], self.epoch, fed, exact, picked, places=places)


class View:
    """What stages and batches see of rows.

    kinds: how fields that the pipeline does not declare would be stored (only asked without a store).
    """

    def __init__(self, layout: Layout, *, train: bool, pick_seed: int) -> None:
        self.kinds: Mapping[str, Kind | None] = {}
        self._layout, self._pipeline = layout, layout.pipeline
        self._train, self._pick_seed = train, pick_seed

    def input(self, work: Work, stage: Stage, name: str) -> Column:
        """What a stage reads. Below the line: the values that it got when it was frozen."""
        if not self._layout.is_above(stage):
            return work.exact[name] if name in work.exact else rows_of(work.fed[name])
        pick = self._layout.pick_of(name) if self._layout.reads_picked(stage, name) else None
        column = self._line(work, name) if pick is None else self._picked(work, pick, name)
        if not stage.chunk:
            column = on_host(column)
        # a frozen value may be memory of somebody's data set, and a stage may work in place
        lent = pick is None and name not in work.fed and self._pipeline.is_frozen(name)
        return _copied(column) if lent or self._layout.is_shared(name) else column

    def output(self, work: Work, name: str, *, pin: bool) -> Any:
        """A field as it stands in the batch: one tensor, a Ragged, or a list."""
        writer, pick = self._pipeline.writer_of(name), self._layout.pick_of(name)
        stage = SOURCE if writer is None else writer.name
        if pick is not None:
            column = self._picked(work, pick, name)
            keys = () if isinstance(column, Tensor) else work.keys  # to name the row that does not fit
            return collated(name, stage, keys, column, None, pin=pin)
        if name in work.fed:
            return collated(name, stage, (), work.fed[name], "list", pin=pin)  # a feed's lists are texts
        return collated(name, stage, work.keys, self._line(work, name), self._kind(name), pin=pin)

    def _kind(self, name: str) -> Kind | None:
        writer = self._pipeline.writer_of(name)
        declared = writer.fields.get(name) if writer is not None else None
        if declared is None:
            return self.kinds.get(name)
        if declared.dtype in TEXT_LIKE:
            return "list"
        return "ragged" if declared.ragged else None

    def _line(self, work: Work, name: str) -> Column:
        """A field as a store gives it, whether or not it comes from one."""
        if name in work.fed:
            return rows_of(work.fed[name])
        if not self._pipeline.is_frozen(name):
            return work.exact[name]
        writer = self._pipeline.writer_of(name)
        spec = writer.fields.get(name) if writer is not None else None
        if spec is None and self.kinds.get(name) == "list":
            spec = _ANYTHING
        return column_as_stored(name, work.keys, work.exact[name], spec)

    def _picked(self, work: Work, pick: Pick, name: str) -> Column:
        """The entries of a field that its Pick chooses; made for all fields of the Pick at once."""
        if name not in work.picked:
            there = [n for n in pick.fields if n in work.fed or n in work.exact]
            columns = {n: self._line(work, n) for n in there}
            lengths = [
                [_length(n, k, v) for k, v in zip(work.keys, c, strict=True)] for n, c in columns.items()
            ]
            if any(other != lengths[0] for other in lengths[1:]):
                raise UsageError(
                    f"Pick{pick.fields}: these fields differ in length in some rows; pick them one by one."
                )
            rows = pick.indices(self._pick_seed, work.epoch, work.keys, lengths[0], self._train)
            work.picked |= {n: _chosen(column, torch.from_numpy(rows)) for n, column in columns.items()}
        return work.picked[name]


def _length(name: str, key: str, value: Any) -> int:
    if not isinstance(value, Tensor) or not value.ndim:
        raise StageFailed(name, [key], f"{name!r} has no first dimension to pick from")
    return len(value)


def _chosen(column: Column, chosen: Tensor) -> Column:
    """[rows, n] of the entries of every row."""
    if isinstance(column, Tensor):
        at = moved(chosen, column.device)
        return column[torch.arange(len(at), device=column.device)[:, None], at]
    return [value[at.to(value.device)] for value, at in zip(column, chosen, strict=True)]


def on_host(column: Column) -> Column:
    """Stages of single samples run on the CPU."""
    if isinstance(column, Tensor):
        return column.cpu()
    return [value.cpu() if isinstance(value, Tensor) else value for value in column]


def _copied(column: Column) -> Column:
    if isinstance(column, Tensor):
        return column.clone()
    return [value.clone() if isinstance(value, Tensor) else value for value in column]
