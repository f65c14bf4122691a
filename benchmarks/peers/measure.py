"""Rows for the peers, and their speed: whole batches delivered to the calling process."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .base import Peer

ROOT = Path(__file__).resolve().parents[2]
WARM_UP_S = 2.0


@dataclass(frozen=True)
class Kind:
    """A kind of rows to measure with."""

    n: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    batch_size: int


KINDS = {
    "clip": Kind(300, (24, 325, 384), torch.bfloat16, 16),
    "vector": Kind(100_000, (768,), torch.float16, 256),
}


def make_rows(kind: Kind) -> Iterator[Tensor]:
    """Rows of normal noise that carry their number in three digits of base 256 (exact in bf16 and f16).

    Windows into one noise buffer: different rows, without drawing gigabytes of random numbers for every peer.
    """
    numel = prod(kind.shape)
    noise = torch.randn(numel + 4096, generator=torch.Generator().manual_seed(0)).to(kind.dtype)
    for i in range(kind.n):
        start = i * 2654435761 % 4096
        row = noise[start : start + numel].clone()
        yield with_number(row.view(kind.shape), i)


def with_number(row: Tensor, i: int) -> Tensor:
    row.view(-1)[:3] = torch.tensor([i % 256, i // 256 % 256, i // 65536], dtype=row.dtype)
    return row


def row_numbers(batch: Tensor) -> list[int]:
    """The numbers that `with_number` put into the rows of a batch."""
    digits = batch.reshape(len(batch), -1)[:, :3].to(torch.int64)
    numbers: list[int] = (digits @ torch.tensor([1, 256, 65536])).tolist()
    return numbers


def folder_of(peer: Peer, folder: Path, kind: str) -> Path:
    return folder / kind / peer.format


def prepared(peer: Peer, folder: Path, kind: str) -> Path:
    """The peer's folder, written first if nobody has."""
    rows = KINDS[kind]
    own = folder_of(peer, folder, kind)
    if not (own / "layout.json").exists():
        peer.prepare(own, make_rows(rows), rows.n, rows.shape, rows.dtype)
    return own


def measure(peer: Peer, folder: Path, kind: str, seconds: float) -> dict[str, Any]:
    """Delivered rows per second after the warm-up; starting the workers is not counted, new epochs are."""
    told = _told(peer)
    if reason := peer.unavailable():
        return told | {"unavailable": reason}
    own = prepared(peer, folder, kind)
    warm(own)
    loader = peer.loader(own, KINDS[kind].batch_size)
    batches = _endless(loader)
    _count(batches, WARM_UP_S)
    rows, n_bytes, took_s = _count(batches, seconds)
    batches.close()
    return told | _speed(rows, n_bytes, took_s)


def measure_cold(peer: Peer, folder: Path, kind: str, max_rows: int | None = None) -> dict[str, Any]:
    """One epoch (or its first `max_rows`) from evicted files; `from_disk` is the share the disk really gave.

    For peers in one process: the page-fault counters of workers are not ours to read.
    """
    told = _told(peer) | {"cold": True}
    if reason := peer.unavailable():
        return told | {"unavailable": reason}
    own = prepared(peer, folder, kind)
    evict(own)
    batch_size = KINDS[kind].batch_size
    epoch = islice(iter(peer.loader(own, batch_size)), (max_rows or KINDS[kind].n) // batch_size)
    before = _disk_bytes()
    rows, n_bytes, took_s = _count(epoch, float("inf"))
    share = (_disk_bytes() - before) / n_bytes
    return told | _speed(rows, n_bytes, took_s) | {"from_disk": share}


def warm(folder: Path) -> None:
    """Read every file, so that all rows lie in the page cache, whatever the system has reclaimed since."""
    buffer = bytearray(8 << 20)
    for path in _files(folder):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def evict(folder: Path) -> None:
    """Drop the folder's files from the page cache (no process may have them mapped)."""
    for path in _files(folder):
        with path.open("rb", buffering=0) as file:
            os.fsync(file.fileno())  # dirty pages would stay
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def measure_in_venv(
    peer: Peer, folder: Path, kind: str, seconds: float, *, cold: bool = False
) -> dict[str, Any]:
    """`measure` in a process of the peer's own environment: rounds of all peers can be interleaved."""
    python = ROOT / peer.venv / "bin" / "python"
    if not python.exists():
        return _told(peer) | {"unavailable": f"no {peer.venv}: run scripts/bench-setup"}
    command = [str(python), "-m", "benchmarks.peers", "measure", peer.name, str(folder), kind, str(seconds)]
    done = subprocess.run(command + ["--cold"] * cold, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return _told(peer) | {"unavailable": f"failed: {last}"}
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def _told(peer: Peer) -> dict[str, Any]:
    return {"name": peer.name, "version": peer.version, "settings": peer.settings, "way": peer.way}


def _speed(rows: int, n_bytes: int, took_s: float) -> dict[str, Any]:
    return {"rows_per_s": rows / took_s, "gb_per_s": n_bytes / took_s / 1e9, "rows": rows}


def _endless(loader: Iterable[Tensor]) -> Generator[Tensor, None, None]:
    while True:
        yield from loader


def _count(batches: Iterable[Tensor], seconds: float) -> tuple[int, int, float]:
    """Rows, bytes and the seconds that they took, over at least `seconds`."""
    rows = n_bytes = 0
    start = time.perf_counter()
    took_s = 0.0
    for batch in batches:
        touch(batch)
        rows += len(batch)
        n_bytes += batch.nbytes
        took_s = time.perf_counter() - start
        if took_s >= seconds:
            break
    return rows, n_bytes, took_s


def touch(batch: Tensor) -> None:
    """Read a byte of every page: until then a worker's batch is not in the consumer's memory."""
    batch.contiguous().view(-1).view(torch.uint8)[::4096].sum()


def _disk_bytes() -> int:
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise RuntimeError("/proc/self/io has no read_bytes; cold reads cannot be proven on this system")
