"""Everything a training is at one optimiser step, for a checkpoint; and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from frostline.errors import CheckpointError, UsageError
from frostline.step import Step
from frostline.trainer import state as states
from frostline.trainer.checkpoint import Loaded
from frostline.trainer.differences import some
from frostline.trainer.distributed import Single
from frostline.trainer.wrapping import clean, parameter_names

Groups = dict[str, dict[str, Tensor]]


def take(step: Step, ranks: Single) -> tuple[Groups, dict[str, Any]]:
    """Groups of tensors and JSON: model, optimiser, scaler, generators of all ranks, rows a pass."""
    groups, about = states.model_state(step.model)
    tensors, optimizer = states.optimizer_tensors(step.optimizer, step.model)
    groups["optimizer"] = tensors
    if step.scaler is not None:
        groups["scaler"] = step.scaler.state_tensors()
    state: dict[str, Any] = {
        "model": about,
        "optimizer": optimizer,
        "microbatch": step.microbatch,
        "world": ranks.world,
        "switched": _switched(step),
    }
    own, generators = states.rng_tensors(step.device)
    told = {n: [str(t.dtype).removeprefix("torch."), t.tolist()] for n, t in own.items()}
    everyone = ranks.gather({"tensors": told if ranks.rank else {}, "about": generators})
    for rank, one in enumerate(everyone):
        found = {n: torch.tensor(v, dtype=getattr(torch, d)) for n, (d, v) in one["tensors"].items()}
        groups[f"generators-{rank}"] = found if rank else own
    state["generators"] = [one["about"] for one in everyone]
    return groups, state


def refuse_new(step: Step) -> None:
    """UsageError for buffers that the model made while it ran: one made anew has no place for them."""
    new = [clean(name) for name, _ in step.model.named_buffers() if name not in step.buffers]
    if new:
        raise UsageError(
            f"The model registered buffers while it ran: {some(new)}. No run could go on with them, since a "
            f"model that is made anew does not have them. Register them where it is made; with None where "
            f"the shape is not known yet: self.register_buffer('name', None)."
        )


OWN = ("model", "optimizer", "generators", "world")
LOOPS = (*OWN, "supply", "schedule", "elapsed_s", "names")
"""What a checkpoint of a whole training has."""


def refuse_foreign(loaded: Loaded, needed: tuple[str, ...] = LOOPS) -> None:
    """CheckpointError for a checkpoint that is none of a training."""
    files = [name for name in ("model", "optimizer") if name in needed and name not in loaded.groups]
    lacks = dict.fromkeys([*files, *(name for name in needed if name not in loaded.state)])
    if lacks:
        raise CheckpointError(f"{loaded.path} is no checkpoint of a training: it has no {', '.join(lacks)}.")


def restore(step: Step, loaded: Loaded, ranks: Single) -> str | None:
    """The training as it was; a sentence where something does not go on exactly."""
    groups, state = loaded.groups, loaded.state
    refuse_foreign(loaded, OWN)
    beside = {"buffers": groups.get("buffers"), "extra": groups.get("extra")}
    states.load_model(step.model, groups["model"], about=state["model"], **beside)
    states.load_optimizer(step.optimizer, step.model, groups["optimizer"], state["optimizer"])
    if step.scaler is not None and "scaler" in groups:
        step.scaler.load_tensors(groups["scaler"])
    for parameter, name in parameter_names(step.model).items():
        parameter.requires_grad = state.get("switched", {}).get(name, parameter.requires_grad)
    step.microbatch = _smaller(step.microbatch, state.get("microbatch"))
    if ranks.rank < len(state["generators"]):
        states.restore_rng(groups[f"generators-{ranks.rank}"], state["generators"][ranks.rank], step.device)
    if state["world"] == ranks.world:
        return None
    if ranks.rank >= len(state["generators"]):
        torch.manual_seed(step.training.seed + 1_000_003 * ranks.rank + loaded.step)
    return (
        f"the checkpoint was written by {state['world']} processes, this is one of {ranks.world}: data and "
        f"augmentation go on exactly, the model's own dropout does not"
    )


def _switched(step: Step) -> dict[str, bool]:
    """Parameters that were frozen, or made to train, since the model was made: whether they train."""
    names = parameter_names(step.model)
    return {
        names[p]: p.requires_grad
        for p, built in step.built.items()
        if p in names and p.requires_grad != built
    }


def _smaller(here: int | None, there: int | None) -> int | None:
    return min((n for n in (here, there) if n is not None), default=None)
