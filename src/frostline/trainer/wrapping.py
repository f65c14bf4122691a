"""The model inside its wrappers (torch.compile, DDP), and names without them."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

_COMPILED = "_orig_mod"


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself, however it is wrapped. Modules that are compiled inside it stay as they are."""
    while True:
        if isinstance(model, DataParallel | DistributedDataParallel):
            model = model.module
        elif isinstance(inner := dict(model.named_children()).get(_COMPILED), nn.Module):
            model = inner
        else:
            return model


def clean(name: str) -> str:
    """
    >>> clean("blocks.0._orig_mod.attn.weight")
    'blocks.0.attn.weight'
    """
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def parameter_names(model: nn.Module) -> dict[Tensor, str]:
    """Each parameter once, with the first of its names."""
    return {parameter: clean(name) for name, parameter in unwrapped(model).named_parameters()}
