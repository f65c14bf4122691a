"""What `frostline store inspect` shows of a store, or of one row."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from frostline.cli import show

if TYPE_CHECKING:
    from torch import Tensor

    from frostline.store import Store

_MOST_BAD = 10


def show_store(store: Store, *, as_json: bool) -> None:
    from frostline.store.describe import describe

    about = describe(store)
    if as_json:
        _print_json(about)
        return
    show.lines(_summary(about))
    _fields(about["fields"])
    _errors(about["fields"])
    _origins(about["fields"])
    _quarantine(about)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=True, allow_nan=False))


def _summary(about: dict[str, Any]) -> list[tuple[str, object]]:
    runs = about["runs"]
    return [
        ("store", about["path"]),
        ("rows", f"{about['rows']:,}, at most {about['rows_per_shard']:,} a shard"),
        ("bytes", show.size(about["bytes"])),
        (
            "commit",
            f"{about['commit']:,} ({about['commits_on_disk']:,} on disk), format version {about['version']}",
        ),
        ("index", f"{len(runs):,} runs, {show.size(sum(r['bytes'] for r in runs))}"),
        ("quarantine", f"{about['quarantined']:,} inputs" if about["quarantined"] else "empty"),
    ]


def _fields(fields: list[dict[str, Any]]) -> None:
    columns = ("field", "dtype", "shape", "codec", "rows", "shards", "bytes")
    rows = [
        (
            f["name"], f["dtype"], show.shape(f["shape"]) or "–", f["codec"],
            f"{f['rows']:,}", f"{f['shards']:,}", show.size(f["bytes"]),
        )
        for f in fields
    ]  # fmt: skip
    show.table("Fields", columns, rows, right=("rows", "shards", "bytes"))


def _errors(fields: list[dict[str, Any]]) -> None:
    coded = [(f["name"], f["error"]) for f in fields if f["error"]]
    if not coded:
        return
    columns = ("field", "max |error|", "rel. L2", "cosine: min", "1 %", "median", "rows sampled")
    rows = [
        (
            name, f"{e['max_abs']:.3g}", f"{e['relative_l2']:.3g}",
            *(_cosine(e[f"cosine_{which}"]) for which in ("min", "p01", "median")), f"{e['rows_sampled']:,}",
        )
        for name, e in coded
    ]  # fmt: skip
    show.table("Encoding error, as decoded against as given", columns, rows, right=columns[1:])


def _cosine(value: float | None) -> str:
    """As many nines as there are: 0.9999998 must not read as 1."""
    if value is None:
        return "–"
    return f"{value:.5f}" if value < 0.9999 else f"1 − {1 - value:.1e}" if value < 1 else "1"


def _origins(fields: list[dict[str, Any]]) -> None:
    """Fingerprints and provenance; fields that came from the same share a line."""
    same: dict[tuple[str, str], list[str]] = {}
    for f in fields:
        if f["fingerprint"] or f["provenance"] is not None:
            same.setdefault((f["fingerprint"] or "–", _short_json(f["provenance"])), []).append(f["name"])
    if same:
        rows = [(", ".join(names), *origin) for origin, names in same.items()]
        show.table("Computed from", ("fields", "fingerprint", "provenance"), rows)


def _short_json(value: Any) -> str:
    return "–" if value is None else show.plain(json.dumps(value, ensure_ascii=False), 300)


def _quarantine(about: dict[str, Any]) -> None:
    bad = about["quarantine"]
    if not bad:
        return
    named = any(entry.get("field") for entry in bad)
    columns = ("key", *(["field"] if named else []), "reason", "input")
    rows = [tuple(_cell(entry.get(name)) for name in columns) for entry in bad[:_MOST_BAD]]
    more = f", the first {_MOST_BAD} (--json has all)" if len(bad) > _MOST_BAD else ""
    show.table(f"Quarantine: {len(bad):,} inputs{more}", columns, rows)


def _cell(value: Any) -> str:
    return show.plain(value, 200) if isinstance(value, str) else _short_json(value)


def show_row(store: Store, key: str, *, as_json: bool, picture: Path | None) -> None:
    from frostline.store.describe import describe_row

    about, pictures = describe_row(store, key)
    # JSON is for programs: they get the files they ask for, and no others
    written = _write_pictures(pictures, key, picture) if pictures and (picture or not as_json) else {}
    if as_json:
        _print_json({**about, "pictures": {name: str(path) for name, path in written.items()}})
        return
    where = f"position {about['position']:,}, row {about['row']:,}"
    rows = [(name, *_value(summary)) for name, summary in about["fields"].items()]
    show.table(f"{show.plain(key)} ({where})", ("field", "dtype", "shape", "value"), rows)
    for name, path in written.items():
        typer.echo(f"picture of {name}: {path}")
    if picture and not pictures:
        typer.echo("No field of this row is an image or a video; no picture was written.")


def _value(summary: dict[str, Any]) -> tuple[str, str, str]:
    if summary.get("absent"):
        return "–", "–", "not there: this row has no value yet"
    dims = show.shape(summary["shape"]) if summary.get("shape") else "–"
    return summary["dtype"], dims, _said(summary)


def _said(summary: dict[str, Any]) -> str:
    if "text" in summary:
        return show.plain(summary["text"], 400) or "(empty)"
    if "value" in summary:
        return show.plain(
            summary["value"] if isinstance(summary["value"], str) else json.dumps(summary["value"]), 400
        )
    if "start" in summary:
        return f"{summary['length']:,} bytes: {summary['start']}{' …' if summary['length'] > 16 else ''}"
    figures = [
        f"{name} {_figure(summary[name])}" for name in ("min", "mean", "max") if summary[name] is not None
    ]
    odd = [
        f"{summary[name]:,} {word}"
        for name, word in (("nan", "NaN"), ("infinite", "infinite"))
        if summary[name]
    ]
    return ", ".join([*figures, *odd]) or "no elements"


def _figure(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _write_pictures(pictures: dict[str, Tensor], key: str, wanted: Path | None) -> dict[str, Path]:
    """One PNG a field: at `wanted` (with the field's name where there are several), or in a new folder."""
    from frostline.errors import UsageError
    from frostline.store.picture import write_picture

    if wanted is None:
        stem = "".join(c if c.isalnum() or c in "-_." else "-" for c in key).lstrip(".")[-80:] or "row"
        wanted = Path(tempfile.mkdtemp(prefix="frostline-"), f"{stem}.png")
    one = len(pictures) == 1
    places = {n: wanted if one else wanted.with_name(f"{wanted.stem}-{n}{wanted.suffix}") for n in pictures}
    try:
        for name, place in places.items():
            write_picture(pictures[name], place)
    except OSError as e:
        raise UsageError(f"Cannot write the picture {e.filename or wanted}: {e.strerror}.") from e
    return places
