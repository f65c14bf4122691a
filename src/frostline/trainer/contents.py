"""What goes into a checkpoint, seen before anything is written: is it storable, in which files, how large."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from frostline.trainer import tensorfile
from frostline.trainer.plain import Plain

Parts = list[tuple[str, dict[str, Tensor]]]
"""The files of a group: name, tensors."""

_SPARE = 64 << 10
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_RESERVED = ("latest", "best", "checkpoint")


def checked(step: Any, groups: Mapping[str, Mapping[str, Tensor]], state: Any, label: str | None) -> Any:
    """The state as JSON, once all that was given is seen to be something a checkpoint can hold."""
    plain = Plain(tensors=False)
    out = plain.of(state, "state")
    problems = plain.problems
    if type(step) is not int or step < 0:
        problems.append(f"step is {step!r}; a whole number from 0")
    if label is not None and (label in _RESERVED or not _NAME.fullmatch(label)):
        problems.append(
            f"label is {label!r}; letters, digits, '_', '-', '.', and none of {', '.join(_RESERVED)}"
        )
    for group, tensors in groups.items():
        if not _NAME.fullmatch(group):
            problems.append(f"a group is called {group!r}; letters, digits, '_', '-', '.'")
        problems += [f"{group}: {wrong}" for wrong in tensorfile.unfit(tensors)]
    plain.refuse("This cannot be saved as a checkpoint:")
    return out


def _split(group: str, tensors: Mapping[str, Tensor], limit: int) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """A group's files, each up to `limit` bytes (one tensor is never split)."""
    parts: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if parts[-1] and filled + tensor.nbytes > limit:
            parts.append({})
            filled = 0
        parts[-1][name] = tensor
        filled += tensor.nbytes
    for i, part in enumerate(parts, 1):
        number = f"-{i:05d}-of-{len(parts):05d}" if len(parts) > 1 else ""
        yield f"{group}{number}.safetensors", part


def needed(planned: Mapping[str, Parts], plain: Any) -> int:
    """Bytes that the disk must have: the files, and some to spare for the folder and the names."""
    parts = [part for files in planned.values() for _, part in files]
    values = sum(t.nbytes for part in parts for t in part.values())
    headers = sum(len(tensorfile.header(part)[0]) for part in parts)
    return values + headers + len(json.dumps(plain, indent=1)) + _SPARE


def planned(groups: Mapping[str, Mapping[str, Tensor]], limit: int) -> dict[str, Parts]:
    """The files of every group."""
    return {group: list(_split(group, tensors, limit)) for group, tensors in groups.items()}
