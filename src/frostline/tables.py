"""Tables from files: .json, .jsonl, .csv, .tsv and .parquet as rows of named values."""

from __future__ import annotations

import csv
import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from frostline.errors import MissingExtra, UsageError

Row = dict[str, Any]
_DECIMAL = re.compile(r"-?\d+(\.\d*([eE][+-]?\d+)?|[eE][+-]\d+)")
"""A number as people write it; 12e4 is not one, but very often a name."""


def read(path: Path, *, as_text: Sequence[str] = ()) -> Sequence[Row]:
    """All rows of a table. In CSV, columns of nothing but numbers become numbers, except `as_text`."""
    readers: dict[str, Callable[[Path], Sequence[Row]]] = {
        ".json": _json, ".jsonl": _jsonl, ".ndjson": _jsonl, ".parquet": _parquet,
        ".csv": lambda p: _csv(p, ",", as_text), ".tsv": lambda p: _csv(p, "\t", as_text),
    }  # fmt: skip
    if path.suffix.lower() not in readers:
        raise UsageError(
            f"{path}: cannot read {path.suffix or 'this'} as a table; {', '.join(readers)} are known."
        )
    if not path.is_file():
        near = sorted(p.name for p in path.parent.glob(f"*{path.suffix}")) if path.parent.is_dir() else []
        raise UsageError(f"No table at {path}{nearest(path.name, near)}.")
    try:
        return checked(readers[path.suffix.lower()](path))
    except (ValueError, csv.Error, UnicodeDecodeError) as e:
        raise UsageError(f"{path} cannot be read as {path.suffix}: {e}") from e


def checked(rows: Any) -> Sequence[Row]:
    """Rows, or UsageError when some are not named values."""
    if isinstance(rows, _Arrow):
        return rows
    if not isinstance(rows, Sequence) or isinstance(rows, str | bytes):
        raise UsageError(f"A table is a list of dicts or the path of a file; got {type(rows).__name__}.")
    wrong = [i for i, row in enumerate(rows) if not isinstance(row, Mapping)]
    if wrong:
        raise UsageError(
            f"{len(wrong)} of {len(rows)} rows are not dicts of named values; the first is row {wrong[0]}: "
            f"{type(rows[wrong[0]]).__name__}."
        )
    return rows


def fields_of(rows: Sequence[Row], what: str) -> tuple[str, ...]:
    names = rows.names if isinstance(rows, _Arrow) else dict.fromkeys(n for r in rows for n in r)
    if not names:
        fault = "no row of the source has a field" if len(rows) else "the source is empty"
        raise UsageError(f"There is nothing to work on: {fault} ({what}).")
    return tuple(map(str, names))


def column(rows: Sequence[Row], name: str) -> list[Any]:
    """One field of every row; None where a row lacks it."""
    return rows.column(name) if isinstance(rows, _Arrow) else [row.get(name) for row in rows]


def nearest(name: str, among: Iterable[str]) -> str:
    """ " (did you mean 'x'?)", or nothing when no name is near."""
    near = difflib.get_close_matches(name, list(among), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _json(path: Path) -> list[Row]:
    found = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(found, dict) and found and all(isinstance(v, dict) for v in found.values()):
        return [{**row, "key": key} for key, row in found.items()]
    if not isinstance(found, list):
        raise ValueError(
            f"expected a list of objects, or an object of objects by key; got {type(found).__name__}"
        )
    return found


def _jsonl(path: Path) -> list[Row]:
    rows = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    rows.append(json.loads(line))
                except ValueError as e:
                    raise ValueError(f"line {number}: {e}") from e
    return rows


def _csv(path: Path, delimiter: str, as_text: Sequence[str]) -> list[Row]:
    with path.open(encoding="utf-8-sig", newline="") as text:
        reader = csv.DictReader(text, delimiter=delimiter, strict=True)
        columns = list(reader.fieldnames or ())
        repeated = sorted({name for name in columns if columns.count(name) > 1})
        if repeated:
            raise ValueError(f"several columns are called {', '.join(map(repr, repeated))}")
        rows: list[Row] = list(reader)
    uneven = [i for i, row in enumerate(rows) if None in row or None in row.values()]
    if uneven:
        raise ValueError(
            f"{len(uneven)} rows have more or fewer values than there are columns; the first: {uneven[0] + 1}"
        )
    for name in columns:
        convert = None if name in as_text else _type_of([row[name] for row in rows])
        if convert:
            for row in rows:
                row[name] = convert(row[name])
    return rows


def _type_of(values: list[str]) -> type[int] | type[float] | None:
    """int where every value is a whole number as Python writes it ("007" is not), else float, else None."""
    whole = [re.fullmatch(r"-?[1-9]\d*|0", value) is not None for value in values]
    if values and all(whole):
        return int
    numbers = (w or (_DECIMAL.fullmatch(v) and not v.isdecimal()) for w, v in zip(whole, values, strict=True))
    return float if values and all(numbers) else None


class _Arrow(Sequence[Row]):
    """Rows of a Parquet file, turned into Python values as they are asked for."""

    def __init__(self, table: Any) -> None:
        self._table = table
        self.names = tuple(table.column_names)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def column(self, name: str) -> list[Any]:
        values: list[Any] = self._table.column(name).to_pylist()
        return values

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[n] for n in range(*i.indices(len(self)))]
        row: Row = self._table.slice(i, 1).to_pylist()[0]
        return row


def _parquet(path: Path) -> _Arrow:
    try:
        import pyarrow.parquet as parquet
    except ImportError as e:
        raise MissingExtra.needed("Reading a Parquet table", package="pyarrow", extra="parquet") from e
    return _Arrow(parquet.read_table(path))
