"""Resize, crop, rescale and normalise whole batches on the device, as a model's own processor would.

The processors that models ship with work one picture at a time on the CPU, most of them through Pillow; the
resize in `resample.py` gives the same bits. Shapes: B batch, T frames, C channels, H height, W width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from frostline.errors import UsageError
from frostline.stages import geometry, processors
from frostline.stages.geometry import Size
from frostline.stages.resample import resized

Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]


class Preprocess(nn.Module):
    """uint8 [B, C, H, W] or [B, T, C, H, W] to normalised floats of the size a network wants.

    >>> clip = Preprocess(224, mean=(0.48, 0.46, 0.41), std=(0.27, 0.26, 0.28), crop=224)
    >>> clip(torch.zeros(2, 3, 480, 640, dtype=torch.uint8)).shape
    torch.Size([2, 3, 224, 224])

    As a stage, `fl.Stage("pixels", Preprocess(…), reads="image", on="device")`; for a model by name, see
    `Preprocess.of`. Equal to the Pillow-based processors of CLIP, SigLIP, ViT and DINOv2 (BitImageProcessor)
    to within 1e-6 of the largest value, because the resize has the same bits. With Pillow 13, pictures whose
    height shrinks more than their width are the exception: up to 10 % of their values are a step or two of
    8 bits beside the processor's, 1/255/std each (see `resample.py`). The tests hold both.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        size: Size | None,
        mean: Sequence[float] | None,
        std: Sequence[float] | None,
        *,
        interpolation: Interpolation = "bicubic",
        antialias: bool = True,
        crop: Size | None = None,
        rescale: float = 1 / 255,
        rounding: bool = True,
    ) -> None:
        """
        size: an integer is the shorter side, which keeps proportions; (height, width) is exact; None: as it
        is. mean, std: of each channel, after `rescale`. None leaves the values as they are. interpolation:
        the filter; with `antialias` it widens when shrinking, as Pillow's do. crop: the middle, after the
        resize; zeros around it where the picture is smaller. rescale: what pixel values are multiplied with.
        rounding: to 8 bits after each pass of the resize, as Pillow does. False: as DINOv3's processor does.
        """
        super().__init__()
        _refuse_bad(size, mean, std, interpolation, crop, rescale)
        self.size, self.interpolation, self.antialias = size, interpolation, antialias
        self.crop, self.rescale, self.rounding = crop, rescale, rounding
        self.register_buffer("mean", torch.tensor(list(mean or [0.0]), dtype=torch.float32).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(list(std or [1.0]), dtype=torch.float32).view(-1, 1, 1))

    @classmethod
    def of(cls, processor: str | PathLike[str] | Mapping[str, object] | object) -> Preprocess:
        """What a model's own image processor does, read from its configuration.

        >>> half = [0.5, 0.5, 0.5]
        >>> vit = {"size": {"height": 224, "width": 224}, "image_mean": half, "image_std": half}
        >>> Preprocess.of({**vit, "resample": 2})
        Preprocess(size=(224, 224), interpolation='bilinear', crop=None, rescale=0.00392156862745098)

        `processor` is a name on the Hugging Face hub, a folder with a `preprocessor_config.json`, what such a
        file holds, or a transformers image processor.
        """
        recipe = processors.recipe(processor)
        return cls(
            recipe.size,
            recipe.mean,
            recipe.std,
            interpolation=recipe.interpolation,
            crop=recipe.crop,
            rescale=recipe.rescale,
            rounding=recipe.rounding,
        )

    def extra_repr(self) -> str:
        names = ("size", "interpolation", "crop", "rescale")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)

    def forward(self, images: Tensor) -> Tensor:
        self._refuse_shape(images)
        x_BCHW = images.flatten(0, -4)
        x_BCHW = x_BCHW.float() if self.size is None else self._resized(x_BCHW)
        if self.crop is not None:
            x_BCHW = cropped(x_BCHW, *geometry.sides(self.crop))
        x_BCHW = (x_BCHW * self.rescale).sub_(self.mean).div_(self.std)
        return x_BCHW.reshape(*images.shape[:-3], *x_BCHW.shape[1:])

    def _resized(self, x_BCHW: Tensor) -> Tensor:
        height, width = x_BCHW.shape[-2:]
        edge = self.size
        to = geometry.shortest(height, width, edge) if isinstance(edge, int) else edge or (height, width)
        return resized(x_BCHW, to, by=self.interpolation, antialias=self.antialias, exact=self.rounding)

    def _refuse_shape(self, images: Tensor) -> None:
        problems = []
        channels = self.mean.shape[0]
        if images.dim() not in (4, 5):
            problems.append("expected [B, C, H, W] or [B, T, C, H, W]")
        elif channels > 1 and images.shape[-3] != channels:
            problems.append(f"dimension -3 has {images.shape[-3]} channels; mean and std have {channels}")
        if images.dtype != torch.uint8:
            problems.append(
                f"dtype is {images.dtype}; expected torch.uint8, as images and frames are decoded"
            )
        if problems:
            raise UsageError(f"Preprocess cannot take a tensor {list(images.shape)}:", problems=problems)


def cropped(x_BCHW: Tensor, height: int, width: int) -> Tensor:
    """The middle [height, width], rounded towards the top left, with zeros where there is nothing."""
    missing = [max(0, height - x_BCHW.shape[-2]), max(0, width - x_BCHW.shape[-1])]
    if any(missing):
        (down, right) = (m // 2 for m in missing)
        (up, left) = (m - m // 2 for m in missing)
        x_BCHW = F.pad(x_BCHW, (left, right, up, down))
    top, side = (x_BCHW.shape[-2] - height) // 2, (x_BCHW.shape[-1] - width) // 2
    return x_BCHW[..., top : top + height, side : side + width]


def _refuse_bad(
    size: Size | None,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    interpolation: str,
    crop: Size | None,
    rescale: float,
) -> None:
    problems = geometry.size_problems(size, "stretch", "bicubic")
    problems += [p.replace("size", "crop", 1) for p in geometry.size_problems(crop, "stretch", "bicubic")]
    if (mean is None) != (std is None) or len(mean or ()) != len(std or ()):
        problems.append(f"mean is {mean} and std {std}; one of each per channel, or None for both")
    if any(not math.isfinite(v) for v in mean or ()) or any(
        not (math.isfinite(v) and v > 0) for v in std or ()
    ):
        problems.append(f"mean is {mean} and std {std}; finite numbers, std above 0")
    if interpolation not in get_args(Interpolation):
        problems.append(
            f"interpolation is {interpolation!r}; one of {', '.join(map(repr, get_args(Interpolation)))}"
        )
    if not math.isfinite(rescale) or rescale == 0:
        problems.append(f"rescale is {rescale}; a finite number other than 0")
    if problems:
        raise UsageError("Preprocess(...) cannot work:", problems=problems)
