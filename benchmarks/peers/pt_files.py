"""One `.pt` file a row, read by a DataLoader: what most people have on disk after a night of extraction."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from .base import IN_PROCESS, OWN_LOADER, Layout, Peer, by_row


def _path(folder: Path, i: int) -> Path:
    """Folders of 1,000 files: one folder of 100,000 would measure the file system."""
    return folder / f"{i // 1000:04d}" / f"{i:08d}.pt"


def prepare(folder: Path, rows: Iterable[Tensor], layout: Layout) -> None:
    for i, row in enumerate(rows):
        path = _path(folder, i)
        path.parent.mkdir(exist_ok=True)
        torch.save(row, path)


class PtFiles(Dataset[Tensor]):
    def __init__(self, folder: Path, layout: Layout, mmap: bool) -> None:
        self.paths = [str(_path(folder, i)) for i in range(layout.n)]
        self.mmap = mmap

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> Tensor:
        loaded: Tensor = torch.load(self.paths[i], weights_only=True, mmap=self.mmap)
        return loaded


def loader(folder: Path, layout: Layout, batch_size: int, workers: int) -> Iterable[Tensor]:
    return by_row(PtFiles(folder, layout, mmap=False), batch_size, workers)


def mmap_loader(folder: Path, layout: Layout, batch_size: int, workers: int) -> Iterable[Tensor]:
    return by_row(PtFiles(folder, layout, mmap=True), batch_size, workers)


_SETTINGS = "one .pt a row, torch.load(weights_only=True{}), DataLoader shuffle, {}"
PEERS = [
    Peer(
        name=f"pt{suffix}-w{workers}", format="pt", package="torch", module="torch", workers=workers,
        way=OWN_LOADER if workers else IN_PROCESS, write=prepare, open=opener,
        settings=_SETTINGS.format(option, "2 persistent workers, prefetch 2" if workers else "0 workers"),
    )
    for suffix, option, opener in (("", "", loader), ("-mmap", ", mmap=True", mmap_loader))
    for workers in (0, 2)
]  # fmt: skip
