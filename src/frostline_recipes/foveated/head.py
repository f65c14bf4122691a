"""The next frame's latent from the one before and what the language model makes of the clip so far.

Shapes: R pictures (clips times frames), C channels, h x w latents, E width of the language model.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from frostline.errors import UsageError

_WIDTHS = (64, 128, 256)
_GROUPS = 8


class Head(nn.Module):
    """FiLM-conditioned convolutions, down by strides of 2 and up again, that predict a change of the latent.

    >>> head = Head(4, 16)
    >>> head(torch.randn(2, 4, 32, 32), torch.randn(2, 16)).shape
    torch.Size([2, 4, 32, 32])

    At the start it predicts that nothing changes, which is the loss to beat.
    """

    def __init__(self, channels: int, condition: int, *, widths: tuple[int, ...] = _WIDTHS) -> None:
        super().__init__()
        if any(width % _GROUPS for width in widths) or not widths:
            raise UsageError(
                f"Head(...) cannot work: widths are {widths}; multiples of {_GROUPS}, at least one"
            )
        ups = tuple(reversed(widths))
        self.into = Block(channels, widths[0], condition)
        self.down = nn.ModuleList(Block(a, b, condition, stride=2) for a, b in pairwise(widths))
        self.up = nn.ModuleList(Block(a, b, condition) for a, b in pairwise(ups))
        self.out = nn.Conv2d(widths[0], channels, 3, padding=1)
        nn.init.zeros_(self.out.weight)
        if self.out.bias is not None:
            nn.init.zeros_(self.out.bias)

    def forward(self, previous: Tensor, condition: Tensor) -> Tensor:
        """previous [R, C, h, w], condition [R, E] → the next latent [R, C, h, w]."""
        x = self.into(previous, condition)
        levels = []
        for block in self.down:
            levels.append(x)
            x = block(x, condition)
        for block, level in zip(self.up, reversed(levels), strict=True):
            x = F.interpolate(x, size=level.shape[-2:], mode="nearest")
            x = block(x, condition) + level
        change: Tensor = self.out(x)
        return previous + change


class Block(nn.Module):
    """Convolution, norm, scale and shift by the condition, SiLU."""

    def __init__(self, inside: int, outside: int, condition: int, *, stride: int = 1) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(inside, outside, 3, stride=stride, padding=1)
        self.norm = nn.GroupNorm(_GROUPS, outside)
        self.film = nn.Linear(condition, 2 * outside)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift = self.film(condition)[:, :, None, None].chunk(2, 1)
        return F.silu(torch.addcmul(shift, self.norm(self.convolution(x)), 1 + scale))
