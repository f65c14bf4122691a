"""Lists of clips with captions, as people keep them: JSON, JSONL, CSV, TSV or Parquet, WebVid's among them.

Columns are found by their usual names. Read here and not by `fl.Source.table`, which has to be told the key's
column before it tells which columns there are, and knows no `{"a.mp4": "caption"}`.
"""

from __future__ import annotations

import csv
import json
import logging
import os
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from frostline.errors import MissingExtra, UsageError

SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")
PATH = ("path", "video", "file", "video_path", "file_name", "filename", "videoid", "video_id", "contenturl")
"""Columns that say which clip, the first that is there; WebVid's videoid lies in the folder page_dir."""
CAPTION = ("caption", "text", "description", "sentence", "title", "name")
SPLIT = ("split", "subset")
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
"""How splits are called, and what we call them."""
_IDS = ("videoid", "video_id")
"""Columns of PATH that hold ids, not names of files."""
log = logging.getLogger("frostline")


@dataclass(frozen=True)
class Clip:
    """One clip of a list, or of a folder."""

    path: str
    """Relative to the folder that the clips are in, with `/`; of a line just read, as the line has it."""
    caption: str = ""
    split: str = ""


def read(path: Path, *, need_caption: bool) -> list[Clip]:
    """All clips of a list, each once.

    >>> import tempfile
    >>> place = Path(tempfile.mkdtemp()) / "webvid.csv"
    >>> _ = place.write_text("videoid,page_dir,name\\n123,000001_000050,A cat sleeps\\n")
    >>> read(place, need_caption=True)
    [Clip(path='000001_000050/123.mp4', caption='A cat sleeps', split='')]
    """
    rows: Sequence[Mapping[Any, Any]] = _rows(path)
    columns = {str(name).lower(): str(name) for row in rows for name in row}
    key, caption, split = (
        next((columns[name] for name in known if name in columns), None) for known in (PATH, CAPTION, SPLIT)
    )
    problems = []
    if not key:
        problems.append(f"no column says which clip; expected one of {', '.join(PATH)}")
    if need_caption and not caption:
        problems.append(f"no column holds captions; expected one of {', '.join(CAPTION)}")
    if key is None or problems:
        have = ", ".join(columns.values()) or "no columns at all"
        raise UsageError(f"{path} cannot be used as a list of clips; it has {have}:", problems=problems)
    if need_caption and caption:
        _refuse_nested(path, rows, caption)
    page, roots = columns.get("page_dir"), folders(path)
    places = (_place(row, key, page, roots) for row in rows)
    clips = [
        Clip(place, _text(row.get(caption)), _text(row.get(split)))
        for place, row in zip(places, rows, strict=True)
    ]
    return _checked(path, clips, key, split)


def folders(path: Path) -> list[str]:
    """What the paths of a list may be relative to: its folder, or the folder `videos` beside it."""
    return [os.fspath(path.parent), os.path.join(path.parent, "videos")]


def _refuse_nested(path: Path, rows: Sequence[Mapping[Any, Any]], caption: str) -> None:
    """Captions by name, as {"en": "a cat"}: which of them is meant is not known."""
    cells = ((i, row.get(caption)) for i, row in enumerate(rows))
    wrong = [(i, cell) for i, cell in cells if isinstance(_first(cell), Mapping)]
    if wrong:
        told = [
            f"row {i + 1}: {caption} is {cell!r:.60}; expected text, or a list of texts" for i, cell in wrong
        ]
        raise _unusable(path, told)


def _unusable(path: Path, problems: Sequence[str]) -> UsageError:
    return UsageError(f"{path} has rows that cannot be used:", problems=ten(problems))


def ten(problems: Sequence[str]) -> list[str]:
    """The first ten, and how many more there are."""
    return [*problems[:10], *([f"… and {len(problems) - 10:,} more"] if len(problems) > 10 else [])]


def _checked(path: Path, clips: Sequence[Clip], key: str, split: str | None) -> list[Clip]:
    """Each clip once, with splits called as we call them; or UsageError with all rows that are wrong."""
    problems, found = [], []
    for i, clip in enumerate(clips):
        called = SPLITS.get(clip.split.lower(), "") if split else ""
        if not clip.path:
            problems.append(f"row {i + 1} has no {key}")
        if split and not called:
            problems.append(f"row {i + 1}: {split} is {clip.split!r}; expected train, val or test")
        found.append(Clip(clip.path, clip.caption, called))
    if problems:
        raise _unusable(path, problems)
    return once(path, found)


def once(path: Path, clips: Iterable[Clip]) -> list[Clip]:
    """Each clip as it is named first; another caption is said aloud, another split is a UsageError."""
    found: dict[str, Clip] = {}
    apart: dict[str, str] = {}
    otherwise: dict[str, None] = {}
    for clip in clips:
        first = found.setdefault(clip.path, clip)
        if first.split != clip.split:
            apart.setdefault(clip.path, f"{clip.path}: {first.split} and {clip.split}")
        if first.caption != clip.caption:
            otherwise[clip.path] = None
    if apart:
        raise UsageError(
            f"{path} names clips more than once, with different splits. A clip is of one split; take the "
            "other lines out:",
            problems=ten([*apart.values()]),
        )
    if otherwise:
        log.warning(
            "%s: clips that are named again with another caption: %s. The first caption is used (as of %s)",
            path, f"{len(otherwise):,}", next(iter(otherwise)),
        )  # fmt: skip
    return list(found.values())


def _place(row: Mapping[Any, Any], key: str, page: str | None, roots: Sequence[str]) -> str:
    """Where a row's clip is, as far as the row says it."""
    name = _text(row.get(key))
    if key.lower() == "contenturl" and "://" in name:  # where it came from; files keep the last part
        name = PurePosixPath(unquote(urlsplit(name).path)).name
    if not name:
        return ""
    is_id = key.lower() in _IDS
    if not any(map(str.isalpha, PurePosixPath(name).suffix)):  # an id, perhaps with seconds: v_10.5_20.0
        as_written = not is_id and any(os.path.isfile(os.path.join(root, name)) for root in roots)
        name += "" if as_written else ".mp4"
    within = _text(row.get(page)) if is_id else ""
    return os.path.normpath(os.path.join(within, name)).replace(os.sep, "/")


def _first(value: Any) -> Any:
    """Of several captions the first."""
    if isinstance(value, list | tuple):
        return value[0] if value else None
    return value


def _text(value: Any) -> str:
    """A cell as text. An empty cell of pandas is NaN, which is not itself."""
    value = _first(value)
    return "" if value is None or value != value else str(value).strip()


def matched(paths: Sequence[str], root: str, lines: Sequence[Clip], folder: str) -> list[Clip | None]:
    """Each clip's line of a list that lies in `folder`: by its path, or by its name.

    By a name only where one clip and one line have it: two clips of one name are told apart by nothing else,
    and one of them would get the caption of the other.

    >>> lines = [Clip("a/1.mp4", "one"), Clip("b/1.mp4", "two"), Clip("b/2.mp4", "three")]
    >>> matched(["b/1.mp4", "2.webm", "c/1.mp4"], "clips", lines, "list")
    [Clip(path='b/1.mp4', caption='two', split=''), Clip(path='b/2.mp4', caption='three', split=''), None]
    """
    exact: dict[str, Clip] = {}
    by_name: dict[str, list[Clip]] = {}
    for line in lines:
        for name in (line.path, _absolute(folder, line.path)):
            exact.setdefault(name, line)
        for name in _names(line.path):
            by_name.setdefault(name, []).append(line)
    clips_of = Counter(name for path in paths for name in _names(path))

    def of(path: str) -> Clip | None:
        for name in (_absolute(root, path), path):
            if name in exact:
                return exact[name]
        named = next((name for name in _names(path) if name in by_name), "")
        alone = clips_of[named] == 1 and len(by_name[named]) == 1
        return by_name[named][0] if alone else None

    return [of(path) for path in paths]


def _names(path: str) -> dict[str, None]:
    """With its suffix and without, each once. An ü may be one sign or, as macOS writes it, two."""
    composed = PurePosixPath(unicodedata.normalize("NFC", path))
    return dict.fromkeys((composed.name, composed.stem))


def _absolute(root: str, path: str) -> str:
    return os.path.abspath(os.path.join(root, path))


# --- files --------------------------------------------------------------------------------------------


def _rows(path: Path) -> Sequence[Mapping[str, Any]]:
    kind = path.suffix.lower()
    if not path.is_file():
        raise UsageError(f"There is no list of clips at {path} (searched in {os.getcwd()}).")
    try:
        if kind == ".json":
            rows = _json(path)
        elif kind in (".jsonl", ".ndjson"):
            rows = _jsonl(path)
        elif kind in (".csv", ".tsv"):
            rows = _csv(path, "," if kind == ".csv" else "\t")
        elif kind == ".parquet":
            rows = _parquet(path)
        else:
            raise ValueError(f"only {', '.join(SUFFIXES)} are known")
    except UnicodeDecodeError as e:
        raise UsageError(f"{path} cannot be read as a list of clips: {e}. Save it as UTF-8.") from e
    except ValueError as e:  # what json, csv and pyarrow raise
        raise UsageError(f"{path} cannot be read as a list of clips: {e}") from e
    wrong = [i for i, row in enumerate(rows) if not isinstance(row, Mapping)]
    if wrong or not rows:
        what = f"row {wrong[0] + 1} is {rows[wrong[0]]!r:.60}, not named values" if wrong else "it is empty"
        raise UsageError(f"{path} cannot be read as a list of clips: {what}.")
    return rows


def _json(path: Path) -> list[Any]:
    """A list of objects, or an object that gives each clip's caption or captions, or its object, by name."""
    found = json.loads(path.read_text("utf-8-sig"))
    if isinstance(found, list):
        return found
    if isinstance(found, dict) and all(isinstance(v, dict) or _is_caption(v) for v in found.values()):
        return [{"path": k, **(v if isinstance(v, dict) else {"caption": v})} for k, v in found.items()]
    raise ValueError('expected [{"path": …, "caption": …}, …] or {"clip.mp4": "its caption", …}')


def _jsonl(path: Path) -> list[Any]:
    rows = []
    # Not splitlines: a caption may hold U+2028 and others that end a line for it, not for JSON.
    for i, line in enumerate(path.read_text("utf-8-sig").split("\n")):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except json.JSONDecodeError as e:  # which calls every line the first
            raise ValueError(f"line {i + 1}, column {e.colno}: {e.msg}") from e
    return rows


def _is_caption(value: Any) -> bool:
    """A text, or several."""
    return all(isinstance(text, str) for text in (value if isinstance(value, list) else [value]))


def _csv(path: Path, usual: str) -> list[dict[str, Any]]:
    """All cells as text: an id such as 007 stays what it is."""
    with path.open(encoding="utf-8-sig", newline="") as text:
        # Spreadsheets put ; or tabs into a .csv where a comma is what others write 0.5 with.
        delimiter = max(usual + ",;\t", key=text.readline().count)
        text.seek(0)
        reader = csv.DictReader(text, delimiter=delimiter, skipinitialspace=True, strict=True)
        try:
            rows = list(reader)
        except csv.Error as e:
            raise ValueError(f"line {reader.reader.line_num}: {e}") from e
    uneven = [i for i, row in enumerate(rows) if None in row or None in row.values()]
    if uneven:
        raise ValueError(f"row {uneven[0] + 1} has more or fewer cells than there are columns")
    return rows


def _parquet(path: Path) -> list[dict[str, Any]]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as e:
        raise MissingExtra.needed("Reading a Parquet list", package="pyarrow", extra="parquet") from e
    # Of a table with pictures or embeddings in it only what is needed is read.
    known = {*PATH, *CAPTION, *SPLIT, "page_dir"}
    names = parquet.ParquetFile(path).schema_arrow.names
    wanted = [name for name in names if name.lower() in known]
    rows: list[dict[str, Any]] = parquet.read_table(path, columns=wanted or names[:1]).to_pylist()
    return rows
