"""tensordict's memory-mapped TensorDict, indexed by a whole batch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from .base import IN_PROCESS, OWN_LOADER, InProcess, Layout, Mapped, Peer, by_batch


def prepare(folder: Path, rows: Iterable[Tensor], layout: Layout) -> None:
    from tensordict import MemoryMappedTensor, TensorDict

    path = str(folder / "x.memmap")
    out = MemoryMappedTensor.empty((layout.n, *layout.shape), dtype=layout.dtype, filename=path)
    for i, row in enumerate(rows):
        out[i] = row
    TensorDict({"x": out}, batch_size=[layout.n]).memmap_(str(folder / "td"), copy_existing=True)
    (folder / "x.memmap").unlink()


def loader(folder: Path, layout: Layout, batch_size: int, workers: int) -> Iterable[Tensor]:
    from tensordict import TensorDict

    td: Any = TensorDict.load_memmap(str(folder / "td"))
    if workers:
        return Mapped(by_batch(td, batch_size, workers, collate_fn=_unchanged), _x)
    return InProcess(layout.n, batch_size, lambda rows: _x(td[rows]))


def _unchanged(batch: Any) -> Any:
    return batch


def _x(batch: Any) -> Tensor:
    x: Tensor = batch["x"]
    return x


PEERS = [
    Peer(
        name=f"tensordict-w{workers}", format="tensordict", package="tensordict", module="tensordict",
        workers=workers, way=OWN_LOADER if workers else IN_PROCESS, write=prepare, open=loader,
        settings="TensorDict.load_memmap, " + how,
    )
    for workers, how in (
        (0, "td[rows] a batch, one process"),
        (2, "td[rows] a batch, DataLoader + BatchSampler, 2 persistent workers, prefetch 2"),
    )
]  # fmt: skip
