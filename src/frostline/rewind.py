"""What a step puts back when it is tried again: random numbers, and buffers that a forward pass wrote."""

from __future__ import annotations

import random

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
        # places, not tensors: a model may put another tensor under the same name
        found = [
            (module, name)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.numel()
        ]
        self._places = [(module._buffers, name) for module, name in found]
        self._of_norms = [module if isinstance(module, _NormBase) else None for module, _ in found]
        self._kept: list[Tensor] = []
        self._looked = False

    def tensors(self) -> list[Tensor]:
        return [buffers[name] for buffers, name in self._places]  # type: ignore[misc]

    def keep(self) -> None:
        now = self.tensors()
        same = len(self._kept) == len(now) and all(
            a.shape == b.shape and a.dtype == b.dtype for a, b in zip(self._kept, now, strict=True)
        )
        if not same:
            self._kept = [buffer.clone() for buffer in now]
        elif now:
            torch._foreach_copy_(self._kept, now)

    def look(self, ranks: Ranks) -> None:
        """After the first pass: those that it left alone, on every rank, need no care.

        Statistics of a norm in train mode always do: its branch may be one that the first pass did not take.
        """
        if self._looked:
            return
        pairs = zip(self.tensors(), self._kept, self._of_norms, strict=True)
        told = ranks.gather(
            [
                int((norm is not None and norm.training) or not torch.equal(now, before))
                for now, before, norm in pairs
            ]
        )
        moved = [any(flags) for flags in zip(*told, strict=True)]
        self._places = [place for place, wrote in zip(self._places, moved, strict=True) if wrote]
        self._kept = [kept for kept, wrote in zip(self._kept, moved, strict=True) if wrote]
        self._looked = True

    def restore(self, where: Tensor | None = None) -> None:
        """As they were; where: 1.0 to put them back, 0.0 to leave them, without looking."""
        for (buffers, name), kept in zip(self._places, self._kept, strict=True):
            now = buffers[name]
            if now is None or now.shape != kept.shape or now.dtype != kept.dtype:
                buffers[name] = kept.clone()
            else:
                now.copy_(kept if where is None else torch.where(where.bool(), kept, now))
