"""A freeze rehearsed: the samples over and over, as many rows as there is time for, into a store of its own.

What a freeze takes beside its stages (looking at the inputs, auditing, handing rows from thread to thread,
checksums, index, commits) is tens of microseconds a row: nothing beside a network, most of it for numbers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from frostline.cut.sampled import sampled
from frostline.cut.walk import Walk
from frostline.freezer import freeze
from frostline.pipeline import Pipeline
from frostline.source import Source
from frostline.stage import Stage

_SECONDS = 1.0
"""What the stages of the rows may take together, and what auditing them may."""
_BYTES = 256 << 20
_FEWEST, _MOST = 512, 16384
"""Rows: of fewer, the stages are nearly all that a freeze takes."""
_START_ROWS = 64


@dataclass(frozen=True)
class Rehearsed:
    """What a freeze takes, in seconds: before and after its rows, and for each of them."""

    start: float
    each: float

    def seconds(self, rows: int) -> float:
        return self.start + self.each * rows


@dataclass(frozen=True)
class Freezing:
    """What is known of a freeze before it is tried."""

    sample_s: float
    """What its stages take for a row."""
    audit_s: float
    """And for the audit."""
    total: int
    """Samples to freeze."""


def rehearsed(
    walk: Walk, cut: Sequence[str], folder: Path, freezing: Freezing, row_bytes: float
) -> Rehearsed | None:
    """A freeze of this cut, or None where the stages take so long that they are all that counts."""
    most = min(_MOST, max(_FEWEST, freezing.total))
    rows = int(min(most, _BYTES / max(row_bytes, 1.0), _SECONDS / max(freezing.sample_s, 1e-7)))
    if rows < _FEWEST or freezing.audit_s > _SECONDS:
        return None
    few = _rows_s(walk, cut, folder / "few", _START_ROWS)
    many = _rows_s(walk, cut, folder / "many", rows)
    each = max(0.0, many - few) / (rows - _START_ROWS)
    return Rehearsed(max(0.0, few - each * _START_ROWS), each)


def _rows_s(walk: Walk, cut: Sequence[str], path: Path, rows: int) -> float:
    data = next(iter(sampled(walk.pipeline, walk.places, rows).pipelines.values()))
    return _freeze_s(data, cut, path, str(walk.device), walk.n_workers)


def start_s(folder: Path) -> float:
    """What any freeze takes before and after its rows: measured on one of numbers."""
    rows = [{"key": str(i), "x": float(i)} for i in range(_START_ROWS)]
    data = Pipeline(Source.table(rows), Stage("y", abs, reads="x"))
    return _freeze_s(data, ["y"], folder / "start", "cpu", 1)


def _freeze_s(data: Pipeline, cut: Sequence[str], path: Path, device: str, n: int) -> float:
    began = time.perf_counter()
    freeze(data, path, cut=cut, device=device, workers="threads", n_workers=n, quiet=True)
    return time.perf_counter() - began
