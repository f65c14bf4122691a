"""`checkpoint.json`: what a checkpoint is and which files belong to it."""

from __future__ import annotations

import json
import stat
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from frostline.errors import CheckpointError

MANIFEST = "checkpoint.json"
FORMAT = "frostline.checkpoint"
VERSION = 1


@dataclass(frozen=True)
class File:
    """One file of a group: its name, how many bytes, their xxh3-64, how many tensors."""

    file: str
    bytes: int
    xxh3: str
    tensors: int


@dataclass(frozen=True)
class Manifest:
    """`serial` counts the checkpoints of a folder in the order of writing: after going back to an earlier
    one, the newest is not that of the highest step. `state` is as `plain.Plain` took it apart."""

    step: int
    serial: int
    state: Any
    groups: Mapping[str, list[File]]

    def text(self) -> bytes:
        groups = {group: [asdict(file) for file in files] for group, files in self.groups.items()}
        body = {
            "format": FORMAT, "version": VERSION, "step": self.step, "serial": self.serial,
            "groups": groups, "state": self.state,
        }  # fmt: skip
        return json.dumps({**body, "xxh3": _digest(body)}, indent=1, allow_nan=False).encode() + b"\n"


def _digest(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return f"{xxhash.xxh3_64_intdigest(text.encode()):016x}"


def read_manifest(folder: Path) -> Manifest:
    """CheckpointError when it is missing, of another version, cut short or altered."""
    path = folder / MANIFEST
    try:
        body = json.loads(path.read_bytes())
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise CheckpointError(f"{MANIFEST} is not that of a frostline checkpoint")
    except FileNotFoundError as e:
        raise CheckpointError(f"{MANIFEST} is missing") from e
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{MANIFEST} is cut short or damaged ({e})") from e
    if body.get("version") != VERSION:
        raise CheckpointError(
            f"it is of format version {body.get('version')!r}, this frostline reads {VERSION}; "
            f"load it with the version that wrote it"
        )
    return _parsed(body)


def _parsed(body: dict[str, Any]) -> Manifest:
    digest = body.pop("xxh3", None)
    try:
        if digest != _digest(body):
            raise CheckpointError(f"{MANIFEST} is not as it was written (checksum)")
        groups = {group: [File(**file) for file in files] for group, files in body["groups"].items()}
        return Manifest(body["step"], body["serial"], body["state"], groups)
    except (KeyError, TypeError, AttributeError, ValueError) as e:
        raise CheckpointError(f"{MANIFEST} lacks what belongs there ({e!r})") from e


def damage(folder: Path, groups: Collection[str] | None = None) -> list[str]:
    """All that is wrong with a checkpoint as far as names and sizes tell; nothing is read but its JSON.

    groups: look at the files of these alone.
    """
    try:
        manifest = read_manifest(folder)
    except (CheckpointError, OSError) as e:
        return [str(e)]
    wanted = manifest.groups if groups is None else groups
    files = [file for group, some in manifest.groups.items() if group in wanted for file in some]
    return [wrong for file in files if (wrong := _wrong(folder, file))]


def _wrong(folder: Path, file: File) -> str | None:
    if Path(file.file).name != file.file:
        return f"{file.file!r} is not a file's name"
    try:
        found = (folder / file.file).stat()
    except FileNotFoundError:
        return f"{file.file} is missing"
    if not stat.S_ISREG(found.st_mode):
        return f"{file.file} is not a regular file"
    if found.st_size != file.bytes:
        return f"{file.file} has {found.st_size:,} bytes; {file.bytes:,} were written"
    return None
