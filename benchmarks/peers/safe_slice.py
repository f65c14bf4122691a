"""One `.safetensors` file a row; `safe_open().get_slice` reads some of its frames: the peer of `fl.Pick`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from .base import IN_PROCESS, PICKED, InProcess, Layout, Peer


def prepare(folder: Path, rows: Iterable[Tensor], layout: Layout) -> None:
    from safetensors.torch import save_file

    for i, row in enumerate(rows):
        save_file({"x": row.contiguous()}, folder / f"{i:08d}.safetensors")


def loader(folder: Path, layout: Layout, batch_size: int, workers: int) -> Iterable[Tensor]:
    """Frames go straight into one batch tensor: `torch.stack` of 8 x 16 frames costs a second copy."""
    from safetensors import safe_open

    paths = [str(folder / f"{i:08d}.safetensors") for i in range(layout.n)]

    def read(rows: Tensor) -> Tensor:
        out = torch.empty((len(rows), PICKED, *layout.shape[1:]), dtype=layout.dtype)
        for at, row in enumerate(rows.tolist()):
            frames = torch.randperm(layout.shape[0])[:PICKED].sort().values.tolist()
            with safe_open(paths[row], framework="pt") as file:
                part = file.get_slice("x")
                for to, frame in enumerate(frames):
                    out[at, to] = part[frame]
        return out

    return InProcess(layout.n, batch_size, read)


PICKS = [
    Peer(
        name="safetensors-slice", format="safetensors", package="safetensors", module="safetensors",
        workers=0, way=IN_PROCESS, write=prepare, open=loader,
        settings="one .safetensors a row, safe_open().get_slice: 8 frames at random (sorted), each read into "
        "its place in the batch, one process",
    )
]  # fmt: skip
