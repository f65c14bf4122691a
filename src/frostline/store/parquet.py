"""The index and the small values of a store as one Parquet file, for everything that speaks Parquet.

A row has its key, its row number and its numbers, strings, JSON (as text) and short vectors; what is larger
stays in the store and is named. pyarrow is an extra.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from frostline.errors import MissingExtra, UsageError
from frostline.store.disk import ASIDE
from frostline.store.field import TEXT_LIKE, Field
from frostline.store.table import Table

if TYPE_CHECKING:
    from frostline.store.convert import Progress
    from frostline.store.export import Written

MOST_BYTES = 4096  # of a value that is still small: a vector of 1,024 floats
FILE = "rows.parquet"
_GROUP = 8192


def export_parquet(
    table: Table,
    out: Path,
    names: Sequence[str],
    *,
    notes: list[str],
    progress: Progress | None = None,
    max_value_bytes: int = MOST_BYTES,
) -> Written:
    """Write `out` (a path that ends in .parquet, or a folder that gets rows.parquet)."""
    from frostline.store.export import Written, explained

    try:
        import pyarrow.parquet
    except ImportError as e:
        raise MissingExtra.needed("Exporting to Parquet", package="pyarrow", extra="parquet") from e
    place = out if out.suffix == ".parquet" else out / FILE
    if place.exists() or (out.exists() and out != place and not out.is_dir()):
        raise UsageError(f"Cannot export to {place}: something is there already. Choose another place.")
    small, large = _split(table, names, max_value_bytes)
    if large:
        notes.append(
            f"Left out, since their values are larger than {max_value_bytes:,} bytes: {', '.join(large)}."
        )
    with explained(place):
        place.parent.mkdir(parents=True, exist_ok=True)
        aside = place.with_name(place.name + ASIDE)
        schema = _schema(small, large)
        with pyarrow.parquet.ParquetWriter(aside, schema, compression="zstd") as writer:
            for start in range(0, len(table), _GROUP):
                positions = np.arange(start, min(len(table), start + _GROUP))
                writer.write_table(_group(table, positions, small, schema))
                if progress:
                    progress("exporting", int(positions[-1]) + 1, len(table))
        aside.rename(place)
    return Written(len(table), place, tuple(small), tuple(notes))


def _split(table: Table, names: Sequence[str], most: int) -> tuple[dict[str, Field], list[str]]:
    """Fields whose values are small, and the names of the others. Strings and JSON always count as small."""
    small = {}
    for name in names:
        spec = table.fields[name]
        size = np.dtype(_numpy(spec)).itemsize * int(np.prod(spec.item_shape, dtype=np.int64))
        if spec.ragged and len(table):
            size *= int(table.lengths(name).max())
        if spec.dtype in ("str", "json") or size <= most:
            small[name] = spec
    return small, [name for name in names if name not in small]


def _numpy(spec: Field) -> str:
    """The type that readers get; half precision widens, since few of them know it."""
    if spec.dtype in TEXT_LIKE:
        return "uint8"
    return "float32" if spec.dtype in ("float16", "bfloat16") else spec.dtype


def _schema(fields: dict[str, Field], left_out: Sequence[str]) -> Any:
    import pyarrow as pa

    columns = [("key", pa.string()), ("row", pa.int64())]
    columns += [(_column(name), _arrow(spec)) for name, spec in fields.items()]
    about = {"fields": {name: asdict(spec) for name, spec in fields.items()}, "left_out": list(left_out)}
    return pa.schema(columns, metadata={"frostline": json.dumps(about)})


def _column(name: str) -> str:
    return f"field.{name}" if name in ("key", "row") else name


def _arrow(spec: Field) -> Any:
    import pyarrow as pa

    if spec.dtype in TEXT_LIKE:
        return pa.binary() if spec.dtype == "bytes" else pa.string()
    kind = pa.bool_() if spec.dtype == "bool" else pa.from_numpy_dtype(np.dtype(_numpy(spec)))
    for _ in spec.shape:
        kind = pa.list_(kind)
    return kind


def _group(table: Table, positions: Any, fields: dict[str, Field], schema: Any) -> Any:
    import pyarrow as pa

    batch = table.rows(positions, list(fields))
    first = next(iter(table.fields))
    row_numbers = table.sources([first], positions)[first].rows
    arrays = [pa.array(batch.keys_of_rows, pa.string()), pa.array(row_numbers, pa.int64())]
    arrays += [pa.array(_values(batch[name], spec), _arrow(spec)) for name, spec in fields.items()]
    return pa.Table.from_arrays(arrays, schema=schema)


def _values(values: Any, spec: Field) -> list[Any]:
    if spec.dtype == "json":
        return [json.dumps(value, ensure_ascii=False) for value in values]
    if spec.dtype in TEXT_LIKE:
        return list(values)
    return values.tolist() if isinstance(values, Tensor) else [row.tolist() for row in values]
