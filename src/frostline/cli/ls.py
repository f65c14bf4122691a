"""`frostline ls`: the recipes that installed packages offer."""

from __future__ import annotations

import inspect
import json
import traceback
from importlib.metadata import EntryPoint
from typing import Annotated, Any

import typer

from frostline.cli import show

NONE = """No recipes are installed. A recipe is a function that returns a Workload; a package offers it in its
pyproject.toml:

    [project.entry-points."frostline.recipes"]
    my_recipe = "my_package.my_work:workload"

A file needs no such entry: frostline show my_work.py"""


def ls(as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False) -> None:
    """List the recipes that installed packages offer.

    \b
    frostline ls
    frostline ls --json
    """
    from frostline.target import recipes

    found = [_about(point) for point in recipes().values()]
    if as_json:
        typer.echo(json.dumps(found, indent=2, ensure_ascii=True))
    elif not found:
        typer.echo(NONE)
    else:
        rows = [(r["name"], r["module"], r["problem"] or r["about"]) for r in found]
        show.table("Recipes", ("name", "module", "about"), rows)
        typer.echo("frostline show NAME shows one of them; with --parameters, only what it can be given.")


def _about(point: EntryPoint) -> dict[str, str | None]:
    """A recipe's row; one that cannot be imported says why, and hides no other."""
    from frostline.errors import UsageError

    about: dict[str, str | None] = {"name": point.name, "module": point.value, "about": "", "problem": None}
    try:
        function = _load(point)
    except UsageError as e:
        return about | {"problem": f"cannot be imported: {e}"}
    return about | {"about": (inspect.getdoc(function) or "").partition("\n")[0]}


def _load(point: EntryPoint) -> Any:
    """The function of a recipe. Anybody's code runs here and may raise anything: it becomes the reason."""
    from frostline.errors import UsageError

    try:
        return point.load()
    except (Exception, SystemExit) as e:
        said = "".join(traceback.format_exception_only(e)).strip().splitlines()[-1]
        raise UsageError(said) from e
