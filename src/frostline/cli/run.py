"""`frostline run TARGET`: an experiment with nothing to train.

Exit status: 0 when it is done, 1 for an error, 130 when it was interrupted twice; 3 when it was stopped
(SIGTERM, Ctrl-C, --max-hours) and the same command goes on: `frostline run … && …` must not take a part for
the whole.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from frostline.cli.freeze import STOPPED
from frostline.cli.graph import OverridesArgument, TargetArgument
from frostline.cli.train import DeviceOption, LiveOption, StoreOption, again_without_resume

if TYPE_CHECKING:
    from frostline.experiment import Result

_SHOWN = 12


def run(
    target: TargetArgument,
    overrides: OverridesArgument = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The run's folder; default: runs/TARGET/TIME.")
    ] = None,
    resume: Annotated[
        Literal["auto", "never"],
        typer.Option(help="Go on with the newest run of these parameters that is not done, or begin anew."),
    ] = "auto",
    store: StoreOption = None,
    live: LiveOption = False,
    device: DeviceOption = None,
    seed: Annotated[int, typer.Option(help="Of what the experiment draws.")] = 0,
    max_hours: Annotated[
        float | None, typer.Option(help="This call ends after so long; the same command goes on.")
    ] = None,
) -> None:
    """Run an experiment: a workload with run= and nothing to train. Killed, the same command goes on.

    Its units are computed once and kept in the run's folder, and what it returned in result.json. Exit
    status 3: stopped before all was done.

    \b
    frostline run my_work.py:compare seeds=3
    frostline run foveated-look checkpoint=runs/foveated/mine --out look
    """
    from frostline.errors import FreezePaused
    from frostline.experiment import run as run_experiment
    from frostline.target import resolve

    resolved = resolve(target, overrides or [])
    again = again_without_resume(sys.argv[1:])
    try:
        result = run_experiment(
            resolved.workload, out=out, resume=resume, store=store, live=live, device=device, seed=seed,
            max_hours=max_hours, parameters=resolved.values,
        )  # fmt: skip
    except FreezePaused as e:
        typer.echo(f"{e} Run the same again to go on: {again}")
        raise typer.Exit(STOPPED) from e
    except KeyboardInterrupt:
        typer.echo(f"stopped at once: units that are whole are kept. To go on: {again}", err=True)
        raise
    _told(result, again)
    if result.stopped is not None:
        raise typer.Exit(STOPPED)


def _told(result: Result, again: str) -> None:
    from frostline.wording import many

    units = f"{many(result.made, 'unit')} made" + (f", {result.found:,} found" if result.found else "")
    if result.stopped is not None:
        typer.echo(f"stopped ({result.stopped}): {units}; {result.folder}")
        typer.echo(f"Run the same again to go on: {again}")
        return
    figures = ", ".join([*_figures(result.value)][:_SHOWN])
    typer.echo(f"ok: {figures + '; ' if figures else ''}{units}; {result.folder}")


def _figures(value: Any) -> list[str]:
    """The numbers and short texts of what was returned, for one line; all of it is in result.json."""
    if not isinstance(value, dict):
        return [f"{value:.6g}" if isinstance(value, float) else str(value)] if _short(value) else []
    return [f"{n} {v:.6g}" if isinstance(v, float) else f"{n} {v}" for n, v in value.items() if _short(v)]


def _short(value: Any) -> bool:
    return isinstance(value, bool | int | float) or (
        isinstance(value, str) and len(value) <= 60 and value.isprintable()
    )
