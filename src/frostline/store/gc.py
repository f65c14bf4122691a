"""Free what no snapshot needs: old commits, runs, retired fields, dead rows, killed writers' leftovers.

A snapshot that some reader has open is needed (readers hold a shared lock on their commit's file). Dead
rows sit among live ones; a shard in which their share reaches `min_dead` is written anew without them,
under the same row numbers.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from frostline.errors import StoreFull
from frostline.store import quarantine
from frostline.store.check import check_index
from frostline.store.disk import sync_folder
from frostline.store.manifest import Column, Commit, RunRef, commit_numbers
from frostline.store.runs import FOLDER as RUNS
from frostline.store.runs import Array, Run, file_table, merge
from frostline.store.session import FileEntry, Session
from frostline.store.shard import FOLDER as DATA
from frostline.store.shard import file_name, open_shard, write
from frostline.store.snapshot import FileTable, Snapshot

Rewrites: TypeAlias = dict[int, dict[int, float]]
"""Column number → shards with too many dead rows (in the file, and not live) → the share that lives."""


@dataclass(frozen=True)
class Collected:
    """What a collection freed (or, in a dry run, would free)."""

    files: int
    bytes: int
    """Less what was written anew; in a dry run by the share of rows that live, without the index."""
    rewritten_shards: int
    pinned_commits: tuple[int, ...]


def collect(root: Path, *, min_dead: float = 0.5, dry_run: bool = False) -> Collected:
    """Free what is not needed.

    `min_dead`: rewrite shards in which at least this share of rows is dead (over 1: none).
    """
    session, freed = Session(root), [0, 0]
    try:
        rewrites = _shards_to_rewrite(session.snapshot, min_dead)
        if dry_run:
            pinned = _would_free(session, rewrites, freed)
        else:
            try:
                written = _compact(session, rewrites)
            except StoreFull:  # what the newest commit does not need makes room for the next one
                _free(session, freed)
                written = _compact(session, rewrites)
            pinned = _free(session, freed)
            freed[1] -= written
        return Collected(freed[0], max(0, freed[1]), sum(map(len, rewrites.values())), pinned)
    finally:
        session.release()


def _free(session: Session, freed: list[int]) -> tuple[int, ...]:
    """Remove what neither the newest commit nor a pinned one needs; → the pinned ones."""
    current = session.snapshot.commit.number
    older = _kept(session, [n for n in commit_numbers(session.root) if n != current], freed, dry_run=False)
    keep = [session.snapshot, *older.values()]
    _unlink(session.root, set().union(*map(_files_of, keep)), freed, dry_run=False)
    _remove_empty(session.root, {c.folder for s in keep for c in s.commit.columns})
    return (*sorted(older),)


def _would_free(session: Session, rewrites: Rewrites, freed: list[int]) -> tuple[int, ...]:
    """The same without doing it: as if the newest commit had made room for one with the rewritten shards."""
    snapshot, root, numbers = session.snapshot, session.root, commit_numbers(session.root)
    stays = _files_of(snapshot)
    anew: dict[Path, int] = {}
    if _is_stale(snapshot, rewrites):
        anew = _written_anew(snapshot, rewrites)
        stays -= {*anew, *(root / RUNS / ref.file for ref in snapshot.commit.runs)}
    else:
        numbers.remove(snapshot.commit.number)
    kept = _kept(session, numbers, freed, dry_run=True)
    counted = {root / "commits" / f"{number:08d}.json" for number in numbers}
    needed = stays.union(counted, *map(_files_of, kept.values()))
    _unlink(root, needed, freed, dry_run=True)
    freed[1] -= sum(size for path, size in anew.items() if path not in needed)
    return (*sorted(kept),)


def _kept(
    session: Session, numbers: Sequence[int], freed: list[int], *, dry_run: bool
) -> dict[int, Snapshot]:
    """Those of these commits that a reader holds. The others go."""
    return {
        number: Snapshot(session.root, session.rows_per_shard, number)
        for number in numbers
        if _pinned(session.root, number, freed, dry_run=dry_run)
    }


def _shards_to_rewrite(snapshot: Snapshot, min_dead: float) -> Rewrites:
    shards, counts = _live_counts(snapshot)
    out = {}
    for column in snapshot.commit.columns:
        table = snapshot.files(column)
        at = np.minimum(np.searchsorted(shards, table.shard), max(0, len(shards) - 1))
        live = (
            np.where(shards[at] == table.shard, counts[at], 0) if len(shards) else np.zeros(len(table.shard))
        )
        gone = np.maximum(table.rows - live, 0) / table.rows
        chosen = (gone > 0) & (gone >= min_dead)
        out[column.number] = dict(zip(table.shard[chosen].tolist(), (1 - gone[chosen]).tolist(), strict=True))
    return out


def _written_anew(snapshot: Snapshot, rewrites: Rewrites) -> dict[Path, int]:
    """Files of shards to rewrite → the bytes that their live rows may take, by their share."""
    found = {}
    for column in snapshot.commit.columns:
        table, shares = snapshot.files(column), rewrites[column.number]
        for shard, commit, size in zip(
            *(a.tolist() for a in (table.shard, table.commit, table.bytes)), strict=True
        ):
            if shard in shares:
                path = snapshot.root / DATA / column.folder / file_name(shard, commit)
                found[path] = int(size * shares[shard])
    return found


def _is_stale(snapshot: Snapshot, rewrites: Rewrites) -> bool:
    """Whether a commit anew would hold less."""
    held = {int(c) for run in snapshot.runs for c in np.unique(run.file_column)}
    retired = held - {c.number for c in snapshot.commit.columns}
    return bool(any(rewrites.values()) or len(snapshot.runs) > 1 or retired or len(snapshot.dead))


def _live_counts(snapshot: Snapshot) -> tuple[Array, Array]:
    """Shards that have rows in the index, and how many of them live."""
    parts = [run.rows // snapshot.rows_per_shard for run in snapshot.runs]
    shards, counts = np.unique(np.concatenate(parts) if parts else np.zeros(0, np.int64), return_counts=True)
    dead, gone = np.unique(snapshot.dead // snapshot.rows_per_shard, return_counts=True)
    counts[np.searchsorted(shards, dead)] -= gone
    return shards, counts


def _compact(session: Session, rewrites: Rewrites) -> int:
    """A commit with one merged run and the rewritten shards; skipped when nothing would change.

    → the bytes that were written.
    """
    snapshot = session.snapshot
    if not _is_stale(snapshot, rewrites):
        return 0
    check_index(snapshot)  # before its tombstones decide what goes
    entries: list[FileEntry] = []
    dropped: set[tuple[int, int]] = set()
    columns = []
    for column in snapshot.commit.columns:
        rewritten, change = _rewrite(
            session, column, snapshot.files(column), rewrites[column.number], dropped
        )
        entries += rewritten
        columns.append(replace(column, bytes=column.bytes + change[0], rows=column.rows + change[1]))
    empty = np.zeros(0, np.int64)
    fresh = Run(
        {
            **{k: v[:0] for k, v in snapshot.runs[0].arrays.items()},
            "key_offsets": np.zeros(1, np.int64),
            **file_table(entries),
        }
    )
    run = merge([*snapshot.runs, fresh], keep_columns={c.number for c in snapshot.commit.columns})
    run = _without(run, dropped)
    run.arrays["tombstones"] = empty
    run.arrays["quarantine"] = np.frombuffer(quarantine.dump(snapshot.quarantine()), np.uint8)
    ref = session.write_run(run, 1, max((r.level for r in snapshot.commit.runs), default=0))
    session.publish(_next(session, tuple(columns), ref))
    commit = session.root / "commits" / session.snapshot.commit.file
    index = session.root / RUNS / ref.file
    return sum(entry[5] for entry in entries) + commit.stat().st_size + index.stat().st_size


def _next(session: Session, columns: tuple[Column, ...], ref: RunRef) -> Commit:
    old = session.snapshot.commit
    return replace(
        old, number=session.next_commit, parent=session.snapshot.checksum, columns=columns, runs=(ref,)
    )


def _rewrite(
    session: Session, column: Column, table: FileTable, shards: Iterable[int], dropped: set[tuple[int, int]]
) -> tuple[list[FileEntry], tuple[int, int]]:
    entries, size, rows = [], 0, 0
    for shard in sorted(shards):
        opened = open_shard(session.root, column, table, shard, session.rows_per_shard)
        opened.verify_whole()  # a damaged or misplaced file must not get a fresh checksum
        live = session.snapshot.live_rows(shard) - shard * session.rows_per_shard
        places = np.flatnonzero(np.isin(opened.rows, live))
        size -= int(table.bytes[table.at(np.array([shard]))[0]])
        rows -= len(opened) - len(places)
        if not len(places):
            dropped.add((column.number, shard))
            continue
        parts: dict[str, list[Array]] = {}
        lengths: list[int] = []
        for part in column.field.parts:
            view = opened.view(part)
            parts[part.name] = [view[slice(*opened.bounds(part, int(p)))] for p in places]
            if part.per_item:
                lengths = [len(piece) for piece in parts[part.name]]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64) if column.field.ragged else None
        checksums = opened.checksums()[places]
        entry = write(
            session.root, column, shard, session.next_commit, opened.rows[places], parts, checksums, offsets
        )
        entries.append(entry)
        size += entry[5]
    return entries, (size, rows)


def _without(run: Run, dropped: set[tuple[int, int]]) -> Run:
    pairs = zip(run.file_column.tolist(), run.file_shard.tolist(), strict=True)
    keep = np.array([pair not in dropped for pair in pairs], bool)
    return Run({k: v[keep] if k.startswith("file_") else v for k, v in run.arrays.items()})


def _pinned(root: Path, number: int, freed: list[int], *, dry_run: bool) -> bool:
    """Whether a reader holds this commit. If not, its file goes at once, under the lock.

    A reader that comes now finds it locked or without a name, and looks for a newer one.
    """
    path = root / "commits" / f"{number:08d}.json"
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)  # NFS wants it writable
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        freed[0] += 1
        freed[1] += os.fstat(fd).st_size
        if not dry_run:
            path.unlink()
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _files_of(snapshot: Snapshot) -> set[Path]:
    root = snapshot.root
    files = {
        root / "commits" / snapshot.commit.file,
        *(root / RUNS / ref.file for ref in snapshot.commit.runs),
    }
    for column in snapshot.commit.columns:
        table = snapshot.files(column)
        names = zip(table.shard.tolist(), table.commit.tolist(), strict=True)
        files |= {root / DATA / column.folder / file_name(*name) for name in names}
    return files


def _unlink(root: Path, needed: set[Path], freed: list[int], *, dry_run: bool) -> None:
    """Remove what is not needed from the store's folders: commits first, so none names what is gone."""
    for top in ("commits", RUNS, DATA):
        if not dry_run:
            sync_folder(root / "commits")
        for path in sorted((root / top).rglob("*")):
            if path.is_dir() or path in needed:
                continue
            freed[0] += 1
            freed[1] += path.lstat().st_size
            if not dry_run:
                path.unlink()


def _remove_empty(root: Path, columns: set[str]) -> None:
    for folder in (root / DATA).iterdir():
        if folder.name not in columns and not any(folder.iterdir()):
            folder.rmdir()
    for top in (RUNS, DATA):
        sync_folder(root / top)
