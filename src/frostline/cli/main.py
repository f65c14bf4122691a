"""The `frostline` command: one sub-app or function per verb, and what happens when one fails.

Modules in `cli/` import torch, rich and the rest of frostline inside their functions, so that `--help` stays
under 0.3 s; a contract test holds that torch is not imported. Help is plain text (`rich_markup_mode=None`)
for the same reason: `--help` took 0.09 s plain and 0.18 s with rich (medians of 20 interleaved runs on two
shared cores, Python 3.11, typer 0.29).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from frostline import __version__
from frostline.cli import freeze, graph, ls, profile, run, store, train
from frostline.errors import FrostlineError

INTERRUPTED = 130  # what shells report for a process that Ctrl-C ended: 128 + SIGINT

app = typer.Typer(
    name="frostline",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("ls")(ls.ls)
app.command("show")(graph.graph)
app.command("profile", cls=profile.AfterDashes)(profile.profile)
app.command("freeze")(freeze.freeze)
app.command("train")(train.train)
app.command("evaluate")(train.evaluate)
app.command("run")(run.run)
app.add_typer(store.app, name="store")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"frostline {__version__}")
        raise typer.Exit


@app.callback()
def frostline(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    """Compute once what never changes, then feed the accelerator flat out."""


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line; ends in `SystemExit`.

    A FrostlineError is the user's to fix, so it is one message and exit status 1. Anything else is ours, and
    keeps its traceback. `FROSTLINE_TRACEBACK=1` shows it for both.
    """
    command = typer.main.get_command(app)  # app() itself would replace sys.excepthook
    try:
        command(args, prog_name="frostline")
    except FrostlineError as error:
        if os.environ.get("FROSTLINE_TRACEBACK") == "1":
            raise
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
