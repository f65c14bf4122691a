"""One numpy memmap of all rows: the fastest thing people build by hand.

Two forms. `memmap` is the Dataset that people write (a row at a time, default collate). `memmap-batched`
reads a whole batch by one index, which is much faster for small rows and which few people write.
`memmap-batched-w0` is also the mmap baseline for cold reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from .base import IN_PROCESS, OWN_LOADER, PICKED, InProcess, Layout, Peer, by_batch, by_row


def prepare(folder: Path, rows: Iterable[Tensor], layout: Layout) -> None:
    out = np.lib.format.open_memmap(
        folder / "rows.npy", mode="w+", dtype=layout.numpy_dtype, shape=(layout.n, *layout.shape)
    )
    for i, row in enumerate(rows):
        out[i] = layout.to_numpy(row)
    out.flush()


class Rows(Dataset[Tensor]):
    """Serves an int (that row, copied) and a list of ints (a batch, copied)."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        self.rows = np.load(folder / "rows.npy", mmap_mode="r")
        self.layout = layout

    def __len__(self) -> int:
        return self.layout.n

    def __getitem__(self, which: int | list[int]) -> Tensor:
        return self.layout.from_stored(torch.from_numpy(np.array(self.rows[which])))


def loader(folder: Path, layout: Layout, batch_size: int, workers: int) -> Iterable[Tensor]:
    return by_row(Rows(folder, layout), batch_size, workers)


def batched_loader(folder: Path, layout: Layout, batch_size: int, workers: int) -> Iterable[Tensor]:
    """In one process without the DataLoader, which would only add its per-index overhead."""
    rows = Rows(folder, layout)
    if workers:
        return by_batch(rows, batch_size, workers)

    # take, not fancy indexing: 1.7 against 1.1 million small rows/s (one short trial, busy machine)
    def read(picked: Tensor) -> Tensor:
        return layout.from_stored(torch.from_numpy(rows.rows.take(picked.numpy(), axis=0)))

    return InProcess(layout.n, batch_size, read)


def frames_loader(folder: Path, layout: Layout, batch_size: int, workers: int) -> Iterable[Tensor]:
    """8 frames of each row, straight into their place in one batch."""
    rows = Rows(folder, layout).rows

    def read(picked: Tensor) -> Tensor:
        out = np.empty((len(picked), PICKED, *layout.shape[1:]), rows.dtype)
        for at, row in enumerate(picked.tolist()):
            frames = torch.randperm(layout.shape[0])[:PICKED].sort().values.numpy()
            np.take(rows[row], frames, axis=0, out=out[at])
        return layout.from_stored(torch.from_numpy(out))

    return InProcess(layout.n, batch_size, read)


_BY_ROW = "one .npy memmap, a row at a time, DataLoader shuffle, "
_BATCHED = "one .npy memmap, a whole batch by one index, "
PEERS = [
    Peer(
        name=name, format="memmap", package="numpy", module="numpy", workers=workers,
        way=OWN_LOADER if workers else IN_PROCESS, settings=settings, write=prepare, open=opener,
    )
    for name, workers, opener, settings in (
        ("memmap-w0", 0, loader, _BY_ROW + "0 workers; bf16 as int16"),
        ("memmap-w2", 2, loader, _BY_ROW + "2 persistent workers, prefetch 2; bf16 as int16"),
        ("memmap-batched-w0", 0, batched_loader, _BATCHED + "ndarray.take in one process; bf16 as int16"),
        ("memmap-batched-w2", 2, batched_loader,
         _BATCHED + "DataLoader + BatchSampler, 2 persistent workers, prefetch 2; bf16 as int16"),
    )
]  # fmt: skip
PICKS = [
    Peer(
        name="memmap-frames", format="memmap", package="numpy", module="numpy", workers=0, way=IN_PROCESS,
        write=prepare, open=frames_loader,
        settings="one .npy memmap, np.take: 8 frames at random (sorted) into their place in the batch, "
        "one process",
    )
]  # fmt: skip
