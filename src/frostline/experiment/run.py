"""`run`: a workload's experiment, in a folder of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frostline.errors import UsageError
from frostline.experiment import plain
from frostline.experiment.context import Context, Stopped
from frostline.experiment.feeds import Feeds
from frostline.experiment.progress import Progress
from frostline.signals import Signals
from frostline.trainer.distributed import ranks
from frostline.trainer.folder import CHECKPOINTS, RUN, Chosen, changes, describe, fresh, held
from frostline.workload import Workload

PathLike = str | os.PathLike[str]
RESULT = "result.json"
"""What the experiment returned; it is there when the experiment ended."""


@dataclass(frozen=True)
class Result:
    """What an experiment came to."""

    folder: Path
    value: Any
    """What run(ctx) returned, as result.json keeps it."""
    made: int
    found: int
    """Units that were computed by this call, and that one before had kept."""
    stopped: str | None
    """Why it ended before its end; None: it is done."""


def run(
    workload: Workload,
    *,
    out: PathLike | None = None,
    resume: str = "auto",
    store: PathLike | None = None,
    live: bool = False,
    device: str | None = None,
    seed: int = 0,
    max_hours: float | None = None,
    parameters: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> Result:
    """Run a workload's experiment. Killed and called again, it goes on after the last unit that is whole.

    >>> import frostline as fl, tempfile
    >>> folder = tempfile.mkdtemp() + "/run"
    >>> work = fl.Workload(None, run=lambda ctx: {"best": ctx.once("try", lambda: 0.5)})
    >>> run(work, out=folder, quiet=True).value, run(work, out=folder, quiet=True).found
    ({'best': 0.5}, 1)

    out:       the run's folder; default: runs/<name>/<time>, the newest of these settings that is not done.
    resume:    "never" begins in a new folder.
    store:     of the data, made when the experiment first asks for it; default: stores/<name>.
    live:      no store: compute the frozen part of the data each time.
    max_hours: this call ends after so long, with the unit that is under way; the same call goes on.
    """
    _refuse(workload, resume, max_hours)
    began = time.monotonic()
    _, place = ranks(device)
    given = plain.normal(dict(parameters or {}), "parameters")
    config = {"parameters": given, "seed": seed}
    chosen = _chosen(workload.name, Path(out) if out is not None else None, resume, config)
    with held(chosen, "running") as folder:
        describe(folder, config)
        plain.remove(folder / RESULT)  # of a call before: it goes on, or begins again
        progress = Progress(folder, quiet=quiet)
        for note in chosen.notes:
            progress.note(f"not as the run was started: {note}")
        feeds = Feeds(
            store=Path(store) if store is not None else None, live=live, device=place, max_hours=max_hours,
            quiet=quiet,
        )  # fmt: skip
        asked = "{}: finishing this unit, then stopping. Once more stops now."
        with Signals(lambda name: progress.note(asked.format(name))) as signals:
            until = None if max_hours is None else began + 3600 * max_hours
            ctx = Context(
                workload, folder, device=place, seed=seed, parameters=given, feeds=feeds, progress=progress,
                signals=signals, until=until,
            )  # fmt: skip
            return _ended(ctx, feeds, progress)


def _ended(ctx: Context, feeds: Feeds, progress: Progress) -> Result:
    experiment: Any = ctx.workload.run
    try:
        value = experiment(ctx)
    except Stopped as e:
        return Result(ctx.out, None, *ctx.counts, str(e))
    finally:
        feeds.close()
        progress.end()
    made, found = ctx.counts
    value = plain.save(ctx.out / RESULT, value, {"made": made, "found": found}, "run(ctx)")
    return Result(ctx.out, value, made, found, None)


def _refuse(workload: Any, resume: str, max_hours: float | None) -> None:
    if not isinstance(workload, Workload):
        raise UsageError(f"run(…) was given {type(workload).__name__}; expected a Workload.")
    problems = []
    if workload.run is None:
        problems.append(
            "this workload has a model to train: `frostline train TARGET` trains it. An experiment is "
            "fl.Workload(data, run=function)"
        )
    if resume not in ("auto", "never"):
        problems.append(f"resume is {resume!r}; 'auto' or 'never'. A run goes on in its own folder: --out")
    if max_hours is not None and not max_hours > 0:
        problems.append(f"max_hours is {max_hours!r}; a number above 0")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        problems.append("torchrun started several processes; an experiment is one")
    if problems:
        raise UsageError("The experiment cannot start:", problems=problems)


def _chosen(name: str | None, out: Path | None, resume: str, config: Mapping[str, Any]) -> Chosen:
    """The folder of this call: the one given, the newest that is not done, or a new one."""
    if out is not None:
        if (out / CHECKPOINTS).is_dir():
            raise UsageError(f"{out} holds a training; give the experiment another --out.")
        if resume == "never" and (out / RUN).exists():
            raise UsageError(
                f"{out} holds a run already, and --resume never was given. Choose another --out, or leave "
                f"--resume away to go on."
            )
        return Chosen(out, notes=changes(out, config))
    if name is None:
        raise UsageError("run(…) needs a folder for the run: run(workload, out='runs/mine').")
    base = Path("runs") / name
    if resume == "auto":
        for folder in sorted((p.parent for p in base.glob(f"*/{RUN}")), reverse=True):
            if not (folder / RESULT).exists() and not changes(folder, config):
                return Chosen(folder)
    return Chosen(fresh(base))
