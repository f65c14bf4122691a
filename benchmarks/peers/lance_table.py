"""Lance: a fixed-size-list column, random rows by `take`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .base import IN_PROCESS, OWN_LOADER, InProcess, Layout, Peer, by_batch

_WRITE_BATCH_BYTES = 32 << 20


def _arrow_batches(rows: Iterable[Tensor], layout: Layout, schema: Any) -> Iterator[Any]:
    import pyarrow as pa

    per_batch = max(1, _WRITE_BATCH_BYTES // layout.row_bytes)
    held: list[Tensor] = []
    for i, row in enumerate(rows):
        held.append(row)
        if len(held) == per_batch or i == layout.n - 1:
            values = pa.array(layout.to_numpy(torch.stack(held)).reshape(-1))
            column = pa.FixedSizeListArray.from_arrays(values, prod(layout.shape))
            yield pa.record_batch([column], schema=schema)
            held = []


def prepare(folder: Path, rows: Iterable[Tensor], layout: Layout) -> None:
    import lance
    import pyarrow as pa

    value = pa.from_numpy_dtype(layout.numpy_dtype)
    # Random mantissas do not compress: say so, or its default would spend time trying.
    told = {"lance-encoding:compression": "none"}
    schema = pa.schema([pa.field("x", pa.list_(value, prod(layout.shape)), nullable=False, metadata=told)])
    reader = pa.RecordBatchReader.from_batches(schema, _arrow_batches(rows, layout, schema))
    lance.write_dataset(reader, str(folder / "rows.lance"), schema=schema)


class Rows:
    """Opened where it is read: Lance's threads do not survive a fork."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        self.path = str(folder / "rows.lance")
        self.layout = layout
        self.table: Any = None

    def __len__(self) -> int:
        return self.layout.n

    def __getitem__(self, rows: list[int]) -> Tensor:
        import lance

        if self.table is None:
            self.table = lance.dataset(self.path)
        column = self.table.take(rows, columns=["x"]).column("x").combine_chunks()
        values = torch.from_numpy(column.flatten().to_numpy())
        return self.layout.from_stored(values.view(-1, *self.layout.shape))


def loader(folder: Path, layout: Layout, batch_size: int, workers: int) -> Iterable[Tensor]:
    rows = Rows(folder, layout)
    if workers:
        return by_batch(rows, batch_size, workers, multiprocessing_context="spawn")
    return InProcess(layout.n, batch_size, lambda picked: rows[picked.tolist()])


PEERS = [
    Peer(
        name=f"lance-w{workers}", format="lance", package="pylance", module="lance", workers=workers,
        way=OWN_LOADER if workers else IN_PROCESS, write=prepare, open=loader,
        settings="fixed-size-list column, no compression, take(rows) a batch, zero-copy to torch, " + how
        + "; bf16 as int16",
    )
    for workers, how in (
        (0, "one process (its own reader threads)"),
        (2, "DataLoader + BatchSampler, 2 persistent spawned workers, prefetch 2"),
    )
]  # fmt: skip
