"""One commit as a table of live rows: position ↔ row ↔ key, and which file holds which rows.

A *row* is a number for life (shard = row // R). A *position* counts the snapshot's live rows, 0 … n − 1.
Nothing here is O(rows) in memory: runs stay mapped, only tombstones and the file table are loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from frostline.errors import StoreCorrupt
from frostline.store import quarantine
from frostline.store.manifest import EMPTY, Column, load_commit
from frostline.store.runs import Array, Run, key_hash, open_run


@dataclass(frozen=True)
class FileTable:
    """The shard files of one column, ascending by shard.

    As large as the index itself, whatever numbers stand in it.
    """

    shard: Array
    rows: Array
    dense: Array
    bytes: Array
    xxh3: Array
    commit: Array

    def shards(self) -> list[int]:
        return [int(n) for n in self.shard]

    def at(self, shards: Array) -> Array:
        """Where each shard's file stands in these arrays; −1 where there is none."""
        n = len(self.shard)
        if n and int(self.shard[-1]) == n - 1:  # no gaps, the usual case
            return np.where((shards >= 0) & (shards < n), shards, -1)
        if not n:
            return np.full(len(shards), -1, np.int64)
        found = np.minimum(np.searchsorted(self.shard, shards), n - 1)
        return np.where(self.shard[found] == shards, found, -1)


class Snapshot:
    """The store at one commit. `after`: a snapshot near it, whose open runs are used again."""

    def __init__(
        self, root: Path, rows_per_shard: int, number: int, *, after: Snapshot | None = None
    ) -> None:
        self.root = root
        self.pin: object = (
            None  # keeps what this snapshot names from `store gc`, as long as anything reads it
        )
        self.rows_per_shard = rows_per_shard
        self.checksum: str | None
        self.commit, self.checksum = load_commit(root, number) if number else (EMPTY, None)
        opened = dict(zip(after.commit.runs, after.runs, strict=True)) if after is not None else {}
        self.runs: list[Run] = [
            opened[ref] if ref in opened else open_run(root, ref) for ref in self.commit.runs
        ]
        dead = [r.tombstones for r in self.runs if len(r.tombstones)]
        self.dead: Array = np.unique(np.concatenate(dead)) if dead else np.zeros(0, np.int64)
        self._dead_places = [self._places_of_dead(run) for run in self.runs]
        counts = [len(run) - len(dead) for run, dead in zip(self.runs, self._dead_places, strict=True)]
        self._ends = np.cumsum(counts, dtype=np.int64)
        if len(self) != self.commit.rows:
            raise StoreCorrupt(
                f"{root}: commit {number} says {self.commit.rows:,} rows, its index holds {len(self):,}."
            )

    def _places_of_dead(self, run: Run) -> Array:
        if not len(self.dead) or not len(run):
            return np.zeros(0, np.int64)
        here = self.dead[(self.dead >= run.rows[0]) & (self.dead <= run.rows[-1])]
        places = np.searchsorted(run.rows, here)
        found: Array = places[run.rows[places] == here]
        return found

    def _refuse_cut(self) -> None:
        for run in self.runs:
            run.refuse_cut()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    # positions, rows, keys

    def _spans(self, positions: Array) -> Iterator[tuple[Run, Any, Array]]:
        """(run, which of `positions`, their places in the run) for each run that is touched."""
        self._refuse_cut()
        owner = np.searchsorted(self._ends, positions, side="right")
        for i in np.flatnonzero(np.bincount(owner)) if len(owner) else ():
            mine = slice(None) if len(self.runs) == 1 else np.flatnonzero(owner == i)
            places = positions[mine] - (self._ends[i - 1] if i else 0)
            dead = self._dead_places[i]
            if len(dead):
                places = places + np.searchsorted(dead - np.arange(len(dead)), places, side="right")
            yield self.runs[i], mine, places

    @cached_property
    def _shifts(self) -> Array | None:
        """What turns a position into a row, run by run, where no run has a gap between its rows."""
        gaps = any(len(run) and int(run.rows[-1]) - int(run.rows[0]) + 1 != len(run) for run in self.runs)
        if gaps or len(self.dead):
            return None
        firsts = np.array([int(run.rows[0]) if len(run) else 0 for run in self.runs], np.int64)
        shifts: Array = firsts - np.concatenate([[0], self._ends[:-1]])
        return shifts

    def row_ids(self, positions: Array) -> Array:
        if self._shifts is not None and len(self._ends):
            return positions + self._shifts[np.searchsorted(self._ends, positions, side="right")]
        out = np.empty(len(positions), np.int64)
        for run, mine, places in self._spans(positions):
            out[mine] = run.rows[places]
        return out

    def keys(self, positions: Array) -> list[str]:
        out = [""] * len(positions)
        for run, mine, places in self._spans(positions):
            where = range(len(positions)) if isinstance(mine, slice) else mine
            for i, place in zip(where, places.tolist(), strict=True):
                out[i] = run.text(place)
        return out

    def hashes(self) -> Array:
        """The hashes of all live keys, by position."""
        return np.concatenate([np.empty(0, np.uint64), *self.hashes_by_run()])

    def hashes_by_run(self) -> Iterator[Array]:
        self._refuse_cut()
        for run, dead in zip(self.runs, self._dead_places, strict=True):
            by_place = np.empty(len(run), np.uint64)
            by_place[run.hash_order] = run.hashes
            yield np.delete(by_place, dead)

    def positions_of_rows(self, rows: Array) -> Array:
        """Positions of live rows (ascending runs make this a search)."""
        self._refuse_cut()
        out = np.full(len(rows), -1, np.int64)
        for i, run in enumerate(self.runs):
            if not len(run):
                continue
            places = np.searchsorted(run.rows, rows)
            hit = np.flatnonzero(run.rows[np.minimum(places, len(run) - 1)] == rows)
            before = np.searchsorted(self._dead_places[i], places[hit])
            out[hit] = places[hit] - before + (self._ends[i - 1] if i else 0)
        return out

    def find(self, key: str) -> int:
        """The live row called `key`, or −1."""
        self._refuse_cut()
        data = _encoded(key)
        if data is None:
            return -1
        hashed = key_hash(data)
        for run in reversed(self.runs):
            for row in reversed(run.find(hashed, data)):
                if not self._is_dead(row):
                    return row
        return -1

    def may_have(self, keys: Sequence[str]) -> list[bool]:
        """For each key, whether `find` has to be asked: no other is there. Also said of keys that are not
        valid Unicode, which nobody can look up."""
        self._refuse_cut()
        data = [_encoded(key) for key in keys]
        hashed = np.fromiter((0 if d is None else key_hash(d) for d in data), np.uint64, len(data))
        found = np.fromiter((d is None for d in data), np.bool_, len(data))
        for run in self.runs:
            found |= run.has_hashes(hashed)
        return [bool(there) for there in found]

    def _is_dead(self, row: int) -> bool:
        place = int(np.searchsorted(self.dead, row)) if len(self.dead) else 0
        return place < len(self.dead) and int(self.dead[place]) == row

    def live_rows(self, shard: int) -> Array:
        """Live rows of one shard, ascending."""
        self._refuse_cut()
        first, last = shard * self.rows_per_shard, (shard + 1) * self.rows_per_shard
        parts = [
            run.rows[np.searchsorted(run.rows, first) : np.searchsorted(run.rows, last)] for run in self.runs
        ]
        rows = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        return rows[~np.isin(rows, self.dead)] if len(self.dead) else rows

    # files and quarantine

    def files(self, column: Column, *, runs: Sequence[Run] | None = None) -> FileTable:
        """The column's files, in all runs or in those given."""
        self._refuse_cut()
        runs = self.runs if runs is None else runs
        mine = [np.flatnonzero(run.file_column == column.number) for run in runs]
        names = ("shard", "rows", "dense", "bytes", "xxh3", "commit")
        parts = {
            name: np.concatenate([run.arrays[f"file_{name}"][at] for run, at in zip(runs, mine, strict=True)])
            if mine
            else np.zeros(0, np.int64)
            for name in names
        }
        # a newer entry stands later: of several about a shard, the last one counts
        newest = len(parts["shard"]) - 1 - np.unique(parts["shard"][::-1], return_index=True)[1]
        table = FileTable(**{name: values[newest] for name, values in parts.items()})
        self._check_files(table, column.name)
        return table

    def _check_files(self, table: FileTable, field: str) -> None:
        if not len(table.shard):
            return
        if not 0 <= int(table.shard[0]) <= int(table.shard[-1]) < self.commit.next_shard:
            raise StoreCorrupt(
                f"{self.root}: field {field!r} names a shard beyond the {self.commit.next_shard:,} there are."
            )
        if not 1 <= int(table.rows.min()) <= int(table.rows.max()) <= self.rows_per_shard:
            raise StoreCorrupt(
                f"{self.root}: a shard of {field!r} claims {int(table.rows.min()):,} … "
                f"{int(table.rows.max()):,} rows; "
                f"expected 1 … {self.rows_per_shard:,}."
            )
        if not 0 <= int(table.commit.min()) <= int(table.commit.max()) <= self.commit.number:
            raise StoreCorrupt(f"{self.root}: a shard of {field!r} names a commit that is not there.")

    def quarantine(self) -> list[dict[str, Any]]:
        """Inputs that failed and have not succeeded since, oldest first."""
        self._refuse_cut()
        name = f"{self.root}: commit {self.commit.number}"
        lines = (line for run in self.runs for line in quarantine.parse(run.quarantine.tobytes(), name))
        entries = list(quarantine.standing(lines).values())
        columns = {c.number for c in self.commit.columns}
        return [
            e for e in entries if "column" not in e or (e["column"] in columns and self.is_live(e["row"]))
        ]

    def is_live(self, row: int) -> bool:
        return int(self.positions_of_rows(np.array([row]))[0]) >= 0 and not self._is_dead(row)


def _encoded(key: str) -> bytes | None:
    try:
        return key.encode()
    except UnicodeEncodeError:
        return None  # a lone surrogate: no stored key can be that
