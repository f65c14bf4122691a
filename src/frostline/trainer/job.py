"""One training: its parts, made in the order in which they need each other, and what it came to."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from frostline.errors import UsageError
from frostline.stage import Lazy
from frostline.step import Step
from frostline.store import Table
from frostline.supply import Supply, supply
from frostline.trainer import checkpoint, moment, state
from frostline.trainer.budget import Budget
from frostline.trainer.distributed import Single
from frostline.trainer.evaluation import VALIDATED, split_for, splits_of
from frostline.trainer.folder import CHECKPOINTS, PASSED, Chosen, describe
from frostline.trainer.limits import Limits
from frostline.trainer.loop import HELD_OUT, TRAINED_ON, Loop, Parts
from frostline.trainer.progress import TrainProgress
from frostline.trainer.recorder import Recorder
from frostline.trainer.schedule import Schedule, changed
from frostline.training import Training
from frostline.workload import Workload

PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class TrainResult:
    """What a training came to."""

    folder: Path
    step: int
    epoch: float
    figures: dict[str, float]
    """Of the last log window: loss, gradient norm, …"""
    evaluation: dict[str, float]
    """The last one of this call."""
    best: float | None
    stopped: str | None
    """Why it ended before its last step; None: it is done."""
    model: nn.Module
    evaluated_at: int | None = None
    """The step of the evaluation; None: this call made none."""
    evaluated_on: str = HELD_OUT
    """What it was of: "held out", or "samples trained on" where no split is held out."""


class Job:
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
        self.looked_at = HELD_OUT

    def run(
        self,
        folder: Path,
        chosen: Chosen,
        stores: Mapping[str, Table] | None,
        init_from: PathLike | None,
        sinks: Mapping[str, Any],
    ) -> TrainResult:
        batches, held_out = self.supply(stores, self.split()), self._held_out(stores)
        step = self.step()
        loaded = checkpoint.load(chosen.checkpoint) if chosen.checkpoint else None
        if loaded is not None:
            moment.refuse_foreign(loaded)
        for note in chosen.notes:
            changed_since = loaded is not None and not note.startswith(PASSED)
            self.progress.note(f"not as the run was started: {note}" if changed_since else note)
        total = self.budget.total_steps(batches)
        before = loaded.state["elapsed_s"] if loaded else 0.0
        spent = time.monotonic() - self.began
        schedule, chunked = self.budget.schedule(self.settings, total, before=before, spent=spent)
        recorder = Recorder(folder, **sinks) if self.group.rank == 0 else None
        kept = checkpoint.Checkpoints(
            folder / CHECKPOINTS, keep=self.settings.keep, keep_every=self.settings.keep_every
        )
        with Limits(self.budget.max_hours, self.progress.note, self.began) as limits:
            try:
                loop = Loop(
                    Parts(
                        self.workload, step, batches, held_out, schedule, total, limits, kept, recorder,
                        self.progress, self.group, chunked, self.looked_at,
                    )
                )  # fmt: skip
                self._begin(loop, loaded, init_from, schedule)
                if self.group.rank == 0:
                    describe(folder, sinks["config"])
                stopped = self._ran(loop)
            finally:
                batches.close()
                if held_out is not None:
                    held_out.close()
                if recorder is not None:
                    recorder.close(failed=sys.exc_info()[0] is not None)
        return TrainResult(
            folder, loop.at, loop.epoch, loop.figures, loop.evaluated, loop.best, stopped, step.model,
            loop.evaluated_at, self.looked_at,
        )  # fmt: skip

    def _ran(self, loop: Loop) -> str | None:
        """The loop until its end; interrupted, it says what there is to go on from."""
        try:
            return loop.run()
        except KeyboardInterrupt:
            at = loop.saved_at
            self.progress.note(
                "no checkpoint was written yet" if at is None else f"the checkpoint of step {at:,} is kept"
            )
            raise

    def _begin(
        self, loop: Loop, loaded: checkpoint.Loaded | None, init_from: PathLike | None, schedule: Schedule
    ) -> None:
        if any("initial_lr" in group for group in loop.step.optimizer.param_groups):
            rates = ", ".join(f"{rate:g}" for rate in dict.fromkeys(loop._base))
            self.progress.note(
                f"optimizer(model) made a torch scheduler, which is never stepped: the peak is {rates}, as "
                f"it left the rate. Leave it out, and give training={{'schedule': 'cosine'}}, say"
            )
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
        if isinstance(self.workload.model, nn.Module):
            self.progress.note(
                "model= is a module that is there already: it begins with the weights it has, whatever the "
                "seed. For the same weights after a kill, give fl.lazy(Class, …)"
            )
        if loop.p.recorder is not None:
            loop.p.recorder.rewind(0)  # of a call that was killed before its first checkpoint
        if init_from is not None:
            taken = state.init_from(loop.step.model, checkpoint.weights(Path(init_from)))
            loop.fresh = False
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
        state.refuse_lazy(model)
        model = model.to(self.device)
        optimizer = self.workload.optimizer(model)  # type: ignore[misc]
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(
                f"optimizer(model) returned {type(optimizer).__name__}; expected one torch optimiser, with "
                f"groups of parameters where they train differently."
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

    def supply(
        self,
        stores: Mapping[str, Table] | None,
        split: str | None,
        *,
        train: bool = True,
        most: int | None = None,
    ) -> Supply:
        rank, world = (self.group.rank, self.group.world) if train else (0, 1)
        size: Any = self.workload.batch_size
        return supply(
            self.workload, stores, split=split, most=most, batch_size=size, device=self.device,
            seed=self.settings.seed, train=train, rank=rank, world_size=world,
        )  # fmt: skip

    def split(self) -> str | None:
        known = splits_of(self.workload)
        if known and "train" not in known:
            raise UsageError(
                f"The workload's splits are {', '.join(known)}; training needs one called 'train'."
            )
        return "train" if known else None

    def _held_out(self, stores: Mapping[str, Table] | None) -> Supply | None:
        if self.group.rank:
            return None
        split = split_for(self.workload, VALIDATED)
        if split is None:
            if self.workload.evaluate is None and self.workload.metric is None:
                return None
            self.looked_at = TRAINED_ON
            split = self.split()  # never one called 'test': the best checkpoint is chosen by this
            on = "all samples, also those trained on" if split is None else "the samples trained on"
            self.progress.note(f"no split called 'val': evaluation is on {on}")
        return self.supply(stores, split, train=False, most=self.settings.eval_rows)
