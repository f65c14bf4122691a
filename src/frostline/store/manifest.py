"""The store's own records, canonical and checksummed: `manifest.json` and one `commits/N.json` a commit.

A commit is a whole snapshot in a few kilobytes: the fields, the totals, and the short list of index runs
that together hold every row. The list stays short because runs are merged (see runs.py), so a commit's
size grows with the logarithm of the number of commits and never with the number of shards.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import xxhash

from frostline.errors import FieldError, StoreCorrupt, StoreError, StoreVersion
from frostline.store.codecs import Error
from frostline.store.disk import read_inside
from frostline.store.field import CODECS, KNOWN_DTYPES, Field, check_fields

FORMAT = "frostline-store"
VERSION = 1
MANIFEST = "manifest.json"
MAX_ROWS_PER_SHARD = 1 << 24
MOST_BYTES = 16 << 20  # bytes of a record: over a hundred fields with all the provenance they may have
_COMMIT_NAME = re.compile(r"([0-9]{8}|[1-9][0-9]{8,17})\.json")


@dataclass(frozen=True)
class Column:
    """A field at one commit. The column number names its folder; a field that comes back gets a new one."""

    name: str
    number: int
    field: Field
    error: Error
    rows: int
    bytes: int

    @property
    def folder(self) -> str:
        return f"{self.number:03d}-{self.name}"


@dataclass(frozen=True)
class RunRef:
    """An index run: it covers commits first…last."""

    first: int
    last: int
    level: int
    rows: int
    bytes: int
    xxh3: str

    @property
    def file(self) -> str:
        return f"{self.first:08d}-{self.last:08d}.safetensors"


@dataclass(frozen=True)
class Commit:
    """One snapshot of the store."""

    number: int
    parent: str | None
    rows: int
    quarantined: int
    next_shard: int
    next_column: int
    columns: tuple[Column, ...]
    runs: tuple[RunRef, ...]

    @property
    def file(self) -> str:
        return f"{self.number:08d}.json"

    def column(self, name: str) -> Column | None:
        return next((c for c in self.columns if c.name == name), None)

    def dump(self) -> bytes:
        return seal(
            {
                "format": FORMAT,
                "version": VERSION,
                "commit": self.number,
                "parent": self.parent,
                "rows": self.rows,
                "quarantined": self.quarantined,
                "next_shard": self.next_shard,
                "next_column": self.next_column,
                "fields": [_dump_column(c) for c in self.columns],
                "runs": [asdict(run) for run in self.runs],
            }
        )


EMPTY = Commit(0, None, 0, 0, 0, 0, (), ())


def _dump_column(column: Column) -> dict[str, Any]:
    spec = column.field
    return {
        "name": column.name,
        "column": column.number,
        "shape": list(spec.shape),
        "dtype": spec.dtype,
        "codec": spec.codec,
        "fingerprint": spec.fingerprint,
        "provenance": spec.provenance,
        "rows": column.rows,
        "bytes": column.bytes,
        "error": asdict(column.error),
    }


_SEAL = re.compile(rb',\n "checksum": "([0-9a-f]{32})"\n}\n')


def seal(record: dict[str, Any]) -> bytes:
    """Sorted JSON that ends with the xxh3-128 of all that stands before the checksum."""
    record = {k: v for k, v in record.items() if k != "checksum"}
    body = json.dumps(record, sort_keys=True, indent=1, ensure_ascii=True, allow_nan=False).encode()[:-2]
    return body + b',\n "checksum": "' + xxhash.xxh3_128_hexdigest(body).encode() + b'"\n}\n'


def unseal(data: bytes, name: str) -> dict[str, Any]:
    """The record in `data`; StoreCorrupt when a byte is not what was written. Unknown keys are left alone."""
    try:
        record = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise StoreCorrupt(f"{name} is not JSON ({e}).") from e
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise StoreCorrupt(f'{name} is not a frostline record: expected "format": "{FORMAT}".')
    if record.get("version") != VERSION:
        raise StoreVersion(
            f"{name} is of store version {record.get('version')!r}; this frostline reads version {VERSION}. "
            f"Install the frostline that wrote it, or write the store anew."
        )
    start = data.rfind(b',\n "checksum": ')
    found = _SEAL.fullmatch(data, max(start, 0))
    if not found or xxhash.xxh3_128_hexdigest(data[:start]).encode() != found[1]:
        raise StoreCorrupt(f"{name}: the checksum does not fit; the file was changed after it was written.")
    return record


def checksum_of(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def load_manifest(root: Path) -> int:
    """Rows per shard, of the store at `root`."""
    if not root.is_dir() or not (root / MANIFEST).exists():
        raise StoreError(
            f"No store at {root}: {MANIFEST} is missing there. Make one with fl.Store.create({str(root)!r}, "
            f"fields=…)."
        )
    record = unseal(read_inside(root, MANIFEST, limit=MOST_BYTES), f"{root}/{MANIFEST}")
    rows = record.get("rows_per_shard")
    if type(rows) is not int or not 1 <= rows <= MAX_ROWS_PER_SHARD:
        raise StoreCorrupt(
            f"{root}/{MANIFEST}: rows_per_shard is {rows!r}; expected 1 … {MAX_ROWS_PER_SHARD:,}."
        )
    return rows


def dump_manifest(rows_per_shard: int) -> bytes:
    return seal({"format": FORMAT, "version": VERSION, "rows_per_shard": rows_per_shard})


def commit_numbers(root: Path) -> list[int]:
    """All commits in the folder, ascending."""
    folder = root / "commits"
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        return sorted(int(m[1]) for e in entries if (m := _COMMIT_NAME.fullmatch(e.name)))


def latest(commits: list[int]) -> int:
    return commits[-1] if commits else 0


def load_commit(root: Path, number: int) -> tuple[Commit, str]:
    """Commit `number` and the checksum of its file; everything in it is checked, all problems are named."""
    name = f"{number:08d}.json"
    data = read_inside(root, "commits", name, limit=MOST_BYTES)
    record = unseal(data, f"{root}/commits/{name}")
    problems: list[str] = []
    try:
        commit = _parse_commit(record, problems)
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise StoreCorrupt(
            f"{root}/commits/{name}: a part is missing or of the wrong kind ({type(e).__name__}: {e})."
        ) from e
    if commit.number != number:
        problems.append(f"it calls itself commit {commit.number}")
    problems += _commit_problems(commit)
    if problems:
        raise StoreCorrupt(f"{root}/commits/{name}: " + "; ".join(problems) + ".")
    return commit, checksum_of(data)


def _parse_commit(record: dict[str, Any], problems: list[str]) -> Commit:
    columns = []
    for entry in record["fields"]:
        try:
            spec = Field(
                tuple(entry["shape"]),
                entry["dtype"],
                entry["codec"],
                entry["fingerprint"],
                entry["provenance"],
            )
            check_fields({entry["name"]: spec})
        except FieldError as e:
            newer = entry["dtype"] not in KNOWN_DTYPES or entry["codec"] not in CODECS
            problems.append(str(e).removesuffix(".") + " (or a newer frostline wrote this)" * newer)
            continue
        columns.append(
            Column(
                entry["name"],
                entry["column"],
                spec,
                Error.parse(entry["error"]),
                entry["rows"],
                entry["bytes"],
            )
        )
    names = [f.name for f in fields(RunRef)]
    runs = tuple(RunRef(**{name: run[name] for name in names}) for run in record["runs"])
    return Commit(
        record["commit"],
        record["parent"],
        record["rows"],
        record["quarantined"],
        record["next_shard"],
        record["next_column"],
        tuple(columns),
        runs,
    )


def _commit_problems(commit: Commit) -> list[str]:
    counts = [commit.number, commit.rows, commit.quarantined, commit.next_shard, commit.next_column]
    counts += [n for c in commit.columns for n in (c.number, c.rows, c.bytes)]
    counts += [n for r in commit.runs for n in (r.first, r.last, r.level, r.rows, r.bytes)]
    problems = []
    if not isinstance(commit.parent, str | None) or not all(isinstance(r.xxh3, str) for r in commit.runs):
        problems.append("a checksum is not a string")
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in counts):
        problems.append("a count is not a whole number, or negative, or beyond 2^62")
        return problems
    if min(len({c.name for c in commit.columns}), len({c.number for c in commit.columns})) < len(
        commit.columns
    ):
        problems.append("a field stands twice")
    if any(c.number >= commit.next_column for c in commit.columns):
        problems.append("a column number was never given out")
    spans = [(run.first, run.last) for run in commit.runs]
    if spans != sorted(spans) or any(a[1] + 1 != b[0] for a, b in pairwise(spans)):
        problems.append("the index runs do not follow each other")
    elif not spans or (spans[0][0] != 1 or spans[-1][1] != commit.number):
        problems.append("the index runs do not cover every commit")
    return problems
