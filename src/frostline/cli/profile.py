"""`frostline profile -- COMMAND` and `frostline profile TARGET`.

Exit status: 0 when a profile came out, also where the script was ended for it; 1 when none could be had, or
the script failed by itself: its own error stands above ours.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from frostline.cli.train import DeviceOption, LiveOption, StoreOption

_GIVEN = "frostline.profile.command"


class AfterDashes(TyperCommand):
    """Keeps what stands after `--` apart: it is somebody else's command line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            place = args.index("--")
            ctx.meta[_GIVEN] = args[place + 1 :]
            args = args[:place]
        return super().parse_args(ctx, args)


def profile(
    ctx: typer.Context,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[TARGET] [-- COMMAND]", show_default=False, help="A workload, or a command after --."
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", show_default=False, help="The workload's parameters."),
    ] = None,
    steps: Annotated[
        int, typer.Option(help="Steps to measure, in turns of the passes; more run between and after.")
    ] = 50,
    warmup: Annotated[int, typer.Option(help="Steps before, at least.")] = 10,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Default: runs/profile/TIME.", show_default=False)
    ] = None,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Let the script run to its own end.")
    ] = False,
    trace: Annotated[
        bool, typer.Option("--trace", help="Also a trace for Perfetto or chrome://tracing.")
    ] = False,
    store: StoreOption = None,
    live: LiveOption = False,
    device: DeviceOption = None,
    no_replay: Annotated[
        bool,
        typer.Option("--no-replay", help="Never hand out a batch twice; the loader's bound is then rougher."),
    ] = False,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            metavar="A.json B.json", show_default=False, help="What changed from one profile to another."
        ),
    ] = None,
) -> None:
    """Say where each step of a training goes, what it computes again, and what that is worth.

    The script is run as it is, and stopped when all was seen: with --steps 50 after 65 to 230 steps and the
    warm-up, or up to 700 quick ones. DIR keeps all: profile.json, report.html; with --trace, trace.json.

    \b
    frostline profile -- python train.py --epochs 1
    frostline profile --steps 100 -- torchrun --nproc-per-node 2 train.py
    frostline profile my_work.py batch_size=64
    frostline profile --compare before/profile.json after/profile.json
    """
    from frostline.errors import UsageError

    command = ctx.meta.get(_GIVEN)
    if compare is not None:
        _compare(*compare)
        return
    if (command is None) == (target is None):
        raise UsageError(
            "frostline profile needs a command after --, or a TARGET: `frostline profile -- python "
            "train.py`, `frostline profile my_work.py`."
        )
    given = {"--keep-going": keep_going, "--no-replay": no_replay} if command is None else {
        "--store": store, "--live": live, "--device": device, "KEY=VALUE": overrides
    }  # fmt: skip
    if wrong := [name for name, value in given.items() if value]:
        what = "a TARGET" if command is None else "a command"
        raise UsageError(f"{', '.join(wrong)} cannot be given with {what}.")
    from frostline.profiler.launch import Settings

    settings = Settings(steps, warmup, keep_going, trace, not no_replay)
    place = out or Path("runs", "profile", f"{datetime.now():%Y-%m-%dT%H-%M-%S}")
    status = 0
    if command is not None:
        from frostline.profiler.scripts import profile_script

        found, status = profile_script(command, settings, place)
    else:
        from frostline.profiler.workloads import profile as profile_workload
        from frostline.target import resolve

        script = "To profile a script: frostline profile -- python"
        resolved = resolve(str(target), overrides or [], meant=script)
        found = profile_workload(
            resolved.workload, steps=steps, warmup=warmup, out=place, store=store, live=live, device=device,
            trace=trace,
        )  # fmt: skip
    from frostline.report import terminal

    terminal.show(found)
    names = [name for name in ("profile.json", "report.html", "trace.json") if (place / name).exists()]
    typer.echo(f"kept in {place}: {', '.join(names)}")
    if status:
        raise typer.Exit(1)


def _compare(a: Path, b: Path) -> None:
    from frostline.profiler.compare import compare, lines
    from frostline.results import Profile

    for line in lines(compare(Profile.read(a), Profile.read(b))):
        typer.echo(line)
