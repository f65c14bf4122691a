"""What every peer has in common: the rows it holds, its description, and torch's DataLoader set up once.

A peer's module has the same three things as its siblings: `prepare(folder, rows, layout)` writes the data
once, `loader(folder, layout, batch_size, workers)` returns an iterable of which one iteration is one shuffled
epoch, and `PEERS` describes the ways in which it is run. Libraries are imported inside those functions,
because they live in different environments and a missing one has to be a line in the table, not a crash.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

# Some peers hand out read-only memory, which is stacked into a batch (copied) or only read here.
# Torch would say so once per worker.
warnings.filterwarnings("ignore", message="The given (NumPy array|buffer) is not writable")

PREFETCH_FACTOR = 2
"""Batches in flight per worker: torch's default. 4 was within the noise, and doubles the shared memory."""

IN_PROCESS = "one process"
PICKED = 8
"""Frames that are read where only some are."""
OWN_LOADER = "as people run it"


@dataclass(frozen=True)
class Layout:
    """How many rows there are and what one looks like."""

    n: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def stored_dtype(self) -> torch.dtype:
        """numpy, arrow and most peers have no bfloat16: its bits travel as int16, a view on either side."""
        return torch.int16 if self.dtype is torch.bfloat16 else self.dtype

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return np.dtype(str(self.stored_dtype).removeprefix("torch."))

    def to_numpy(self, row: Tensor) -> np.ndarray[Any, Any]:
        return np.ascontiguousarray(row.view(self.stored_dtype).numpy())

    def from_stored(self, batch: Tensor) -> Tensor:
        return batch.view(self.dtype)

    def save(self, folder: Path) -> None:
        told = {"n": self.n, "shape": self.shape, "dtype": str(self.dtype).removeprefix("torch.")}
        (folder / "layout.json").write_text(json.dumps(told))

    @classmethod
    def load(cls, folder: Path) -> Layout:
        told = json.loads((folder / "layout.json").read_text())
        return cls(told["n"], tuple(told["shape"]), getattr(torch, told["dtype"]))


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One way of running one peer.

    >>> peer = PEERS["memmap-w2"]                                       # doctest: +SKIP
    >>> peer.prepare(folder, rows, n=300, shape=(24, 325, 384), dtype=torch.bfloat16)   # doctest: +SKIP
    >>> for batch in peer.epoch(folder, batch_size=16): ...             # doctest: +SKIP
    """

    name: str
    format: str
    """Peers of one format share one prepared folder."""
    package: str
    """The distribution whose version is shown."""
    module: str
    """What has to import for the peer to run."""
    workers: int
    way: str
    """IN_PROCESS, or OWN_LOADER (two workers, or the loader the peer brings)."""
    settings: str
    write: Callable[[Path, Iterable[Tensor], Layout], None]
    open: Callable[[Path, Layout, int, int], Iterable[Tensor]]
    venv: str = ".venv-bench"

    @property
    def version(self) -> str:
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return "not installed"

    def unavailable(self) -> str | None:
        """Why this peer cannot run in this environment (None: it can)."""
        try:
            importlib.import_module(self.module)
        except Exception as error:  # noqa: BLE001 - a broken peer may raise anything; the table says what
            return f"{self.module} does not import: {type(error).__name__}: {error}"
        return None

    def prepare(
        self, folder: Path, rows: Iterable[Tensor], n: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        """Write the rows once. The layout goes last, so its presence means that the folder is whole."""
        folder.mkdir(parents=True, exist_ok=True)
        layout = Layout(n, shape, dtype)
        self.write(folder, rows, layout)
        layout.save(folder)

    def loader(self, folder: Path, batch_size: int, workers: int | None = None) -> Iterable[Tensor]:
        """Iterate it again for the next epoch; the workers stay alive in between."""
        chosen = self.workers if workers is None else workers
        return self.open(folder, Layout.load(folder), batch_size, chosen)

    def epoch(self, folder: Path, batch_size: int, workers: int | None = None) -> Iterator[Tensor]:
        """One epoch with workers of its own. To measure, keep a `loader`: its workers start only once."""
        yield from self.loader(folder, batch_size, workers)


class Mapped:
    """A loader whose batches pass through `change` (a view, or the choice of a column: never a copy)."""

    def __init__(self, loader: Iterable[Any], change: Callable[[Any], Tensor]) -> None:
        self.loader = loader
        self.change = change

    def __iter__(self) -> Iterator[Tensor]:
        return (self.change(batch) for batch in self.loader)


class InProcess:
    """Shuffled batches by one batched read each, in the calling process."""

    def __init__(self, n: int, batch_size: int, read: Callable[[Tensor], Tensor]) -> None:
        self.n, self.batch_size, self.read = n, batch_size, read

    def __iter__(self) -> Iterator[Tensor]:
        return (self.read(rows) for rows in torch.split(torch.randperm(self.n), self.batch_size))


def by_row(dataset: Any, batch_size: int, workers: int, **options: Any) -> DataLoader[Any]:
    """The DataLoader that everybody writes: `dataset[i]` row by row, stacked by the default collate."""
    more = worker_options(workers) | options
    return DataLoader(dataset, batch_size, shuffle=True, num_workers=workers, **more)


def by_batch(dataset: Any, batch_size: int, workers: int, **options: Any) -> DataLoader[Any]:
    """`dataset[[i, j, …]]` reads a whole batch: the tuned form, for datasets that can."""
    sampler = BatchSampler(RandomSampler(dataset), batch_size, drop_last=False)
    more = worker_options(workers) | options
    return DataLoader(dataset, batch_size=None, sampler=sampler, num_workers=workers, **more)


def worker_options(workers: int) -> dict[str, Any]:
    return {"persistent_workers": True, "prefetch_factor": PREFETCH_FACTOR} if workers else {}
