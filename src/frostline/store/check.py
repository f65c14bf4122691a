"""Is the store what was written? Every file against its checksum; deep: every row, key and offset too."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

from frostline.errors import StoreCorrupt, StoreError
from frostline.store import quarantine
from frostline.store.column import ColumnReader
from frostline.store.disk import ASIDE, digest_inside, read_inside
from frostline.store.manifest import MANIFEST, Column, RunRef, commit_numbers, load_manifest
from frostline.store.pin import Pin
from frostline.store.runs import FOLDER as RUNS
from frostline.store.runs import Run, order_problems, run_problems
from frostline.store.session import LOG
from frostline.store.shard import FOLDER as DATA
from frostline.store.shard import file_name, open_shard
from frostline.store.snapshot import FileTable, Snapshot

_LONGEST_LOG = 1 << 30

Progress = Callable[[int, int], None]


@dataclass
class CheckResult:
    """What a check found. `problems` are damage; `notes` are leftovers that do no harm."""

    commits: int = 0
    files: int = 0
    rows: int = 0
    bytes: int = 0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems


def check_store(root: Path, *, deep: bool = False, progress: Progress | None = None) -> CheckResult:
    """Check every commit that is there and every file they name; all damage is listed."""
    return _Check(root, deep, progress).run()


def check_index(snapshot: Snapshot, *, order: bool = True) -> None:
    """Compare one snapshot's index runs with their checksums; order: look at their order as well."""
    for ref, run in zip(snapshot.commit.runs, snapshot.runs, strict=True):
        problems = order_problems(run) if order else []
        if digest_inside(snapshot.root, RUNS, ref.file) != ref.xxh3:
            problems.insert(0, "it does not have its checksum")
        if problems:
            raise StoreCorrupt(
                f"{snapshot.root}/{RUNS}/{ref.file}: {'; '.join(problems)}. "
                f"Run `frostline store check {snapshot.root}` to see all that is damaged."
            )


class _Check:
    def __init__(self, root: Path, deep: bool, progress: Progress | None) -> None:
        self.root, self.deep, self.progress = root, deep, progress
        self.result = CheckResult()
        self._known = {MANIFEST, ".lock", LOG}
        self._pin: Pin | None = None
        self._total = sum(p.stat().st_size for p in root.rglob("*") if p.is_file()) if progress else 0

    def run(self) -> CheckResult:
        try:
            rows_per_shard = load_manifest(self.root)
        except StoreError as e:
            self.result.problems.append(str(e))
            return self.result
        self._log()
        numbers = commit_numbers(self.root)
        before: Snapshot | None = None
        for number in numbers:
            before = self._commit(number, rows_per_shard, before)
        if not numbers:
            self.result.problems.append(f"{self.root} has no commit")
        elif before is not None:
            self.result.rows = before.commit.rows
            if self.deep:
                self._rows(before)
        self._strays()
        return self.result

    def _commit(self, number: int, rows_per_shard: int, before: Snapshot | None) -> Snapshot | None:
        self._known.add(f"commits/{number:08d}.json")
        try:
            self._pin = Pin(self.root, number)  # what is being looked at stays, whoever collects beside us
            snapshot = Snapshot(self.root, rows_per_shard, number, after=before)
        except (StoreError, OSError) as e:
            if number not in commit_numbers(self.root):
                return before  # collected since it was listed
            self.result.problems.append(str(e))
            return None
        self.result.commits += 1
        follows = (
            before is None or before.commit.number != number - 1 or snapshot.commit.parent == before.checksum
        )
        if not follows:
            self.result.problems.append(
                f"commit {number} does not follow commit {number - 1}: it was written after another one"
            )
        self._snapshot(snapshot)
        return snapshot

    def _snapshot(self, snapshot: Snapshot) -> None:
        for ref, run in zip(snapshot.commit.runs, snapshot.runs, strict=True):
            place = f"{RUNS}/{ref.file}"
            if place not in self._known:
                self._file(place, partial(self._run, ref, run))
                self._shards(snapshot, run)

    def _shards(self, snapshot: Snapshot, run: Run) -> None:
        """The files that this run names.

        Each run is looked at once, so that a check costs O(runs), not commits × shards.
        """
        for column in snapshot.commit.columns:
            try:
                table = snapshot.files(column, runs=[run])
            except StoreError as e:
                self.result.problems.append(str(e))
                continue
            for shard, commit in zip(table.shard.tolist(), table.commit.tolist(), strict=True):
                place = f"{DATA}/{column.folder}/{file_name(shard, commit)}"
                if place not in self._known:
                    self._file(place, partial(self._shard, snapshot, column, table, shard, place))

    def _shard(self, snapshot: Snapshot, column: Column, table: FileTable, shard: int, place: str) -> None:
        self._digest(place, f"{int(table.xxh3[table.at(np.array([shard]))[0]]):016x}")
        opened = open_shard(self.root, column, table, shard, snapshot.rows_per_shard)
        if self.deep:
            for row in range(len(opened)):
                opened.verify(row)

    def _rows(self, snapshot: Snapshot) -> None:
        """Every live row has a value or a quarantine line; a shard with no file awaits an extension."""
        try:
            failed = {(q["row"], q["column"]) for q in snapshot.quarantine() if "column" in q}
            rows = snapshot.row_ids(np.arange(len(snapshot)))
            held = np.zeros(len(rows), bool)
            for column in snapshot.commit.columns:
                reader = ColumnReader(snapshot, column)
                there, begun = reader.present(rows), reader.table.at(rows // snapshot.rows_per_shard) >= 0
                lost = [r for r in rows[begun & ~there].tolist() if (r, column.number) not in failed]
                held |= there
                self._missing(snapshot, lost, f"no value of {column.name!r}")
            self._missing(snapshot, rows[~held].tolist(), "no value of any field")
        except (StoreError, OSError) as e:
            if self.result.ok:  # else it is a file that is in the list already
                self.result.problems.append(str(e))

    def _missing(self, snapshot: Snapshot, rows: list[int], what: str) -> None:
        if not rows:
            return
        keys = snapshot.keys(snapshot.positions_of_rows(np.array(rows[:3])))
        self.result.problems.append(f"{len(rows):,} rows have {what}, among them {keys}")

    def _file(self, place: str, check: Callable[[], None]) -> None:
        self._known.add(place)
        self.result.files += 1
        try:
            check()
        except (StoreError, OSError) as e:
            self.result.problems.append(f"{place}: {e}" if isinstance(e, OSError) else str(e))

    def _run(self, ref: RunRef, run: Run) -> None:
        place = f"{RUNS}/{ref.file}"
        self._digest(place, ref.xxh3)
        for _ in quarantine.parse(run.quarantine.tobytes(), place):
            pass  # it raises at a line that cannot be read
        if self.deep:
            self.result.problems += [f"{place}: {problem}" for problem in run_problems(run)]

    def _digest(self, place: str, want: str) -> None:
        got = digest_inside(self.root, *place.split("/"), step=self._step)
        if got != want:
            self.result.problems.append(
                f"{place}: checksum {got}, expected {want}; its bytes changed after writing"
            )

    def _step(self, n: int) -> None:
        self.result.bytes += n
        if self.progress:
            self.progress(self.result.bytes, self._total)

    def _log(self) -> None:
        """The log is not data; a changed line is named all the same.

        Half a line at the end is a killed writer's.
        """
        if not os.path.lexists(self.root / LOG):
            return
        try:
            lines = read_inside(self.root, LOG, limit=_LONGEST_LOG).split(b"\n")
        except StoreError as e:
            self.result.problems.append(str(e))
            return
        wrong = [i for i, line in enumerate(lines[:-1], 1) if not _is_sealed(line)]
        if _is_sealed(lines[-1][:-1]):  # whole, but for an end that is no longer one
            wrong.append(len(lines))
        self.result.problems += [
            f"{LOG}, line {i}: was changed after writing (times and hosts only; no data)" for i in wrong
        ]

    def _strays(self) -> None:
        for path in sorted(self.root.rglob("*")):
            place = path.relative_to(self.root).as_posix()
            if path.is_symlink():
                self.result.problems.append(f"{place} is a link; a store holds plain files only")
            elif path.is_file() and place not in self._known:
                kind = "left aside by a killed writer" if place.endswith(ASIDE) else "not part of any commit"
                self.result.notes.append(f"{place} is {kind}; `frostline store gc` removes it")


def _is_sealed(line: bytes) -> bool:
    digest, _, text = line.partition(b" ")
    return digest == xxhash.xxh3_64_hexdigest(text).encode()
