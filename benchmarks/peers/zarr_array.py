"""zarr 3: one chunk a row, uncompressed; small rows in shards: a file for each would test the file system."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .base import IN_PROCESS, OWN_LOADER, InProcess, Layout, Peer, by_batch

SMALL_ROW_BYTES = 64 << 10
SMALL_ROW_CHUNK = 16
"""Rows. Chunks of 1 to 256 rows, sharded or not, all gave 1,100 to 3,700 rows/s on 20,000 small rows."""
SHARD_ROWS = 4096
WRITE_ROWS = 4096


def prepare(folder: Path, rows: Iterable[Tensor], layout: Layout) -> None:
    import zarr

    small = layout.row_bytes < SMALL_ROW_BYTES
    out: Any = zarr.create_array(
        str(folder / "rows.zarr"), shape=(layout.n, *layout.shape), dtype=layout.numpy_dtype,
        chunks=(SMALL_ROW_CHUNK if small else 1, *layout.shape),
        shards=(SHARD_ROWS, *layout.shape) if small else None, compressors=None, fill_value=0, overwrite=True,
    )  # fmt: skip
    held: list[Tensor] = []
    for i, row in enumerate(rows):
        held.append(row)
        if len(held) == (WRITE_ROWS if small else 1) or i == layout.n - 1:
            out[i + 1 - len(held) : i + 1] = layout.to_numpy(torch.stack(held))
            held = []


class Rows:
    """Opened where it is read: zarr's event loop does not survive a fork."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        self.path = str(folder / "rows.zarr")
        self.layout = layout
        self.array: Any = None

    def __len__(self) -> int:
        return self.layout.n

    def __getitem__(self, rows: list[int]) -> Tensor:
        import zarr

        if self.array is None:
            self.array = zarr.open_array(self.path, mode="r")
        if self.layout.row_bytes < SMALL_ROW_BYTES:
            return self.layout.from_stored(torch.from_numpy(self.array.oindex[rows]))
        # oindex is slow on large chunks: 25-27 rows/s in one process, 53 with whole chunks (busy machine)
        out = torch.empty((len(rows), *self.layout.shape), dtype=self.layout.stored_dtype)
        for at, row in enumerate(rows):
            out[at] = torch.from_numpy(self.array[row])
        return self.layout.from_stored(out)


def loader(folder: Path, layout: Layout, batch_size: int, workers: int) -> Iterable[Tensor]:
    rows = Rows(folder, layout)
    if workers:
        return by_batch(rows, batch_size, workers)
    return InProcess(layout.n, batch_size, lambda picked: rows[picked.tolist()])


PEERS = [
    Peer(
        name=f"zarr-w{workers}", format="zarr", package="zarr", module="zarr", workers=workers,
        way=OWN_LOADER if workers else IN_PROCESS, write=prepare, open=loader,
        settings="v3, one uncompressed chunk a row (small rows: chunks of 16 in shards of 4,096), one read a "
        "row (small ones: oindex), " + how + "; bf16 as int16",
    )
    for workers, how in (
        (0, "one process (its own threads)"),
        (2, "DataLoader + BatchSampler, 2 persistent workers, prefetch 2"),
    )
]  # fmt: skip
