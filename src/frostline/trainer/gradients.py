"""The first steps, looked at: parameters that train and get no gradient, frozen ones that move."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch

import torch
from torch import Tensor, nn

from frostline.errors import UsageError

STEPS = 3
"""Steps that are looked at: a branch may be skipped in one of them."""


class GradientAudit:
    """Called before each of the first updates, while gradients are there; `verdict` comes after them."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, unused: Sequence[str]) -> None:
        self._unused = unused
        self._trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._named = dict(model.named_parameters())
        self._without = {n for n, p in self._named.items() if p.requires_grad}
        frozen = [n for n, p in self._named.items() if not p.requires_grad and not self._may_be(n)]
        self._sums = {n: _bits(self._named[n]) for n in frozen}
        self.looked = 0

    def __call__(self) -> None:
        self.looked += 1
        self._without -= {n for n in self._without if self._named[n].grad is not None}

    def verdict(self) -> None:
        """UsageError with everything that is wrong; nothing where all is well."""
        left_out = [n for n, p in self._named.items() if p.requires_grad and id(p) not in self._trained]
        silent = [n for n in sorted(self._without) if n not in left_out and not self._may_be(n)]
        moved = [n for n, before in self._sums.items() if not torch.equal(_bits(self._named[n]), before)]
        problems = [
            *_told(
                "requires gradients but is not in the optimiser", [n for n in left_out if not self._may_be(n)]
            ),
            *_told(f"trains but got no gradient in {self.looked} steps", silent),
            *_told("is frozen (requires_grad=False) but moved", moved),
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
