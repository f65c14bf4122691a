"""What others feed a model with, tuned fairly, for `benchmarks/feed.py`.

Extras of the benchmark, never dependencies of frostline.

    from peers import KINDS, PEERS, PICKS, measure_in_venv
    for peer in PEERS.values():
        measure_in_venv(peer, folder, "clip", seconds=6)
        # {"name", "version", "settings", "way", "rows_per_s", "gb_per_s", "rows"}

`PEERS` deliver whole rows, `PICKS` 8 of the 24 frames. A peer that cannot run has the reason under
"unavailable" in its result.
"""

from . import (
    hf_datasets,
    lance_table,
    lit_data,
    mosaic,
    numpy_memmap,
    pt_files,
    safe_slice,
    tensor_dict,
    web_dataset,
    zarr_array,
)
from .base import IN_PROCESS, OWN_LOADER, Layout, Peer
from .measure import (
    KINDS,
    Kind,
    evict,
    folder_of,
    make_rows,
    measure,
    measure_cold,
    measure_in_venv,
    prepared,
    row_numbers,
    touch,
    warm,
)

_MODULES = (
    pt_files, numpy_memmap, tensor_dict, lit_data, mosaic, web_dataset, hf_datasets, lance_table, zarr_array,
)  # fmt: skip
PEERS: dict[str, Peer] = {peer.name: peer for module in _MODULES for peer in module.PEERS}
PICKS: dict[str, Peer] = {peer.name: peer for module in (safe_slice, numpy_memmap) for peer in module.PICKS}

__all__ = [
    "IN_PROCESS",
    "KINDS",
    "OWN_LOADER",
    "PEERS",
    "PICKS",
    "Kind",
    "Layout",
    "Peer",
    "evict",
    "folder_of",
    "make_rows",
    "measure",
    "measure_cold",
    "measure_in_venv",
    "prepared",
    "row_numbers",
    "touch",
    "warm",
]  # fmt: skip
