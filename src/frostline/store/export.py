"""A store into a folder of files, one a row; `import_folder` of that folder gives the same rows and keys.

Beside the files lies a small record of the fields, written last: without it, the folder is unfinished.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from frostline.errors import FieldError, StoreError, StoreFull, UsageError
from frostline.store.convert import Progress
from frostline.store.disk import ASIDE
from frostline.store.field import Field
from frostline.store.folder import SIDECAR, Exported, is_long, path_of
from frostline.store.formats import ALONE, save
from frostline.store.table import Table

FORMATS = ("pt", "npz", "npy", "safetensors", "parquet")
_READ_BYTES = 32 << 20


@dataclass(frozen=True)
class Written:
    """What an export wrote; `notes` are sentences for a person."""

    rows: int
    place: Path
    fields: tuple[str, ...]
    notes: tuple[str, ...]


def export_folder(
    store: Table,
    out: str | os.PathLike[str],
    *,
    format: str = "pt",
    fields: Sequence[str] | None = None,
    limit: int | None = None,
    cast: bool = False,
    progress: Progress | None = None,
) -> Written:
    """Write each row of `store` as one file under `out`, or all small values as one Parquet file.

    >>> import tempfile, frostline as fl
    >>> path = tempfile.mkdtemp()
    >>> with fl.Store.create(path + "/store", fields={"label": fl.Field((), "int64")}) as writer:
    ...     writer.append("cats/tom", {"label": 3})
    >>> export_folder(fl.Store.open(path + "/store"), path + "/files", format="npz").rows
    1
    >>> np.load(path + "/files/cats/tom.npz")["label"]
    array(3)

    format:  "pt", "npz", "npy" (one field), "safetensors" or "parquet".
    fields:  only these; None takes all.
    limit:   only so many rows, from the first.
    cast:    write bfloat16 as float32 where the format has no bfloat16 (npz, npy), instead of refusing.
    """
    _refuse_options(format, limit)
    notes: list[str] = []
    table, names = _rows_that_have(store, fields, limit, notes)
    if format == "parquet":
        from frostline.store.parquet import export_parquet  # here, since it needs an extra

        return export_parquet(table, Path(out), names, notes=notes, progress=progress)
    specs = _specs(table, names, format, cast, notes)
    folder = Path(out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(
            f"Cannot export to {folder}: something is there already. Choose an empty or a new folder."
        )
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
        long_keys = _write_rows(table, folder, f".{format}", specs, progress)
        record = {ALONE: next(iter(specs.values()))} if format == "npy" else specs
        Exported(record, long_keys).write(folder)
    if long_keys:
        notes.append(f"{len(long_keys):,} keys are too long for a path; {SIDECAR} says which file is whose.")
    return Written(len(table), folder, tuple(names), tuple(notes))


def _refuse_options(format: str, limit: int | None) -> None:
    problems = (
        [f"format is {format!r}; expected one of {', '.join(FORMATS)}"] if format not in FORMATS else []
    )
    problems += [f"limit is {limit}; expected at least 1"] if limit is not None and limit < 1 else []
    if problems:
        raise UsageError("Cannot export:", problems=problems)


def _rows_that_have(
    store: Table, fields: Sequence[str] | None, limit: int | None, notes: list[str]
) -> tuple[Table, list[str]]:
    names = store.names(fields)
    table = store.with_fields(names)
    if len(table) < len(store):
        notes.append(f"Left out {len(store) - len(table):,} rows that do not have all of these fields.")
    if limit is not None and limit < len(table):
        notes.append(f"Wrote the first {limit:,} of {len(table):,} rows.")
        table = table.at(np.arange(limit))
    return table, names


def _specs(table: Table, names: Sequence[str], format: str, cast: bool, notes: list[str]) -> dict[str, Field]:
    """The fields as the files will have them; refuses what the format cannot hold."""
    specs = {name: table.fields[name] for name in names}
    if format == "npy" and (len(specs) != 1 or next(iter(specs.values())).dtype in ("str", "json", "bytes")):
        raise UsageError(
            f"An .npy file holds one array: choose one tensor field of {', '.join(specs)}, or format npz."
        )
    narrow = [name for name, spec in specs.items() if spec.dtype == "bfloat16"]
    if format not in ("npy", "npz") or not narrow:
        return specs
    if not cast:
        raise FieldError(
            f"{', '.join(narrow)}: numpy has no bfloat16. Choose format safetensors or pt, "
            f"or write it as float32 (--cast: exact, twice the bytes)."
        )
    notes.append(f"bfloat16 was written as float32, since numpy has none: {', '.join(narrow)}.")
    return {name: replace(spec, dtype="float32") if name in narrow else spec for name, spec in specs.items()}


def _write_rows(
    table: Table, folder: Path, suffix: str, specs: dict[str, Field], progress: Progress | None
) -> dict[str, str]:
    """Write the files; gives the keys that are too long for a path."""
    long_keys: dict[str, str] = {}
    for done, (key, row) in enumerate(rows_of(table, list(specs)), 1):
        path = path_of(key)
        if is_long(path):
            long_keys[path] = key
        values = {name: _outward(key, name, row[name], spec, suffix) for name, spec in specs.items()}
        _write_one(
            folder / (path + suffix), {ALONE: next(iter(values.values()))} if suffix == ".npy" else values
        )
        if progress:
            progress("exporting", done, len(table))
    return long_keys


def rows_of(table: Table, names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Key and values of every row, read some megabytes at a time."""
    width = sum(table.fields[name].row_bytes for name in names)
    step = max(1, min(1024, _READ_BYTES // max(1, width)))
    for start in range(0, len(table), step):
        batch = table.rows(np.arange(start, min(len(table), start + step)), names)
        for i, key in enumerate(batch.keys_of_rows):
            yield key, {name: batch[name][i] for name in names}


def _outward(key: str, name: str, value: Any, spec: Field, suffix: str) -> Any:
    """A value as the files have it: bytes as uint8, JSON as text outside .pt."""
    if isinstance(value, Tensor):
        return value.to(getattr(torch, spec.dtype))
    if spec.dtype == "bytes":
        return torch.from_numpy(np.frombuffer(value, np.uint8).copy())
    text = json.dumps(value, ensure_ascii=True) if spec.dtype == "json" and suffix != ".pt" else value
    if suffix == ".npz" and isinstance(text, str) and text.endswith("\0"):
        raise FieldError(
            f"Row {key!r}, field {name!r} ends in NUL, which numpy drops. Choose format pt or safetensors."
        )
    return text


def _write_one(path: Path, values: dict[str, Any]) -> None:
    """Aside, then renamed: a file that is there is whole. A leading dot is in no row's name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(ASIDE + path.suffix)
    save(aside, values)
    if path.exists():  # this file system does not tell "A" from "a", or é from é
        aside.unlink()
        raise UsageError(
            f"Two keys need the file {path} on this file system. Export to another one, or to Parquet."
        )
    aside.rename(path)


@contextmanager
def explained(place: Path) -> Iterator[None]:
    """What the disk refuses, in words."""
    try:
        yield
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFull(
                f"No room to go on at {place} ({e.strerror}). Free some space, then export anew."
            ) from e
        raise StoreError(f"Cannot write to {place}: {e.strerror or e}.") from e
