"""The job to kill and run again: it writes a store from a fixed input, deletes, extends and collects.

A request (see killing.py) also has `root`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import frostline as fl
from frostline.store.gc import collect

N, ROWS_PER_SHARD = 45, 4
FIELDS = {
    "x": fl.Field((6, 5), "float32", "int8/token"),
    "c": fl.Field((6, 5), "float32", "int8/channel"),
    "r": fl.Field((None, 3), "float16"),
    "t": fl.Field((), "str"),
    "n": fl.Field((), "int64"),
}
ADDED = {"y": fl.Field((7,), "float32", "bfloat16"), "z": fl.Field((None,), "int32")}
KEYS = [f"ключ {i}" for i in range(N)]
BAD = {key for i, key in enumerate(KEYS) if i % 7 == 3}
BAD_ADDED = {key for i, key in enumerate(KEYS) if i % 11 == 4 or 24 <= i < 28}  # one whole shard among them
DELETED = [key for i, key in enumerate(KEYS) if i % 5 == 0 and key not in BAD]
REPLACED = [key for i, key in enumerate(KEYS) if i % 13 == 1 and key not in BAD]


def values(i: int, *, replaced: bool = False) -> dict[str, Any]:
    make = torch.Generator().manual_seed(i + 1000 * replaced)
    return {
        "x": torch.randn(6, 5, generator=make),
        "c": torch.randn(6, 5, generator=make),
        "r": torch.randn(i % 4, 3, generator=make).half(),
        "t": f"text {i}" * (i % 3),
        "n": i + 1000 * replaced,
    }


def added(i: int) -> dict[str, Any]:
    make = torch.Generator().manual_seed(-i)
    return {"y": torch.randn(7, generator=make), "z": torch.arange(i % 3, dtype=torch.int32)}


def write(root: Path) -> None:
    with fl.Store.create(root, FIELDS, rows_per_shard=ROWS_PER_SHARD, resume=True) as writer:
        for i, key in enumerate(KEYS):
            if writer.settled(key):
                continue
            if key in BAD:
                writer.quarantine(key, reason="planted", input={"i": i})
            else:
                writer.append(key, values(i))


def change(root: Path) -> None:
    with fl.Store.append(root) as writer:
        for key in DELETED:
            if key in writer:
                writer.delete(key)
        writer.commit()
        for key in REPLACED:
            if key in writer and int(fl.Store.open(root)[key]["n"]) < 1000:
                writer.replace(key, values(KEYS.index(key), replaced=True))
                writer.commit()


def extend(root: Path) -> None:
    with fl.Store.extend(root, ADDED) as extender:
        for key in extender.pending:
            if key in BAD_ADDED:
                extender.quarantine(key, reason="planted too")
            else:
                extender.append(key, added(KEYS.index(key)))


STAGES: list[Callable[[Path], Any]] = [write, change, extend, lambda root: collect(root, min_dead=0.2)]


def job(root: Path) -> None:
    """All stages; which are done stands in a file beside the store, written after each."""
    mark = root.with_suffix(".stage")
    for number in range(int(mark.read_text()) if mark.exists() else 0, len(STAGES)):
        STAGES[number](root)
        aside = mark.with_suffix(".stage-aside")
        aside.write_text(str(number + 1))
        aside.rename(mark)


def serve() -> None:
    import killing  # beside this file: whoever starts the server has put the folder on the path

    killing.serve(_asked)


def _asked(request: dict[str, Any]) -> int:
    job(Path(request["root"]))
    return 0
