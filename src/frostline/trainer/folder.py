"""A run's folder: which one a call goes on in, what it was started with, and one process at a time in it."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from frostline.errors import CheckpointError, UsageError
from frostline.trainer.aside import candidates
from frostline.trainer.checkpoint import Checkpoints, find, load
from frostline.trainer.manifest import damage

RUN = "run.json"
CHECKPOINTS = "checkpoints"
_TELLING = {
    f"training.{name}"
    for name in (
        "log_every", "eval_every", "eval_rows", "save_every", "save_minutes", "keep", "keep_every", "compile",
    )
}  # fmt: skip
_PLACES = ("store", "live")
"""Where the same samples come from."""
PASSED = "passed over: "
"""How a note on a run begins that is not gone on with, since its checkpoints are damaged."""
STABLE = "stable"
"""The label of the state before the rate fell, from which the next call goes on."""


@dataclass(frozen=True)
class Chosen:
    """Where a training goes on, or begins."""

    folder: Path
    checkpoint: Path | None = None
    """What it goes on from; None: it begins."""
    notes: list[str] = field(default_factory=list)


def config_of(path: Path) -> dict[str, Any] | None:
    """What the run was started with that a checkpoint belongs to; None where it lies in no run's folder."""
    home = next((p for p in (path, *path.absolute().parents[:2]) if (p / RUN).is_file()), None)
    return None if home is None else _config(home)


def choose(name: str | None, out: Path | None, resume: str, config: Mapping[str, Any]) -> Chosen:
    """The folder of this call. resume: "auto", "never", or a run's folder or checkpoint."""
    if resume not in ("auto", "never"):
        return _named(Path(resume), out, config)
    if out is not None:
        latest = _checkpoint(out)
        if resume == "never" and latest is not None:
            raise UsageError(
                f"{out} holds a training already ({latest.name}), and --resume never was given. Choose "
                f"another --out, or leave --resume away to go on."
            )
        return Chosen(out, latest, changes(out, config) if latest else [])
    if name is None:
        raise UsageError("fl.train(…) needs a folder for the run: fl.train(workload, out='runs/mine').")
    base = Path("runs") / name
    if resume == "auto":
        others: list[str] = []
        broken: list[str] = []
        for folder in sorted((p.parent for p in base.glob(f"*/{RUN}")), reverse=True):
            try:
                latest = _checkpoint(folder)
            except CheckpointError as e:
                broken.append(f"{PASSED}{folder}, no checkpoint in it is whole: {'; '.join(e.problems)}")
                continue
            if latest is None:
                continue
            different = [change for change in changes(folder, config) if not _only_told(change)]
            if not different:
                return Chosen(folder, latest, broken)
            others = others or [f"a new run, since the newest, {folder}, differs: {'; '.join(different)}"]
        return Chosen(fresh(base), None, broken + others)
    return Chosen(fresh(base))


def _named(path: Path, out: Path | None, config: Mapping[str, Any]) -> Chosen:
    """A checkpoint by its path: the run goes on in its own folder, unless another is given."""
    run = path / CHECKPOINTS
    checkpoint = (_checkpoint(path) if run.is_dir() else None) or find(path)
    inside = checkpoint.parent.name == CHECKPOINTS
    home = out or (checkpoint.parent.parent if inside else None)
    if home is None:
        raise UsageError(f"{checkpoint} lies in no run's folder: say with --out where the run goes on.")
    return Chosen(home, checkpoint, changes(home, config))


def _checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint to go on from; one taken while the rate fell sends back to the one before.

    CheckpointError where there are some, and none is whole: to begin anew would write over what is left.
    """
    found = Checkpoints(folder / CHECKPOINTS)
    latest = found.latest() if (folder / CHECKPOINTS).is_dir() else None
    there = candidates(found.folder)
    if latest is None and there:
        raise CheckpointError(
            f"{folder} holds no whole checkpoint to go on from. Begin anew with --resume never and another "
            f"--out, or go on from a checkpoint elsewhere with --resume PATH. What is wrong with those here:",
            problems=[f"{path.name}: {'; '.join(damage(path))}" for path in there],
        )
    if latest is None or not load(latest, only=[]).state.get("decaying"):
        return latest
    return found.labelled(STABLE) or latest


def fresh(base: Path) -> Path:
    """A folder that is not there yet, called after the time."""
    stamp = time.strftime("%Y-%m-%dT%H-%M-%S")
    names = [stamp, *(f"{stamp}-{n}" for n in range(2, 100))]
    return next(base / name for name in names if not (base / name).exists())


def changes(folder: Path, config: Mapping[str, Any]) -> list[str]:
    """Settings that are not those the run was started with."""
    if not (folder / RUN).exists():
        return []
    flat_old, flat_now = _flat(_config(folder)), _flat(json.loads(json.dumps(config)))
    # runs of before targets were written down know of no parameter that was not given
    names = dict.fromkeys([*flat_old, *(flat_now if "target" in flat_old else ())])
    return [
        f"{name} was {flat_old.get(name)!r}, is {flat_now.get(name)!r}"
        for name in names
        if flat_old.get(name) != flat_now.get(name) and name not in _PLACES
    ]


def _config(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / RUN).read_text())["config"]
        _flat(found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise UsageError(
            f"{folder / RUN} is damaged ({e!r}): what the run was started with is unknown."
        ) from e
    return found


def _only_told(change: str) -> bool:
    """Whether a setting changes what is written down, and nothing of the training itself."""
    return change.split(" ")[0] in _TELLING


def _flat(config: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in config.items():
        out |= _flat(value, f"{before}{name}.") if isinstance(value, Mapping) else {before + name: value}
    return out


def describe(folder: Path, config: Mapping[str, Any]) -> None:
    """Write down what the run goes on with; only once it can: a call that fails must not rename a run."""
    aside = folder / f".{RUN}.{os.getpid()}"
    aside.write_text(json.dumps({"version": 1, "config": config}, indent=1) + "\n")
    os.replace(aside, folder / RUN)


@contextmanager
def held(chosen: Chosen, doing: str = "training") -> Iterator[Path]:
    """The folder, made and locked. doing: what a process that has it is said to be at."""
    folder = chosen.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as e:
        raise UsageError(
            f"A run cannot be written to {folder}: {e.strerror or e}. Give --out another folder."
        ) from e
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise UsageError(
                f"Another process is {doing} in {folder}. Wait for it, or give this one another --out."
            ) from e
        yield folder
    finally:
        os.close(lock)
