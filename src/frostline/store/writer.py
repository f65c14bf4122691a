"""Adding rows: rows into shards, shards into commits.

Killed anywhere, it goes on after the last shard that was committed.
"""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
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
class _Shard:
    """A row range on its way to disk, with what else its commit will say."""

    number: int
    blocks: dict[str, Block]
    keys: dict[str, int] = field(default_factory=dict)  # key → place in the range
    failed: dict[str, dict[str, Any]] = field(default_factory=dict)
    dead: set[int] = field(default_factory=set)
    used: int = 0
    committed: bool = False

    def add(self, keys: Sequence[str], encoded: dict[str, Encoded]) -> None:
        """All of these rows, or none where it is interrupted: half a row would make the file unreadable."""
        used, marks = self.used, {name: block.mark() for name, block in self.blocks.items()}
        try:
            for name, rows in encoded.items():
                self.blocks[name].add(rows)
            for key in keys:
                self.keys[key] = self.used
                self.used += 1
        except BaseException:
            self.used = used
            for key in keys:
                self.keys.pop(key, None)
            for name, block in self.blocks.items():
                block.cut(marks[name])
            raise


class Writer:
    """Adds rows. Use it as a context manager.

    Leaving it commits what is there, an exception keeps only whole shards. A shard is written and
    committed in the background when its row range is full. Rows in shards under way are lost when the
    process dies: append them again. `key in writer` says which are in, `writer.settled(key)` which need
    no more work, because they are in or in quarantine.
    """

    def __init__(self, session: Session, fields: dict[str, Field]) -> None:
        self._session = session
        self._pid = os.getpid()
        commit = session.snapshot.commit
        self._next_column = commit.next_column
        self._columns = commit.columns
        if not commit.number:
            self._columns = new_columns(fields, 0)
            self._next_column = len(self._columns)
        ensure_folders(session.root, self._columns)
        if not commit.number:
            session.commit(columns=self._columns, next_shard=0, next_column=self._next_column)
        self.resumed_rows = commit.rows
        self._now = self._new_shard(commit.next_shard)
        self._before: deque[_Shard] = deque()
        """Shards that are being written."""
        self._order = InOrder(session)
        self._closed = False

    def _new_shard(self, number: int) -> _Shard:
        return _Shard(number, {c.name: Block(c.name, c.field) for c in self._columns})

    # what is in

    def __contains__(self, key: object) -> bool:
        if not isinstance(key, str):
            return False
        return any(key in shard.keys for shard in self._under_way()) or self._committed(key) >= 0

    def _under_way(self) -> list[_Shard]:
        return [self._now, *self._before]

    def settled(self, key: str) -> bool:
        """Whether this key needs no more work: it is in, or in quarantine. What a resumed loop skips."""
        if key in self:
            return True
        failed = any(key in shard.failed for shard in self._under_way())
        return failed or (key, None) in self._session.quarantined

    def __len__(self) -> int:
        self._wait()
        return self._session.snapshot.commit.rows + len(self._now.keys) - len(self._now.dead)

    @property
    def fields(self) -> dict[str, Field]:
        return {c.name: c.field for c in self._columns}

    @property
    def quarantined(self) -> list[dict[str, Any]]:
        """Inputs that failed and have not succeeded since."""
        self._wait()
        held: dict[quarantine.Id, dict[str, Any]] = dict(self._session.quarantined)
        held.update({(key, None): e for key, e in self._now.failed.items()})
        return [e for (key, column), e in held.items() if column is not None or key not in self._now.keys]

    def _committed(self, key: str) -> int:
        """The row that bears this key in the newest commit, or −1; a deletion under way counts."""
        row = self._session.snapshot.find(key)
        return -1 if any(row in shard.dead for shard in self._under_way()) else row

    # adding

    def append(self, key: str, values: dict[str, Any]) -> None:
        """Add one row: a value for every field."""
        self.append_batch([key], self._one(key, values))

    def _one(self, key: str, values: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(values, Mapping):
            raise _no_values(key, values, [c.name for c in self._columns])
        return {name: [value] for name, value in values.items()}

    def append_batch(self, keys: Sequence[str], values: dict[str, Any], *, take: bool = False) -> None:
        """Add rows: for each field a tensor [rows, …] or a list of values. All are taken, or none.

        take: the tensors are given away and not written to any more, so they need not be copied.
        """
        keys = list(keys)
        self._check_keys(keys)
        if len(set(keys)) != len(keys):
            raise KeyDuplicate(
                f"append_batch: {_first_repeat(keys)!r} stands twice among the {len(keys)} keys given."
            )
        room = self._session.rows_per_shard - self._now.used
        self._add(self._encoded(keys, values, room=room, take=take))

    def _encoded(
        self, keys: Sequence[str], values: dict[str, Any], *, room: int, take: bool = False
    ) -> list[tuple[Sequence[str], dict[str, Encoded]]]:
        """The rows as bytes, in the pieces that go into shards; FieldError before anything is taken."""
        self._check_names(keys[0] if keys else "", values)
        rows = {c.name: checked(c.name, c.field, keys, values[c.name]) for c in self._columns}
        out: list[tuple[Sequence[str], dict[str, Encoded]]] = []
        held, done = len(self._now.keys), 0
        while done < len(keys):
            part = slice(done, done + room)
            some, sample = keys[part], max(0, SAMPLED_ROWS - held)
            out.append(
                (
                    some,
                    {
                        c.name: encode_rows(
                            c.name, c.field, some, rows[c.name][part], sample=sample, take=take
                        )
                        for c in self._columns
                    },
                )
            )
            done, room, held = done + room, self._session.rows_per_shard, 0
        return out

    def _add(self, pieces: list[tuple[Sequence[str], dict[str, Encoded]]]) -> None:
        for keys, encoded in pieces:
            self._now.add(keys, encoded)
            self._flush_if_full()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("This writer is closed. Open the store again with fl.Store.append(path).")
        if self._pid != os.getpid():
            raise UsageError(
                f"This writer belongs to process {self._pid}, of which this one is a fork. Write there."
            )

    def _check_keys(self, keys: list[str]) -> None:
        """As `_check_key` does for each, but the index is searched once: with tiny rows it is what counts."""
        self._check_open()
        doubtful = keys
        if all(isinstance(key, str) for key in keys):
            seen = self._session.snapshot.may_have(keys)
            coming = [shard.keys for shard in self._under_way()]
            doubtful = [k for k, s in zip(keys, seen, strict=True) if s or any(k in held for held in coming)]
        for key in doubtful:
            self._check_key(key)

    def _check_key(self, key: str) -> None:
        self._check_open()
        _refuse_no_string(key)
        try:
            key.encode()
        except UnicodeEncodeError as e:
            raise UsageError(f"Key {key!r} is not valid Unicode ({e}).") from e
        if key in self:
            raise KeyDuplicate(
                f"Key {key!r} is in {self._session.root} already. Skip it (`if key in writer`), or change "
                f"it with "
                f"writer.replace."
            )

    def _check_names(self, key: str, values: dict[str, Any]) -> None:
        names = [c.name for c in self._columns]
        if not isinstance(values, Mapping):
            raise _no_values(key, values, names)
        missing = (
            [f"no value for {', '.join(n for n in names if n not in values)}"]
            if set(names) - set(values)
            else []
        )
        extra = (
            [f"no field called {', '.join(n for n in values if n not in names)}"]
            if set(values) - set(names)
            else []
        )
        if missing or extra:
            raise FieldError(f"Row {key!r}: {'; '.join(missing + extra)}. The store has {', '.join(names)}.")

    def quarantine(self, key: str, *, reason: object, input: Any = None) -> None:
        """Record that this key's input failed. It takes its place in the row range, and no row."""
        self._check_key(key)
        self._now.failed[key] = quarantine.entry(key, reason, input)
        self._now.used += 1
        self._flush_if_full()

    def delete(self, key: str) -> None:
        """Take a row out (a tombstone; `store gc` frees the bytes)."""
        self._check_open()
        _refuse_no_string(key)
        if key in self._now.keys:
            self.commit()
        self._wait()
        row = self._committed(key)
        if row < 0:
            raise KeyMissing(f"Cannot delete {key!r}: {self._session.root} has no such key.")
        self._now.dead.add(row)

    def replace(self, key: str, values: dict[str, Any]) -> None:
        """Put new values under a key that is there; the row moves to the end."""
        self._check_open()
        _refuse_no_string(key)
        if key in self._now.keys:
            self.commit()
        encoded = self._encoded([key], self._one(key, values), room=1)  # before the old row goes
        self.delete(key)
        self._add(encoded)

    # committing

    def _flush_if_full(self) -> None:
        if self._now.used >= self._session.rows_per_shard:
            self._flush()

    def _flush(self) -> None:
        shard = self._now
        size = sum(block.size for block in shard.blocks.values())
        try:
            self._now = self._new_shard(shard.number + bool(shard.used))
            self._before.append(shard)
            self._order.put(size, partial(self._files, shard), partial(self._commit, shard, self._now.number))
        except BaseException:
            self._stop()
            raise
        while self._before[0].committed and len(self._before) > 1:
            self._before.popleft()

    def _files(self, shard: _Shard, commit: int) -> list[FileEntry]:
        """A file for each field."""
        local = _places(shard)
        blocks = ((column, shard.blocks[column.name]) for column in self._columns if len(local))
        return [
            write_shard(
                self._session.root,
                column,
                shard.number,
                commit,
                local,
                block.pieces,
                block.checksums,
                block.offsets(),
            )
            for column, block in blocks
        ]

    def _commit(self, shard: _Shard, next_shard: int, files: list[FileEntry]) -> None:
        session, columns, local = self._session, [], _places(shard)
        sizes = {entry[0]: entry[5] for entry in files}
        for column in self._columns:
            error = Error(**vars(column.error))
            error.merge(shard.blocks[column.name].error)
            grown = column.bytes + sizes.get(column.number, 0)
            columns.append(replace(column, rows=column.rows + len(local), bytes=grown, error=error))
        session.commit(
            columns=tuple(columns),
            files=files,
            rows=local + shard.number * session.rows_per_shard,
            keys=[k.encode() for k in shard.keys],
            tombstones=sorted(shard.dead),
            failed=list(shard.failed.values()),
            next_shard=next_shard,
            next_column=self._next_column,
        )
        self._columns = tuple(columns)
        shard.blocks.clear()
        shard.committed = True

    def _wait(self) -> None:
        try:
            self._order.wait()
        except BaseException:
            self._stop()
            raise
        self._before.clear()

    def commit(self) -> None:
        """Write what is there, also an unfinished shard: later rows start a new one."""
        self._check_open()
        self._wait()
        if self._now.used or self._now.dead:
            self._flush()
            self._wait()

    def close(self) -> None:
        """Commit and let the store go. In a forked process: nothing, the store is its parent's."""
        if self._pid == os.getpid():
            try:
                if not self._closed:
                    self.commit()
            finally:
                self._stop()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and self._pid == os.getpid():
            self._session.release()
            lost = sum(len(shard.keys) for shard in self._under_way() if not shard.committed)
            warnings.warn(
                f"A writer of {self._session.root} was never closed: {lost} rows that it was given are not "
                f"in the store. Use `with fl.Store.create(…) as writer:` or writer.close().",
                ResourceWarning,
                stacklevel=2,
            )

    def _stop(self) -> None:
        """Nothing more is written, and the store is free. May be called again, where it was interrupted."""
        self._closed = True
        self._order.close()
        self._session.release()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif self._pid == os.getpid():
            # Only whole shards stay: the same command run again gives the bytes of a run without the error.
            try:
                if not self._closed:
                    self._wait()
            finally:
                self._stop()


def _places(shard: _Shard) -> Array:
    """Of its rows in the row range."""
    return np.fromiter(shard.keys.values(), np.int64, len(shard.keys))


def _refuse_no_string(key: object) -> None:
    if not isinstance(key, str):
        raise UsageError(f"A key is a string, got {type(key).__name__} {key!r}.")


def _no_values(key: str, values: object, names: Sequence[str]) -> FieldError:
    return FieldError(
        f"Row {key!r}: expected {{field: value}} for {', '.join(names)}, got {type(values).__name__}."
    )


def _first_repeat(keys: Sequence[str]) -> str:
    seen: set[str] = set()
    return next(key for key in keys if key in seen or seen.add(key))  # type: ignore[func-returns-value]
