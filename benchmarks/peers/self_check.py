"""Every peer delivers each row exactly once an epoch, with the right bytes, in a new order each time."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from . import PEERS, PICKS
from .base import PICKED, Peer
from .measure import Kind, row_numbers, with_number

TINY = {
    "clip": Kind(70, (24, 40, 48), torch.bfloat16, 8),  # 92 KB: large enough for zarr's path for large rows
    "vector": Kind(1100, (48,), torch.float16, 32),
}


def check_all(folder: Path) -> dict[str, str]:
    """Name and kind of every peer → "ok", or what is wrong, or why it could not run here."""
    found = {}
    for kind_name, kind in TINY.items():
        peers = PEERS | (PICKS if kind_name == "clip" else {})
        for peer in peers.values():
            found[f"{peer.name} {kind_name}"] = _check(peer, folder / kind_name / peer.format, kind)
    return found


def _check(peer: Peer, folder: Path, kind: Kind) -> str:
    if reason := peer.unavailable():
        return f"unavailable: {reason}"
    noise = torch.randn((kind.n, *kind.shape), generator=torch.Generator().manual_seed(0)).to(kind.dtype)
    expected = [with_number(row, i) for i, row in enumerate(noise)]
    if not folder.exists():
        peer.prepare(folder, iter(expected), kind.n, kind.shape, kind.dtype)
    loader = peer.loader(folder, kind.batch_size)
    orders = []
    for _ in range(2):
        batches = list(loader)
        if wrong := _wrong(peer, batches, expected, kind):
            return f"WRONG: {wrong}"
        if peer.name not in PICKS:
            orders.append([n for batch in batches for n in row_numbers(batch)])
    if orders and (orders[0] == orders[1] or orders[0] == sorted(orders[0])):
        return "WRONG: not shuffled anew"
    return "ok"


def _wrong(peer: Peer, batches: list[Tensor], expected: list[Tensor], kind: Kind) -> str | None:
    if dtypes := {batch.dtype for batch in batches} - {kind.dtype}:
        return f"dtypes {dtypes}, expected {kind.dtype}"
    rows = torch.cat(batches)
    if peer.name in PICKS:
        return _wrong_picks(rows, expected, kind)
    if rows.shape[1:] != torch.Size(kind.shape):
        return f"rows of {tuple(rows.shape[1:])}, expected {kind.shape}"
    numbers = row_numbers(rows)
    if sorted(numbers) != list(range(kind.n)):
        missing = len(set(range(kind.n)) - set(numbers))
        return f"{len(numbers)} rows of {kind.n}, {missing} missing"
    if not torch.equal(_bits(rows), _bits(torch.stack([expected[n] for n in numbers]))):
        return "bytes differ"
    return None


def _wrong_picks(rows: Tensor, expected: list[Tensor], kind: Kind) -> str | None:
    """Each row once, its frames its own and in order. No two frames are alike, so their bytes name them."""
    if rows.shape != (kind.n, PICKED, *kind.shape[1:]):
        return f"shape {tuple(rows.shape)}"
    place = {_bytes(frame): (i, at) for i, row in enumerate(expected) for at, frame in enumerate(row)}
    seen = []
    for row in rows:
        places = [place.get(_bytes(frame), (-1, -1)) for frame in row]
        if len({i for i, _ in places}) > 1 or places != sorted(set(places)):
            return f"frames {places} are not ordered frames of one row"
        seen.append(places[0][0])
    return None if sorted(seen) == list(range(kind.n)) else "not every row once"


def _bytes(tensor: Tensor) -> bytes:
    return _bits(tensor).numpy().tobytes()


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int16)
