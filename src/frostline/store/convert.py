"""A folder of files into a store: look at every file first, decide the fields, then read and write.

Looking costs headers only. What does not fit is found before anything is written; a file that cannot be read,
or is unlike the others, counts against `max_bad` and is quarantined with its reason. Files are taken in the
order of their names, so that a killed import that is run again gives the same bytes. The way back: export.py.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frostline.errors import FieldError, UsageError
from frostline.store.field import Field
from frostline.store.folder import Bad, Exported, Found, find, shown
from frostline.store.formats import BadFile, load, look
from frostline.store.manifest import MANIFEST
from frostline.store.reader import Store
from frostline.store.schema import Look, decide, misfit, storable_names, with_codecs
from frostline.store.writer import Writer

Progress = Callable[[str, int, int], None]
"""Called with what is being done ("looking", "importing", "exporting"), files done, and files in all."""

_READERS = 4  # threads that read ahead while rows are encoded
_SHOWN = 10


@dataclass(frozen=True)
class Imported:
    """What an import did; `notes` are sentences for a person."""

    rows: int
    already_in: int
    fields: dict[str, Field]
    bad: tuple[Bad, ...]
    notes: tuple[str, ...]


def import_folder(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    pattern: str = "*",
    fields: Sequence[str] | None = None,
    codec: Mapping[str, str] | None = None,
    ragged: str | Sequence[str] = "auto",
    max_bad: int | str = 0,
    rows_per_shard: int | None = None,
    resume: bool = True,
    retry_bad: bool = False,
    follow_links: bool = False,
    progress: Progress | None = None,
) -> Imported:
    """Make a store at `out` of the .pt, .pth, .npy, .npz and .safetensors files under `folder`, a row a file.

    >>> import tempfile, torch
    >>> folder = tempfile.mkdtemp()
    >>> for i in range(3):
    ...     torch.save({"x": torch.full((2,), float(i)), "label": i}, f"{folder}/clip-{i}.pt")
    >>> done = import_folder(folder, folder + "-store")
    >>> done.rows, {name: (spec.dtype, spec.shape) for name, spec in done.fields.items()}
    (3, {'x': ('float32', (2,)), 'label': ('int64', ())})

    pattern:      only files whose name, or path under `folder`, matches: "train/*.pt".
    fields:       only these; None takes all.
    codec:        field → codec; "*" stands for every floating-point field with a shape.
    ragged:       "auto" (fields whose first dimension differs between files), "never", or names of fields.
    max_bad:      how many files may fail, a count or a share ("1%").
    resume:       go on with the store of this folder that is at `out` already.
    retry_bad:    read files again that an earlier run put into quarantine.
    follow_links: also take links that lead out of the folder; otherwise they are bad files.
    """
    source = Path(folder)
    _refuse_places(source, Path(out))
    exported = Exported.of(source)
    found = find(source, pattern=pattern, exported=exported, follow_links=follow_links)
    budget = Budget.parse(max_bad, len(found.files))
    looks = _look_at_all(found, exported, progress)
    budget.check(found, source)
    specs = decide(found, looks, wanted=fields, ragged=ragged, exported=exported)
    specs = with_codecs(specs, codec or {})
    _mark_misfits(found, looks, specs, all_names=fields is None)
    budget.check(found, source)
    names = storable_names(specs, found.notes)
    stored = {names[name]: spec for name, spec in specs.items()}
    with Store.create(out, stored, rows_per_shard=rows_per_shard, resume=resume) as writer:
        copy = _Copy(writer, found, names, exported, budget)
        rows, skipped = copy.run(retry_bad, progress)
    return Imported(rows, skipped, stored, tuple(found.bad.values()), tuple(found.notes))


def _refuse_places(folder: Path, out: Path) -> None:
    if not folder.is_dir():
        what = "it is not a folder" if folder.exists() else "there is no such folder"
        raise UsageError(f"Cannot import {folder}: {what}.")
    if (folder / MANIFEST).is_file() and (folder / "commits").is_dir():
        raise UsageError(
            f"Cannot import {folder}: it is a frostline store already; `frostline store inspect` shows it."
        )
    if out.resolve().is_relative_to(folder.resolve()):
        raise UsageError(
            f"Cannot import {folder} into {out}: the store would lie among its sources. Choose another place."
        )


@dataclass(frozen=True)
class Budget:
    """How many bad files an import takes."""

    most: int
    said: str

    @staticmethod
    def parse(said: int | str, total: int) -> Budget:
        text = str(said).strip()
        share = text.endswith("%")
        try:
            number = float(text[:-1]) / 100 * total if share else int(text)
        except ValueError:
            number = -1
        if not number >= 0 or (share and number > total):
            raise UsageError(f"max_bad is {said!r}; expected a number of files (3) or a share of them (1%).")
        return Budget(int(number), text)

    def check(self, found: Found, folder: Path, *, rows_in: int | None = None) -> None:
        """Stop when there are too many, naming the first of them, or when nothing would be left."""
        bad, total = list(found.bad.values()), len(found.files)
        if len(bad) <= self.most and len(bad) < total:
            return
        first = [str(b) for b in bad[:_SHOWN]]
        if len(bad) > _SHOWN:
            first.append(f"… and {len(bad) - _SHOWN:,} more")
        kept = f" {rows_in:,} rows are in; run the same again to go on with them." if rows_in else ""
        if len(bad) == total:
            raise UsageError(
                f"Cannot import {folder}: none of its files can be taken ({total:,}).", problems=first
            )
        raise UsageError(
            f"Stopped the import of {folder}: {len(bad):,} of {total:,} files cannot be taken, {self.most:,} "
            f"allowed (--max-bad). Repair or remove them, or allow more: they are then quarantined.{kept}",
            problems=first,
        )


def _look_at_all(found: Found, exported: Exported | None, progress: Progress | None) -> dict[str, Look]:
    """What each file holds, if it can be read. Equal answers are kept once: there may be a million files."""
    looks: dict[str, Look] = {}
    known: dict[Look, Look] = {}
    for done, key in enumerate(found.files, 1):
        if key not in found.bad:
            try:
                held = tuple(look(found.path(key), exported.texts if exported else ()).items())
                looks[key] = known.setdefault(held, held)
            except BadFile as e:
                found.mark(key, str(e))
        if progress:
            progress("looking", done, len(found.files))
    return looks


def _mark_misfits(
    found: Found, looks: Mapping[str, Look], specs: Mapping[str, Field], *, all_names: bool
) -> None:
    reasons: dict[int, str | None] = {}
    for key, held in looks.items():
        if id(held) not in reasons:  # `looks` keeps each answer once, so that its id stands for it
            reasons[id(held)] = misfit(held, specs, all_names=all_names)
        reason = reasons[id(held)]
        if reason:
            found.mark(key, reason)


class _Copy:
    """The second pass: values into rows, in order, with a few files read ahead."""

    def __init__(
        self,
        writer: Writer,
        found: Found,
        names: Mapping[str, str],
        exported: Exported | None,
        budget: Budget,
    ) -> None:
        self._writer, self._found, self._names = writer, found, names
        self._exported, self._budget = exported, budget

    def run(self, retry_bad: bool, progress: Progress | None) -> tuple[int, int]:
        """(rows added, files that were dealt with before)."""
        entries = [entry for entry in self._writer.quarantined if not entry.get("field")]  # of whole rows
        before = {entry["key"]: entry["reason"] for entry in entries}
        left = [key for key in self._found.files if key not in self._writer]
        todo = [key for key in left if retry_bad or shown(key) not in before]
        for key in left:
            if shown(key) in before and not retry_bad and key not in self._found.bad:
                self._found.mark(
                    key, f"{before[shown(key)]} (found by an earlier run; --retry-bad reads it again)"
                )
        rows, done = 0, len(self._found.files) - len(todo)
        skipped = done
        for key, values in self._read_ahead(todo):
            if values is not None and self._append(key, values):
                rows += 1
            elif shown(key) not in before:
                bad = self._found.bad[key]
                self._writer.quarantine(bad.key, reason=bad.reason, input=bad.file)
            done += 1
            if progress:
                progress("importing", done, len(self._found.files))
        return rows, skipped

    def _append(self, key: str, values: dict[str, Any]) -> bool:
        try:
            self._writer.append(key, values)
        except FieldError as e:  # a value the codec cannot hold: NaN in int8, 1e6 in float16
            self._bad(key, str(e))
            return False
        return True

    def _bad(self, key: str, reason: str) -> None:
        self._found.mark(key, reason)
        self._budget.check(self._found, self._found.folder, rows_in=len(self._writer))

    def _read_ahead(self, keys: Sequence[str]) -> Iterator[tuple[str, dict[str, Any] | None]]:
        with ThreadPoolExecutor(_READERS, "frostline-import") as pool:
            waiting: deque[tuple[str, Future[dict[str, Any]] | None]] = deque()
            try:
                for key in keys:
                    waiting.append((key, None if key in self._found.bad else pool.submit(self._load, key)))
                    if len(waiting) > 2 * _READERS:
                        yield self._finished(*waiting.popleft())
                while waiting:
                    yield self._finished(*waiting.popleft())
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _finished(
        self, key: str, reading: Future[dict[str, Any]] | None
    ) -> tuple[str, dict[str, Any] | None]:
        if reading is None:
            return key, None
        try:
            return key, reading.result()
        except BadFile as e:
            self._bad(key, str(e))
            return key, None

    def _load(self, key: str) -> dict[str, Any]:
        path = self._found.path(key)
        values = load(path, self._exported.texts if self._exported else ())
        if self._exported:
            restore = self._exported.restore
            values = {name: restore(name, value, path.suffix.lower()) for name, value in values.items()}
        return {self._names[name]: value for name, value in values.items() if name in self._names}
