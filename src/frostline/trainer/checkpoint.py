"""Checkpoints of a run: folders that are whole or absent, with tensors as safetensors and the rest as JSON.

    checkpoints/step-00000120/checkpoint.json       step, state, and each file's bytes and xxh3
    checkpoints/step-00000120/model.safetensors     one group of tensors; -00001-of-00003 where it is large
    checkpoints/latest.json, best.json, <label>.json   {"folder": "step-00000120", "step": 120}

A folder is written aside, every file and then the folder synced, renamed, the names pointed at it; only then
are older ones deleted. Whoever is killed in between leaves all that was there before.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import resource
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from frostline.errors import CheckpointError, CheckpointFull, StoreError, UsageError
from frostline.store.disk import make_folder, sync_folder, write_whole
from frostline.trainer import aside, contents, tensorfile
from frostline.trainer.contents import Parts
from frostline.trainer.manifest import MANIFEST, File, Manifest, damage, read_manifest
from frostline.trainer.plain import whole

log = logging.getLogger("frostline")

SHARD_BYTES = 4_000_000_000
_THREADS = 4
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""errno of writes for which there is no room; `no_room` tells which kind of room."""
_FOLDER = re.compile(r"step-\d{8,}")
_PICKLED = (".pt", ".pth", ".bin", ".ckpt", ".pkl")


class Checkpoints:
    """The folder of one run's checkpoints.

    >>> import tempfile, torch
    >>> checkpoints = Checkpoints(Path(tempfile.mkdtemp()) / "checkpoints", keep=2)
    >>> for step in (10, 20, 30):
    ...     path = checkpoints.save(step, {"model": {"w": torch.full((2,), float(step))}}, {"epoch": 1})
    >>> path.name, [p.name for p in checkpoints.all()]
    ('step-00000030', ['step-00000020', 'step-00000030'])
    >>> loaded = load(checkpoints.folder)
    >>> loaded.step, loaded.state, loaded.groups["model"]["w"].tolist()
    (30, {'epoch': 1}, [30.0, 30.0])

    keep: so many of the newest stay. keep_every: those of every so many steps stay too, as do the best one
    and the labelled ones. shard_bytes: a group larger than that is split into several files.
    """

    def __init__(
        self, folder: Path, *, keep: int = 3, keep_every: int | None = None, shard_bytes: int = SHARD_BYTES
    ) -> None:
        self.folder, self.keep, self.keep_every, self.shard_bytes = (
            Path(folder),
            keep,
            keep_every,
            shard_bytes,
        )
        given = {
            "keep": keep,
            "keep_every": 1 if keep_every is None else keep_every,
            "shard_bytes": shard_bytes,
        }
        problems = [
            f"{n} is {v!r}; a whole number from 1" for n, v in given.items() if type(v) is not int or v < 1
        ]
        if problems:
            raise UsageError("Checkpoints(…) cannot work:", problems=problems)

    # writing

    def save(
        self,
        step: int,
        groups: Mapping[str, Mapping[str, Tensor]],
        state: Mapping[str, Any],
        *,
        best: bool = False,
        label: str | None = None,
    ) -> Path:
        """Write a checkpoint; → its folder. One of the same step is replaced, once this one is whole."""
        plain = contents.checked(step, groups, state, label)
        for device in {t.device for group in groups.values() for t in group.values() if t.is_cuda}:
            torch.cuda.synchronize(device)  # whatever stream computed them
        planned = contents.planned(groups, self.shard_bytes)
        needed = contents.needed(planned, plain)
        with self._explained(needed):
            make_folder(self.folder)
            aside.recover(self.folder)
            if (free := _free(self.folder)) < needed:
                raise CheckpointFull.told(
                    str(self.folder), needed=needed, free=free, why="seen before writing"
                )
            final = self.folder / f"step-{step:08d}"
            written = aside.name(final, "tmp")
            try:
                self._write(written, step, planned, plain)
                aside.put(written, final)
            except BaseException:
                shutil.rmtree(written, ignore_errors=True)  # gone, or what `recover` removes next time
                raise
            names = ["latest", *(["best"] if best else []), *([label] if label else [])]
            for name in names:
                self._point(name, final, step)
        self._retire()
        return final

    def _write(self, written: Path, step: int, planned: Mapping[str, Parts], plain: Any) -> None:
        written.mkdir()
        tasks = [(group, name, part) for group, parts in planned.items() for name, part in parts]
        with ThreadPoolExecutor(min(_THREADS, max(1, len(tasks)))) as pool:
            wrote = list(pool.map(lambda task: tensorfile.write(written / task[1], task[2]), tasks))
        files: dict[str, list[File]] = {group: [] for group in planned}
        for (group, name, part), (nbytes, digest) in zip(tasks, wrote, strict=True):
            files[group].append(File(name, nbytes, digest, len(part)))
        serial = max((m.serial for m in self._manifests().values()), default=0) + 1
        write_whole(written / MANIFEST, [Manifest(step, serial, plain, files).text()])
        sync_folder(written)

    def name_again(self, path: Path, names: Sequence[str]) -> None:
        """Point these names at a checkpoint that was to have them: a kill may have come in between."""
        for name in names:
            if path.parent == self.folder and self._pointer(name) != path:
                self._point(name, path, read_manifest(path).step)

    def _point(self, name: str, folder: Path, step: int) -> None:
        text = json.dumps({"folder": folder.name, "step": step}) + "\n"
        write_whole(self.folder / f"{name}.json", [text.encode()])

    @contextmanager
    def _explained(self, needed: int) -> Iterator[None]:
        """What the disk says, in words; a StoreError is what the store's helpers make of it."""
        try:
            yield
        except (OSError, StoreError) as e:
            cause = e if isinstance(e, OSError) else e.__cause__
            code = cause.errno if isinstance(cause, OSError) else None
            why = os.strerror(code) if code else str(e)
            if code in NO_ROOM:
                raise no_room("a checkpoint", self.folder, needed=needed, code=code) from e
            raise CheckpointError(
                f"Cannot write a checkpoint in {self.folder}: {why}. Those written before are whole. Make "
                f"the folder writable for this user, or choose another one."
            ) from e

    def _retire(self) -> None:
        """Delete what is not to stay. What cannot be deleted is said, and does not end the training."""
        found = self._manifests()
        newest = sorted(found, key=lambda path: found[path].serial)[-self.keep :]
        named = {p.name for name in self._names() if (p := self._named(name)) is not None}
        for path, manifest in found.items():
            every = self.keep_every is not None and manifest.step and not manifest.step % self.keep_every
            if path in newest or path.name in named or every:
                continue
            try:
                aside.remove(path)
            except OSError as e:
                log.warning("The old checkpoint %s cannot be deleted (%s); it stays.", path, e)

    # finding

    def all(self) -> list[Path]:
        """The whole ones, the oldest first: in the order of writing, which may not be that of the steps."""
        found = self._manifests()
        return sorted(found, key=lambda path: found[path].serial)

    def latest(self) -> Path | None:
        """The newest whole one. One that is not whole is passed over, and said."""
        self._tell_damage()
        newest = self.all()
        pointed = self._pointer("latest")
        if pointed is not None and pointed not in newest:
            log.warning(
                "%s names %s, which is missing or damaged.", self.folder / "latest.json", pointed.name
            )
        return newest[-1] if newest else None

    def best(self) -> Path | None:
        """The last that was saved with best=True; None when there is none, or it is damaged (and said)."""
        return self._named("best")

    def labelled(self, label: str) -> Path | None:
        """The last that was saved with this label; None when there is none, or it is damaged (and said)."""
        return self._named(label)

    def _named(self, name: str) -> Path | None:
        path = self._pointer(name)
        if path is not None and (wrong := damage(path)):
            log.warning(
                "%s names %s, which cannot be used: %s", self.folder / f"{name}.json", path.name, wrong[0]
            )
            return None
        return path

    def _pointer(self, name: str) -> Path | None:
        place = self.folder / f"{name}.json"
        if not place.exists():
            return None
        try:
            folder = str(json.loads(place.read_bytes())["folder"])
            if not _FOLDER.fullmatch(folder):
                raise ValueError(f"folder is {folder!r}")
        except (ValueError, KeyError, TypeError) as e:
            log.warning("%s is damaged (%r) and is passed over.", place, e)
            return None
        return self.folder / folder

    def _names(self) -> list[str]:
        return [p.stem for p in self.folder.glob("*.json")]

    def _manifests(self) -> dict[Path, Manifest]:
        """Those of whole checkpoints, by folder; files are held against their sizes, not read."""
        found = {}
        for path in aside.candidates(self.folder):
            if not damage(path):
                found[path] = read_manifest(path)
        return found

    def _tell_damage(self) -> None:
        for path in aside.candidates(self.folder):
            if wrong := damage(path):
                log.warning("The checkpoint %s is passed over: %s", path, "; ".join(wrong))


def no_room(what: str, place: Path, *, needed: int, code: int) -> CheckpointFull:
    """The error for bytes that were not taken at `place`; code: which of NO_ROOM the write gave."""
    free = _free(place)
    fault, remedy = _limit(code) or _full(needed, free)
    error = CheckpointFull(
        f"No room for {what} in {place}: it needs {needed:,} bytes, {fault} ({os.strerror(code)}). The "
        f"checkpoints written before are whole; {remedy}, and run the same command again."
    )
    error.needed, error.free = needed, free
    error.missing = max(0, needed - free) if code == errno.ENOSPC else 0
    return error


def _limit(code: int) -> tuple[str, str] | None:
    """What is used up where it is not the disk, and what to do about it."""
    if code == errno.EDQUOT:
        return "and the quota of this user or folder is used up", "free some of it, or ask for more"
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if code == errno.EFBIG and most == resource.RLIM_INFINITY:
        return "and a file is larger than its file system takes", "choose a folder on another one"
    if code == errno.EFBIG:
        return f"and this process may write files of {most:,} bytes at most", "raise that limit (`ulimit -f`)"
    return None


def _full(needed: int, free: int) -> tuple[str, str]:
    remedy = "free some space, or keep fewer of them"
    if free < needed:
        return f"{free:,} are free, {needed - free:,} are missing", remedy
    return f"{free:,} are free, but the disk takes no more (`df -i` shows whether it has files left)", remedy


def _free(folder: Path) -> int:
    there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    found = os.statvfs(there)
    return found.f_bavail * found.f_frsize


@dataclass(frozen=True)
class Loaded:
    """A checkpoint in memory: its step, its tensors by group and name, the state saved beside them."""

    path: Path
    step: int
    groups: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


def load(path: Path, *, check: bool = True, only: Iterable[str] | None = None) -> Loaded:
    """Read a checkpoint: its own folder, a run's or its `checkpoints/` (the newest whole one), or a name in
    that one, as in `checkpoints/best`.

    check: every file is held against its checksum while it is read. only: these groups, and no others; files
    of the others may be missing, as where weights were sent without an optimiser's state.
    """
    folder = find(Path(path))
    wanted = None if only is None else list(only)
    _refuse(folder, [CheckpointError(wrong) for wrong in damage(folder, wanted)])
    manifest = read_manifest(folder)
    wanted = list(manifest.groups) if wanted is None else wanted
    if absent := [group for group in wanted if group not in manifest.groups]:
        has = ", ".join(manifest.groups) or "none"
        raise CheckpointError(f"The checkpoint {folder} has no group {', '.join(absent)}; it has: {has}.")
    groups = _read(folder, {group: manifest.groups[group] for group in wanted}, check)
    return Loaded(folder, manifest.step, groups, whole(manifest.state, {}))


def _read(folder: Path, files: Mapping[str, list[File]], check: bool) -> dict[str, dict[str, Tensor]]:
    """Every file, by several threads; all that is wrong is gathered before any of it is told."""
    tasks = [(group, file) for group, some in files.items() for file in some]
    begun = [_tried(partial(_begun, folder, file)) for _, file in tasks]
    _refuse(folder, begun)

    with ThreadPoolExecutor(tensorfile.THREADS) as pool:
        read = [
            _tried(partial(one.finish, file.xxh3 if check else None, pool))
            for one, (_, file) in zip(begun, tasks, strict=True)
        ]
    _refuse(folder, read)
    groups: dict[str, dict[str, Tensor]] = {group: {} for group in files}
    for (group, _), tensors in zip(tasks, read, strict=True):
        groups[group].update(tensors)
    return groups


def _begun(folder: Path, file: File) -> tensorfile.Reading:
    reading = tensorfile.Reading(folder / file.file)
    if len(reading.entries) != file.tensors:
        raise CheckpointError(f"{file.file}: {len(reading.entries)} tensors of {file.tensors}")
    return reading


def _tried(run: Callable[[], Any]) -> Any:
    """What `run` returns, or the error, for `_refuse` to tell with the others."""
    try:
        return run()
    except (CheckpointError, OSError) as e:
        return e


def _refuse(folder: Path, results: list[Any]) -> None:
    problems = [str(r) for r in results if isinstance(r, Exception)]
    if problems:
        raise CheckpointError(
            f"The checkpoint {folder} cannot be loaded:{_others(folder)}", problems=problems
        )


def _others(folder: Path) -> str:
    others = [p.name for p in Checkpoints(folder.parent).all() if p != folder]
    return f" (whole ones beside it: {', '.join(others)})" if others else ""


def find(path: Path) -> Path:
    """The folder of the checkpoint that `path` means; see `load`."""
    if (path / MANIFEST).exists() or _FOLDER.fullmatch(path.name):
        return path
    pointer = path if path.suffix == ".json" else path.with_name(path.name + ".json")
    if not path.is_dir() and pointer.is_file():
        named = Checkpoints(pointer.parent)._named(pointer.stem)
    else:
        inner = path / "checkpoints"
        named = Checkpoints(inner if inner.is_dir() else path).latest()
    if named is None:
        raise CheckpointError(
            f"{path} holds no whole checkpoint. Expected: a folder step-… with {MANIFEST}, a folder of "
            f"those, a run's folder with checkpoints/ in it, or a name: checkpoints/latest, or "
            f"checkpoints/best where the workload has a metric."
        )
    return named


def weights(path: Path) -> dict[str, Tensor]:
    """Weights alone, for `init_from`: those of a checkpoint (see `load`), or a .safetensors file.

    A tensor that has two names in the checkpoint's model is there under both: they may be two in another.
    """
    path = Path(path)
    if path.suffix in _PICKLED:
        raise CheckpointError(
            f"{path} is a pickle, which may run anything when opened; it is not opened. Convert it where it "
            f"comes from: safetensors.torch.save_file(state_dict, 'weights.safetensors')."
        )
    if path.suffix != ".safetensors":
        loaded = load(path, only=["model"])
        found, shared = loaded.groups["model"], loaded.state.get("model", {}).get("shared", {})
        return found | {name: found[other] for name, other in shared.items() if other in found}
    try:
        return tensorfile.read(path)
    except OSError as e:
        raise CheckpointError(f"{path} cannot be read: {e.strerror}.") from e
