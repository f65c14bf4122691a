"""`Store`: the way in.

Creating, appending and extending give writers; opening gives a snapshot that stays as it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_args

from frostline.errors import FieldError, StoreError, UsageError
from frostline.store import extender
from frostline.store.building import default_rows_per_shard
from frostline.store.check import CheckResult, check_index, check_store
from frostline.store.column import Check
from frostline.store.extender import Extender
from frostline.store.field import Field, check_fields
from frostline.store.manifest import MAX_ROWS_PER_SHARD, Commit, commit_numbers
from frostline.store.pin import Pin
from frostline.store.session import Session, make_store
from frostline.store.table import Table, common_positions, open_member
from frostline.store.writer import Writer

PathLike = str | os.PathLike[str]
_Made = TypeVar("_Made")


class Store(Table):
    """Fields of rows, named by keys, on disk. `Store.open` is a snapshot: later commits do not show in it.

    >>> import tempfile, torch, frostline as fl
    >>> path = tempfile.mkdtemp() + "/feats"
    >>> fields = {"x": fl.Field((3,), "float32"), "caption": fl.Field((), "str")}
    >>> with fl.Store.create(path, fields) as writer:
    ...     writer.append("a", {"x": torch.tensor([1.0, 2.0, 3.0]), "caption": "one"})
    ...     writer.append("b", {"x": torch.tensor([4.0, 5.0, 6.0]), "caption": "two"})
    >>> store = fl.Store.open(path)
    >>> len(store), list(store.keys), store["b"]["caption"]
    (2, ['a', 'b'], 'two')
    >>> store.rows([1, 0])["x"].tolist()
    [[4.0, 5.0, 6.0], [1.0, 2.0, 3.0]]
    """

    def __init__(self, path: PathLike, *, check: Check = "files", commit: int | None = None) -> None:
        if check not in get_args(Check):
            raise UsageError(
                f"Store.open(check={check!r}): expected 'files' (each file's checksum, once in a process), "
                f"'read' (each row's, whenever it is read) or 'open' (sizes and structure only)."
            )
        self.path = _local(path)
        self._check = check
        member = open_member(self.path, commit, check=check)
        super().__init__([member])
        self._snapshot = member.snapshot
        if check != "open":
            check_index(self._snapshot, order=check == "read")
            member.require_files()

    @staticmethod
    def open(path: PathLike, *, check: Check = "files") -> Store:
        """The newest commit.

        check="files": that every file is there with its size, when the store is opened; each file's checksum
        once in this process, in the background from its first use on. `rows` waits for the outcome, a feed
        says it at once when a file is damaged and at the end of an epoch at the latest. "read": each row's
        checksum whenever it is read. "open": only what is needed to read safely, for stores known to be
        damaged.
        """
        return Store(path, check=check)

    @staticmethod
    def create(
        path: PathLike, fields: dict[str, Field], *, rows_per_shard: int | None = None, resume: bool = False
    ) -> Writer:
        """A new store and its writer. resume=True goes on with one of the same fields that is there."""
        root = _local(path)
        check_fields(fields)
        rows = default_rows_per_shard(fields) if rows_per_shard is None else rows_per_shard
        if type(rows) is not int or not 1 <= rows <= MAX_ROWS_PER_SHARD:
            raise UsageError(
                f"Store.create(rows_per_shard={rows_per_shard!r}): expected a whole number from 1 to "
                f"{MAX_ROWS_PER_SHARD:,}."
            )
        if not commit_numbers(root):
            make_store(root, rows)
        session = Session(root)
        return _released_on_error(session, lambda: _resumed(session, fields, rows_per_shard, resume))

    @staticmethod
    def append(path: PathLike) -> Writer:
        """A writer that adds rows to the store at `path`, or deletes and replaces them."""
        session = Session(_local(path))
        return _released_on_error(session, lambda: Writer(_begun(session), {}))

    @staticmethod
    def extend(path: PathLike, fields: dict[str, Field]) -> Extender:
        """A writer that adds fields to the rows; run again, it goes on after the last whole shard."""
        check_fields(fields)
        session = Session(_local(path))
        return _released_on_error(session, lambda: Extender(_begun(session), fields))

    @staticmethod
    def retire(path: PathLike, *names: str) -> None:
        """Take fields out. Their files go with `frostline store gc`."""
        session = Session(_local(path))
        try:
            extender.retire(session, names)
        finally:
            session.release()

    @staticmethod
    def join(*tables: Table) -> Table:
        """The rows whose key is in all of the tables, in the first one's order, with the fields of all."""
        other = [type(table).__name__ for table in tables if not isinstance(table, Table)]
        if other:
            raise UsageError(
                f"Store.join(…) takes stores, as fl.Store.open(path) gives them; got {other[0]}."
            )
        repeated = sorted(
            {name for t in tables for name in t.fields if sum(name in u.fields for u in tables) > 1}
        )
        if len(tables) < 2 or repeated:
            raise FieldError(
                f"Cannot join: {', '.join(repeated)} stand in more than one of the stores. Retire one of "
                f"each, or open them side by side in a feed."
                if repeated
                else "Store.join takes two or more stores."
            )
        places = common_positions([table.keys for table in tables])
        joined = [table.at(at) for table, at in zip(tables, places, strict=True)]
        return Table([member for table in joined for member in table._members])

    @property
    def commit(self) -> Commit:
        """What this snapshot is."""
        return self._snapshot.commit

    @property
    def rows_per_shard(self) -> int:
        return self._snapshot.rows_per_shard

    @property
    def quarantine(self) -> list[dict[str, Any]]:
        """Inputs that failed: key, reason, input."""
        return self._snapshot.quarantine()

    def check(self, *, deep: bool = False) -> CheckResult:
        """Compare every file with its checksum; deep: also every row, every key and every offset."""
        return check_store(self.path, deep=deep)

    def __repr__(self) -> str:
        return f"<frostline.Store {str(self.path)!r}: {len(self):,} rows of {', '.join(self.fields)}>"

    def close(self) -> None:
        """Let the snapshot go (`store gc` may then free it). Garbage collection does the same."""
        if isinstance(self._snapshot.pin, Pin):
            self._snapshot.pin.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_reopen, (str(self.path), self._check, self.commit.number))


def _reopen(path: str, check: Check, commit: int) -> Store:
    return Store(path, check=check, commit=commit)


def _local(path: PathLike) -> Path:
    text = os.fspath(path)
    if "://" in text:
        raise UsageError(
            f"{text}: stores at a URL cannot be opened yet. Copy the store to a local folder first."
        )
    # a process may change its folder while a store is open; `..` stays, it may lead out of a link's target
    return Path(text).absolute()


def _released_on_error(session: Session, make: Callable[[], _Made]) -> _Made:
    try:
        return make()
    except BaseException:
        session.release()
        raise


def _begun(session: Session) -> Session:
    if not session.snapshot.commit.number:
        root = str(session.root)
        raise StoreError(
            f"The store at {root} was never begun. Make it with fl.Store.create({root!r}, fields=…)."
        )
    return session


def _resumed(session: Session, fields: dict[str, Field], rows_per_shard: int | None, resume: bool) -> Writer:
    _refuse_other(session, fields, rows_per_shard, resume)
    return Writer(session, fields)


def _refuse_other(
    session: Session, fields: dict[str, Field], rows_per_shard: int | None, resume: bool
) -> None:
    commit = session.snapshot.commit
    if not commit.number:
        return
    if not resume:
        raise StoreError(
            f"A store with {commit.rows:,} rows is at {session.root} already. Go on with it by "
            f"fl.Store.create(…, resume=True) "
            f"or fl.Store.append(path), or choose another folder."
        )
    held = {c.name: c.field for c in commit.columns}
    if held != fields or rows_per_shard not in (None, session.rows_per_shard):
        wrong = [
            f"{n}: there {held.get(n)}, now {fields.get(n)}"
            for n in sorted({*held, *fields})
            if held.get(n) != fields.get(n)
        ]
        wrong += (
            [f"rows_per_shard: there {session.rows_per_shard}, now {rows_per_shard}"] if not wrong else []
        )
        raise StoreError(
            f"Cannot resume the store at {session.root}, it was begun otherwise: " + "; ".join(wrong) + "."
        )
