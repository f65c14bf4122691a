"""How a picture is fitted to a size: one rule for images and for the frames of a video."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from frostline.errors import UsageError

if TYPE_CHECKING:
    from PIL.Image import Image as Picture
    from PIL.Image import Resampling

Size = int | tuple[int, int]
Fit = Literal["stretch", "cover", "contain", "shortest"]
Filter = Literal["nearest", "bilinear", "bicubic", "lanczos", "box"]

LARGEST_SIDE = 16_384


def size_problems(size: Size | None, fit: str, resample: str) -> list[str]:
    """What is wrong with these three parameters, in words."""
    found = []
    given: tuple[object, ...] = size if isinstance(size, tuple) else () if size is None else (size,)
    if not all(type(side) is int and 0 < side <= LARGEST_SIDE for side in given):
        found.append(f"size is {size!r}; an integer or (height, width), each from 1 to {LARGEST_SIDE:,}")
    elif isinstance(size, tuple) and len(given) != 2:
        found.append(f"size is {size!r}; (height, width) has two entries")
    if fit not in get_args(Fit):
        found.append(f"fit is {fit!r}; one of {', '.join(map(repr, get_args(Fit)))}")
    if fit == "shortest" and size is not None and not isinstance(size, int):
        found.append(f"size is {size!r} with fit='shortest'; the shorter side is one integer")
    if resample not in get_args(Filter):
        found.append(f"resample is {resample!r}; one of {', '.join(map(repr, get_args(Filter)))}")
    return found


def sides(size: Size) -> tuple[int, int]:
    """(height, width); an integer means a square."""
    return size if isinstance(size, tuple) else (size, size)


def shortest(height: int, width: int, edge: int) -> tuple[int, int]:
    """(height, width) with the shorter side `edge` and the longer one rounded down.

    >>> shortest(480, 640, 256)
    (256, 341)
    """
    if height <= width:
        return edge, int(edge * width / height)
    return int(edge * height / width), edge


def filter_named(name: Filter) -> Resampling:
    """Pillow's filter. All but "nearest" widen when shrinking, so they do not alias."""
    from PIL.Image import Resampling

    return Resampling[name.upper()]


def fitted(
    picture: Picture, size: Size | None, fit: Fit, *, resample: Filter, fill: tuple[int, ...]
) -> Picture:
    """The picture at `size`, scaled once, straight from the part of it that is kept."""
    if size is None:
        return picture
    by = filter_named(resample)
    if fit == "shortest":
        height, width = shortest(picture.height, picture.width, int(sides(size)[0]))
        if max(height, width) > LARGEST_SIDE:  # a very long picture would ask for more memory than it has
            raise UsageError(
                f"scaling the shorter side of {picture.width}x{picture.height} to {size} makes it "
                f"{width}x{height}, and no side may exceed {LARGEST_SIDE:,}. Use fit='cover' or 'contain'."
            )
        return picture.resize((width, height), by)
    height, width = sides(size)
    if fit == "cover":
        return picture.resize((width, height), by, box=_middle(picture.width, picture.height, width, height))
    if fit == "contain":
        return _padded(picture, height, width, by, fill)
    return picture.resize((width, height), by)


def _middle(width: int, height: int, to_width: int, to_height: int) -> tuple[float, float, float, float]:
    """The largest box in the middle with the target's proportions; Pillow takes parts of pixels."""
    scale = min(width / to_width, height / to_height)
    w, h = min(width, to_width * scale), min(height, to_height * scale)
    left, top = (width - w) / 2, (height - h) / 2
    return left, top, min(width, left + w), min(height, top + h)


def _padded(picture: Picture, height: int, width: int, by: Resampling, fill: tuple[int, ...]) -> Picture:
    """The whole picture as large as fits, in the middle of `fill`."""
    from PIL import Image

    scale = min(width / picture.width, height / picture.height)
    w = min(width, max(1, round(picture.width * scale)))
    h = min(height, max(1, round(picture.height * scale)))
    canvas = Image.new(picture.mode, (width, height), fill)
    canvas.paste(picture.resize((w, h), by), ((width - w) // 2, (height - h) // 2))
    return canvas


def scaled(height: int, width: int, size: Size | None, fit: Fit) -> tuple[int, int]:
    """(height, width) that a frame is scaled to, before `centred` cuts or pads it.

    >>> scaled(720, 1280, 256, "cover"), scaled(720, 1280, 256, "contain")
    ((256, 455), (144, 256))
    """
    if size is None:
        return height, width
    to_height, to_width = sides(size)
    if fit == "stretch":
        return to_height, to_width
    if fit == "shortest":
        return shortest(height, width, to_height)
    scales = to_height / height, to_width / width
    scale = max(scales) if fit == "cover" else min(scales)
    return max(1, round(height * scale)), max(1, round(width * scale))


def centred(pixels: NDArray[np.uint8], size: Size | None, fit: Fit) -> NDArray[np.uint8]:
    """Pixels [H, W, C] cut (cover) or padded with black (contain) to `size`, keeping the middle."""
    if size is None or fit not in ("cover", "contain"):
        return pixels
    height, width = sides(size)
    top, left = max(0, pixels.shape[0] - height) // 2, max(0, pixels.shape[1] - width) // 2
    cut = pixels[top : top + height, left : left + width]
    if cut.shape[:2] == (height, width):
        return cut
    canvas = np.zeros((height, width, pixels.shape[2]), np.uint8)
    top, left = (height - cut.shape[0]) // 2, (width - cut.shape[1]) // 2
    canvas[top : top + cut.shape[0], left : left + cut.shape[1]] = cut
    return canvas
