"""What the fault tests share: a small store of many kinds of fields, and ways to break it."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import frostline as fl
from frostline.store.manifest import RunRef, commit_numbers, load_commit, seal
from frostline.store.runs import Run, open_run

FIELDS = {
    "x": fl.Field((4, 3), "float32", "int8/token"),
    "h": fl.Field((5,), "float16"),
    "r": fl.Field((None, 2), "int16"),
    "t": fl.Field((), "str"),
}
N = 10


def row(i: int) -> dict[str, Any]:
    make = torch.Generator().manual_seed(i)
    return {
        "x": torch.randn(4, 3, generator=make),
        "h": torch.randn(5, generator=make).half(),
        "r": torch.full((i % 3 + 1, 2), i, dtype=torch.int16),
        "t": f"text {i}",
    }


def write(root: Path, n: int = N, *, resume: bool = False) -> Path:
    """Ten rows and a failure in shards of four, in five commits."""
    with fl.Store.create(root, FIELDS, rows_per_shard=4, resume=resume) as writer:
        for i in range(n):
            if i == 6 and not writer.settled("bad"):
                writer.quarantine("bad", reason="planted", input="bad.mp4")
            if f"k{i}" not in writer:
                writer.append(f"k{i}", row(i))
    return root


def read_all(root: Path) -> dict[str, Any]:
    """Everything a reader can see of a store, as plain values; raises what reading raises."""
    store = fl.Store.open(root, check="read")
    batch = store.rows(list(range(len(store))))
    found = {name: [v.tolist() if isinstance(v, torch.Tensor) else v for v in batch[name]] for name in batch}
    by_key = [store.keys.position(key) for key in store.keys]
    return {"keys": batch.keys_of_rows, "by_key": by_key, "quarantine": store.quarantine, **found}


def files_of(root: Path) -> dict[str, bytes]:
    """All files but those that hold times and hosts."""
    return {
        p.relative_to(root).as_posix(): p.read_bytes()
        for p in sorted(root.rglob("*"))
        if p.is_file() and p.name not in ("log.txt", ".lock")
    }


@contextmanager
def little_memory(most_bytes: int = 512 << 20) -> Iterator[None]:
    """Whoever takes much more memory than there is now gets a MemoryError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + most_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def change_commit(root: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the newest commit and seal it again: its checksum is right, what it says is not."""
    place = root / "commits" / f"{commit_numbers(root)[-1]:08d}.json"
    record = json.loads(place.read_bytes())
    change(record)
    place.write_bytes(seal(record))


def change_run(root: Path, which: int, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the arrays of one of the newest commit's runs; size, checksum and commit are made to fit."""
    commit, _ = load_commit(root, commit_numbers(root)[-1])
    ref: RunRef = commit.runs[which]
    arrays = {name: values.copy() for name, values in open_run(root, ref).arrays.items()}
    change(arrays)
    data = b"".join(bytes(memoryview(chunk).cast("B")) for chunk in Run(arrays).chunks())
    (root / "runs" / ref.file).write_bytes(data)
    change_commit(root, lambda record: record["runs"][which].update(refit(data), rows=len(arrays["rows"])))


def refit(data: bytes) -> dict[str, Any]:
    import xxhash

    return {"bytes": len(data), "xxh3": xxhash.xxh3_64_hexdigest(data)}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return write(tmp_path / "store")


@pytest.fixture(scope="session")
def faults() -> Any:
    """This module: its functions, for tests in this folder."""
    import sys

    return sys.modules[__name__]
