"""Resizing as Pillow does it, in torch, on any device: the same whole-number arithmetic, so the same bits.

A filter is a weighted sum of a few neighbours. Pillow rounds weights to 22 binary digits, adds up in whole
numbers, and rounds to 8 bits after each of its two passes. Floats would come close, and differ wherever a
sum lies on the border between two values. Along rows comes first, as in Pillow up to 12, whatever Pillow is
installed: 13 begins with the columns of pictures whose height shrinks more than their width, and those differ
by a step or two of 8 bits in a few values.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

_BITS = 22
_REACH = {"bilinear": 1.0, "bicubic": 2.0, "lanczos": 3.0}


def resized(x: Tensor, to: tuple[int, int], *, by: str, antialias: bool = True, exact: bool = True) -> Tensor:
    """uint8 [..., H, W] at another size, as float32.

    >>> resized(torch.tensor([[[0, 100]]], dtype=torch.uint8), (1, 4), by="bilinear")
    tensor([[[  0.,  25.,  75., 100.]]])

    by: "nearest", "bilinear", "bicubic" or "lanczos".
    antialias: let the filter grow with the shrinking, as Pillow always does.
    exact: Pillow's whole numbers. Otherwise floats, without rounding in between.
    """
    if x.shape[-2:] == to:
        return x.to(torch.float32).contiguous()
    x = x.to(torch.int32 if exact else torch.float32)
    for axis, length in ((-1, to[1]), (-2, to[0])):
        if x.shape[axis] == length:
            continue
        # Gathering whole rows is several times faster than gathering out of rows: width is turned to height.
        rows = x.transpose(-1, -2) if axis == -1 else x
        scaled = _one_axis(rows, length, by, antialias, exact)
        x = scaled.transpose(-1, -2) if axis == -1 else scaled
    return x.to(torch.float32).contiguous()


def _one_axis(rows: Tensor, to: int, by: str, antialias: bool, exact: bool) -> Tensor:
    length = rows.shape[-2]
    rows = rows.contiguous()
    if by == "nearest":
        return rows.index_select(-2, torch.tensor(_nearest(length, to), device=rows.device))
    places, weights = _weights(length, to, by, antialias)
    places = places.to(rows.device)
    if exact:
        weights = (weights * 2**_BITS + torch.where(weights < 0, -0.5, 0.5)).trunc()
    weights = weights.to(rows.device, rows.dtype)
    # Half a step, so that dropping the digits rounds to the nearest.
    start = 2 ** (_BITS - 1) if exact else 0
    total = rows.new_full((*rows.shape[:-2], to, rows.shape[-1]), start)
    gathered = torch.empty_like(total)  # reused: a fresh one for each neighbour doubles the time
    for k in range(places.shape[0]):
        torch.index_select(rows, -2, places[k], out=gathered)
        total.addcmul_(gathered, weights[k, :, None])
    return (total >> _BITS).clamp_(0, 255) if exact else total


def _nearest(length: int, to: int) -> list[int]:
    """Places added up as Pillow does, so that ties fall alike."""
    step = length / to
    return [int(place) for place in accumulate([step] * (to - 1), initial=step / 2)]


@lru_cache(maxsize=64)
def _weights(length: int, to: int, by: str, antialias: bool) -> tuple[Tensor, Tensor]:
    """Neighbours and their weights, [K, to] each; an output with fewer than K has weights of 0."""
    scale = length / to
    wide = max(1.0, scale) if antialias else 1.0
    reach = _REACH[by] * wide
    centres = (torch.arange(to, dtype=torch.float64) + 0.5) * scale
    first = (centres - reach + 0.5).trunc().clamp(min=0)
    last = (centres + reach + 0.5).trunc().clamp(max=length)
    places = first + torch.arange(int((last - first).max()))[:, None]
    weights = _filter((places - centres + 0.5) / wide, by) * (places < last)
    return places.clamp(max=length - 1).long(), weights / weights.sum(0)


def _filter(x: Tensor, by: str) -> Tensor:
    far = x.abs()
    if by == "bilinear":
        return (1 - far).clamp(min=0)
    if by == "bicubic":  # Keys' with a = -1/2
        near, out = (1.5 * far - 2.5) * far * far + 1, ((-0.5 * far + 2.5) * far - 4) * far + 2
        return torch.where(far < 1, near, torch.where(far < 2, out, 0.0))
    return torch.where(far < 3, torch.sinc(x) * torch.sinc(x / 3), 0.0)
