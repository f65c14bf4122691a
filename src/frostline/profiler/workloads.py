"""`fl.profile(workload)`: the workload's own step and batches, under the agent that scripts have.

The step is `Job.step()` and the batches are `Job.supply()`, as in `fl.train`. What is waited for is what is
prepared ahead: stages on the device run after that wait, in the step's own thread, and count as its work.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import datetime
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
from torch import nn

from frostline.errors import ProfileFailed, UsageError
from frostline.freezer.options import Options
from frostline.freezer.stores import complete, places_of
from frostline.profiler.differential import differences
from frostline.profiler.inside.agent import Agent
from frostline.profiler.inside.patches import Patches
from frostline.profiler.launch import Settings, fresh_parts
from frostline.profiler.monitor import Monitor
from frostline.profiler.reading import profile_of
from frostline.profiler.scripts import keep
from frostline.profiler.steps import usual
from frostline.results import Profile
from frostline.rewind import Moment
from frostline.step import Step
from frostline.store import Store
from frostline.supply import Supply
from frostline.supply.rows import Parts
from frostline.trainer.budget import Budget
from frostline.trainer.distributed import Single, ranks
from frostline.trainer.job import Job, PathLike
from frostline.trainer.progress import TrainProgress
from frostline.trainer.run import settled
from frostline.training import Training
from frostline.workload import Workload

_MOST = 20
"""Batches that may go by, as a multiple of the steps and the warm-up, before the optimiser has to step."""


def profile(
    workload: Workload,
    *,
    steps: int = 50,
    warmup: int = 10,
    out: PathLike | None = None,
    store: PathLike | None = None,
    live: bool = False,
    device: str | None = None,
    training: Mapping[str, Any] | None = None,
    trace: bool = False,
    quiet: bool = False,
) -> Profile:
    """Say where each step of a workload's training goes, what it computes again, and what that is worth.

    >>> import frostline as fl, tempfile, torch
    >>> data = fl.Pipeline(fl.Source.table([{"key": str(i), "x": [float(i), 1.0]} for i in range(64)]))
    >>> work = fl.Workload(data, model=fl.lazy(torch.nn.Linear, 2, 1), batch_size=8, name="doc",
    ...     loss=lambda model, batch: model(torch.tensor(batch["x"])).square().mean(),
    ...     optimizer=lambda model: torch.optim.SGD(model.parameters(), 1e-4))
    >>> found = profile(work, steps=12, warmup=4, out=tempfile.mkdtemp(), live=True, quiet=True)
    >>> found.boundary, [trial.name for trial in found.trials]
    ('SGD.step', ['compute', 'replayed', 'real', 'half'])

    The model is trained while it is looked at; afterwards it, and every random number, is as before.

    steps:    measured in all, in turns of two passes; then come rounds of differential runs.
    warmup:   steps before, at least.
    out:      a folder for profile.json, report.html and, with trace=True, trace.json; default:
              runs/profile/<time>.
    store:    where frozen fields are read from, made or completed first; default: stores/<name>.
    live:     compute the frozen part each time instead of reading it from a store.
    training: settings over the workload's own (see `frostline.training.Training`).
    """
    _refuse(workload)
    asked = Settings(steps, warmup, keep_going=True, trace=trace, replay=False, quiet=quiet)
    settings = Training.of(workload.training).but(training or {})
    _, place = ranks(device)
    folder = Path(out) if out is not None else Path("runs", "profile", f"{datetime.now():%Y-%m-%dT%H-%M-%S}")
    with _unchanged(workload, place), settled(settings):
        places = None if live else places_of(workload, store, asked="fl.profile(…)")
        if places is not None:
            complete(workload, places, Options(device=str(place)), quiet=quiet)
        job = Job(workload, settings, Budget(steps=1), place, Single(), TrainProgress(quiet=quiet), False)
        found = _profiled(job, asked, places, folder)
    keep(found, folder, sorted((folder / "parts").glob("trace-*.json")))
    return found


def _refuse(workload: Any) -> None:
    if not isinstance(workload, Workload):
        raise UsageError(f"fl.profile(…) was given {type(workload).__name__}; expected a Workload.")
    if workload.model is None:
        raise UsageError(
            "This workload is an experiment, it has no model whose steps could be profiled. Profile its "
            "process, `frostline profile -- frostline run TARGET`; or give fl.Workload model=, loss= and "
            "optimizer=."
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            "A workload is profiled in one process, and torchrun started several. Profile the training: "
            "`frostline profile -- torchrun … -m frostline train TARGET`."
        )


def _profiled(job: Job, asked: Settings, places: Mapping[str, Path] | None, folder: Path) -> Profile:
    workload = job.workload
    stores = {name: Store.open(place) for name, place in places.items()} if places is not None else None
    parts = fresh_parts(folder)
    step = job.step()
    with closing(job.supply(stores, job.split())) as supply:
        with Monitor(os.getpid()) as monitor:
            raw = _watched(step, supply, _named(workload), asked, parts)
        files = None if places is None else [f for p in places.values() for f in p.rglob("*") if f.is_file()]
        job.progress.note("differential runs: the same steps, with one thing about their data changed")
        beside = differences(step, supply, files, 1000 * usual(raw))
    prepared = [{**line, "pid": raw["pid"]} for line in raw["prepared"]]
    told = f"fl.profile({_named(workload)}{', live=True' if places is None else ''})"
    return profile_of(raw, prepared, monitor.samples, told, folder, beside.notes, beside.trials)


def _named(workload: Workload) -> str:
    return workload.name or "workload"


# --- under the agent ----------------------------------------------------------------------------------


def _watched(step: Step, supply: Supply, name: str, asked: Settings, parts: Path) -> dict[str, Any]:
    """Steps until the agent has seen enough; what it wrote."""
    agent = Agent(
        {
            "folder": str(parts), "steps": asked.steps, "warmup": asked.warmup, "keep_going": True,
            "trace": asked.trace, "replay": False, "quiet": asked.quiet,
        }
    )  # fmt: skip
    watch = _Watch(agent, supply, name, pinned=step.device.type == "cuda")
    agent.begin()
    try:
        with watch:
            _stepped(agent, step, supply, _MOST * (asked.steps + asked.warmup))
    finally:
        _ended(agent)
    found: dict[str, Any] = json.loads((parts / f"process-{agent.pid}.json").read_text(encoding="utf-8"))
    return found


def _stepped(agent: Agent, step: Step, supply: Supply, most: int) -> None:
    step.to_train_mode()
    before = Moment(step.device)
    for taken, batch in enumerate(chain.from_iterable(repeat(supply))):  # epoch after epoch
        if not taken:
            before.restore()  # networks of the pipeline drew their first weights
            agent.decodes.install_all()  # of libraries that its stages imported
        if taken - agent.n > most:
            raise ProfileFailed(
                f"After {taken:,} batches the optimiser has taken {agent.n:,} steps. One is left out where "
                f"loss or gradients are no finite numbers: are they?"
            )
        step(batch)
        if agent.done:
            break
    supply.close()


def _ended(agent: Agent) -> None:
    """Everything as it was, also after an error in the middle of a step."""
    agent.finish("an error")
    agent.unhook()


class _Watch:
    """Tells an agent about the supply's waits, items and decodes. Starting an epoch is waiting too."""

    def __init__(self, agent: Agent, supply: Supply, name: str, *, pinned: bool) -> None:
        self._agent, self._supply, self._name, self._pinned = agent, supply, name, pinned
        self._wait, self._end = supply._next, supply.close
        self._patches = Patches()
        self._iteration: Any = None
        self._source: Iterator[Parts] = iter(())
        self._began, self._place = 0.0, -1

    def __enter__(self) -> None:
        self._patches.set(self._supply, "_next", self._next)
        self._patches.set(self._supply, "close", self._close)

    def __exit__(self, *error: object) -> None:
        self._patches.undo()

    def _close(self) -> None:
        """What an iteration does first."""
        spans, self._began = self._agent.loaders.spans, time.perf_counter()
        self._place = spans.enter("data", "an epoch begins") if spans is not None else -1
        self._end()

    def _next(self, iteration: Any) -> Parts | None:
        loaders, agent = self._agent.loaders, self._agent
        fresh = iteration is not self._iteration
        if fresh:
            loaders.begun += 1
            self._iteration = iteration
            self._source = loaders.watched(self._name, self._parts(iteration), rows=_n_rows)
            if loaders.spans is not None:
                loaders.spans.leave(self._place)
        parts = next(self._source, None)
        if parts is not None and not agent.done:
            if fresh:
                loaders.seen[-1]["wait_s"] += agent.waits[-1][0] - self._began
                agent.waits[-1][0] = self._began
            self._tell(parts)
        return parts

    def _parts(self, iteration: Any) -> Iterator[Parts]:
        while (parts := self._wait(iteration)) is not None:
            yield parts

    def _tell(self, parts: Parts) -> None:
        loaders, state = self._agent.loaders, self._supply.state_dict()
        about = loaders.seen[-1]
        if about["batches"] is None:
            pool = self._iteration._pool
            about |= {
                "batches": self._supply.n_batches(), "samples": max(state["rows"].values()),
                "batch_size": state["batch_size"], "workers": pool.n if pool is not None else 0,
                "pinned": self._pinned,
            }  # fmt: skip
        for work in parts.values():
            if isinstance(work.names, list):  # otherwise asking for them would cost
                about["items"] += len(work.names)
                about["repeats"] += sum(key in about["known"] for key in work.names)
                about["known"].update(work.names)
        decodes, loaders.decodes = loaders.decodes, []
        if decodes or loaders.prepared:  # "decoding": no time to prepare a batch is known, threads share it
            line = {"dataset": "decoding", "start": -1.0, "s": 0.0, "n": _n_rows(parts), "decodes": decodes}
            loaders.prepared.append(line)


def _n_rows(parts: Parts) -> int:
    """As `Batch.n_rows`: of the first part."""
    work = next(iter(parts.values()))
    if work.hidden:
        return 0
    columns = [*work.fed.values(), *work.picked.values(), *work.done.values(), *work.exact.values()]
    return len(work.places) if work.places is not None else len(columns[0])


# --- afterwards ---------------------------------------------------------------------------------------


@contextmanager
def _unchanged(workload: Workload, device: torch.device) -> Iterator[None]:
    """The model that the workload was given, and all random numbers, as they were."""
    moment = Moment(device)
    kept = _Kept(workload.model) if isinstance(workload.model, nn.Module) else None
    try:
        yield
    finally:
        if kept is not None:
            kept.restore()
        moment.restore()


class _Kept:
    """A model's tensors, gradients and modes, where they lay."""

    def __init__(self, model: nn.Module) -> None:
        self._modes = {module: module.training for module in model.modules()}
        self._parameters = [
            (p, p.data, p.detach().clone(), None if p.grad is None else p.grad.clone(), p.requires_grad)
            for p in model.parameters()
        ]
        self._buffers = [
            (module._buffers, name, buffer, buffer.clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def restore(self) -> None:
        for module, mode in self._modes.items():
            module.training = mode
        with torch.no_grad():
            for parameter, data, value, grad, trained in self._parameters:
                parameter.data = data  # also where it was moved to a device
                parameter.copy_(value)
                parameter.grad = grad
                parameter.requires_grad_(trained)
            for buffers, name, buffer, value in self._buffers:
                buffers[name] = buffer
                buffer.copy_(value)
