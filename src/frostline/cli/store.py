"""`frostline store …`: look into, check and move stores.

Longer than most files: seven commands, and an option is declared where it is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from frostline.cli import show

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

StoreArgument = Annotated[
    Path, typer.Argument(metavar="STORE", help="The store's folder.", show_default=False)
]
OutOption = Annotated[Path, typer.Option("--out", metavar="PATH", help="Where to write.", show_default=False)]
CodecOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[FIELD=]CODEC",
        help="How to store a field, or all floating-point ones: "
        "raw, float16, bfloat16, float32, int8/token, int8/channel.",
    ),
]
DAMAGED = 1


@app.callback()
def store() -> None:
    """Look into, check and move stores."""


@app.command()
def inspect(
    path: StoreArgument,
    row: Annotated[str | None, typer.Option("--row", metavar="KEY", help="Show this row's values.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    picture: Annotated[
        Path | None,
        typer.Option(
            "--picture", metavar="PATH", help="With --row: where the PNG of an image or video goes."
        ),
    ] = None,
) -> None:
    """Show what a store holds, or one of its rows.

    \b
    frostline store inspect stores/clips
    frostline store inspect stores/clips --row train/clip-7 --picture clip-7.png
    """
    from frostline.cli import inspection
    from frostline.errors import UsageError
    from frostline.store import Store

    if picture and row is None:
        raise UsageError("--picture shows one row: say which one, with --row KEY.")
    opened = Store.open(path)
    if row is None:
        inspection.show_store(opened, as_json=as_json)
    else:
        inspection.show_row(opened, row, as_json=as_json, picture=picture)


@app.command()
def check(
    path: StoreArgument,
    deep: Annotated[bool, typer.Option("--deep", help="Also compare every row, key and offset.")] = False,
) -> None:
    """Compare every file with its checksum; exit status 1 and the list when something is damaged.

    \b
    frostline store check stores/clips --deep
    """
    from frostline.errors import StoreError
    from frostline.store.check import check_store

    if not (path / "manifest.json").exists() and not (path / "commits").exists():
        raise StoreError(f"No store at {path}: there is neither manifest.json nor commits/.")
    with show.Meter("bytes") as meter:
        result = check_store(path, deep=deep, progress=lambda done, total: meter("checking", done, total))
    for note in result.notes:
        typer.echo(f"note: {show.plain(note)}")
    counted = f"{result.files:,} files, {show.size(result.bytes)}, {result.commits:,} commits"
    if result.ok:
        typer.echo(f"ok: {path} is whole ({counted}, {result.rows:,} rows).")
        return
    for problem in result.problems:
        typer.echo(f"damaged: {show.plain(problem)}")
    typer.echo(f"{path} has {len(result.problems):,} problem(s) ({counted}).")
    raise typer.Exit(DAMAGED)


@app.command("import")
def import_(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of files.", show_default=False)],
    out: OutOption,
    pattern: Annotated[str, typer.Option(metavar="GLOB", help="Only files that match: 'train/*.pt'.")] = "*",
    field: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this field; may be given several times.")
    ] = None,
    codec: CodecOption = None,
    ragged: Annotated[
        str,
        typer.Option(help="Fields of varying first dimension: auto, never, or names with commas between."),
    ] = "auto",
    max_bad: Annotated[
        str,
        typer.Option(metavar="N|N%", help="Files that may fail; they are quarantined. More stop the import."),
    ] = "0",
    rows_per_shard: Annotated[
        int | None, typer.Option(help="Rows a shard; about 64 MB when not given.")
    ] = None,
    resume: Annotated[bool, typer.Option(help="Go on with an import that was interrupted.")] = True,
    retry_bad: Annotated[
        bool, typer.Option("--retry-bad", help="Read files again that are in quarantine.")
    ] = False,
    follow_links: Annotated[
        bool, typer.Option("--follow-links", help="Take links that lead out of the folder.")
    ] = False,
) -> None:
    """Make a store of a folder of .pt, .pth, .npy, .npz and .safetensors files, one row a file.

    A row's key is the file's path without its suffix. Nothing is unpickled.

    \b
    frostline store import features/ --out stores/features
    frostline store import features/ --out stores/features --codec dino=int8/token --max-bad 1%
    """
    from frostline.store.convert import import_folder

    names: Any = ragged if ragged in ("auto", "never") else [name.strip() for name in ragged.split(",")]
    try:
        with show.Meter() as meter:
            done = import_folder(
                folder,
                out,
                pattern=pattern,
                fields=field,
                codec=codecs_of(codec or []),
                ragged=names,
                max_bad=max_bad,
                rows_per_shard=rows_per_shard,
                resume=resume,
                retry_bad=retry_bad,
                follow_links=follow_links,
                progress=meter,
            )
    except KeyboardInterrupt:
        typer.echo("Interrupted. Whole shards are kept: run the same command again to go on.", err=True)
        raise
    for name, spec in done.fields.items():
        dims = f" [{show.shape(spec.shape)}]" if spec.shape else ""
        typer.echo(
            f"field: {name}: {spec.dtype}{dims}"
            + (f", stored as {spec.codec}" if spec.codec != "raw" else "")
        )
    for note in done.notes:
        typer.echo(f"note: {show.plain(note)}")
    for bad in done.bad[:10]:
        typer.echo(f"quarantined: {show.plain(bad)}")
    before = f", {done.already_in:,} files were dealt with before" if done.already_in else ""
    failed = f", {len(done.bad):,} in quarantine" if done.bad else ""
    typer.echo(f"ok: {done.rows:,} rows imported into {out}{before}{failed}.")


def codecs_of(given: list[str]) -> dict[str, str]:
    """`x=int8/token` is one field's codec, `float16` that of every floating-point field ("*")."""
    parted = [text.rpartition("=") for text in given]
    return {name or "*": codec for name, _, codec in parted}


@app.command()
def export(
    path: StoreArgument,
    out: OutOption,
    format: Annotated[
        str,
        typer.Option(
            help="pt, npz, npy, safetensors: one file a row. parquet: one file of all small values."
        ),
    ] = "pt",
    field: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this field; may be given several times.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Only so many rows, from the first.")] = None,
    cast: Annotated[
        bool, typer.Option("--cast", help="Write bfloat16 as float32 where the format has none.")
    ] = False,
) -> None:
    """Write a store's rows as files.

    \b
    frostline store export stores/features --out features/ --format safetensors
    frostline store export stores/features --out features.parquet --format parquet
    """
    from frostline.store import Store
    from frostline.store.export import export_folder

    opened = Store.open(path)
    _known(opened.fields, field or [], f"Store {str(path)!r}")
    with show.Meter("rows") as meter:
        done = export_folder(opened, out, format=format, fields=field, limit=limit, cast=cast, progress=meter)
    for note in done.notes:
        typer.echo(f"note: {show.plain(note)}")
    typer.echo(f"ok: {done.rows:,} rows of {', '.join(done.fields)} written to {done.place}.")


def _known(there: Any, asked: list[str], what: str) -> None:
    """FieldError with the nearest names for a field that is not there."""
    from frostline.errors import FieldError
    from frostline.store.schema import nearest

    unknown = [name for name in asked if name not in there]
    if unknown:
        hint = nearest(unknown[0], list(there)) or "."
        raise FieldError(f"{what} has no field {unknown[0]!r}{hint} It has {', '.join(there)}.")


@app.command()
def delete(
    path: StoreArgument,
    keys: Annotated[list[str], typer.Argument(metavar="KEY…", help="Keys of the rows.", show_default=False)],
) -> None:
    """Take rows out; all of the keys, or none when one is not there. `store gc` then frees their bytes.

    \b
    frostline store delete stores/clips train/clip-7 train/clip-8
    """
    from frostline.store import Store
    from frostline.store.describe import require_keys

    wanted = list(dict.fromkeys(keys))
    require_keys(Store.open(path), wanted)
    with Store.append(path) as writer:
        for key in wanted:
            writer.delete(key)
    typer.echo(
        f"ok: {len(wanted):,} rows deleted from {path}; `frostline store gc {path}` frees their bytes."
    )


@app.command()
def retire(
    path: StoreArgument,
    fields: Annotated[
        list[str], typer.Argument(metavar="FIELD…", help="Names of the fields.", show_default=False)
    ],
) -> None:
    """Take fields out. Nothing else is touched; `store gc` then frees their bytes.

    \b
    frostline store retire stores/clips old_features
    """
    from frostline.store import Store

    _known(Store.open(path).fields, fields, f"Store {str(path)!r}")
    Store.retire(path, *dict.fromkeys(fields))
    typer.echo(f"ok: {', '.join(fields)} retired from {path}; `frostline store gc {path}` frees the bytes.")


@app.command()
def gc(
    path: StoreArgument,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be freed.")] = False,
    min_dead: Annotated[
        str,
        typer.Option(
            metavar="N%", help="Write shards anew in which at least this share of the rows is dead."
        ),
    ] = "50%",
) -> None:
    """Free what no snapshot needs: old commits, retired fields, deleted rows, leftovers of killed writers.

    \b
    frostline store gc stores/clips --dry-run
    """
    from frostline.store.gc import collect

    done = collect(path, min_dead=_share(min_dead), dry_run=dry_run)
    would = "would be " if dry_run else ""
    typer.echo(f"ok: {done.files:,} files, {show.size(done.bytes)} {would}freed in {path}.")
    if done.rewritten_shards:
        typer.echo(f"{done.rewritten_shards:,} shards {would}written anew without their deleted rows.")
    if done.pinned_commits:
        typer.echo(
            f"{len(done.pinned_commits):,} older commits are open in a reader and {would or 'were '}kept."
        )


def _share(text: str) -> float:
    try:
        share = float(text.removesuffix("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        raise typer.BadParameter(f"{text!r} is not a share such as 50% or 0.5", param_hint="--min-dead")
    return share
