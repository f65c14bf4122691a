"""Rows with named fields: what a store, a join and a subset of rows share, and what a feed reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index
from pathlib import Path
from typing import Any, overload

import numpy as np
import xxhash
from torch import Tensor

from frostline.batch import Batch, Ragged
from frostline.errors import FieldError, KeyMissing, StoreCorrupt, UsageError
from frostline.store.column import Check, ColumnReader
from frostline.store.field import TEXT_LIKE, Field
from frostline.store.manifest import load_manifest
from frostline.store.pin import Pin
from frostline.store.read import Source, read_now
from frostline.store.runs import Array
from frostline.store.snapshot import Snapshot

_CHUNK = 1 << 20  # rows looked at in one go


_KEYS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Member:
    """A snapshot's part in a table: these fields, of these positions (None: all, in order)."""

    snapshot: Snapshot
    readers: dict[str, ColumnReader]
    positions: Array | None = None

    def __len__(self) -> int:
        return len(self.snapshot) if self.positions is None else len(self.positions)

    def row_ids(self, positions: Array) -> Array:
        return self.snapshot.row_ids(positions if self.positions is None else self.positions[positions])

    def at(self, positions: Array) -> Member:
        return Member(
            self.snapshot, self.readers, positions if self.positions is None else self.positions[positions]
        )

    def require_files(self) -> None:
        """StoreCorrupt unless every file that the snapshot names for these fields is there, with its size."""
        lost = [problem for reader in self.readers.values() for problem in reader.missing_files()]
        if lost:
            more = f" (and {len(lost) - 3:,} more)" if len(lost) > 3 else ""
            root = self.snapshot.root
            raise StoreCorrupt(
                f"{root} is damaged: {'; '.join(lost[:3])}{more}. Restore the files from a copy. "
                f"`frostline store check {root}` lists all damage; with check='open' the rows of the "
                f"other files can be read."
            )

    def place_of(self, position: int) -> int:
        """Where a position of the snapshot stands among these; −1 where it does not."""
        order, ascending = self._sorted
        at = int(np.searchsorted(ascending, position))
        return int(order[at]) if at < len(ascending) and int(ascending[at]) == position else -1

    @cached_property
    def _sorted(self) -> tuple[Array, Array]:
        positions = np.arange(len(self)) if self.positions is None else self.positions
        order = np.argsort(positions, kind="stable")
        return order, positions[order]

    def __reduce__(self) -> tuple[Any, ...]:
        # a worker process opens the same commit anew; open files do not travel
        check = next((reader.check for reader in self.readers.values()), "files")
        number = self.snapshot.commit.number
        return (open_member, (self.snapshot.root, number, list(self.readers), check, self.positions))


def open_member(
    root: Path,
    commit: int | None = None,
    names: Sequence[str] | None = None,
    check: Check = "files",
    positions: Array | None = None,
) -> Member:
    """The fields called `names` (None: all) of a commit (None: the newest)."""
    rows_per_shard = load_manifest(root)
    pin = Pin(root, commit)
    snapshot = Snapshot(root, rows_per_shard, pin.number)
    snapshot.pin = pin
    columns = [c for c in snapshot.commit.columns if names is None or c.name in names]
    return Member(snapshot, {c.name: ColumnReader(snapshot, c, check=check) for c in columns}, positions)


class Keys(Sequence[str]):
    """A table's keys, in row order; read as they are asked for."""

    def __init__(self, member: Member) -> None:
        self._member = member

    def __len__(self) -> int:
        return len(self._member)

    @overload
    def __getitem__(self, i: int) -> str: ...
    @overload
    def __getitem__(self, i: slice) -> list[str]: ...
    def __getitem__(self, i: int | slice) -> str | list[str]:
        if isinstance(i, slice):
            return self.at(np.arange(*i.indices(len(self))))
        if not -len(self) <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        return self.at(np.array([i % len(self)]))[0]

    def at(self, positions: Array) -> list[str]:
        inner = self._member.positions
        return self._member.snapshot.keys(positions if inner is None else inner[positions])

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), 4096):
            yield from self[start : start + 4096]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.position(key) >= 0

    def position(self, key: str) -> int:
        return self.positions([key])[0]

    def positions(self, keys: Sequence[str]) -> list[int]:
        """Where these keys stand; −1 where one does not."""
        snapshot = self._member.snapshot
        rows = np.fromiter((snapshot.find(key) for key in keys), np.int64, len(keys))
        if int(rows.max(initial=-1)) < 0:
            return [-1] * len(rows)
        places: list[int] = snapshot.positions_of_rows(rows).tolist()
        if self._member.positions is None:
            return places
        return [place if place < 0 else self._member.place_of(place) for place in places]

    def hashes(self) -> Array:
        """xxh3-64 of every key, in row order."""
        whole = self._member.snapshot.hashes()
        return whole if self._member.positions is None else whole[self._member.positions]

    def digest(self) -> str:
        """Other keys, or the same in another order, give another one. Takes memory for a run at a time."""
        digest = xxhash.xxh3_64()
        whole = self._member.positions is None
        for hashes in self._member.snapshot.hashes_by_run() if whole else [self.hashes()]:
            digest.update(np.ascontiguousarray(hashes).data)
        return digest.hexdigest()


def common_positions(tables: Sequence[Keys]) -> list[Array]:
    """Where the keys that all of these have stand in each of them, in the order of the first."""
    first = tables[0]
    hashes = first.hashes()
    places = [np.arange(len(first))]
    for other in tables[1:]:
        theirs = other.hashes()
        order = np.argsort(theirs, kind="stable")
        at = np.minimum(np.searchsorted(theirs, hashes, sorter=order), max(0, len(theirs) - 1))
        place = np.full(len(first), -1)
        if len(theirs):
            place = np.where(theirs[order[at]] == hashes, order[at], -1)
        found = np.flatnonzero(place >= 0)
        for start in range(0, len(found), _KEYS_AT_ONCE):
            some = found[start : start + _KEYS_AT_ONCE]
            for i, mine, yours in zip(some, first.at(some), other.at(place[some]), strict=True):
                if mine != yours:  # two keys with one hash
                    place[i] = other.position(mine)
        places.append(place)
    everywhere = np.flatnonzero(np.all([place >= 0 for place in places], axis=0))
    return [place[everywhere] for place in places]


class Table:
    """Named fields of rows 0 … n − 1."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = tuple(members)

    def __len__(self) -> int:
        return len(self._members[0])

    @property
    def keys(self) -> Keys:
        return Keys(self._members[0])

    @property
    def fields(self) -> dict[str, Field]:
        return {name: r.spec for member in self._members for name, r in member.readers.items()}

    def __contains__(self, key: object) -> bool:
        return key in self.keys

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys)

    def __getitem__(self, key: str) -> dict[str, Any]:
        """One row's fields, by key."""
        batch = self.rows([key])
        return {name: value[0] for name, value in batch.items()}

    def rows(
        self,
        which: Sequence[int | str] | Array,
        fields: Sequence[str] | None = None,
        *,
        pinned: bool = False,
    ) -> Batch:
        """Several rows, by position or key, as one batch in fresh memory (pinned: page-locked, for a GPU)."""
        positions = self.positions(which)
        values = read_now(self.sources(self.names(fields), positions), len(positions), pinned=pinned)
        return Batch(values, lambda: self.keys.at(positions))

    def positions(self, which: Sequence[int | str] | Array) -> Array:
        """Positions of rows given by position or key."""
        plain = isinstance(which, np.ndarray) and which.ndim == 1 and which.dtype.kind in "iu"
        rows = np.asarray(which) if plain else np.array(self._looked_up(self._asked(which)))
        if len(rows) and not -len(self) <= int(rows.min()) <= int(rows.max()) < len(self):
            raise UsageError(
                f"{self._name()} has rows 0 … {len(self) - 1}; asked for {rows.min()} … {rows.max()}."
            )
        out = rows.astype(np.int64)
        return np.where(out < 0, out + len(self), out)

    def _asked(self, which: Any) -> list[int | str]:
        """Whole numbers and strings. A mask is neither: as numbers it would be rows 0 and 1, many times."""
        try:
            given = which.tolist() if isinstance(which, np.ndarray | Tensor) else list(which)
            if isinstance(which, str) or any(isinstance(w, bool | np.bool_) for w in given):
                raise TypeError
            return [w if isinstance(w, str) else index(w) for w in given]
        except TypeError:
            raise UsageError(
                f"{self._name()}: rows are asked for by a list of positions (whole numbers) and keys "
                f"(strings), got {which!r:.80}. Of a mask: np.flatnonzero(mask)."
            ) from None

    def _looked_up(self, wanted: list[int | str]) -> list[int]:
        keys = list(dict.fromkeys(key for key in wanted if isinstance(key, str)))
        places = dict(zip(keys, self.keys.positions(keys), strict=True))
        missing = [key for key, place in places.items() if place < 0]
        if missing:
            raise KeyMissing(
                f"{self._name()} has no key {missing[0]!r}"
                + (f" (nor {len(missing) - 1} more of those asked for)." if missing[1:] else ".")
            )
        return [places[w] if isinstance(w, str) else w for w in wanted]

    def names(self, fields: Sequence[str] | None) -> list[str]:
        """The fields asked for (all when None), or FieldError that lists those there are."""
        if fields is None:
            return list(self.fields)
        unknown = [name for name in fields if name not in self.fields]
        if unknown:
            raise FieldError(
                f"{self._name()} has no field {', '.join(map(repr, unknown))}; it has "
                f"{', '.join(self.fields)}."
            )
        return list(fields)

    def sources(
        self,
        names: Sequence[str],
        positions: Array,
        *,
        chosen: dict[str, Array] | None = None,
        direct: Sequence[str] = (),
    ) -> dict[str, Source]:
        """What a Read needs for these fields of these rows."""
        out = {}
        for member in self._members:
            mine = [name for name in names if name in member.readers]
            rows = member.row_ids(positions) if mine else positions
            for name in mine:
                out[name] = Source(member.readers[name], rows, (chosen or {}).get(name), name in direct)
        return {name: out[name] for name in names}

    def reader(self, name: str) -> ColumnReader:
        return next(m.readers[name] for m in self._members if name in m.readers)

    def at(self, positions: Array) -> Table:
        """The rows at these positions, in this order."""
        return Table([member.at(positions) for member in self._members])

    def with_fields(self, fields: Sequence[str]) -> Table:
        """The rows that have all of these fields (an extension may be unfinished, or have failed on some)."""
        names = self.names(fields)
        keep = np.concatenate(
            [self._have(names, np.arange(s, min(len(self), s + _CHUNK))) for s in range(0, len(self), _CHUNK)]
            or [np.ones(0, bool)]
        )
        return self if keep.all() else self.at(np.flatnonzero(keep))

    def _have(self, names: Sequence[str], positions: Array) -> Array:
        keep = np.ones(len(positions), bool)
        for member in self._members:
            rows = member.row_ids(positions)
            for name in (n for n in names if n in member.readers):
                keep &= member.readers[name].present(rows)
        return keep

    # whole columns of small values, for orders

    def is_ragged(self, field: str) -> bool:
        return self.fields[self.names([field])[0]].ragged

    def column(self, field: str) -> Any:
        """All values of a number field (an array) or of a string field (a list), in row order."""
        spec = self.fields[self.names([field])[0]]
        if spec.dtype not in TEXT_LIKE and spec.shape != ():
            raise FieldError(
                f"Field {field!r} is {spec.dtype} {list(spec.shape)}; a whole column is read of numbers and "
                f"strings only."
            )
        pieces = [
            self.rows(np.arange(s, min(len(self), s + 65536)), [field])[field]
            for s in range(0, len(self), 65536)
        ]
        if spec.dtype in TEXT_LIKE:
            return [value for piece in pieces for value in piece]
        return np.concatenate(
            [piece.float().numpy() if spec.dtype == "bfloat16" else piece.numpy() for piece in pieces]
            or [np.zeros(0)]
        )

    def lengths(self, field: str) -> Array:
        """First-dimension lengths of a ragged field, in row order."""
        source = self.sources(self.names([field]), np.arange(len(self)))[field]
        return source.reader.lengths(*source.reader.locate(source.rows))

    def dataset(self, fields: Sequence[str] | None = None) -> Dataset:
        """A map-style dataset for torch's DataLoader, Lightning, the HF Trainer.

        Rows come as dicts and are read in batches.
        """
        return Dataset(self, self.names(fields))

    def _name(self) -> str:
        return f"Store {str(self._members[0].snapshot.root)!r}"


class Dataset:
    """Rows of a table as a map-style dataset; `__getitems__` reads a whole batch at once."""

    def __init__(self, table: Table, fields: Sequence[str]) -> None:
        self._table, self._fields = table, list(fields)

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, i: int) -> dict[str, Any]:
        if not -len(self) <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")  # what ends a `for` loop over the rows
        return self.__getitems__([i])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        batch = self._table.rows(np.asarray(indices, np.int64), self._fields)
        columns = {name: list(value) if isinstance(value, Ragged) else value for name, value in batch.items()}
        return [{name: column[i] for name, column in columns.items()} for i in range(len(indices))]
