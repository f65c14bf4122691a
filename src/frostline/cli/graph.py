"""`frostline show`: a workload's graph, what of it is frozen and why the rest is not, and its parameters."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from frostline.cli import show

if TYPE_CHECKING:
    from frostline.target import Resolved

NOT_FROZEN = 1
_NAME = 24
_FLAKE, _TURN = "❄", "↻"

TargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="A recipe's name (frostline ls), a file (my_work.py, my_work.py:function) or module:function.",
        show_default=False,
    ),
]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Values for the function's parameters, checked against their types.",
        show_default=False,
    ),
]


def graph(
    target: TargetArgument,
    overrides: OverridesArgument = None,
    svg: Annotated[
        Path | None, typer.Option("--svg", metavar="PATH", help="Also draw the graph into this SVG file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    audit: Annotated[
        bool,
        typer.Option(
            "--audit",
            help="Run the stages on a few samples and show what is frozen indeed; exit status 1 when "
            "something that is declared frozen is not.",
        ),
    ] = False,
    only_parameters: Annotated[
        bool,
        typer.Option("--parameters", help="Only the parameters; the workload itself is not made."),
    ] = False,
) -> None:
    """Show a workload: its graph, what is computed once, what is not and why, and its parameters.

    \b
    frostline show my_work.py
    frostline show my_work.py:small num_frames=8 --svg graph.svg
    frostline show my_package.my_work:workload --audit
    frostline show foveated --parameters
    """
    from frostline.cli.outline import outline, signature
    from frostline.target import described, resolve

    if only_parameters:
        _parameters_alone(signature(described(target, overrides or ())), as_json)
        return
    found = resolve(target, overrides or ())
    about = outline(found)
    drawn = _draw(found, svg) if svg else {}
    report = _audit(found) if audit else None
    if as_json:
        extra = {"audit": {"ok": report.ok, "text": str(report)}} if report is not None else {}
        pictures = {"pictures": {name: str(path) for name, path in drawn.items()}}
        typer.echo(json.dumps({**about, **pictures, **extra}, indent=2, ensure_ascii=True))
    else:
        _print(about, report)
        for name, path in drawn.items():
            typer.echo(f"graph of {name}: {path}")
    if report is not None and not all(stage.frozen for stage in report.stages):
        raise typer.Exit(NOT_FROZEN)


def _parameters_alone(about: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(about, indent=2, ensure_ascii=True))
        return
    show.lines([("workload", about["name"]), ("function", about["function"])])
    _print_parameters(about["parameters"])


def _audit(found: Resolved) -> Any:
    from frostline.inspector import audit

    return audit(found.workload, progress=lambda text: typer.echo(show.plain(text), err=True))


def _draw(found: Resolved, wanted: Path) -> dict[str, Path]:
    """One SVG a pipeline: at `wanted`, with the pipeline's name where there are several."""
    from frostline.drawing import draw
    from frostline.errors import UsageError

    pipelines = found.workload.pipelines
    one = len(pipelines) == 1
    places = {n: wanted if one else wanted.with_name(f"{wanted.stem}-{n}{wanted.suffix}") for n in pipelines}
    for name, place in places.items():
        title = str(found.workload.name) if one else f"{found.workload.name}: {name}"
        try:
            place.write_text(draw(pipelines[name], title=title), encoding="utf-8")
        except OSError as e:
            raise UsageError(f"Cannot write the graph {place}: {e.strerror}.") from e
    return places


# --- the terminal -------------------------------------------------------------------------------------


def _print(about: dict[str, Any], report: Any) -> None:
    show.lines([("workload", about["name"]), ("function", about["function"])])
    if report is not None:
        typer.echo("\n".join(_folded(show.plain(line)) for line in str(report).splitlines()) + "\n")
    else:
        for name, pipeline in about["pipelines"].items():
            _print_pipeline(name, pipeline)
    parts = _parts(about)
    if parts:
        show.lines(parts)
    _print_parameters(about["parameters"])


def _print_pipeline(name: str, about: dict[str, Any]) -> None:
    """In the order of the data: the source, what is computed once, the line, what runs every epoch."""
    frozen = [stage for stage in about["stages"] if stage["frozen"]]
    live = [stage for stage in about["stages"] if not stage["frozen"]]
    labels = ["source", "outputs", *(stage["name"] for stage in about["stages"])]
    width = min(_NAME, max(map(len, labels))) + 2
    _rule(f"pipeline {name}", "═")
    show.lines([
        (_label(" ", "source", width), _source(about["source"])),
        *(pair for stage in frozen for pair in _stage(stage, width)),
    ])  # fmt: skip
    stored = ", ".join(about["cut"])
    _rule(f"{_FLAKE} the frostline{'' if stored else ': there is nothing to store'}", "╌")
    show.lines([
        *([(_label(_FLAKE, "stored", width), stored)] if stored else []),
        *((_label(_TURN, "pick", width), _pick(pick)) for pick in about["picks"]),
        *(pair for stage in live for pair in _stage(stage, width)),
        (_label(" ", "outputs", width), ", ".join(about["outputs"]) or "none"),
        *([(_label(" ", "splits", width), _counts(about["splits"]))] if about["splits"] else []),
    ])  # fmt: skip


def _folded(line: str) -> str:
    """A line at the width of the window, what is folded indented further."""
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    width = max(show.console().width, len(indent) + 20)
    return "\n".join(textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False))


def _rule(text: str, stroke: str) -> None:
    """A line across with words at its start."""
    columns = show.console().width
    said = show.plain(text, max(columns - 5, 1))
    typer.echo(f"{stroke * 3} {said} {stroke * max(0, columns - len(said) - 5)}".rstrip())


def _label(mark: str, name: str, width: int) -> str:
    return f"{mark} {show.plain(name, _NAME)}".ljust(width)


def _source(about: dict[str, Any]) -> str:
    if about["problem"]:
        return f"{about['kind']}: {about['problem']}"
    keys = f"{about['keys']:,} key{'s' if about['keys'] != 1 else ''}"
    what = "" if about["what"].endswith(" rows") else f" {about['what']}"  # rows of a list: the keys say it
    return f"{about['kind']}{what}: {keys}; fields {', '.join(about['fields'])}"


def _stage(about: dict[str, Any], width: int) -> list[tuple[str, str]]:
    how = [
        about["on"] + (f", {about['chunk']:,} samples a call" if about["chunk"] else ""),
        about["precision"] or "",
        "compiled" if about["compile"] else "",
        f"{about['fn']}{', loaded when needed' if about['lazy'] else ''}",
    ]
    flow = f"{', '.join(about['reads'])} → {', '.join(about['writes'])}"
    mark = _FLAKE if about["frozen"] else _TURN
    first = (_label(mark, about["name"], width), f"{flow}  ({'; '.join(filter(None, how))})")
    why = [("", f"every epoch: {about['why']}")] if about["why"] else []
    return [first, *why]


def _pick(pick: dict[str, Any]) -> str:
    return f"{pick['n']:,} entries of {', '.join(pick['fields'])}, drawn each epoch (eval: {pick['eval']})"


def _counts(splits: dict[str, int] | str) -> str:
    if isinstance(splits, str):
        return splits
    return ", ".join(f"{name} {n:,}" for name, n in splits.items()) + " keys"


def _parts(about: dict[str, Any]) -> list[tuple[str, object]]:
    parts = {n: about[n] for n in ("run", "model", "loss", "optimizer", "evaluate") if about[n] is not None}
    found = [(n, p["name"] + (", loaded when needed" if p["lazy"] else "")) for n, p in parts.items()]
    found += [(name, about[name]) for name in ("batch_size", "order") if about[name] is not None]
    if about["metric"]:
        m = about["metric"]
        found.append(("metric", f"{m['name']}, {m['better']} is better, margin {m['margin']:g}"))
    if about["splits"]:
        found.append(("splits", _shares(about["splits"], about["group"])))
    for store in about["stores"]:
        rows = store["problem"] or f"{store['rows']:,} rows; fields {', '.join(store['fields'])}"
        found.append(("store", f"{store['path']}: {rows}"))
    return found


def _shares(splits: dict[str, float] | str, group: str | None) -> str:
    if isinstance(splits, str):
        return f"by field {splits!r}"
    return ", ".join(f"{n} {share:.4g}" for n, share in splits.items()) + f", by hash of {group or 'the key'}"


def _print_parameters(parameters: list[dict[str, Any]]) -> None:
    if not parameters:
        typer.echo("It has no parameters.")
        return
    columns = ["name", "type", "default", "given", "help"]
    used = [c for c in columns if c not in ("given", "help") or any(p[c] for p in parameters)]
    rows = [
        [("required" if p["required"] else p[c]) if c == "default" else p[c] or "" for c in used]
        for p in parameters
    ]
    show.table("Parameters", used, rows)
