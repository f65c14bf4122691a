"""WebDataset: tar shards read in sequence, shuffled by a buffer, batched inside the workers."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .base import OWN_LOADER, Layout, Peer, worker_options

N_SHARDS = 16
"""Enough for two workers and for a shard shuffle that means something."""
BUFFER_BYTES = 400 << 20
"""Per worker: 66 of the 6 MB rows (four batches); small rows are held to BUFFER_ROWS."""
BUFFER_ROWS = 5000


def _buffer_rows(layout: Layout) -> int:
    return max(1, min(BUFFER_BYTES // layout.row_bytes, BUFFER_ROWS))


def prepare(folder: Path, rows: Iterable[Tensor], layout: Layout) -> None:
    import webdataset

    per_shard = -(-layout.n // N_SHARDS)
    with webdataset.ShardWriter(str(folder / "%04d.tar"), maxcount=per_shard, maxsize=1e12, verbose=0) as out:
        for i, row in enumerate(rows):
            out.write({"__key__": f"{i:08d}", "x.bin": layout.to_numpy(row).tobytes()})


def _decode(sample: dict[str, Any], layout: Layout) -> Tensor:
    return torch.frombuffer(sample["x.bin"], dtype=layout.dtype).view(layout.shape)


def loader(folder: Path, layout: Layout, batch_size: int, workers: int) -> Iterable[Tensor]:
    import webdataset

    shards = sorted(str(path) for path in folder.glob("*.tar"))
    pipeline = (
        webdataset.WebDataset(shards, shardshuffle=len(shards), empty_check=False)
        .shuffle(_buffer_rows(layout))
        .map(partial(_decode, layout=layout))
        .batched(batch_size, collation_fn=torch.stack, partial=True)
    )
    loaded: Iterable[Tensor] = webdataset.WebLoader(
        pipeline, batch_size=None, num_workers=workers, **worker_options(workers)
    )
    return loaded


PEERS = [
    Peer(
        name="webdataset", format="webdataset", package="webdataset", module="webdataset", workers=2,
        way=OWN_LOADER, write=prepare, open=loader,
        settings="16 tar shards, raw bytes a row (no npy header to parse), shard shuffle + buffer of 400 MB ("
        "at most 5,000 rows) a worker: not a global shuffle; batched in the worker, WebLoader, 2 persistent "
        "workers, prefetch 2",
    )
]  # fmt: skip
