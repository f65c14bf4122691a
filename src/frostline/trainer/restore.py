"""A trained model without its training: `restored`."""

from __future__ import annotations

import os
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from frostline.errors import UsageError
from frostline.stage import Lazy
from frostline.trainer import checkpoint, moment, state
from frostline.workload import Workload


def another(model: Any) -> Any:
    """A copy of a module that the workload was given as it is: its weights stay what they are.

    It may be what a training gave back, and two checkpoints may be compared.
    """
    try:
        return deepcopy(model)
    except (RuntimeError, TypeError) as e:
        raise UsageError(
            f"The workload's model, a {type(model).__name__} that is there already, cannot be copied for the "
            f"weights of a checkpoint: {e}. Give the workload fl.lazy(Class, …) instead."
        ) from e


def restored(
    workload: Workload, path: str | os.PathLike[str], *, device: str | torch.device = "cpu"
) -> nn.Module:
    """The workload's model with the weights and buffers of a checkpoint, in eval mode.

    path: a checkpoint, or a run's folder (its newest whole one). Names, shapes and types must be the same.
    """
    loaded = checkpoint.load(Path(path), only=["model", "buffers", "extra"])
    moment.refuse_foreign(loaded, ("model",))
    given = workload.model
    model = given.loader(*given.args, **given.kwargs) if isinstance(given, Lazy) else another(given)
    if not isinstance(model, nn.Module):
        raise UsageError(f"The workload's model is {type(model).__name__}; expected an nn.Module.")
    beside = {"buffers": loaded.groups["buffers"], "extra": loaded.groups["extra"]}
    state.load_model(model, loaded.groups["model"], about=loaded.state["model"], **beside)
    return model.to(device).eval()
