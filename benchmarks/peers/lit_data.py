"""LitData: chunks of its optimised format, StreamingDataset and its StreamingDataLoader."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from .base import OWN_LOADER, Layout, Mapped, Peer, worker_options

CHUNK_BYTES = 64 << 20
"""What its README uses."""


def prepare(folder: Path, rows: Iterable[Tensor], layout: Layout) -> None:
    """Its Cache is what `litdata.optimize` drives; used directly it needs no second process."""
    from litdata.streaming import Cache

    cache = Cache(str(folder / "chunks"), chunk_bytes=CHUNK_BYTES)
    for i, row in enumerate(rows):
        cache[i] = row.view(layout.stored_dtype)
    cache.done()
    cache.merge()


def loader(folder: Path, layout: Layout, batch_size: int, workers: int) -> Iterable[Tensor]:
    from litdata import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(str(folder / "chunks"), shuffle=True, drop_last=False)
    options = worker_options(workers)
    batches = StreamingDataLoader(dataset, batch_size=batch_size, num_workers=workers, **options)
    return Mapped(batches, layout.from_stored)


PEERS = [
    Peer(
        name="litdata", format="litdata", package="litdata", module="litdata", workers=2, way=OWN_LOADER,
        write=prepare, open=loader,
        settings="64 MB chunks, StreamingDataset(shuffle=True: chunks, then rows within them), "
        "StreamingDataLoader, 2 persistent workers, prefetch 2; bf16 as int16",
    )
]  # fmt: skip
