"""MosaicML streaming: MDS shards, StreamingDataset and StreamingDataLoader, in an environment of its own."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from .base import OWN_LOADER, Layout, Mapped, Peer, worker_options

SHARD_BYTES = 64 << 20
"""Its default."""

_UNUSED = {
    "torchvision": (),
    "torchvision.datasets": ("VisionDataset",),
    "torchvision.transforms": (),
    "torchvision.transforms.functional": ("to_tensor",),
    "transformers": (),
    "transformers.feature_extraction_utils": ("BatchFeature",),
    "transformers.tokenization_utils_base": ("BatchEncoding",),
    "transformers.models": (),
    "transformers.models.auto": (),
    "transformers.models.auto.tokenization_auto": ("AutoTokenizer",),
}


def streaming() -> Any:
    """Import it without torchvision and transformers.

    `import streaming` pulls both in for its vision and text datasets, which nothing here uses; torchvision
    does not import beside the CPU build of torch. Empty classes of those names suffice, and cost the
    measured path nothing.
    """
    if importlib.util.find_spec("streaming") and "streaming" not in sys.modules:
        for name, members in _UNUSED.items():
            module = sys.modules.setdefault(name, ModuleType(name))
            for member in members:
                setattr(module, member, type(member, (), {}))
    import streaming

    return streaming


def prepare(folder: Path, rows: Iterable[Tensor], layout: Layout) -> None:
    shape = ",".join(str(size) for size in layout.shape)
    columns = {"x": f"ndarray:{layout.numpy_dtype.name}:{shape}"}
    with streaming().MDSWriter(out=str(folder / "mds"), columns=columns, size_limit=SHARD_BYTES) as out:
        for row in rows:
            out.write({"x": layout.to_numpy(row)})


def loader(folder: Path, layout: Layout, batch_size: int, workers: int) -> Iterable[Tensor]:
    lib = streaming()
    lib.base.util.clean_stale_shared_memory()
    dataset = lib.StreamingDataset(local=str(folder / "mds"), shuffle=True, batch_size=batch_size)
    options = worker_options(workers)
    batches = lib.StreamingDataLoader(dataset, batch_size=batch_size, num_workers=workers, **options)
    return Mapped(batches, lambda batch: layout.from_stored(batch["x"]))


class _Peer(Peer):
    def unavailable(self) -> str | None:
        try:
            streaming()
        except Exception as error:  # noqa: BLE001 - as in Peer.unavailable
            return f"streaming does not import: {type(error).__name__}: {error}"
        return None


PEERS = [
    _Peer(
        name="mosaic", format="mosaic", package="mosaicml-streaming", module="streaming", workers=2,
        way=OWN_LOADER, write=prepare, open=loader, venv=".venv-mosaic",
        settings="MDS shards of 64 MB, ndarray column, StreamingDataset(shuffle=True, py1e), "
        "StreamingDataLoader, 2 persistent workers, prefetch 2; bf16 as int16",
    )
]  # fmt: skip
