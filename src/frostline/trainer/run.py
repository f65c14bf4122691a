"""`fl.train` and `evaluate`: from a workload to its loop."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from frostline.errors import UsageError
from frostline.freezer.options import Options
from frostline.freezer.stores import complete, places_of
from frostline.store import Store, Table
from frostline.trainer import checkpoint, moment, state
from frostline.trainer.budget import Budget
from frostline.trainer.distributed import Single, ranks
from frostline.trainer.evaluation import TESTED, split_for, splits_of
from frostline.trainer.evaluation import evaluate as evaluate_model
from frostline.trainer.folder import Chosen, choose, config_of, held
from frostline.trainer.job import Job, PathLike, TrainResult
from frostline.trainer.progress import TrainProgress
from frostline.trainer.restore import another
from frostline.training import Training
from frostline.workload import Workload


def train(
    workload: Workload,
    *,
    steps: int | None = None,
    epochs: float | None = None,
    max_hours: float | None = None,
    schedule_hours: float | None = None,
    resume: str = "auto",
    init_from: PathLike | None = None,
    out: PathLike | None = None,
    store: PathLike | None = None,
    live: bool = False,
    max_bad: str | int = "1%",
    device: str | None = None,
    training: Mapping[str, Any] | None = None,
    strict: bool = False,
    tensorboard: bool = False,
    wandb: bool | str = False,
    quiet: bool = False,
    target: str | None = None,
    parameters: Mapping[str, Any] | None = None,
) -> TrainResult:
    """Train a workload's model. Killed at any moment and called again, it ends with the same bits.

    >>> import frostline as fl, tempfile, torch
    >>> data = fl.Pipeline(fl.Source.table([{"key": str(i), "x": [float(i), 1.0]} for i in range(32)]))
    >>> work = fl.Workload(data, model=fl.lazy(torch.nn.Linear, 2, 1), batch_size=8, name="doc",
    ...     loss=lambda model, batch: model(torch.tensor(batch["x"])).square().mean(),
    ...     optimizer=lambda model: torch.optim.SGD(model.parameters(), 1e-4))
    >>> folder = tempfile.mkdtemp()
    >>> fl.train(work, steps=6, out=folder + "/run", live=True, quiet=True).step
    6

    steps, epochs:  the end of the training, over all calls.
    max_hours:      this call ends after so long, with a checkpoint; the same call again goes on.
    schedule_hours: the hours that the learning rate's schedule is bound to, over all calls.
    resume:         "auto" goes on with the newest run of these settings; "never" begins; or a checkpoint.
    init_from:      a checkpoint or .safetensors file whose weights the model begins with.
    out:            the run's folder; default: runs/<name>/<time>.  store: default, stores/<name>.
    live:           compute the frozen part each time instead of reading it from a store: the baseline.
    max_bad:        samples that may fail while the store is made, a number or a share.
    training:       settings over the workload's own (see `frostline.training.Training`).
    strict:         a model that cannot be compiled is an error.
    target, parameters: what the workload was made from; a run of anything else is not gone on with.
    """
    began = time.monotonic()
    _refuse(workload)
    budget = Budget(steps, epochs, max_hours, schedule_hours)
    settings = Training.of(workload.training).but(training or {})
    group, place = ranks(device)
    try:
        config: dict[str, Any] = {
            "target": target, "parameters": dict(parameters or {}), "training": asdict(settings),
            "batch_size": workload.batch_size, "init_from": str(init_from) if init_from else None,
            "store": str(store) if store else None, "live": live,
        }  # fmt: skip
        chosen = _chosen(workload, Path(out) if out else None, resume, config, group)
        _refuse_early(chosen, Path(out) if out and group.rank == 0 else None, init_from)
        if epochs is None:  # in steps they are counted once there is a store
            budget.schedule(settings, steps, before=0.0, spent=0.0)
        progress = TrainProgress(quiet=quiet or group.rank > 0)
        making = Options(device=str(place), max_hours=max_hours, max_bad=max_bad)
        stores = None if live else _stores(workload, store, making, group, quiet)
        with _held(chosen, group) as folder, settled(settings):
            job = Job(workload, settings, budget, place, group, progress, strict)
            job.began = began  # freezing and loading count too
            sinks = {"tensorboard": tensorboard, "wandb": wandb, "config": config}
            return job.run(folder, chosen, stores, init_from, sinks)
    finally:
        group.close()


def evaluate(
    workload: Workload,
    path: PathLike,
    *,
    split: str | None = None,
    store: PathLike | None = None,
    live: bool = False,
    device: str | None = None,
    training: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> dict[str, float]:
    """The figures of a checkpoint's model on a held-out split ("test", or "val" where there is none).

    store, live: default, as its run was trained.
    """
    _refuse(workload)
    if isinstance(workload.model, nn.Module):
        workload = replace(workload, model=another(workload.model))
    if store is None and not live:
        config = config_of(Path(path)) or {}
        store, live = config.get("store"), bool(config.get("live"))
    settings = Training.of(workload.training).but(training or {})
    group, place = ranks(device)
    loaded = checkpoint.load(Path(path), only=["model", "buffers", "extra"])
    moment.refuse_foreign(loaded, ("model",))
    progress = TrainProgress(quiet=quiet)
    chosen = _looked_at(workload, split, progress)
    stores = None if live else _stores(workload, store, Options(device=str(place)), group, quiet)
    with settled(settings):
        job = Job(workload, settings, Budget(steps=1), place, group, progress, False)
        step = job.step()
        beside = {"buffers": loaded.groups["buffers"], "extra": loaded.groups["extra"]}
        state.load_model(step.model, loaded.groups["model"], about=loaded.state["model"], **beside)
        batches = job.supply(stores, chosen, train=False)
        return evaluate_model(workload, step, batches, at=loaded.step)


def _looked_at(workload: Workload, split: str | None, progress: TrainProgress) -> str | None:
    """The split to evaluate on; never in silence one with samples that were trained on."""
    chosen, known = split_for(workload, TESTED, split), splits_of(workload)
    if chosen is None and known:
        raise UsageError(
            f"The workload's splits are {', '.join(known)}; none is called {' or '.join(TESTED)}. Say which "
            "one to look at: --split NAME."
        )
    progress.note(
        f"on the split {chosen!r}" if chosen else "no splits: on all samples, also those it was trained on"
    )
    return chosen


def _refuse_early(chosen: Chosen, out: Path | None, init_from: PathLike | None) -> None:
    """What would only be found after the store is made."""
    if init_from is not None:
        place = Path(init_from)
        named = place.with_name(f"{place.name}.json")  # as checkpoints/best
        if not place.exists() and not named.is_file():
            raise UsageError(f"--init-from {init_from}: there is no such file or folder, nor a name of one.")
    other = next((note for note in chosen.notes if note.startswith("init_from ")), None)
    if chosen.checkpoint is not None and init_from is not None and other is not None:
        raise UsageError(
            f"{chosen.folder} goes on from {chosen.checkpoint.name}, and --init-from is what a run begins "
            f"with ({other}). Leave --init-from away, or begin another run with another --out."
        )
    if out is not None:
        with held(Chosen(out)):  # it can be written to, and nobody trains in it
            pass


def _refuse(workload: Any) -> None:
    if not isinstance(workload, Workload):
        raise UsageError(f"fl.train(…) was given {type(workload).__name__}; expected a Workload.")
    if workload.model is None:
        raise UsageError(
            "This workload is an experiment, it has no model to train: `frostline run TARGET` runs it. To "
            "train, give fl.Workload model=, loss= and optimizer=."
        )


def _stores(
    workload: Workload, store: PathLike | None, options: Options, group: Single, quiet: bool
) -> dict[str, Table]:
    """The stores of all pipelines, made or completed first; by the first rank, while the others wait."""
    places = places_of(workload, store, asked="fl.train(…)")
    if group.rank == 0:
        complete(workload, places, options, quiet=quiet)
    group.wait()
    return {name: Store.open(place) for name, place in places.items()}


def _chosen(
    workload: Workload, out: Path | None, resume: str, config: Mapping[str, Any], group: Single
) -> Chosen:
    """The first rank chooses: a new folder is called after the time, and clocks differ."""
    mine = choose(workload.name, out, resume, config) if group.rank == 0 else None
    told = mine and [str(mine.folder), str(mine.checkpoint) if mine.checkpoint else None, mine.notes]
    folder, checkpoint, notes = group.gather(told)[0]
    return Chosen(Path(folder), Path(checkpoint) if checkpoint else None, notes)


@contextmanager
def _held(chosen: Chosen, group: Single) -> Iterator[Path]:
    if group.rank:
        yield chosen.folder
        return
    with held(chosen) as folder:
        yield folder


@contextmanager
def settled(settings: Training) -> Iterator[None]:
    """torch's global switches as the settings want them, and back."""
    strict = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    if settings.deterministic:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(strict, warn_only=warn_only)
