"""`Source`: the keys of a data set with their cheap raw fields.

Files by pattern, rows of a table, a Hugging Face data set, or anything with a length and an index. Listing
happens when it is first needed, and is kept.
"""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from frostline import tables
from frostline.errors import UsageError

Raw = dict[str, Any]
PathLike = str | os.PathLike[str]


class Listing(Protocol):
    """What a source found: keys in a fixed order, and the raw fields of each."""

    @property
    def keys(self) -> Sequence[str]: ...

    def raw(self, i: int) -> Raw: ...


class Finder(Protocol):
    """What lists a source, when it is needed."""

    def find(self) -> Listing: ...


@dataclass(frozen=True, eq=False)
class Source:
    """Keys with their raw fields: `Source.files(…)`, `Source.table(…)` or `Source.dataset(…)`.

    >>> import frostline as fl
    >>> source = fl.Source.table([{"key": "a", "text": "one"}, {"key": "b", "text": "two"}])
    >>> list(source.keys), source.fields, source.raw(1)
    (['a', 'b'], ('key', 'text'), {'key': 'b', 'text': 'two'})
    """

    what: str
    """Where it comes from, for messages."""
    fields: tuple[str, ...]
    """The raw fields of every sample."""
    finder: Finder
    key: str | None = None
    """The field that holds nothing but the key."""
    paths: tuple[str, ...] = ()
    """Fields that hold paths of files; the files' content is part of the input."""
    cheap: bool = True
    """Whether a sample's raw fields cost next to nothing to get: a path, a line of a table."""
    version: str | None = None
    """Stands for the content of samples that would be expensive to compare (`Source.dataset`)."""

    @staticmethod
    def files(pattern: PathLike | Iterable[PathLike]) -> Source:
        """The files that match a pattern (`clips/**/*.mp4`), or all in a folder; the field is `path`.

        A key is the path below the part of the pattern that has no wildcard, so that a data set can move.
        """
        given: Any = pattern
        several = isinstance(given, Iterable) and not isinstance(given, str | bytes | os.PathLike)
        patterns = list(given) if several else [given]
        texts = tuple(os.fspath(p) for p in patterns if isinstance(p, str | os.PathLike))
        if not texts or len(texts) < len(patterns) or not all(isinstance(t, str) and t for t in texts):
            raise UsageError(
                f"Source.files({pattern!r}): expected a pattern such as 'clips/*.mp4', or a list of them."
            )
        return Source(", ".join(texts), ("path",), _Files(texts), paths=("path",))

    @staticmethod
    def table(
        rows: PathLike | Sequence[Mapping[str, Any]],
        *,
        key: str | Sequence[str] = "key",
        paths: str | Sequence[str] = (),
        root: PathLike | None = None,
    ) -> Source:
        """Rows of a list of dicts, or of a .json, .jsonl, .csv, .tsv or .parquet file.

        key:   the field, or fields, that name a row.
        paths: fields that hold paths of files, relative to `root` (default: the table's folder). They may not
               lead out of it.
        """
        listed = (paths,) if isinstance(paths, str) else tuple(paths)
        keyed_by = (key,) if isinstance(key, str) else tuple(key)
        finder = _Table.of(rows, keyed_by, listed, root)
        wrong = [name for name in (*keyed_by, *listed) if name not in finder.fields]
        if wrong or not keyed_by:
            what = (
                f"no field {wrong[0]!r}{tables.nearest(wrong[0], finder.fields)}" if wrong else "no key field"
            )
            raise UsageError(
                f"Source.table({finder.what}): {what}. It has {', '.join(finder.fields)}; name the one that "
                f"identifies a row, e.g. key={finder.fields[0]!r}."
            )
        named = keyed_by[0] if len(keyed_by) == 1 else None
        return Source(finder.what, finder.fields, finder, named, paths=listed)

    @staticmethod
    def dataset(
        dataset: Any,
        *,
        key: str | None = None,
        fields: Sequence[str] | None = None,
        version: str | None = None,
    ) -> Source:
        """A Hugging Face data set, or anything with `len()` and `[i]` that gives dicts or tuples.

        key:     the field that names a sample; without it the position does, as eight digits.
        fields:  names for the parts of a tuple.
        version: stands for the data's content. Without it (and without a Hugging Face fingerprint) every
                 sample is read and hashed each time something asks whether it changed.
        """
        finder = _Dataset(dataset, key, tuple(fields) if fields else None)
        known = version or getattr(dataset, "_fingerprint", None)
        return Source(type(dataset).__name__, finder.names(), finder, key, cheap=False, version=known)

    @cached_property
    def listing(self) -> Listing:
        found = self.finder.find()
        repeated = [key for key, n in Counter(found.keys).items() if n > 1] if found.keys else []
        if repeated or not len(found.keys):
            raise UsageError(
                f"{len(repeated)} keys of {self.what} stand there more than once. A key names one sample:"
                if repeated
                else f"{self.what} lists nothing: there is no sample to work on.",
                problems=[repr(key) for key in repeated[:10]],
            )
        return found

    @property
    def keys(self) -> Sequence[str]:
        """All keys, in the order in which rows are made."""
        return self.listing.keys

    def __len__(self) -> int:
        return len(self.keys)

    def raw(self, i: int) -> Raw:
        """The raw fields of the i-th sample."""
        return self.listing.raw(i)

    def unlisted(self) -> Source:
        """The same source, not listed yet."""
        return replace(self)

    def __reduce__(self) -> tuple[Any, ...]:  # the listing is found anew where it is unpacked
        return (Source, (self.what, self.fields, self.finder, self.key, self.paths, self.cheap, self.version))


@dataclass(frozen=True)
class Found:
    """Keys, and each one's raw fields."""

    keys: Sequence[str]
    rows: Sequence[Raw]

    def raw(self, i: int) -> Raw:
        return self.rows[i]


# --- files --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Files:
    patterns: tuple[str, ...]

    def find(self) -> Found:
        roots = [_fixed_part(pattern) for pattern in self.patterns]
        root = os.path.commonpath([os.path.abspath(r) for r in roots])
        names = (name for pattern in self.patterns for name in _matches(pattern))
        found = {os.path.abspath(name): name for name in names}  # two patterns may find the same file
        if not found:
            there = [r for r in roots if os.path.isdir(r)]
            hint = (
                f"{there[0] or '.'} is there, but nothing in it matches" if there else f"no folder {roots[0]}"
            )
            raise UsageError(
                f"No file matches {', '.join(self.patterns)} ({hint}; searched in {os.getcwd()})."
            )
        rows = sorted((_key(name, root), name) for name in found.values())
        return Found([key for key, _ in rows], [{"path": name} for _, name in rows])


def _matches(pattern: str) -> list[str]:
    if os.path.isdir(pattern):
        pattern = os.path.join(glob.escape(pattern), "**", "*")
    return [name for name in glob.glob(pattern, recursive=True) if not os.path.isdir(name)]


def _fixed_part(pattern: str) -> str:
    """The folder before the first wildcard."""
    if os.path.isdir(pattern):
        return pattern
    parts = Path(pattern).parts
    fixed = []
    for part in parts[:-1]:
        if glob.has_magic(part):
            break
        fixed.append(part)
    return os.path.join(*fixed) if fixed else ""


def _key(name: str, root: str) -> str:
    """The path below the root; bytes that are no UTF-8 are written as \\xNN, since a key is text."""
    relative = os.path.relpath(os.path.abspath(name), root).replace(os.sep, "/")
    return os.fsencode(relative).decode("utf-8", "backslashreplace")


# --- tables -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Table:
    what: str
    rows: Sequence[Raw]
    fields: tuple[str, ...]
    key: tuple[str, ...]
    paths: tuple[str, ...]
    root: str

    @staticmethod
    def of(rows: Any, key: tuple[str, ...], paths: tuple[str, ...], root: PathLike | None) -> _Table:
        if isinstance(rows, str | os.PathLike):
            place = Path(rows)
            read = tables.read(place, as_text=key)
            folder = os.fspath(root) if root is not None else os.fspath(place.parent)
            return _Table(os.fspath(place), read, tables.fields_of(read, str(place)), key, paths, folder)
        listed = tables.checked(rows)
        what = f"{len(listed):,} rows"
        folder = os.fspath(root) if root is not None else ""
        return _Table(what, listed, tables.fields_of(listed, what), key, paths, folder)

    def find(self) -> _Table:
        return self

    @cached_property
    def keys(self) -> list[str]:
        columns = [tables.column(self.rows, name) for name in self.key]
        return _keys(self.what, self.key, zip(*columns, strict=True))

    def raw(self, i: int) -> Raw:
        row = {name: self.rows[i].get(name) for name in self.fields}
        for name in self.paths:
            row[name] = inside(self.root, row[name], f"{name!r} of {self.keys[i]!r}")
        return row


def _keys(what: str, names: Sequence[str], rows: Iterable[tuple[Any, ...]]) -> list[str]:
    """Keys from the values that name each row."""
    found, wrong = [], []
    for i, parts in enumerate(rows):
        if any(part == "" or isinstance(part, bool) or not isinstance(part, str | int) for part in parts):
            wrong.append(f"row {i}: {', '.join(map(repr, parts))}")
        found.append("/".join(map(str, parts)))
    if wrong:
        raise UsageError(
            f"{len(wrong)} rows of {what} have no usable {'/'.join(names)}: a key is text or a whole number.",
            problems=wrong[:10],
        )
    return found


def inside(root: str, path: object, what: str) -> str:
    """`root/path`, or UsageError when a path from somebody's table leads out of its folder."""
    if not isinstance(path, str) or not path or "\0" in path:
        raise UsageError(f"{what} is {path!r}; expected the path of a file.")
    whole = os.path.normpath(os.path.join(root, path))
    if os.path.isabs(path) or os.path.relpath(whole, root or ".").split(os.sep)[0] == os.pardir:
        raise UsageError(
            f"{what} is {path!r}, which leads out of {root or '.'!r}. Give root= the folder "
            f"that all of the files are in, and paths relative to it."
        )
    return whole


# --- anything with an index ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Dataset:
    dataset: Any
    key: str | None
    given: tuple[str, ...] | None

    def names(self) -> tuple[str, ...]:
        if not hasattr(self.dataset, "__len__") or not hasattr(self.dataset, "__getitem__"):
            raise UsageError(
                f"Source.dataset({type(self.dataset).__name__}): expected something with len() and [i]. Turn "
                f"an iterable into a list first, or write it down as a table."
            )
        if isinstance(self.dataset, Mapping):
            raise UsageError(
                f"Source.dataset({type(self.dataset).__name__}): it has no [0] but names: "
                f"{', '.join(map(repr, list(self.dataset)[:5]))}. Give one of them, as "
                f"dataset[{next(iter(self.dataset), 'train')!r}]."
            )
        columns = getattr(self.dataset, "column_names", None)
        names = tuple(columns) if isinstance(columns, list | tuple) else self.given
        if names is None and len(self.dataset):
            names = tuple(self._row(self.dataset[0]))
        names = names or ()
        if self.key is not None and self.key not in names:
            raise UsageError(
                f"Source.dataset(key={self.key!r}): no such field{tables.nearest(self.key, names)}. "
                f"It has {', '.join(names)}."
            )
        return names

    def _row(self, item: Any) -> Raw:
        if isinstance(item, Mapping):
            return {str(name): value for name, value in item.items()}
        parts = item if isinstance(item, tuple | list) else (item,)
        if self.given is None or len(self.given) != len(parts):
            raise UsageError(
                f"Source.dataset({type(self.dataset).__name__}): a sample is {type(item).__name__} of "
                f"{len(parts)} parts; name them, e.g. fields=('image', 'label'). Given: {self.given}."
            )
        return dict(zip(self.given, parts, strict=True))

    def find(self) -> _Dataset:
        return self

    @cached_property
    def keys(self) -> list[str]:
        if self.key is None:
            return [f"{i:08d}" for i in range(len(self.dataset))]
        if isinstance(getattr(self.dataset, "column_names", None), list):
            values = self.dataset[self.key]
        else:
            values = [self.raw(i)[self.key] for i in range(len(self.dataset))]
        return _keys(type(self.dataset).__name__, (self.key,), ((value,) for value in values))

    def raw(self, i: int) -> Raw:
        return self._row(self.dataset[i])
