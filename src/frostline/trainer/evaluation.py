"""Evaluation that training does not notice: eval mode; gradients, buffers, generators and flags put back."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from frostline.batch import Batch, copied
from frostline.errors import UsageError
from frostline.ranks import Alone
from frostline.rewind import Buffers, Extra, Moment
from frostline.step import Step
from frostline.store.verification import settle_all
from frostline.supply import Supply
from frostline.workload import Workload

VALIDATED = ("val", "validation", "valid", "dev")
TESTED = ("test", *VALIDATED)


def split_for(workload: Workload, names: tuple[str, ...], asked: str | None = None) -> str | None:
    """The split to evaluate on: the one asked for, or the first of these names that there is."""
    known = splits_of(workload)
    if asked is not None:
        if asked not in known:
            there = ", ".join(known) or "none: give the workload splits="
            raise UsageError(f"There is no split {asked!r}; there are {there}.")
        return asked
    return next((name for name in names if name in known), None)


def splits_of(workload: Workload) -> list[str]:
    if isinstance(workload.splits, str):
        field = workload.splits
        values = {
            str(p.source.raw(i)[field]) for p in workload.pipelines.values() for i in range(len(p.source))
        }
        return sorted(values)
    return [*(workload.splits or ())]


def evaluate(workload: Workload, step: Step, supply: Supply, *, at: int = 0) -> dict[str, float]:
    """What the workload's `evaluate` returns, or the mean of its loss where it has none.

    at: the training steps that the model has had.
    """
    with undisturbed(step.model, step.device):
        supply.load_state_dict({**supply.state_dict(), "epoch": 0, "cursor": 0})  # from the beginning
        if workload.evaluate is None:
            found: Any = _mean_loss(step, supply)
        else:
            with _as_in_training(step):
                # how long it was trained: what is odd later is usual at first
                more = {"step": at} if _takes(workload.evaluate, "step") else {}
                found = workload.evaluate(step.model, supply, **more)
    settle_all()  # no figure is given that comes from a damaged file
    if not isinstance(found, Mapping) or not found:
        raise UsageError(f"evaluate(model, feed) returned {found!r:.80}; expected {{name: number}}.")
    metric = workload.metric
    if metric is not None and metric.name not in found:
        raise UsageError(
            f"evaluate(model, feed) returned {', '.join(map(str, found))}; the workload's metric is "
            f"{metric.name!r}, which is not among them."
        )
    try:
        return {str(name): float(value) for name, value in found.items()}
    except (TypeError, ValueError, RuntimeError) as e:
        raise UsageError(f"evaluate(model, feed) returned {dict(found)!r:.200}; expected numbers: {e}") from e


def _takes(function: Callable[..., Any], name: str) -> bool:
    """Whether it has a parameter of this name."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # it has no signature that can be read
        return False


def _mean_loss(step: Step, supply: Supply) -> dict[str, float]:
    """The loss's figures, weighted by rows; read from the device once."""
    totals: dict[str, Any] = {}
    rows: dict[str, int] = {}  # of each: a batch may lack a figure
    for batch in supply:
        for name, value in step.figures(batch).items():
            totals[name] = totals.get(name, 0.0) + value.double() * batch.n_rows
            rows[name] = rows.get(name, 0) + batch.n_rows
    return {name: float(value) / rows[name] for name, value in totals.items()} or {"loss": math.nan}


def check(
    workload: Workload, step: Step, batch: Batch, figures: Mapping[str, float], *, fresh: bool = True
) -> None:
    """The workload's own assertions; they see the model as it is before the first step.

    fresh: its weights are those that it was made with.
    """
    problems = []
    for one in workload.checks:
        with undisturbed(step.model, step.device, eval=False):
            more = {"fresh": fresh} if _takes(one, "fresh") else {}
            wrong = one(step.model, copied(batch), dict(figures), **more)
        if wrong:
            problems.append(f"{getattr(one, '__name__', 'check')}: {wrong}")
    if problems:
        raise UsageError("The workload's checks failed before the first step:", problems=problems)


@contextmanager
def _as_in_training(step: Step) -> Iterator[None]:
    """The step's precision. Without autocast's cache: an evaluation may swap weights, as those of an EMA."""
    with step._autocast():
        if torch.is_autocast_enabled(step.device.type):
            torch.set_autocast_cache_enabled(False)  # put back where autocast ends
        yield


@contextmanager
def undisturbed(model: nn.Module, device: torch.device, *, eval: bool = True) -> Iterator[None]:
    """No gradients, and eval mode (unless eval=False); afterwards all is as it was.

    All: modes, generators, buffers, extra state, which parameters train, and their gradients, whatever a
    backward pass within has left there.
    """
    modes = {module: module.training for module in model.modules()}
    parameters = [(parameter, parameter.grad, parameter.requires_grad) for parameter in model.parameters()]
    moment, buffers, extra = Moment(device), Buffers(model), Extra(model)
    buffers.keep()
    for parameter, *_ in parameters:
        parameter.grad = None
    if eval:
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        buffers.look(Alone())  # others are not written, so that the step goes on to see who does
        buffers.restore()
        for module, mode in modes.items():
            module.training = mode
        for parameter, gradient, trains in parameters:
            parameter.grad = gradient
            parameter.requires_grad = trains
        extra.restore()
        moment.restore()
