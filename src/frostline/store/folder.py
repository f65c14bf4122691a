"""Folders of files, one a row: which files there are, what their keys are, and which file a key becomes.

A key is any string; a path is not. `path_of` therefore percent-encodes what would leave the folder, hide the
file or upset a file system, so that every key has its own path inside, and `key_of` gives the key back.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from frostline.errors import FieldError, UsageError
from frostline.store.field import Field, check_fields
from frostline.store.formats import SUFFIXES

SIDECAR = ".frostline-export.json"  # hidden, so that no key can become a file of this name
_ODD = re.compile(r'[\x00-\x1f\x7f%\\:*?"<>|]')
_RESERVED = re.compile(r"(con|prn|aux|nul|com[0-9¹²³]|lpt[0-9¹²³])(\.|$)", re.IGNORECASE)
_EMPTY = "%"  # an empty part of a path; no encoded character is a lone percent sign
_LONG = "%long"
_FORMAT, _VERSION = "frostline-export", 1
_MOST_PART, _MOST_PATH = 180, 900  # bytes; file systems take 255 and 4096 (macOS: 1024)


def _percent(text: str) -> str:
    return "".join(f"%{byte:02X}" for byte in text.encode())


def _encode_part(part: str, *, folder: bool) -> str:
    text = _ODD.sub(lambda m: _percent(m[0]), part)
    if text.startswith(".") or _RESERVED.match(text):
        text = _percent(text[0]) + text[1:]
    if text.endswith((" ", ".")):
        text = text[:-1] + _percent(text[-1])
    if folder and text.lower().endswith((*SUFFIXES, ".parquet")):
        dot = text.rindex(".")  # the key "a.pt/b" must not want a folder where the key "a" has its file
        text = text[:dot] + "%2E" + text[dot + 1 :]
    return text or _EMPTY


def path_of(key: str) -> str:
    """The relative path (POSIX, without suffix) of a key; `long` keys get the name of their hash.

    >>> path_of("train/clip-7"), path_of("../x"), path_of("/abs"), path_of("")
    ('train/clip-7', '%2E%2E/x', '%/abs', '%')
    """
    *folders, last = key.split("/")
    parts = [*(_encode_part(p, folder=True) for p in folders), _encode_part(last, folder=False)]
    path = "/".join(parts)
    if len(path.encode()) > _MOST_PATH or any(len(p.encode()) > _MOST_PART for p in parts):
        return f"{_LONG}/{hashlib.sha256(key.encode()).hexdigest()}"
    return path


def is_long(path: str) -> bool:
    """Whether a path is the hash of a key, which then has to be written down beside it."""
    return path.startswith(f"{_LONG}/")


def key_of(path: str) -> str:
    """The key whose path this is.

    >>> key_of("%2E%2E/x"), key_of("%")
    ('../x', '')
    """
    return "/".join("" if part == _EMPTY else unquote(part, errors="strict") for part in path.split("/"))


@dataclass(frozen=True)
class Exported:
    """What an export says of itself beside its files: the fields as they were, keys too long for a path."""

    fields: dict[str, Field]
    long_keys: dict[str, str]

    @property
    def texts(self) -> list[str]:
        return [name for name, spec in self.fields.items() if spec.dtype in ("str", "json")]

    def write(self, folder: Path) -> None:
        fields = {name: asdict(spec) for name, spec in self.fields.items()}
        record = {"format": _FORMAT, "version": _VERSION, "fields": fields, "long_keys": self.long_keys}
        (folder / SIDECAR).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def of(folder: Path) -> Exported | None:
        """The record in `folder`, or None where a person made the files."""
        path = folder / SIDECAR
        if not path.is_file():
            return None
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if (record["format"], record["version"]) != (_FORMAT, _VERSION):
                raise ValueError(f"it is {record['format']!r}, version {record['version']!r}")
            fields = {name: Field(**spec) for name, spec in record["fields"].items()}
            check_fields(fields)
            long_keys = {str(path): str(key) for path, key in record["long_keys"].items()}
        except (ValueError, KeyError, TypeError, AttributeError, FieldError, OSError) as e:
            raise UsageError(
                f"{path} does not describe an export of this version ({e}). "
                f"Export the store again, or delete that file to import the folder without it."
            ) from e
        return Exported(fields, long_keys)

    def key(self, path: str) -> str:
        try:
            return self.long_keys[path] if path in self.long_keys else key_of(path)
        except UnicodeDecodeError:  # no path that an export wrote: a file that was added by hand
            return path

    def restore(self, name: str, value: Any, suffix: str) -> Any:
        """A loaded value as the field had it: bytes travel as uint8, JSON as text outside .pt files."""
        dtype = self.fields[name].dtype if name in self.fields else ""
        if dtype == "bytes":
            return value.numpy().tobytes()
        return json.loads(value) if dtype == "json" and suffix not in (".pt", ".pth") else value


@dataclass(frozen=True)
class Bad:
    """A file that was not taken."""

    key: str
    file: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}: {self.reason}"


@dataclass
class Found:
    """The files to import, in order (key → name under `folder`); what is bad already; notes for a person."""

    folder: Path
    files: dict[str, str] = field(default_factory=dict)
    bad: dict[str, Bad] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def path(self, key: str) -> Path:
        return self.folder / self.files[key]

    def mark(self, key: str, reason: str) -> None:
        self.bad[key] = Bad(shown(key), shown(self.files[key]), reason)


def find(folder: Path, *, pattern: str, exported: Exported | None, follow_links: bool) -> Found:
    """Every file under `folder` that an import takes, in the order of their names."""
    found = Found(folder)
    names: list[str] = []
    others: Counter[str] = Counter()
    for name in _walk(folder, follow_links, found.notes):
        if not any(fnmatch.fnmatchcase(text, pattern) for text in (name, name.rpartition("/")[2])):
            others["outside the pattern"] += 1
        elif os.path.splitext(name)[1].lower() not in SUFFIXES:
            others[shown(os.path.splitext(name)[1]) or "without suffix"] += 1
        else:
            names.append(name)
    _say_what_is_left(found, names, others, pattern)
    inside = folder.resolve()
    for name, key in _keys(sorted(names), exported, found.notes).items():
        if key in found.files:
            other = shown(found.files[key])
            raise UsageError(f"{folder}: {shown(name)} and {other} have the same key. Remove one of them.")
        found.files[key] = name
        if shown(name) != name:
            found.mark(key, "its name is not UTF-8")
        elif not follow_links and not found.path(key).resolve().is_relative_to(inside):
            found.mark(key, "is a link that leaves the folder; --follow-links takes it")
    return found


def _walk(folder: Path, follow_links: bool, notes: list[str]) -> Iterator[str]:
    """Names of the files; hidden ones are left out, and so are linked folders unless asked for."""
    seen, links = {folder.resolve()}, 0
    for top, folders, files in os.walk(folder, followlinks=follow_links):
        entered = []
        for name in (n for n in folders if not n.startswith(".")):
            path = Path(top, name)
            if path.is_symlink() and (not follow_links or path.resolve() in seen):
                links += 1  # followed, one that leads upwards would never end
                continue
            seen.add(path.resolve())
            entered.append(name)
        folders[:] = entered
        shown_files = [name for name in files if not name.startswith(".")]
        yield from (Path(top, name).relative_to(folder).as_posix() for name in shown_files)
    if links:
        remedy = "." if follow_links else "; --follow-links does."
        notes.append(f"Did not enter {links} linked folder(s){remedy}")


def _say_what_is_left(found: Found, names: Sequence[str], others: Mapping[str, int], pattern: str) -> None:
    counted = ", ".join(f"{n:,} {what}" for what, n in Counter(others).most_common(5))
    if not names:
        matching = f" that matches {pattern!r}" if pattern != "*" else ""
        there = f"There are other files: {counted}." if others else "The folder is empty."
        raise UsageError(
            f"Nothing to import in {found.folder}: no file{matching} ends in {', '.join(SUFFIXES)}. {there}"
        )
    if others:
        found.notes.append(f"Left out other files: {counted}.")


def _keys(names: Sequence[str], exported: Exported | None, notes: list[str]) -> dict[str, str]:
    """Name → key: the path without its suffix; with it, for all, when two files differ in nothing else."""
    keys = {name: os.path.splitext(name)[0] for name in names}
    if exported:
        return {name: exported.key(path) for name, path in keys.items()}
    twice = next((key for key, n in Counter(keys.values()).items() if n > 1), None)
    if twice is None:
        return keys
    same = [shown(name) for name, key in keys.items() if key == twice]
    notes.append(f"Keys keep their suffix: {' and '.join(same[:2])} would have the same key without it.")
    return {name: name for name in names}


def shown(name: str) -> str:
    """A name that can be printed and stored, also when it is not UTF-8."""
    return name.encode(errors="backslashreplace").decode()
