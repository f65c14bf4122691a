"""What a step puts back when it is tried again: random numbers, and what a forward pass wrote."""

from __future__ import annotations

import random
from copy import deepcopy

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from frostline.ranks import Ranks


class Moment:
    """Where the random numbers stood.

    >>> moment = Moment(torch.device("cpu"))
    >>> before = random.random(), np.random.rand(), torch.rand(())
    >>> moment.restore()
    >>> before == (random.random(), np.random.rand(), torch.rand(()))
    True
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._python, self._numpy = random.getstate(), np.random.get_state(legacy=False)
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if self._device is not None else None

    def restore(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._cpu)
        if self._device is not None and self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)


class Buffers:
    """The buffers that a forward pass writes, as they were before the step. The first step shows which.

    Their values do: batch norm writes its statistics where no version counter of torch's sees it.
    """

    def __init__(self, model: nn.Module) -> None:
        # places, not tensors: a model may put another tensor under the same name, or the first one
        found = [
            (module, name, buffer)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is None or buffer.layout is torch.strided
        ]
        self._places = [(module._buffers, name) for module, name, _ in found]
        self._of_norms = [module if isinstance(module, _NormBase) else None for module, *_ in found]
        self._there = [buffer is not None and bool(buffer.numel()) for *_, buffer in found]
        self._kept: list[Tensor | None] = []
        self._looked = False

    def tensors(self) -> list[Tensor]:
        """Those that there were from the beginning: what every rank has."""
        return [now for now, there in zip(self._now(), self._there, strict=True) if there and now is not None]

    def _now(self) -> list[Tensor | None]:
        return [buffers[name] for buffers, name in self._places]

    def keep(self) -> None:
        now = self._now()
        if len(self._kept) != len(now) or not all(map(_alike, self._kept, now)):
            self._kept = [None if buffer is None else buffer.clone() for buffer in now]
        elif tensors := [buffer for buffer in now if buffer is not None]:
            torch._foreach_copy_([kept for kept in self._kept if kept is not None], tensors)

    def look(self, ranks: Ranks) -> None:
        """After the first pass: those that it left alone, on every rank, need no care.

        Statistics of a norm in train mode always do: its branch may be one that the first pass did not take.
        """
        if self._looked:
            return
        pairs = zip(self._now(), self._kept, self._of_norms, strict=True)
        told = ranks.gather(
            [
                int((norm is not None and norm.training and now is not None) or not _equal(now, before))
                for now, before, norm in pairs
            ]
        )
        moved = [any(flags) for flags in zip(*told, strict=True)]
        self._places = [place for place, wrote in zip(self._places, moved, strict=True) if wrote]
        self._there = [there for there, wrote in zip(self._there, moved, strict=True) if wrote]
        self._kept = [kept for kept, wrote in zip(self._kept, moved, strict=True) if wrote]
        self._looked = True

    def restore(self, where: Tensor | None = None) -> None:
        """As they were; where: 1.0 to put them back, 0.0 to leave them, without looking.

        One that got another shape is looked for: it is replaced as a whole, or left.
        """
        for (buffers, name), kept in zip(self._places, self._kept, strict=True):
            now = buffers[name]
            if kept is None or now is None or not _alike(now, kept):
                if now is not kept and (where is None or bool(where)):
                    buffers[name] = None if kept is None else kept.clone()
            elif where is not None:
                now.copy_(torch.where(where.bool(), kept, now))
            elif torch._debug_has_internal_overlap(now) != 1:
                now.copy_(kept)
            elif not torch.equal(now, kept):  # one that was expanded takes no copy
                buffers[name] = kept.clone()


class Extra:
    """What the model's modules give as their extra state, as it was: counters, generators of their own."""

    def __init__(self, model: nn.Module) -> None:
        own = nn.Module.get_extra_state, nn.Module.set_extra_state
        self._kept = [
            (module, deepcopy(module.get_extra_state()))
            for module in model.modules()
            if type(module).get_extra_state is not own[0] and type(module).set_extra_state is not own[1]
        ]

    def restore(self) -> None:
        for module, kept in self._kept:
            module.set_extra_state(deepcopy(kept))


def _alike(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether one can be copied into the other."""
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and one.dtype == other.dtype


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)
