"""`frostline freeze TARGET`: compute what never changes once, into a store.

Exit status: 0 when all is done, 1 for an error, 130 when it was interrupted twice; 3 when it was stopped
(SIGTERM, Ctrl-C, --max-hours) and the same command goes on: `frostline freeze … && train` must not train on
a part.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from frostline.cli import show
from frostline.cli.graph import OverridesArgument, TargetArgument
from frostline.cli.store import CodecOption, codecs_of

if TYPE_CHECKING:
    from frostline.cut import CutPlan, StepCost
    from frostline.freezer.attempt import Outcome
    from frostline.freezer.options import Options
    from frostline.pipeline import Pipeline
    from frostline.workload import Workload

_SHOWN = 10
STOPPED = 3
"""The exit status of a run that ended in order, before all was done."""
_EPOCHS = 10.0
"""What a dry run compares cuts for, unless it is told."""


MaxBadOption = Annotated[
    str, typer.Option(metavar="N|N%", help="Samples that may fail; they are quarantined. More stop the run.")
]


def freeze(
    target: TargetArgument,
    overrides: OverridesArgument = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "--store",
            metavar="STORE",
            help="The store's folder; default: stores/TARGET.",
            show_default=False,
        ),
    ] = None,
    cut: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD,…", help="The fields to store; default: the last frozen ones.", show_default=False
        ),
    ] = None,
    codec: CodecOption = None,
    limit: Annotated[int | None, typer.Option(help="Only the first so many samples.")] = None,
    max_hours: Annotated[
        float | None, typer.Option(help="Stop after so long, at the end of a shard; run again to go on.")
    ] = None,
    max_bad: MaxBadOption = "1%",
    paranoid: Annotated[
        bool,
        typer.Option("--paranoid", help="Compare all of each file's content, and networks by loading them."),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Only say what would be done, and what it and every other cut would take."
        ),
    ] = False,
    for_epochs: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            help="Store what makes a training of so many epochs shortest, which may be nothing.",
            show_default=False,
        ),
    ] = None,
    retry_bad: Annotated[
        bool, typer.Option("--retry-bad", help="Try samples again that are in quarantine.")
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(help="Where networks run: cuda, cuda:1, cpu; default: a GPU if there is one."),
    ] = None,
    workers: Annotated[
        Literal["auto", "threads", "processes"],
        typer.Option(help="What runs the CPU stages: threads, processes, or auto (the faster)."),
    ] = "auto",
    n_workers: Annotated[int | None, typer.Option(help="How many of them; default: all cores.")] = None,
    precision: Annotated[
        Literal["fp32", "bf16", "fp16"] | None,
        typer.Option(help="Run networks in bf16 or fp16; default: as they are."),
    ] = None,
    compile: Annotated[bool, typer.Option("--compile", help="Run networks through torch.compile.")] = False,
    pipeline: Annotated[
        str | None, typer.Option(help="Only this pipeline, where the target has several.")
    ] = None,
) -> None:
    """Compute what never changes once, into a store. Run again, it does only what changed.

    Killed or stopped, the same command goes on where it was. Nothing is stored that an audit
    refuses. Exit status 3: stopped before all was done.

    With --dry-run, where there is no store yet, every cut is measured on a few samples and compared for
    10 epochs; with --for-epochs for as many, and what is best is chosen (--cut overrides).

    \b
    frostline freeze my_work.py num_frames=16
    frostline freeze my_work.py --dry-run --for-epochs 30
    frostline freeze my_work.py --cut frames,features --codec features=int8/token --max-hours 2
    """
    from dataclasses import replace

    from frostline.errors import UsageError
    from frostline.freezer.options import Options
    from frostline.freezer.progress import Reporter
    from frostline.freezer.run import run
    from frostline.tables import nearest
    from frostline.target import resolve

    resolved = resolve(target, overrides or [])
    pipelines = resolved.workload.pipelines
    if pipeline is not None and pipeline not in pipelines:
        raise UsageError(f"{target} has no pipeline {pipeline!r}{nearest(pipeline, pipelines)}.")
    options = Options(
        cut=tuple(name.strip() for name in cut.split(",")) if cut else None, codec=codecs_of(codec or []),
        limit=limit, max_hours=max_hours, max_bad=max_bad, paranoid=paranoid, retry_bad=retry_bad,
        device=device, workers=workers, n_workers=n_workers, precision=precision, compile=compile,
        dry_run=dry_run,
    )  # fmt: skip
    root = out or Path("stores") / resolved.name
    again = shlex.join(["frostline", *sys.argv[1:]])
    for name, one in pipelines.items():
        if pipeline in (None, name):
            place = root if len(pipelines) == 1 else root / name
            chosen = options
            if for_epochs is not None or (dry_run and not place.exists()):
                epochs = _EPOCHS if for_epochs is None else for_epochs
                planned = _planned(resolved.workload, one, place, options, epochs)
                if for_epochs is None and cut is None and one.cut and {*planned.cut} != {*one.cut}:
                    typer.echo(f"note: {_as_it_stands(one, planned, epochs)}\n")
                if for_epochs is not None and cut is None:
                    if not planned.cut:
                        typer.echo("nothing was written; to store fields all the same, name them: --cut")
                        continue
                    chosen = replace(options, cut=planned.cut)
            try:
                outcome = run(one, place, chosen, Reporter())
            except KeyboardInterrupt:
                typer.echo(f"stopped at once: whole shards are kept. To go on: {again}", err=True)
                raise
            _dry(outcome) if dry_run else _told(outcome, again=again)
            if outcome.stopped is not None:  # it is for all of them: the next pipeline is not begun either
                raise typer.Exit(STOPPED)


def _planned(workload: Workload, one: Pipeline, place: Path, options: Options, epochs: float) -> CutPlan:
    """What every cut of a pipeline would take, said; and the plan."""
    from dataclasses import replace

    import torch

    from frostline.cut import plan
    from frostline.freezer.plan import chosen_cut
    from frostline.freezer.progress import Reporter
    from frostline.freezer.run import with_options

    if options.cut is not None:
        chosen_cut(one, options.cut)  # what is wrong with it is said before anything is measured
    data = with_options(one, options)
    whole = replace(workload, data=data) if len(workload.pipelines) == 1 else data
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    step = _step(whole, device) if isinstance(whole, type(workload)) else None
    found = plan(
        whole, epochs=epochs, device=device, step=step, n_workers=options.n_workers, limit=options.limit,
        out=place, progress=Reporter().note,
    )  # fmt: skip
    typer.echo(found.table())
    if options.codec:
        typer.echo("note: the bytes above are those without --codec")
    typer.echo("")
    return found


def _as_it_stands(one: Pipeline, planned: CutPlan, epochs: float) -> str:
    best = f"store {', '.join(planned.cut)}" if planned.cut else "store nothing"
    return f"as it stands, this command stores {', '.join(one.cut)}; --for-epochs {epochs:g} would {best}"


def _step(workload: Workload, device: str) -> StepCost | None:
    """What a training step takes; None where nothing is trained, or it cannot be done, which is said."""
    from frostline.cut import step_cost
    from frostline.errors import FrostlineError

    if workload.model is None:
        return None
    try:
        return step_cost(workload, device=device)
    except FrostlineError as e:  # frozen fields can be stored whatever is wrong with the model
        typer.echo(f"the training step is not counted: {e}", err=True)
        return None


def _told(outcome: Outcome, *, again: str) -> None:
    """What happened, for a person."""
    plan, stats = outcome.plan, outcome.stats
    if plan.idle:
        typer.echo(f"ok: {outcome.root} is up to date ({len(outcome.store):,} rows); nothing to compute.")
        return
    store = outcome.store
    rate = stats.samples / max(outcome.streamed, 1e-9)
    busy = min(1.0, stats.busy / max(outcome.streamed, 1e-9))
    for entry in store.quarantine[:_SHOWN]:
        typer.echo(f"quarantined: {show.plain(entry['key'])}: {show.plain(entry['reason'])}")
    took = f"{show.duration(outcome.seconds)} (once begun {rate:,.1f}/s, device busy {busy:.0%})"
    figures = f"{stats.samples:,} samples, {show.size(stats.bytes)}, in {took}"
    bad = f", {len(store.quarantine):,} in quarantine" if store.quarantine else ""
    if outcome.stopped is not None:
        typer.echo(f"stopped ({outcome.stopped}): {figures}; {outcome.root} has {len(store):,} rows{bad}.")
        typer.echo(f"Run the same again to go on: {again}")
    else:
        typer.echo(f"ok: {figures}; {outcome.root} has {len(store):,} rows{bad}.")


def _dry(outcome: Outcome) -> None:
    guess = outcome.forecast
    if guess is None:
        typer.echo(f"dry run: {outcome.root} is up to date; nothing to compute.")
    else:
        typer.echo(
            f"dry run: {guess.samples:,} samples, {show.duration(guess.seconds)}, {show.size(guess.bytes)} "
            f"({show.size(guess.free)} free); nothing was written."
        )
