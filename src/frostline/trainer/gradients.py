"""The first steps, looked at: parameters without gradient, frozen ones that move, what the loss keeps."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatch
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from frostline.errors import UsageError

STEPS = 3
"""Steps that are looked at: a branch may be skipped in one of them."""


class GradientAudit:
    """Called before each of the first updates, while gradients are there; `verdict` comes after them."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, unused: Sequence[str], loss: Any = None
    ) -> None:
        self._unused = unused
        self._trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._named = dict(model.named_parameters())
        self._without = {n for n, p in self._named.items() if p.requires_grad}
        frozen = [n for n, p in self._named.items() if not p.requires_grad and not self._may_be(n)]
        self._sums = {n: _bits(self._named[n]) for n in frozen}
        self._of_loss = {n: (t, _bits(t)) for n, t in _of_loss(loss, model).items() if not self._may_be(n)}
        self.looked = 0

    def __call__(self) -> None:
        self.looked += 1
        self._without -= {n for n in self._without if self._named[n].grad is not None}

    def verdict(self) -> None:
        """UsageError with everything that is wrong; nothing where all is well."""
        left_out = [n for n, p in self._named.items() if p.requires_grad and id(p) not in self._trained]
        silent = [n for n in sorted(self._without) if n not in left_out and not self._may_be(n)]
        moved = [n for n, before in self._sums.items() if not torch.equal(_bits(self._named[n]), before)]
        of_loss = [n for n, (now, before) in self._of_loss.items() if not torch.equal(_bits(now), before)]
        problems = [
            *_told(
                "requires gradients but is not in the optimiser", [n for n in left_out if not self._may_be(n)]
            ),
            *_told(f"trains but got no gradient in {self.looked} steps", silent),
            *_told("is frozen (requires_grad=False) but moved", moved),
            *_told("moved and is in no checkpoint: make it a part of the model", of_loss),
        ]
        if problems:
            raise UsageError(
                "The model does not train as it is declared (the gradient audit of the first steps). Give "
                "training={'unused': ['name', 'pattern.*']} for what is meant to be so, as a branch that is "
                "rarely taken, or a frozen teacher that follows its student:",
                problems=problems,
            )

    def _may_be(self, name: str) -> bool:
        return any(fnmatch(name, pattern) for pattern in self._unused)


def _of_loss(loss: Any, model: nn.Module) -> dict[str, Tensor]:
    """What modules that the loss uses hold beside the model, by name: a centre, statistics."""
    known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    return {
        f"{whose}.{name}": tensor
        for whose, module in _reached(loss).items()
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if id(tensor) not in known and tensor.layout is torch.strided
    }


def _reached(loss: Any) -> dict[str, nn.Module]:
    """The loss itself, whose method it is, what it was given beforehand, and what its code names."""
    found: dict[str, Any] = {"loss": getattr(loss, "__self__", loss)}
    if isinstance(loss, partial):
        found |= _reached(loss.func) | {f"argument {i}": given for i, given in enumerate(loss.args)}
        found |= loss.keywords
    elif inspect.isfunction(loss):
        found |= {name: loss.__globals__.get(name) for name in loss.__code__.co_names}
        for name, cell in zip(loss.__code__.co_freevars, loss.__closure__ or (), strict=True):
            with suppress(ValueError):  # nothing was put into it yet
                found[name] = cell.cell_contents
    return {name: value for name, value in found.items() if isinstance(value, nn.Module)}


def _told(what: str, names: Sequence[str]) -> list[str]:
    more = f" (and {len(names) - 8} more)" if len(names) > 8 else ""
    return [f"{', '.join(names[:8])}{more} {what}"] if names else []


def _bits(tensor: Tensor) -> Tensor:
    """A sum over a tensor's bits as whole numbers: any change of one value shows."""
    flat = tensor.detach().reshape(-1)
    if flat.dtype.is_complex:
        flat = torch.view_as_real(flat).reshape(-1)
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    values = flat.contiguous().view(kind).long()
    return torch.stack(
        [values.sum(), (values * torch.arange(1, len(values) + 1, device=values.device)).sum()]
    )
