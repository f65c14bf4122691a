"""What a training step takes, with a batch that is on the device already."""

from __future__ import annotations

import copy
from contextlib import closing
from typing import Any

import torch

from frostline.cut.costs import StepCost
from frostline.cut.sampled import sampled
from frostline.cut.walk import FEWEST, chosen_places, clocked
from frostline.errors import FrostlineError, UsageError
from frostline.execution.call import described
from frostline.stage import Lazy
from frostline.step import Step
from frostline.supply import supply
from frostline.training import Training
from frostline.workload import Workload


def step_cost(workload: Workload, *, device: str = "cpu") -> StepCost:
    """One step of training, as the workload says, on a copy of its model.

    >>> import frostline as fl
    >>> data = fl.Pipeline(fl.Source.table([{"key": str(i), "x": float(i)} for i in range(100)]))
    >>> work = fl.Workload(data, model=fl.lazy(torch.nn.Linear, 1, 1), batch_size=16,
    ...                    loss=lambda model, batch: model(batch["x"].float()[:, None]).square().mean(),
    ...                    optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1))
    >>> cost = step_cost(work)
    >>> cost.samples, cost.seconds > 0
    (16, True)

    The batch is made of eight samples, each as often as it takes: a step's time hardly depends on what the
    numbers are, and those of a whole batch may be more than a forecast should look at.
    """
    if workload.run is not None or workload.loss is None or workload.optimizer is None:
        raise UsageError("There is no step to measure: this workload is an experiment, and trains nothing.")
    if len(workload.pipelines) > 1:
        raise UsageError("A step can be measured for a workload with one pipeline; this has several.")
    place, size = torch.device(device), workload.batch_size or 1
    batch = _batch(workload, size, place)
    try:
        given = workload.model.get() if isinstance(workload.model, Lazy) else workload.model
        model = copy.deepcopy(given).to(place)
        step = Step(
            model, workload.loss, workload.optimizer(model), training=Training.of(workload.training),
            device=place, note=_silent,
        )  # fmt: skip
        step.to_train_mode()
        cost = clocked(lambda: step(batch), 1, place)
    except FrostlineError:
        raise
    except Exception as e:
        raise UsageError(
            f"The training step could not be measured: {described(e)}. Correct the workload's model, loss or "
            "optimizer; `frostline show --audit` looks at them."
        ) from e
    return StepCost(cost.wall, size, cost.cores / cost.wall)


def _batch(workload: Workload, size: int, device: torch.device) -> Any:
    pipeline = next(iter(workload.pipelines.values()))
    few = sampled(pipeline, chosen_places(pipeline, 1e-9)[:FEWEST], size)
    batches = supply(few, None, split=None, batch_size=size, device=device)
    with closing(batches):
        return next(iter(batches))


def _silent(text: str) -> None:
    """What a step has to say is for a training."""
