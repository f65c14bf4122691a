"""Results on disk: plain values in a JSON file, their tensors in a safetensors file beside it.

    units/seed-3.json                         {"version": 1, "about": {…}, "value": …, "tensors": {…}}
    units/seed-3.9f3a….safetensors            its tensors, named by the checksum of the file

JSON has neither tensors nor nan: they stand there as {"$tensor": "value.scores"} and {"$number": "nan"}. The
tensors are written first and the JSON file is renamed into its place last, so a result is whole or absent.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from frostline.errors import CheckpointError, UsageError
from frostline.store.disk import explained, sync_folder, write_whole
from frostline.trainer import tensorfile

_TENSOR, _NUMBER = "$tensor", "$number"


@dataclass(frozen=True)
class Loaded:
    """What lies at a place."""

    value: Any = None
    about: Mapping[str, Any] = field(default_factory=dict)
    damage: str | None = None
    """Why it is not what was written; then there is no value."""


def save(path: Path, value: Any, about: Mapping[str, Any], what: str) -> Any:
    """Keep a value at `path` (….json); → it as `load` gives it back: tuples are lists, tensors on the CPU.

    what: whose value it is, for the error that lists everything in it that cannot be kept.
    """
    tensors: dict[str, Tensor] = {}
    problems: list[str] = []
    encoded = _encoded(value, "value", tensors, problems)
    problems += tensorfile.unfit(tensors)
    if problems:
        raise UsageError(
            f"{what} returned something that cannot be kept (None, numbers, texts, lists, dicts by text and "
            f"tensors can be):",
            problems=problems,
        )
    old = [*_beside(path)]
    beside = _save_tensors(path, tensors) if tensors else None
    table = {"version": 1, "about": about, "value": encoded, "tensors": beside}
    write_whole(path, [json.dumps(table, indent=1, allow_nan=False).encode() + b"\n"])
    for file in old:
        if beside is None or file.name != beside["file"]:
            file.unlink(missing_ok=True)
    return _decoded(encoded, tensors)


def load(path: Path) -> Loaded | None:
    """The value at a place and what is said about it; None: there is none."""
    try:
        table = json.loads(path.read_bytes())
        if table["version"] != 1:
            return Loaded(damage=f"it is of version {table['version']!r}, and this frostline reads 1")
        beside, tensors = table["tensors"], {}
        if beside is not None:
            tensors = tensorfile.read(path.with_name(Path(beside["file"]).name), check=beside["xxh3"])
        return Loaded(_decoded(table["value"], tensors), dict(table["about"]))
    except FileNotFoundError as e:
        return Loaded(damage=f"{e.filename} is missing") if path.exists() else None
    except (CheckpointError, ValueError, KeyError, TypeError) as e:
        return Loaded(damage=str(e) or repr(e))


def remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    for file in _beside(path):
        file.unlink(missing_ok=True)


def normal(value: Any, what: str) -> Any:
    """Plain settings as they are after a file: what stands in one can be compared with it."""
    problems: list[str] = []
    tensors: dict[str, Tensor] = {}
    found = _encoded(value, what, tensors, problems)
    if problems or tensors:
        raise UsageError(
            f"{what} holds what cannot be compared later (numbers, texts, lists and dicts can):",
            problems=[*problems, *(f"{name} is a tensor" for name in tensors)],
        )
    return found


def _save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    aside = path.with_name(f".{path.stem}.aside")
    with explained(aside, sum(t.nbytes for t in tensors.values())):
        aside.unlink(missing_ok=True)  # of a process that was killed
        _, digest = tensorfile.write(aside, tensors)
        name = f"{path.stem}.{digest}.safetensors"
        os.replace(aside, path.with_name(name))
        sync_folder(path.parent)
    return {"file": name, "xxh3": digest}


def _beside(path: Path) -> list[Path]:
    start, digits = f"{path.stem}.", 16
    found = path.parent.glob("*.safetensors") if path.parent.is_dir() else ()
    return [f for f in found if f.stem.startswith(start) and len(f.stem) == len(start) + digits]


def _encoded(value: Any, place: str, tensors: dict[str, Tensor], problems: list[str]) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_NUMBER: str(value)}
    if isinstance(value, np.ndarray):
        try:
            value = torch.from_numpy(np.ascontiguousarray(value))
        except TypeError as e:
            problems.append(f"{place} is an array of {value.dtype}: {e}")
            return None
    if isinstance(value, Tensor):
        while place in tensors:  # {"a.b": …, "a": {"b": …}}
            place += "~"
        tensors[place] = value.detach().cpu().clone()  # of its own: what is kept must not change later
        return {_TENSOR: place}
    if isinstance(value, list | tuple):
        return [_encoded(v, f"{place}[{i}]", tensors, problems) for i, v in enumerate(value)]
    if isinstance(value, Mapping):
        odd = [name for name in value if not isinstance(name, str) or name.startswith("$")]
        problems += [f"{place} has the key {name!r}; keys are texts that do not begin with $" for name in odd]
        return {
            name: _encoded(v, f"{place}.{name}", tensors, problems)
            for name, v in value.items()
            if name not in odd
        }
    problems.append(f"{place} is {type(value).__qualname__} {value!r:.40}")
    return None


def _decoded(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decoded(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    if [*value] == [_TENSOR]:
        return tensors[value[_TENSOR]]
    if [*value] == [_NUMBER]:
        return float(value[_NUMBER])
    return {name: _decoded(v, tensors) for name, v in value.items()}
