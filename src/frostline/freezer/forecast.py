"""What a freeze will take: time, bytes and free disk, measured on its first samples."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from frostline.errors import StoreFull
from frostline.execution import Block, Execution, together
from frostline.execution.columns import Column
from frostline.freezer.stream import column_bytes, keep_to, usual_kinds
from frostline.freezer.workers import Given

_MARGIN = 1.02
"""Checksums, index and headers on top of the rows' bytes."""
_SPARE = 256 << 20
"""Bytes that stay free."""


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

    def none_worked(self) -> str:
        failed = self.block.failed
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


def probe(execution: Execution, places: Sequence[int], given: Given | None) -> Probe:
    """Compute the first samples that work; those that fail are passed over here, and met again later."""
    size = execution.block_size
    blocks: list[Block] = []
    began, tried = time.perf_counter(), 0
    good = 0
    while good < min(size, len(places)) and tried < len(places) and tried < 4 * size:
        some = places[tried : tried + max(1, size - good)]
        keys = [execution.pipeline.source.keys[i] for i in some]
        blocks.append(execution.begin(some, given(keys) if given else None))
        tried += len(some)
        good += len(blocks[-1].keys)
    sample_s = (time.perf_counter() - began) / max(1, tried)
    begun = together(blocks)
    kinds = usual_kinds(execution, begun)
    keep_to(kinds, begun)
    finished = execution.finish(begun)  # loads, compiles and warms up
    if not finished.keys:
        return Probe(finished, sample_s, 0.0, 1, kinds)
    _synchronize(execution.device)
    began = time.perf_counter()
    if execution.late:
        execution.finish(begun)
        _synchronize(execution.device)
    chunk_s = (time.perf_counter() - began) / len(begun.keys)
    bytes_ = sum(map(column_bytes, begun.columns.values())) // len(begun.keys)
    return Probe(_on_cpu(finished), sample_s, chunk_s, bytes_, kinds)


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
