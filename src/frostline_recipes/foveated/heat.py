"""Attention as pictures: a warm map laid over the darkened frame, by one scale for all that is compared.

Attention is shown in multiples of an even look: 1× is what every token gets when nothing is chosen, and stays
dark. A map that was stretched to its own maximum would make an even look as colourful as a sharp one.
Shapes: T frames, N tokens of a frame (a prefix, then h × w patches), H × W pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from frostline.errors import UsageError

Floats = NDArray[np.floating[Any]]
Pixels = NDArray[np.uint8]

_ANCHORS = (
    (0, 0, 4), (31, 12, 72), (85, 15, 109), (136, 34, 106), (186, 54, 85), (227, 89, 51), (249, 140, 10),
    (249, 201, 50), (252, 255, 164),
)  # fmt: skip
"""Black to pale yellow over violet and red; each lighter than the one before (a test looks), so that it also
reads in grey and to most colour-blind people."""
_DARK, _COVER = 0.42, 0.85
"""How much of a frame's light stays, and how much of it the strongest heat hides."""
_LEAST_TOP = 4.0
"""Multiples of an even look that are at least needed for the brightest colour."""


@dataclass(frozen=True, eq=False)
class Look:
    """One pass, or one head of it, over a clip."""

    name: str
    maps: Floats
    """[T, h, w], multiples of an even look; the prefix is left out."""
    entropy: Floats
    """[T], of even attention: 1 is an even look at everything, 0 one token."""

    @property
    def peaks(self) -> Floats:
        """[T]"""
        found: Floats = self.maps.max((1, 2))
        return found

    def peaks_at(self) -> Floats:
        """[T, 2] the middle (x, y) of the patch that is looked at most, in 0…1."""
        height, width = self.maps.shape[1:]
        at = self.maps.reshape(len(self.maps), -1).argmax(1)
        return np.stack([(at % width + 0.5) / width, (at // width + 0.5) / height], 1)


def looks(name: str, attention: Tensor, *, prefix: int, grid: tuple[int, int]) -> tuple[Look, list[Look]]:
    """Attention [T, heads, N] as the mean over its heads, and each head by itself.

    >>> even = torch.full((2, 3, 17), 1 / 17)
    >>> mean, heads = looks("coarse", even, prefix=1, grid=(4, 4))
    >>> mean.maps.shape, float(mean.maps.max().round(4)), float(mean.entropy[0].round(4)), len(heads)
    ((2, 4, 4), 1.0, 1.0, 3)
    """
    height, width = grid
    if attention.ndim != 3 or attention.shape[-1] != prefix + height * width:
        raise UsageError(
            f"Attention of {name!r} is {list(attention.shape)}; expected [frames, heads, tokens] with "
            f"{prefix} + {height} x {width} = {prefix + height * width} tokens."
        )
    p = attention.detach().float().cpu()
    tokens = p.shape[-1]
    entropy = torch.special.entr(p).sum(-1) / np.log(tokens)
    maps = (p[..., prefix:] * tokens).reshape(*p.shape[:2], height, width)
    heads = [
        Look(f"{name}, head {k + 1}", maps[:, k].numpy(), entropy[:, k].numpy()) for k in range(p.shape[1])
    ]
    return Look(name, maps.mean(1).numpy(), entropy.mean(1).numpy()), heads


def top_of(shown: Sequence[Look]) -> float:
    """The multiple of an even look that gets the brightest colour: one scale for all that is compared."""
    peaks = np.concatenate([look.peaks for look in shown])
    return max(_LEAST_TOP, float(np.quantile(peaks, 0.75)))


def colours(shares: Any) -> Pixels:
    """Shares 0…1 as [..., 3]."""
    table, places = np.array(_ANCHORS, float), np.linspace(0, 1, len(_ANCHORS))
    mixed = np.stack([np.interp(shares, places, table[:, c]) for c in range(3)], -1)
    return mixed.round().astype(np.uint8)


def share_of(multiples: Any, top: float) -> Floats:
    """Where multiples of an even look lie on the scale: 0 up to 1×, 1 from `top`. A root lifts weak ones."""
    found: Floats = np.sqrt(np.clip((np.asarray(multiples) - 1) / (top - 1), 0, 1))
    return found


def laid_over(frame: Any, heat: Floats, top: float) -> Pixels:
    """A frame uint8 [3, H, W], dark, with a map [h, w] over it: [H, W, 3]."""
    from PIL import Image

    pixels = np.asarray(frame).transpose(1, 2, 0)
    size = pixels.shape[1], pixels.shape[0]
    wide = np.asarray(Image.fromarray(heat.astype(np.float32)).resize(size, Image.Resampling.BICUBIC))
    share = share_of(wide, top)[..., None]
    warm = colours(share[..., 0])
    laid: Pixels = (
        (pixels * (_DARK * (1 - _COVER * share)) + warm * (_COVER * share)).round().astype(np.uint8)
    )
    return laid


def between(maps: Floats, times: Floats, at: float) -> Floats:
    """The map [h, w] at a time: between two frames that were looked at, a mixture of theirs."""
    right = int(np.clip(np.searchsorted(times, at), 1, max(1, len(times) - 1)))
    if len(times) == 1:
        only: Floats = maps[0]
        return only
    span = max(float(times[right] - times[right - 1]), 1e-9)
    part = float(np.clip((at - times[right - 1]) / span, 0, 1))
    mixed: Floats = maps[right - 1] * (1 - part) + maps[right] * part
    return mixed


def figures(look: Look, truth: Floats | None, *, near: float = 0.125) -> dict[str, float]:
    """What a pass comes to: entropy, peak, and where the truth [T, 2] is known, how near the look is to it.

    near: the distance, in widths of the picture, that counts as on the target.
    """
    found = {"entropy": float(look.entropy.mean()), "peak": float(look.peaks.mean())}
    if truth is None:
        return found
    height, width = look.maps.shape[1:]
    x, y = (np.arange(width) + 0.5) / width, (np.arange(height) + 0.5) / height
    away = np.hypot(x[None, None, :] - truth[:, 0, None, None], y[None, :, None] - truth[:, 1, None, None])
    total = np.maximum(look.maps.sum((1, 2)), 1e-9)
    distance = np.hypot(*(look.peaks_at() - truth).T)
    return found | {
        "on_target": float((distance <= near).mean()),
        "mass_on_target": float(((look.maps * (away <= near)).sum((1, 2)) / total).mean()),
    }
