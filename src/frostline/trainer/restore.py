"""A trained model without its training: `restored`."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from frostline.errors import UsageError
from frostline.stage import Lazy
from frostline.trainer import checkpoint, moment, state
from frostline.workload import Workload


def restored(
    workload: Workload, path: str | os.PathLike[str], *, device: str | torch.device = "cpu"
) -> nn.Module:
    """The workload's model with the weights and buffers of a checkpoint, in eval mode.

    path: a checkpoint, or a run's folder (its newest whole one). Names, shapes and types must be the same.
    """
    loaded = checkpoint.load(Path(path), only=["model", "buffers", "extra"])
    moment.refuse_foreign(loaded, ("model",))
    given = workload.model
    model = given.loader(*given.args, **given.kwargs) if isinstance(given, Lazy) else given
    if not isinstance(model, nn.Module):
        raise UsageError(f"The workload's model is {type(model).__name__}; expected an nn.Module.")
    beside = {"buffers": loaded.groups["buffers"], "extra": loaded.groups["extra"]}
    state.load_model(model, loaded.groups["model"], about=loaded.state["model"], **beside)
    return model.to(device).eval()
