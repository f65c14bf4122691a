"""A writing session: the lock, and how commits are added. The writers are made of this."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from frostline.errors import FieldError, StoreCorrupt, StoreError
from frostline.store import quarantine
from frostline.store.codecs import Error
from frostline.store.disk import (
    ASIDE,
    Lock,
    digest_inside,
    explained,
    make_folder,
    refuse_links,
    write_all,
    write_whole,
)
from frostline.store.field import Field
from frostline.store.manifest import (
    MANIFEST,
    MOST_BYTES,
    Column,
    Commit,
    RunRef,
    commit_numbers,
    dump_manifest,
    latest,
    load_manifest,
)
from frostline.store.runs import FANOUT, FOLDER, MAX_MERGED_ROWS, Array, Run, build, file_table, merge
from frostline.store.shard import FOLDER as DATA
from frostline.store.snapshot import Snapshot

FileEntry = tuple[int, int, int, int, bool, int, int]
LOG = "log.txt"
_LONGEST_LINE = 1 << 16


class Session:
    """A lock on a store and the way to add commits to it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.rows_per_shard = load_manifest(root)
        self._lock = Lock(root)
        try:
            refuse_links(root / "commits", root / FOLDER, root / DATA)
            refuse_links(*(root / DATA).glob("*"))
            self.snapshot = Snapshot(root, self.rows_per_shard, latest(commit_numbers(root)))
            _sweep(root)
            self.quarantined = {quarantine.id_of(q): q for q in self.snapshot.quarantine()}
        except BaseException:
            self._lock.release()
            raise
        self._started = time.monotonic()

    @property
    def next_commit(self) -> int:
        return self.snapshot.commit.number + 1

    def commit(
        self,
        *,
        columns: tuple[Column, ...],
        files: Sequence[FileEntry] = (),
        rows: Array | None = None,
        keys: Sequence[bytes] = (),
        tombstones: Sequence[int] = (),
        failed: Sequence[dict[str, Any]] = (),
        next_shard: int,
        next_column: int,
    ) -> None:
        """Make what was written part of the store.

        The index run comes first, then the commit file, the one moment that counts.
        """
        self.refuse_other()
        old = self.snapshot.commit
        rows = np.zeros(0, np.int64) if rows is None else rows
        lines = [*failed, *self._releases(keys, failed)]
        dead = np.array(sorted(tombstones), np.int64)
        run = build(rows, keys, dead, file_table(list(files)), quarantine.dump(lines))
        kept, run, first, level = self._merge(run)
        ref = self.write_run(run, first, level)
        held = self._still_held(lines, columns, set(tombstones))
        n_rows = old.rows + len(rows) - len(tombstones)
        number, parent, runs = self.next_commit, self.snapshot.checksum, (*kept, ref)
        self.publish(Commit(number, parent, n_rows, len(held), next_shard, next_column, columns, runs))
        self.quarantined = held

    def _releases(self, keys: Sequence[bytes], failed: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Lines for keys that come in with this commit after they had failed."""
        now = {e["key"] for e in failed}
        if not now and not self.quarantined:
            return []
        texts = map(bytes.decode, keys)
        return [quarantine.released(key) for key in texts if key in now or (key, None) in self.quarantined]

    def _still_held(
        self, lines: list[dict[str, Any]], columns: tuple[Column, ...], dead: set[int]
    ) -> dict[quarantine.Id, dict[str, Any]]:
        entries = quarantine.standing(lines, self.quarantined) if lines else self.quarantined
        numbers = {c.number for c in columns}
        if not dead and numbers == {c.number for c in self.snapshot.commit.columns}:
            return entries  # to look at many thousands in every commit would take longer than the rows
        return {
            i: e
            for i, e in entries.items()
            if "column" not in e or (e["column"] in numbers and e["row"] not in dead)
        }

    def publish(self, commit: Commit) -> None:
        data = commit.dump()
        if len(data) > MOST_BYTES:  # nobody could read it again
            raise FieldError(
                f"A commit of {len(data):,} bytes is over {MOST_BYTES:,}: shorten the fields' provenance."
            )
        write_whole(self.root / "commits" / commit.file, [data])
        self._log(commit)
        self.snapshot = Snapshot(self.root, self.rows_per_shard, commit.number, after=self.snapshot)

    def _merge(self, run: Run) -> tuple[tuple[RunRef, ...], Run, int, int]:
        """Fold neighbours of the same level into the new run while there are FANOUT of them."""
        refs, runs, first, level = (
            list(self.snapshot.commit.runs),
            list(self.snapshot.runs),
            self.next_commit,
            0,
        )
        while True:
            tail = refs[-(FANOUT - 1) :]
            rows = sum(ref.rows for ref in tail) + len(run)
            if len(tail) < FANOUT - 1 or any(ref.level != level for ref in tail) or rows > MAX_MERGED_ROWS:
                return tuple(refs), run, first, level
            for ref in tail:
                self._refuse_damaged(ref)
            run = merge([*runs[-(FANOUT - 1) :], run])
            first, level = tail[0].first, level + 1
            del refs[-(FANOUT - 1) :], runs[-(FANOUT - 1) :]

    def _refuse_damaged(self, ref: RunRef) -> None:
        """Merged into a new run, damage would get a fresh checksum."""
        if digest_inside(self.root, FOLDER, ref.file) != ref.xxh3:
            raise StoreCorrupt(
                f"{self.root}/{FOLDER}/{ref.file} does not have its checksum. "
                f"Run `frostline store check {self.root}` to see all that is damaged."
            )

    def write_run(self, run: Run, first: int, level: int) -> RunRef:
        ref = RunRef(first, self.next_commit, level, len(run), 0, "")
        size, digest = write_whole(self.root / FOLDER / ref.file, run.chunks())
        return replace(ref, bytes=size, xxh3=f"{digest:016x}")

    def _log(self, commit: Commit) -> None:
        """Times and hosts: beside the data, never in it, so that the same input gives the same bytes."""
        entry = {
            "commit": commit.number,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "rows": commit.rows,
            "seconds": round(time.monotonic() - self._started, 3),
        }
        append_log(self.root, entry)

    def refuse_other(self) -> None:
        """StoreError where another store stands in the place of the one that is locked."""
        self._lock.refuse_other()

    def release(self) -> None:
        self._lock.release()


def append_log(root: Path, entry: dict[str, Any]) -> None:
    text = json.dumps(entry, sort_keys=True).encode()
    line = xxhash.xxh3_64_hexdigest(text).encode() + b" " + text + b"\n"
    # O_NONBLOCK: a FIFO planted under this name must not hang the writer
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    with explained(root / LOG, len(line)):
        fd = os.open(root / LOG, flags, 0o644)
        try:
            write_all(fd, memoryview(line))
        finally:
            os.close(fd)


def _sweep(root: Path) -> None:
    """Remove what a killed writer left aside, and half a line at the end of the log."""
    for folder in (root, root / "commits", root / FOLDER, *(root / DATA).glob("*")):
        for left in folder.glob(f"*{ASIDE}"):
            left.unlink()
    if (root / LOG).is_file() and not (root / LOG).is_symlink():
        with explained(root / LOG, 0), open(root / LOG, "rb+") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LONGEST_LINE))
            start, tail = log.tell(), log.read()
            log.truncate(start + tail.rfind(b"\n") + 1)


def refuse_foreign(root: Path) -> None:
    """StoreError unless a store can be made at `root`: absent, empty, or left by a killed creation."""
    ours = {"commits", FOLDER, DATA, ".lock", MANIFEST, MANIFEST + ASIDE}
    if root.exists() and (not root.is_dir() or any(p.name not in ours for p in root.iterdir())):
        raise StoreError(
            f"Cannot create a store at {root}: something else is there. Choose an empty or a new folder."
        )
    if any((root / DATA).glob("*/*.safetensors")):
        raise StoreCorrupt(
            f"{root} holds data but no commit. Restore its `commits` folder, or choose another folder."
        )


def make_store(root: Path, rows_per_shard: int) -> None:
    """The empty store; the manifest comes last: a killed creation leaves nothing that looks like one."""
    refuse_foreign(root)
    make_folder(root)
    lock = Lock(root)
    try:
        if not commit_numbers(root):  # else another process was first
            for folder in ("commits", FOLDER, DATA):
                make_folder(root / folder)
            write_whole(root / MANIFEST, [dump_manifest(rows_per_shard)])
    finally:
        lock.release()


def new_columns(fields: dict[str, Field], first: int) -> tuple[Column, ...]:
    return tuple(
        Column(name, first + i, spec, Error(), 0, 0) for i, (name, spec) in enumerate(fields.items())
    )


def ensure_folders(root: Path, columns: Iterable[Column]) -> None:
    """Folders for these columns; also anew, since empty ones get lost when a store is copied."""
    for column in columns:
        make_folder(root / DATA / column.folder)
