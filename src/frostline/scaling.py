"""Loss scaling for fp16, on the device: no step waits for the CPU to learn whether a gradient overflowed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Scaler:
    """Multiplies the loss so that small gradients survive in fp16, and falls back when large ones do not.

    >>> scaler = Scaler(torch.device("cpu"), start=8.0)
    >>> scaler.update(torch.tensor(1.0))  # an overflow
    >>> scaler.scale.item()
    4.0

    torch's GradScaler does the same arithmetic, and reads the outcome back with a sync for optimisers that
    are not fused; here the step decides how to skip.
    """

    GROWTH, BACKOFF, INTERVAL = 2.0, 0.5, 2000

    def __init__(self, device: torch.device, *, start: float = 65536.0) -> None:
        self.scale = torch.full((), start, device=device)
        self._tracker = torch.zeros((), dtype=torch.int32, device=device)

    def unscale(self, gradients: Sequence[Tensor]) -> None:
        torch._foreach_mul_(list(gradients), self.scale.double().reciprocal().float())

    def update(self, overflowed: Tensor) -> None:
        """overflowed: 1.0 where a gradient was not finite, else 0.0."""
        torch._amp_update_scale_(
            self.scale, self._tracker, overflowed, self.GROWTH, self.BACKOFF, self.INTERVAL
        )

    def state_tensors(self) -> dict[str, Tensor]:
        return {"scale": self.scale, "growth_tracker": self._tracker}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        self.scale.copy_(tensors["scale"])
        self._tracker.copy_(tensors["growth_tracker"])
