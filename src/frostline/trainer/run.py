"""`fl.train` and `evaluate`: from a workload to its loop."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from frostline.errors import FreezeStopped, NotFrozen, UsageError
from frostline.freezer.options import Options
from frostline.freezer.progress import Reporter
from frostline.freezer.run import run as freeze_one
from frostline.stage import Lazy
from frostline.step import Step
from frostline.store import Store, Table
from frostline.supply import Supply, supply
from frostline.trainer import checkpoint, moment, state
from frostline.trainer.distributed import Single, ranks
from frostline.trainer.evaluation import HELD_OUT, TESTED, split_for, splits_of
from frostline.trainer.evaluation import evaluate as evaluate_model
from frostline.trainer.folder import CHECKPOINTS, Chosen, choose, describe, held
from frostline.trainer.limits import Limits
from frostline.trainer.loop import Loop, Parts
from frostline.trainer.progress import TrainProgress
from frostline.trainer.recorder import Recorder
from frostline.trainer.schedule import Schedule, changed
from frostline.training import Training
from frostline.workload import Workload

PathLike = str | os.PathLike[str]
_RESERVED = 0.03
"""wsd by the clock: the rate has fallen this share of a call before its end, so that the end is reached."""


@dataclass(frozen=True)
class TrainResult:
    """What a training came to."""

    folder: Path
    step: int
    epoch: float
    figures: dict[str, float]
    """Of the last log window: loss, gradient norm, …"""
    evaluation: dict[str, float]
    best: float | None
    stopped: str | None
    """Why it ended before its last step; None: it is done."""
    model: nn.Module


@dataclass(frozen=True)
class Budget:
    """How long: in steps or epochs in all, hours of this call, hours that the schedule is bound to."""

    steps: int | None = None
    epochs: float | None = None
    max_hours: float | None = None
    schedule_hours: float | None = None

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {value!r}; a number above 0"
            for name, value in asdict(self).items()
            if value is not None and not (isinstance(value, int | float) and value > 0)
        ]
        if self.steps is not None and self.epochs is not None:
            problems.append("steps and epochs are both given; one of them is the end")
        if self.steps is None and self.epochs is None and self.max_hours is None and not self.schedule_hours:
            problems.append("say how long: steps=, epochs=, max_hours= or schedule_hours=")
        if problems:
            raise UsageError("fl.train(…) cannot start:", problems=problems)


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
    device: str | None = None,
    training: Mapping[str, Any] | None = None,
    strict: bool = False,
    tensorboard: bool = False,
    wandb: bool | str = False,
    quiet: bool = False,
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
    training:       settings over the workload's own (see `frostline.training.Training`).
    strict:         a model that cannot be compiled is an error.
    """
    began = time.monotonic()
    _refuse(workload)
    budget = Budget(steps, epochs, max_hours, schedule_hours)
    settings = Training.of(workload.training).but(training or {})
    group, place = ranks(device)
    try:
        config: dict[str, Any] = {
            "parameters": dict(parameters or {}), "training": asdict(settings),
            "batch_size": workload.batch_size, "init_from": str(init_from) if init_from else None,
        }  # fmt: skip
        chosen = _chosen(workload, Path(out) if out else None, resume, config, group)
        progress = TrainProgress(quiet=quiet or group.rank > 0)
        stores = None if live else _stores(workload, store, place, group, quiet, max_hours)
        with _held(chosen, group) as folder, _settled(settings):
            job = _Job(workload, settings, budget, place, group, progress, strict)
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
    """The figures of a checkpoint's model on a held-out split ("test", or "val" where there is none)."""
    _refuse(workload)
    settings = Training.of(workload.training).but(training or {})
    group, place = ranks(device)
    loaded = checkpoint.load(Path(path), only=["model", "buffers", "extra"])
    moment.refuse_foreign(loaded, ("model",))
    stores = None if live else _stores(workload, store, place, group, quiet)
    with _settled(settings):
        job = _Job(workload, settings, Budget(steps=1), place, group, TrainProgress(quiet=quiet), False)
        step = job.step()
        beside = {"buffers": loaded.groups["buffers"], "extra": loaded.groups["extra"]}
        state.load_model(step.model, loaded.groups["model"], about=loaded.state["model"], **beside)
        chosen = split_for(workload, TESTED, split)
        return evaluate_model(workload, step, job.supply(stores, chosen, train=False))


class _Job:
    """One training: its parts, made in the order in which they need each other."""

    def __init__(
        self,
        workload: Workload,
        settings: Training,
        budget: Budget,
        device: torch.device,
        group: Single,
        progress: TrainProgress,
        strict: bool,
    ) -> None:
        self.workload, self.settings, self.budget = workload, settings, budget
        self.device, self.group, self.progress, self.strict = device, group, progress, strict
        self.began = time.monotonic()

    def run(
        self,
        folder: Path,
        chosen: Chosen,
        stores: Mapping[str, Table] | None,
        init_from: PathLike | None,
        sinks: Mapping[str, Any],
    ) -> TrainResult:
        batches, held_out = self.supply(stores, self._split()), self._held_out(stores)
        step = self.step()
        loaded = checkpoint.load(chosen.checkpoint) if chosen.checkpoint else None
        if loaded is not None:
            moment.refuse_foreign(loaded)
        for note in chosen.notes:
            self.progress.note(f"not as the run was started: {note}")
        total = self._total_steps(batches)
        before = loaded.state["elapsed_s"] if loaded else 0.0
        schedule, chunked = self._schedule(total, before)
        recorder = Recorder(folder, **sinks) if self.group.rank == 0 else None
        kept = checkpoint.Checkpoints(
            folder / CHECKPOINTS, keep=self.settings.keep, keep_every=self.settings.keep_every
        )
        with Limits(self.budget.max_hours, self.progress.note, self.began) as limits:
            try:
                loop = Loop(
                    Parts(
                        self.workload, step, batches, held_out, schedule, total, limits, kept, recorder,
                        self.progress, self.group, chunked,
                    )
                )  # fmt: skip
                self._begin(loop, loaded, init_from, schedule)
                if self.group.rank == 0:
                    describe(folder, sinks["config"])
                stopped = loop.run()
            finally:
                batches.close()
                if held_out is not None:
                    held_out.close()
                if recorder is not None:
                    recorder.close(failed=sys.exc_info()[0] is not None)
        return TrainResult(
            folder, loop.at, loop.epoch, loop.figures, loop.evaluated, loop.best, stopped, step.model
        )

    def _begin(
        self, loop: Loop, loaded: checkpoint.Loaded | None, init_from: PathLike | None, schedule: Schedule
    ) -> None:
        if loaded is not None:
            loop.restore(loaded)
            self.progress.note(f"going on from {loaded.path}: step {loop.at:,}")
            old = Schedule(**loaded.state["schedule"])
            told = changed(old, schedule, loop.at, loaded.state["elapsed_s"])
            if told and not loop.done and {old.kind, schedule.kind} != {"constant"}:
                self.progress.note(told)
            if loop.done:
                self.progress.note(f"nothing to do: {loop.at:,} steps are trained")
            return
        if loop.p.recorder is not None:
            loop.p.recorder.rewind(0)  # of a call that was killed before its first checkpoint
        if init_from is not None:
            taken = state.init_from(loop.step.model, checkpoint.weights(Path(init_from)))
            self.progress.note(f"weights from {init_from}: {taken.told()}")

    # parts

    def step(self) -> Step:
        seed = self.settings.seed
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        given = self.workload.model
        model = given.loader(*given.args, **given.kwargs) if isinstance(given, Lazy) else given
        if not isinstance(model, nn.Module):
            raise UsageError(f"The workload's model is {type(model).__name__}; expected an nn.Module.")
        model = model.to(self.device)
        optimizer = self.workload.optimizer(model)  # type: ignore[misc]
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(
                f"optimizer(model) returned {type(optimizer).__name__}; expected a torch optimiser."
            )
        if self.group.world > 1:
            self.group.copy_first([*model.parameters(), *model.buffers()])
            own = seed + 1_000_003 * self.group.rank
            random.seed(own)
            np.random.seed(own % 2**32)
            torch.manual_seed(own)
        loss: Any = self.workload.loss
        return Step(
            model, loss, optimizer, training=self.settings, device=self.device, ranks=self.group,
            note=self.progress.note, strict=self.strict,
        )  # fmt: skip

    def supply(self, stores: Mapping[str, Table] | None, split: str | None, *, train: bool = True) -> Supply:
        rank, world = (self.group.rank, self.group.world) if train else (0, 1)
        size: Any = self.workload.batch_size
        return supply(
            self.workload, stores, split=split, batch_size=size, device=self.device, seed=self.settings.seed,
            train=train, rank=rank, world_size=world,
        )  # fmt: skip

    def _split(self) -> str | None:
        known = splits_of(self.workload)
        if known and "train" not in known:
            raise UsageError(
                f"The workload's splits are {', '.join(known)}; training needs one called 'train'."
            )
        return "train" if known else None

    def _held_out(self, stores: Mapping[str, Table] | None) -> Supply | None:
        if self.group.rank:
            return None
        split = split_for(self.workload, HELD_OUT)
        if split is None:
            if self.workload.evaluate is None:
                return None
            self.progress.note("no split called 'val': evaluation is on all samples, also those trained on")
        return self.supply(stores, split, train=False)

    def _total_steps(self, batches: Supply) -> int | None:
        if self.budget.steps is not None or self.budget.epochs is None:
            return self.budget.steps
        whole = int(self.budget.epochs)
        part = self.budget.epochs - whole
        steps = sum(batches.n_batches(epoch) for epoch in range(whole))
        return max(1, steps + round(part * batches.n_batches(whole)))

    def _schedule(self, total: int | None, before: float) -> tuple[Schedule, bool]:
        """The schedule, and whether it is bound to this call only."""
        s, hours = self.settings, self.budget.max_hours
        kind = s.schedule or ("constant" if total is not None or self.budget.schedule_hours else "wsd")
        options: dict[str, Any] = {"warmup_steps": s.warmup_steps, "floor": s.floor, "decay": s.decay}
        if self.budget.schedule_hours:
            return Schedule(kind, total_s=3600 * self.budget.schedule_hours, **options), False
        if total is not None:
            return Schedule(kind, total_steps=total, **options), False
        if kind != "wsd" or hours is None:
            return Schedule(kind, **options), False
        call = max(1.0, 3600 * hours - (time.monotonic() - self.began)) * (1 - _RESERVED)
        options["decay"] = s.decay * call / (before + call)
        return Schedule(kind, total_s=before + call, **options), True


def _refuse(workload: Any) -> None:
    if not isinstance(workload, Workload):
        raise UsageError(f"fl.train(…) was given {type(workload).__name__}; expected a Workload.")
    if workload.model is None:
        raise UsageError(
            "This workload is an experiment, it has no model to train: `frostline run TARGET` runs it. To "
            "train, give fl.Workload model=, loss= and optimizer=."
        )


def _stores(
    workload: Workload,
    store: PathLike | None,
    device: torch.device,
    group: Single,
    quiet: bool,
    max_hours: float | None = None,
) -> dict[str, Table]:
    """The stores of all pipelines, made or completed first; by the first rank, while the others wait."""
    if store is None and workload.name is None:
        raise UsageError("fl.train(…) needs a folder for the store: store='stores/mine', or live=True.")
    root = Path(store) if store is not None else Path("stores") / str(workload.name)
    places = {n: root if len(workload.pipelines) == 1 else root / n for n in workload.pipelines}
    if group.rank == 0:
        for name, pipeline in workload.pipelines.items():
            try:
                outcome = freeze_one(
                    pipeline,
                    places[name],
                    Options(device=str(device), max_hours=max_hours),
                    Reporter(quiet=quiet),
                )
            except NotFrozen as e:
                raise NotFrozen(
                    f"{e}\nWithout a store, the pipeline can be run each time: live=True (--live).",
                    problems=(),
                ) from e
            if outcome.stopped is not None:
                raise FreezeStopped(f"Stopped while freezing ({outcome.stopped}); the same call goes on.")
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
def _settled(settings: Training) -> Iterator[None]:
    """torch's global switches as the settings want them, and back."""
    strict = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(settings.deterministic or strict)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(strict)
