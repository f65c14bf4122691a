"""What a freeze will take: time, bytes and free disk, measured on its first samples."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from frostline.errors import StageFailed, StoreFull
from frostline.execution import Block, Execution, together
from frostline.execution.columns import Column
from frostline.freezer import schema
from frostline.freezer.stream import column_bytes, keep_to, usual_kinds
from frostline.freezer.workers import Given

_MARGIN = 1.02
"""Checksums, index and headers on top of the rows' bytes."""
_SPARE = 256 << 20
"""Bytes that stay free."""
_TRIED = 4
"""Blocks that are tried when samples fail."""


@dataclass(frozen=True)
class Probe:
    """The first samples, computed, and how long that took."""

    block: Block
    sample_s: float
    """Stages of single samples: seconds a sample, in one thread."""
    chunk_s: float
    """Stages that take chunks: seconds a sample."""
    sample_bytes: int
    """What a sample brings from the first to the second."""
    kinds: dict[str, str]
    """Shape and type of what comes to a stage that takes several samples a call."""
    sample: dict[str, Any] = field(default_factory=dict)
    """One sample, as it comes to these stages."""
    waiting: float = 0.0
    """Share of `sample_s` in which its thread used no core: it waited for a disk or a network."""

    def none_worked(self) -> str:
        return none_worked(self.block.failed)


def none_worked(failed: Mapping[str, StageFailed]) -> str:
    """What is said when all samples that were tried failed, with the first ten reasons."""
    reasons = "".join(f"\n  - {e}" for e in [*failed.values()][:10])
    return f"None of the first {len(failed):,} samples could be computed; nothing was written:{reasons}"


@dataclass(frozen=True)
class Forecast:
    """Seconds and bytes for what is to be done."""

    samples: int
    seconds: float
    bytes: int
    free: int
    """Bytes free where the store will lie."""

    def refuse_if_full(self, root: Path) -> None:
        if self.bytes + _SPARE > self.free:
            raise StoreFull(
                f"Freezing into {root} needs about {self.bytes / 1e9:,.2f} GB for {self.samples:,} samples, "
                f"and {self.free / 1e9:,.2f} GB are free there. Free some, give --out another disk, a "
                f"smaller codec (--codec), another cut (--cut), or fewer samples (--limit)."
            )


def probe(execution: Execution, places: Sequence[int], given: Given | None, tries: int = 0) -> Probe:
    """Compute the first samples that work; those that fail are passed over here, and met again later.

    tries: how many are tried when none works; four blocks at least.
    """
    most = min(len(places), max(tries, _TRIED * execution.block_size))
    failed: dict[str, StageFailed] = {}
    tried = 0
    while True:
        spent = time.thread_time()
        begun, sample_s, n = _begun(execution, places[tried:most], given)
        waiting = 1 - (time.thread_time() - spent) / max(sample_s * n, 1e-9)
        tried += n
        kinds = usual_kinds(execution, begun)
        keep_to(kinds, begun)
        finished = execution.finish(begun)  # loads, compiles and warms up
        if bad := schema.unstorable_in(finished):
            finished.leave_out(bad)
        failed |= finished.failed
        if finished.keys or tried >= most:
            break
    finished.failed = failed
    if not finished.keys:
        return Probe(finished, sample_s, 0.0, 1, kinds)
    _synchronize(execution.device)
    began = time.perf_counter()
    if execution.late:
        execution.finish(begun)
        _synchronize(execution.device)
    chunk_s = (time.perf_counter() - began) / len(begun.keys)
    bytes_ = sum(map(column_bytes, begun.columns.values())) // len(begun.keys)
    sample = {name: column[0] for name, column in begun.columns.items()}
    return Probe(_on_cpu(finished), sample_s, chunk_s, bytes_, kinds, sample, max(0.0, waiting))


def _begun(execution: Execution, places: Sequence[int], given: Given | None) -> tuple[Block, float, int]:
    """A block of samples through the stages of single samples, seconds for each, and how many were tried."""
    size = execution.block_size
    blocks: list[Block] = []
    began, tried, good = time.perf_counter(), 0, 0
    while good < size and tried < min(len(places), _TRIED * size):
        some = places[tried : tried + max(1, size - good)]
        keys = [execution.pipeline.source.keys[i] for i in some]
        blocks.append(execution.begin(some, given(keys) if given else None))
        tried += len(some)
        good += len(blocks[-1].keys)
    return together(blocks), (time.perf_counter() - began) / max(1, tried), tried


def _on_cpu(block: Block) -> Block:
    columns: dict[str, Column] = {
        name: column.cpu() if isinstance(column, torch.Tensor) else column
        for name, column in block.columns.items()
    }
    return Block(block.keys, columns, block.failed)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def forecast(
    probed: Probe | None,
    samples: int,
    workers: int,
    device: torch.device,
    row_bytes: Mapping[str, int],
    root: Path,
) -> Forecast:
    """From the first samples: workers and a GPU work at the same time, workers and a CPU share its cores."""
    sample_s, chunk_s = (probed.sample_s / max(1, workers), probed.chunk_s) if probed else (0.0, 0.0)
    each = max(sample_s, chunk_s) if device.type != "cpu" else sample_s + chunk_s
    size = int(sum(row_bytes.values()) * samples * _MARGIN)
    place = next(p for p in (root, *root.absolute().parents) if p.exists())
    return Forecast(samples, each * samples, size, shutil.disk_usage(place).free)
