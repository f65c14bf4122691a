"""Evaluation that training does not notice: eval mode, no gradients, every generator and flag put back."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from frostline.errors import UsageError
from frostline.rewind import Moment
from frostline.step import Step
from frostline.supply import Supply
from frostline.workload import Workload

HELD_OUT = ("val", "validation", "valid", "dev")
TESTED = ("test", *HELD_OUT)


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


def evaluate(workload: Workload, step: Step, supply: Supply) -> dict[str, float]:
    """What the workload's `evaluate` returns, or the mean of its loss where it has none."""
    with undisturbed(step.model, step.device):
        supply.load_state_dict({**supply.state_dict(), "epoch": 0, "cursor": 0})  # from the beginning
        found = workload.evaluate(step.called, supply) if workload.evaluate else _mean_loss(step, supply)
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


def _mean_loss(step: Step, supply: Supply) -> dict[str, float]:
    """The loss's figures, weighted by rows; read from the device once."""
    totals: dict[str, Any] = {}
    rows = 0
    for batch in supply:
        for name, value in step.figures(batch).items():
            totals[name] = totals.get(name, 0.0) + value.double() * batch.n_rows
        rows += batch.n_rows
    return {name: float(value) / rows for name, value in totals.items()} if rows else {"loss": math.nan}


@contextmanager
def undisturbed(model: nn.Module, device: torch.device, *, eval: bool = True) -> Iterator[None]:
    """No gradients, and eval mode (unless eval=False); afterwards modes and generators are as they were."""
    modes = {module: module.training for module in model.modules()}
    moment = Moment(device)
    if eval:
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        moment.restore()
