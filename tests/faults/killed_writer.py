"""The job to kill and run again: it writes a store from a fixed input, deletes, extends and collects.

Run as a program it serves: one JSON request a line, for each of which it forks a child that does the
job, so that hundreds of kills cost one import of torch. `kill_call`: the child kills itself at its n-th
call that changes the disk; `kill_after_s`: it is killed from outside, wherever it is.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from itertools import count
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


def _watch(request: dict[str, Any], calls: list[int]) -> None:
    """Wrap what changes the disk: count it; kill this process before, half-way through or after it."""
    write, numbers = os.write, count(1)  # several threads write
    for name in ("write", "fsync", "replace", "unlink", "mkdir", "rmdir", "ftruncate"):
        real = getattr(os, name)

        def wrapped(*args: Any, real: Any = real, **options: Any) -> Any:
            number = next(numbers)
            calls[0] = max(calls[0], number)
            if number == request.get("kill_call"):
                if request["when"] == "half" and real is write:
                    real(args[0], args[1][: len(args[1]) // 2])
                if request["when"] != "after":
                    os.kill(os.getpid(), signal.SIGKILL)
            out = real(*args, **options)
            if number == request.get("kill_call"):
                os.kill(os.getpid(), signal.SIGKILL)
            return out

        setattr(os, name, wrapped)


def _run(request: dict[str, Any]) -> dict[str, Any]:
    reader, writer = os.pipe()
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        calls = [0]
        _watch(request, calls)
        job(Path(request["root"]))
        os.writev(writer, [str(calls[0]).encode()])
        os._exit(0)
    os.close(writer)
    if request.get("kill_after_s") is not None:
        time.sleep(request["kill_after_s"])
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    with os.fdopen(reader) as pipe:
        calls_made = pipe.read()
    signalled = os.waitstatus_to_exitcode(status)
    return {"exit": signalled, "calls": int(calls_made or 0), "seconds": time.monotonic() - started}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), flush=True)
