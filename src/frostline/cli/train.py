"""`frostline train TARGET` and `frostline evaluate TARGET`.

Exit status: 0 when the training is done, or was stopped in order (the time limit, SIGTERM, Ctrl-C once: the
checkpoint is written and the same command goes on); 1 for an error; 130 when it was interrupted twice.
"""

from __future__ import annotations

import inspect
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from frostline.cli.freeze import MaxBadOption
from frostline.cli.graph import OverridesArgument, TargetArgument

if TYPE_CHECKING:
    from frostline.trainer.job import TrainResult

DeviceOption = Annotated[
    str | None, typer.Option(help="Where it runs: cuda, cuda:1, cpu; default: a GPU if there is one.")
]
StoreOption = Annotated[
    Path | None,
    typer.Option(metavar="STORE", help="The store of the frozen fields; default: stores/TARGET."),
]
LiveOption = Annotated[
    bool, typer.Option("--live", help="No store: compute the frozen fields each time. The honest baseline.")
]


def train(
    target: TargetArgument,
    overrides: OverridesArgument = None,
    steps: Annotated[int | None, typer.Option(help="The end, in optimiser steps over all calls.")] = None,
    epochs: Annotated[float | None, typer.Option(help="The end, in epochs over all calls.")] = None,
    max_hours: Annotated[
        float | None, typer.Option(help="This call ends after so long; the same command goes on.")
    ] = None,
    schedule_hours: Annotated[
        float | None, typer.Option(help="Bind the rate's schedule to so many hours over all calls.")
    ] = None,
    resume: Annotated[
        str, typer.Option(metavar="auto|never|PATH", help="Go on with the newest run of these settings.")
    ] = "auto",
    init_from: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Begin with the weights of a checkpoint or file.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The run's folder; default: runs/TARGET/TIME.")
    ] = None,
    store: StoreOption = None,
    live: LiveOption = False,
    max_bad: MaxBadOption = "1%",
    device: DeviceOption = None,
    precision: Annotated[
        Literal["fp32", "tf32", "bf16", "fp16"] | None, typer.Option(help="Default: the workload's.")
    ] = None,
    microbatch: Annotated[
        int | None, typer.Option(help="Rows a pass; gradients of a larger batch are added up.")
    ] = None,
    schedule: Annotated[
        Literal["constant", "cosine", "linear", "wsd"] | None,
        typer.Option(
            help="Of the learning rate; default: the workload's, else constant, or wsd with hours alone."
        ),
    ] = None,
    compile: Annotated[bool, typer.Option("--compile", help="Run the model through torch.compile.")] = False,
    seed: Annotated[int | None, typer.Option(help="Of weights, order and augmentation.")] = None,
    log_every: Annotated[int | None, typer.Option(help="Steps between two lines of metrics.")] = None,
    eval_every: Annotated[int | None, typer.Option(help="Steps between two evaluations.")] = None,
    eval_rows: Annotated[int | None, typer.Option(help="The most samples such an evaluation takes.")] = None,
    save_every: Annotated[int | None, typer.Option(help="Steps between two checkpoints.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="A failing compilation is an error.")] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Metrics to TensorBoard too.")] = False,
    wandb: Annotated[
        str | None, typer.Option(metavar="PROJECT", help="Metrics to this project of W&B too.")
    ] = None,
) -> None:
    """Train the workload's model on what the store holds. Killed, the same command goes on.

    The store is made or completed first. Metrics go to metrics.jsonl, checkpoints to checkpoints/ in
    the run's folder.

    \b
    frostline train my_work.py --steps 10000
    frostline train my_work.py batch_size=128 --max-hours 2 --precision bf16
    torchrun --nproc-per-node 2 -m frostline train my_work.py --epochs 10
    """
    from frostline.errors import FreezePaused
    from frostline.target import resolve, written
    from frostline.trainer.run import train as train_workload

    resolved = resolve(target, overrides or [])
    settings = {
        "precision": precision, "microbatch": microbatch, "schedule": schedule, "compile": compile or None,
        "seed": seed, "log_every": log_every, "eval_every": eval_every, "eval_rows": eval_rows,
        "save_every": save_every,
    }  # fmt: skip
    again = again_without_resume(sys.argv[1:])
    try:
        result = train_workload(
            resolved.workload, steps=steps, epochs=epochs, max_hours=max_hours, schedule_hours=schedule_hours,
            resume=resume, init_from=init_from, out=out, store=store, live=live, max_bad=max_bad,
            device=device, training=settings, strict=strict, tensorboard=tensorboard, wandb=wandb or False,
            target=written(target), parameters=resolved.values,
        )  # fmt: skip
    except FreezePaused as e:
        typer.echo(f"{e} Run the same again to go on: {again}")
        return
    except KeyboardInterrupt:
        typer.echo(f"stopped at once. To go on: {again}", err=True)
        raise
    if int(os.environ.get("RANK", "0")):
        return
    told = _told(result)
    if result.stopped is not None:
        typer.echo(f"stopped ({result.stopped}) at step {result.step:,}{told}; {result.folder}")
        typer.echo(f"Run the same again to go on: {again}")
    else:
        typer.echo(f"ok: {result.step:,} steps, {result.epoch:.2f} epochs{told}; {result.folder}")


def _told(result: TrainResult) -> str:
    """The figures that a training ends with, after a colon; "" where this call has none."""
    loss = f"loss {result.figures['loss']:.4g}" if "loss" in result.figures else ""
    held_out = ", ".join(f"{n} {v:.4g}" for n, v in result.evaluation.items())
    if held_out:
        at = result.evaluated_at
        earlier = f" at step {at:,}" if at is not None and at != result.step else ""
        held_out = f"{result.evaluated_on}{earlier}: {held_out}"
    told = f"{loss} ({held_out})" if loss and held_out else loss or held_out
    return f": {told}" if told else ""


def evaluate(
    target: TargetArgument,
    overrides: OverridesArgument = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            show_default=False,
            help="A checkpoint, or a run's folder: its newest one. Default: the newest run's in runs/TARGET.",
        ),
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="The samples to look at; default: test, else val.", show_default=False)
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(metavar="STORE", help="The store of the frozen fields; default: the run's."),
    ] = None,
    live: LiveOption = False,
    device: DeviceOption = None,
    precision: Annotated[
        Literal["fp32", "tf32", "bf16", "fp16"] | None, typer.Option(help="Default: the workload's.")
    ] = None,
) -> None:
    """The figures of a checkpoint's model on samples that it was not trained on.

    Parameters are those the run was started with, unless others are given.

    \b
    frostline evaluate my_work.py --checkpoint runs/my_work/2026-11-15T12-00-00
    frostline evaluate my_work.py --checkpoint runs/mine/checkpoints/best --split val
    """
    from frostline.target import find, resolve
    from frostline.trainer.checkpoint import load
    from frostline.trainer.folder import config_of
    from frostline.trainer.run import evaluate as evaluate_workload

    name, function = find(target)
    place = checkpoint or _newest(name)
    load(place, only=[])  # what is not there shows before a recipe makes its data
    started = config_of(place) or {}
    _refuse_other_target(place, target, function, started)
    before = started.get("parameters", {})
    resolved = resolve(target, overrides or [], before)
    usual = {p.name: p.default for p in resolved.parameters}
    told = [f"{name}={value}" for name, value in before.items() if usual.get(name, value) != value]
    if told:
        typer.echo(f"as the run was started: {' '.join(told)}", err=True)
    figures = evaluate_workload(
        resolved.workload, place, split=split, store=store, live=live, device=device,
        training={"precision": precision},
    )  # fmt: skip
    for name, value in figures.items():
        typer.echo(f"{name}: {value:.6g}")


def _refuse_other_target(
    place: Path, target: str, function: Callable[..., Any], started: Mapping[str, Any]
) -> None:
    """A run of something else would be evaluated on this target's own data."""
    from frostline.errors import UsageError
    from frostline.target import written

    taken = inspect.signature(function).parameters
    other = [name for name in started.get("parameters", {}) if name not in taken]
    its = started.get("target")
    if other and its is not None and its != written(target):
        raise UsageError(
            f"{place} was trained from {its} with {', '.join(other)}, which {target} does not take. Evaluate "
            f"it as what it is: frostline evaluate {shlex.quote(its)} --checkpoint {shlex.quote(str(place))}"
        )


def _newest(name: str | None) -> Path:
    """The newest run of a target that has a checkpoint."""
    from frostline.errors import UsageError

    runs = sorted(Path("runs", name or "").glob("*/checkpoints/*.json"), key=lambda p: p.parent.parent.name)
    if not runs:
        raise UsageError(
            f"There is no run of {name!r} in {Path('runs', name or '')} to evaluate. Train it first: "
            f"frostline train {name}; or say where the checkpoint is: --checkpoint PATH."
        )
    return runs[-1].parent.parent


def again_without_resume(arguments: list[str]) -> str:
    """The command that goes on: without --resume, which may say to begin anew or to go back."""
    kept: list[str] = []
    for i, word in enumerate(arguments):
        if not word.startswith("--resume") and (not i or arguments[i - 1] != "--resume"):
            kept.append(word)
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    torchrun = [] if ranks == "1" else ["torchrun", "--nproc-per-node", ranks, "-m"]
    return shlex.join([*torchrun, "frostline", *kept])
