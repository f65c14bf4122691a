"""Adding and retiring fields, without touching what is there."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np

from frostline.errors import FieldError, KeyDuplicate, KeyMissing, UsageError
from frostline.store import quarantine
from frostline.store.building import SAMPLED_ROWS, Block, Encoded, checked, encode_rows
from frostline.store.codecs import Error
from frostline.store.field import Field
from frostline.store.inorder import InOrder
from frostline.store.runs import Array
from frostline.store.session import FileEntry, Session, ensure_folders, new_columns
from frostline.store.shard import write as write_shard


@dataclass
class _Pending:
    """A shard whose new values are coming in: its live rows, and what they have so far."""

    rows: dict[int, int]  # row → its rank among the live ones
    values: dict[int, dict[str, tuple[Encoded, int]]] = field(default_factory=dict)
    """Row → for each field the rows that came with it, and which of them it is."""
    failed: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    def has(self, row: int) -> bool:
        return row in self.values or row in self.failed

    @property
    def whole(self) -> bool:
        return len(self.values) + len(self.failed) >= len(self.rows)


class Extender:
    """Adds fields to the rows that are there. `pending` lists the keys that still lack them, shard by shard.

    A shard is written and committed in the background when each of its rows has come, or is in quarantine;
    other shards wait in memory, so rows are best given in the order of `pending`.
    """

    def __init__(self, session: Session, fields: dict[str, Field]) -> None:
        self._session = session
        self._pid = os.getpid()
        commit = session.snapshot.commit
        old = {c.name: c.field for c in commit.columns}
        clash = [n for n, f in fields.items() if n in old and _other(old[n], f)]
        if clash:
            raise FieldError(
                f"{session.root} has {', '.join(clash)} already, of another type or fingerprint. "
                f"Retire it first: fl.Store.retire(path, {clash[0]!r})."
            )
        self._fresh = new_columns({n: f for n, f in fields.items() if n not in old}, commit.next_column)
        self._next_column = commit.next_column + len(self._fresh)
        self._columns = {c.name: c for c in (*commit.columns, *self._fresh)}
        self._names = list(fields)
        ensure_folders(session.root, (self._columns[name] for name in fields))
        self._open: dict[int, _Pending] = {}
        self._rows: dict[str, int] = {}
        """Where keys are that `pending_shards` gave out."""
        self._order = InOrder(session)
        self._closed = False
        self._todo = dict.fromkeys(self._shards_to_do())

    def _shards_to_do(self) -> list[int]:
        """Shards with live rows that lack one of the fields, and did not fail as a whole."""
        snapshot = self._session.snapshot
        self._have: dict[str, set[int]] = {}
        for name in self._names:
            column = self._columns[name]
            failed = {
                q["shard"] for q in self._session.quarantined.values() if q.get("column") == column.number
            }
            self._have[name] = {*snapshot.files(column).shard.tolist(), *failed}
        done = set.intersection(*self._have.values())
        size = self._session.rows_per_shard
        found = [np.unique(run.rows // size) for run in snapshot.runs]
        shards = np.unique(np.concatenate(found)).tolist() if found else []
        return [s for s in shards if s not in done and len(snapshot.live_rows(s))]

    @property
    def fields(self) -> dict[str, Field]:
        """The fields that are added."""
        return {name: self._columns[name].field for name in self._names}

    @property
    def pending(self) -> Iterator[str]:
        """Keys whose values are still to come, in row order."""
        for shard in list(self._todo):
            for key, row in self._keys_of(shard):
                if shard in self._todo and not (shard in self._open and self._open[shard].has(row)):
                    yield key

    def pending_shards(self) -> Iterator[list[str]]:
        """The keys of each shard to which nothing was added yet: what is written, or lost, together."""
        for shard in list(self._todo):
            if shard in self._todo and shard not in self._open:
                rows = dict(self._keys_of(shard))
                self._rows |= rows  # looking each of them up in the index would take 20 µs
                yield [*rows]

    def _keys_of(self, shard: int) -> list[tuple[str, int]]:
        snapshot = self._session.snapshot
        rows = snapshot.live_rows(shard)
        keys = snapshot.keys(snapshot.positions_of_rows(rows))
        return list(zip(keys, rows.tolist(), strict=True))

    def append(self, key: str, values: dict[str, Any]) -> None:
        """The new fields' values for a key that is there."""
        self.append_batch([key], {name: [value] for name, value in values.items()})

    def append_batch(self, keys: Sequence[str], values: dict[str, Any], *, take: bool = False) -> None:
        """The same for several keys; per field a tensor [rows, …] or a list. All are taken, or none.

        take: the tensors are given away and not written to any more, so they need not be copied.
        """
        keys = list(keys)
        if set(values) != set(self._names):
            raise FieldError(
                f"Expected values for {', '.join(self._names)}, got {', '.join(values) or 'none'}."
            )
        places = [self._place(key) for key in keys]
        if len({row for row, _ in places}) != len(keys):
            raise KeyDuplicate("append_batch: a key stands twice among those given.")
        specs = {name: self._columns[name].field for name in self._names}
        rows = {name: checked(name, spec, keys, values[name]) for name, spec in specs.items()}
        encoded = []
        for first, last in self._together(places):
            some, part = slice(first, last), [row for row, _ in places[first:last]]
            pending = self._shard(places[first][1])
            sample = sum(pending.rows[row] < SAMPLED_ROWS for row in part)
            batch = {
                n: encode_rows(n, s, keys[some], rows[n][some], sample=sample, take=take)
                for n, s in specs.items()
            }
            encoded += [(row, places[first][1], batch, i) for i, row in enumerate(part)]
        for row, shard, batch, i in encoded:
            self._open[shard].values[row] = {name: (those, i) for name, those in batch.items()}
            self._write_if_whole(shard)

    def _together(self, places: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Which rows are encoded in one go: neighbours in a shard, in order, and no ragged fields."""
        first = 0
        ragged = any(self._columns[name].field.ragged for name in self._names)
        for i in range(1, len(places) + 1):
            if i == len(places) or ragged or places[i][1] != places[first][1] or places[i] < places[i - 1]:
                yield first, i
                first = i

    def quarantine(self, key: str, *, reason: object, input: Any = None) -> None:
        """This key's new fields could not be made; it stays without them."""
        row, shard = self._place(key)
        self._shard(shard).failed[row] = [
            quarantine.entry(
                key, reason, input, field=name, column=self._columns[name].number, row=row, shard=shard
            )
            for name in self._names
            if shard not in self._have[name]
        ]
        self._write_if_whole(shard)

    def _place(self, key: str) -> tuple[int, int]:
        if self._closed or self._pid != os.getpid():
            raise UsageError(
                "This writer is closed, or a fork of another process's. Open the store again with "
                "fl.Store.extend(path, fields)."
            )
        row = self._rows.get(key, -1)
        if row < 0:
            row = self._session.snapshot.find(key)
        if row < 0:
            raise KeyMissing(f"Cannot add fields to {key!r}: {self._session.root} has no such key.")
        shard = row // self._session.rows_per_shard
        if shard not in self._todo or (shard in self._open and self._open[shard].has(row)):
            raise KeyDuplicate(f"{key!r} has {', '.join(self._names)} already.")
        return row, shard

    def _shard(self, shard: int) -> _Pending:
        if shard not in self._open:
            rows = self._session.snapshot.live_rows(shard).tolist()
            self._open[shard] = _Pending({row: rank for rank, row in enumerate(rows)})
        return self._open[shard]

    def _write_if_whole(self, shard: int) -> None:
        if not self._open[shard].whole:
            return
        try:
            self._put(shard, self._open.pop(shard))
        except BaseException:
            self._release()  # what is on disk is whole; what was in memory is not to be trusted any more
            raise
        del self._todo[shard]
        size = self._session.rows_per_shard
        for key in [key for key, row in [*self._rows.items()] if row // size == shard]:
            self._rows.pop(key, None)  # in place: another thread may be asking for the next shard's keys

    def _put(self, shard: int, pending: _Pending) -> None:
        rows = sorted(pending.values)
        names = [n for n in self._names if rows and shard not in self._have[n]]
        blocks = [self._block(name, [pending.values[row][name] for row in rows]) for name in names]
        failed = [e for row in sorted(pending.failed) for e in pending.failed[row]]
        local = np.array(rows, np.int64) - shard * self._session.rows_per_shard
        self._order.put(
            sum(block.size for block in blocks),
            partial(self._files, shard, local, blocks),
            partial(self._commit, blocks, len(rows), failed),
        )

    def _block(self, name: str, values: Sequence[tuple[Encoded, int]]) -> Block:
        spec = self._columns[name].field
        block = Block(name, spec)
        for batch, start, stop in _runs(values):
            block.add(batch.rows(start, stop) if not spec.ragged else batch)
        return block

    def _files(self, shard: int, local: Array, blocks: Sequence[Block], commit: int) -> list[FileEntry]:
        return [
            write_shard(
                self._session.root,
                self._columns[block.name],
                shard,
                commit,
                local,
                block.pieces,
                block.checksums,
                block.offsets(),
            )
            for block in blocks
        ]

    def _commit(
        self, blocks: Sequence[Block], rows: int, failed: list[dict[str, Any]], files: list[FileEntry]
    ) -> None:
        columns = dict(self._columns)
        for block, entry in zip(blocks, files, strict=True):
            column = columns[block.name]
            error = Error(**vars(column.error))
            error.merge(block.error)
            columns[block.name] = replace(
                column, rows=column.rows + rows, bytes=column.bytes + entry[5], error=error
            )
        self._session.commit(
            columns=tuple(columns.values()), files=files, failed=failed,
            next_shard=self._session.snapshot.commit.next_shard, next_column=self._next_column,
        )  # fmt: skip
        self._columns, self._fresh = columns, ()

    def close(self) -> None:
        """Let the store go. Values of unfinished shards are dropped; `pending` will name them again.

        In a forked process: nothing, the store is its parent's.
        """
        if self._pid != os.getpid():
            return
        try:
            if not self._closed:
                self._order.wait()
            if not self._closed and self._fresh and not self._todo:
                self._commit([], 0, [], [])  # no row to wait for: the store has the fields from now on
        finally:
            self._release()

    def _release(self) -> None:
        """Nothing more is written, and the store is free. May be called again, where it was interrupted."""
        self._closed = True
        self._order.close()
        self._session.release()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and self._pid == os.getpid():
            self._session.release()
            warnings.warn(
                f"An extender of {self._session.root} was never closed: use `with fl.Store.extend(…) as "
                f"extender:` or extender.close().",
                ResourceWarning,
                stacklevel=2,
            )

    def __enter__(self) -> Extender:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._release()


def _runs(rows: Sequence[tuple[Encoded, int]]) -> Iterator[tuple[Encoded, int, int]]:
    """Rows that lie side by side in what they came with, as (that, first, last + 1)."""
    start = 0
    for i in range(1, len(rows) + 1):
        if i < len(rows) and rows[i][0] is rows[i - 1][0] and rows[i][1] == rows[i - 1][1] + 1:
            continue
        yield rows[start][0], rows[start][1], rows[i - 1][1] + 1
        start = i


def _other(held: Field, given: Field) -> bool:
    return not held.same_data(given) or held.fingerprint != given.fingerprint


def retire(session: Session, names: Sequence[str]) -> None:
    """Take fields out of the store; their files stay until `store gc`."""
    commit = session.snapshot.commit
    unknown = [name for name in names if commit.column(name) is None]
    left = tuple(c for c in commit.columns if c.name not in names)
    if unknown or not left or not names:
        what = f"no field called {', '.join(unknown)}" if unknown else "a store keeps at least one field"
        raise FieldError(
            f"Cannot retire {', '.join(names) or 'nothing'}: {what if names else 'name a field'}. "
            f"{session.root} has {', '.join(c.name for c in commit.columns)}."
        )
    session.commit(columns=left, next_shard=commit.next_shard, next_column=commit.next_column)
