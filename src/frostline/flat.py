"""A tensor's numbers in one line, for whoever looks at their bytes."""

from __future__ import annotations

import torch
from torch import Tensor


def flat(x: Tensor) -> Tensor:
    """Its numbers in one line; copied only where they do not lie in one.

    >>> flat(torch.ones(1, 4)[:, 0]).stride()  # one number is contiguous whatever its stride
    (1,)
    """
    x = x.detach().resolve_conj().resolve_neg().contiguous()
    return x.as_strided((x.numel(),), (1,))


def flat_bytes(x: Tensor) -> Tensor:
    """Their bytes in one line.

    >>> flat_bytes(torch.ones(1, 4)[:, 0])
    tensor([  0,   0, 128,  63], dtype=torch.uint8)
    """
    return flat(x).view(torch.uint8)
