"""Image files to tensors, with Pillow.

Nothing of a picture is decoded before its header has said how large it is. Colour profiles are not applied;
what the file's numbers are is what a network sees.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from frostline.errors import FrostlineError, MissingExtra, UsageError
from frostline.stages import geometry
from frostline.stages.geometry import Filter, Fit, Size

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

Mode = Literal["RGB", "L", "RGBA"]

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
"""Others are refused: some of Pillow's readers start other programs (EPS), and none is a data set's."""

MAX_PIXELS = 89_478_485
"""Where Pillow, too, begins to suspect a decompression bomb: a quarter of a GiB in RGB."""

_ORIENTATION = 0x0112
_DEEP = ("I", "I;16", "I;16L", "I;16B", "I;16N")
_FAULTS = (
    OSError,
    SyntaxError,
    ValueError,
    struct.error,
    zlib.error,
    EOFError,
    IndexError,
    TypeError,
    KeyError,
)
"""What Pillow's readers raise on damaged files, as found by feeding them damaged files."""


@dataclass(frozen=True)
class Image:
    """A path (or the file's bytes) to a uint8 tensor [C, H, W].

    >>> from PIL import Image as Pillow
    >>> file = BytesIO()
    >>> Pillow.new("RGB", (640, 480), "red").save(file, "jpeg")
    >>> Image(size=224, fit="cover")(file.getvalue()).shape
    torch.Size([3, 224, 224])

    The EXIF orientation is applied. Of an animation the first frame is taken; 16-bit grey is scaled to 8
    bits; palettes, CMYK and the like are converted. A file that cannot be read, is too large or is cut off
    raises `UsageError` with its path, so that freezing quarantines it.
    """

    size: Size | None = None
    """An integer (a square; the shorter side with fit="shortest") or (height, width). None: as it is."""
    fit: Fit = "stretch"
    """"stretch" to the size, "cover" it and cut the middle out, "contain" the whole in it with a margin of
    `background`, or scale the "shortest" side to it, so that the other differs from picture to picture."""
    mode: Mode = "RGB"
    """RGB, L (grey, one channel) or RGBA."""
    resample: Filter = "bicubic"
    """Pillow's filter: "nearest", "bilinear", "bicubic", "lanczos" or "box"."""
    background: tuple[int, int, int] | None = (255, 255, 255)
    """What shows through transparent pixels. None drops the transparency, whatever colour lies under it."""
    max_pixels: int = MAX_PIXELS
    """Larger pictures are refused by their header, before memory is taken."""
    draft: bool = False
    """Decode JPEG files at 1/2, 1/4 or 1/8 where that is still twice the size: faster, other pixels."""

    def __post_init__(self) -> None:
        problems = geometry.size_problems(self.size, self.fit, self.resample)
        if self.mode not in get_args(Mode):
            problems.append(f"mode is {self.mode!r}; one of {', '.join(map(repr, get_args(Mode)))}")
        if self.background is not None and not _is_colour(self.background):
            problems.append(f"background is {self.background!r}; (red, green, blue) from 0 to 255, or None")
        if self.max_pixels < 1:
            problems.append(f"max_pixels is {self.max_pixels}; at least 1")
        if self.draft and self.size is None:
            problems.append("draft=True needs a size to come close to")
        if problems:
            raise UsageError("Image(...) cannot work:", problems=problems)

    def __call__(self, file: str | Path | bytes) -> Tensor:
        name = f"{len(file):,} bytes" if isinstance(file, bytes) else repr(os.fspath(file))
        _refuse_empty(file, name)
        try:
            from PIL import Image as pillow
        except ImportError as e:
            raise MissingExtra.needed("Reading images", package="Pillow", extra="images") from e
        pillow.init()  # once; then it is known which formats this Pillow was built with
        formats = [known for known in FORMATS if known in pillow.OPEN]
        try:
            with pillow.open(BytesIO(file) if isinstance(file, bytes) else file, formats=formats) as picture:
                return self._tensor(picture, name)
        except FrostlineError:
            raise
        except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as e:
            raise _cannot(name, f"Pillow refuses its size ({e})", _RAISE_BOTH) from e
        except pillow.UnidentifiedImageError as e:
            raise _cannot(name, f"it is no image in a known format ({_start(file)})", _KNOWN) from e
        except _FAULTS as e:
            raise _cannot(name, f"it is damaged or cut off ({type(e).__name__}: {e})", _REPLACE) from e

    def _tensor(self, picture: Picture, name: str) -> Tensor:
        if picture.width * picture.height > self.max_pixels:
            what = f"{picture.width}x{picture.height} is more than max_pixels={self.max_pixels:,}"
            raise _cannot(name, what, "Leave it out, or raise max_pixels.")
        if self.draft:
            self._draft(picture)
        picture.load()
        upright = _upright(picture)
        # Grey with more bits has no alpha and no colour: scaled by hand, since convert() would clip it.
        plain = _eight_bits(upright, name) if upright.mode in _DEEP else upright
        if plain.mode == "F":
            raise _cannot(name, "its pixels are floating-point numbers without an agreed range", _CONVERT)
        converted = self._converted(plain)
        fill = (*(self.background or (0, 0, 0)), 255)[: len(converted.getbands())]
        fitted = geometry.fitted(converted, self.size, self.fit, resample=self.resample, fill=fill)
        pixels = np.array(fitted, np.uint8)  # a copy: Pillow keeps its own memory
        # torch's copy, unlike numpy's, lets other threads run meanwhile
        return torch.from_numpy(np.atleast_3d(pixels)).permute(2, 0, 1).contiguous()

    def _draft(self, picture: Picture) -> None:
        if self.size is None:
            return
        height, width = geometry.sides(self.size)
        side = 2 * max(height, width)  # square, so that a picture lying on its side is no special case
        picture.draft(None, (side, side))  # None keeps the file's own mode

    def _converted(self, picture: Picture) -> Picture:
        if picture.mode == self.mode and "transparency" not in picture.info:
            return picture
        if self.mode == "RGBA":
            return picture.convert("RGBA")
        if picture.has_transparency_data:
            picture = picture.convert("RGBA")  # first, since a palette may carry its transparency in bytes
            if self.background is not None:
                picture = _over(picture, self.background)
        return picture.convert(self.mode)


_RAISE_BOTH = "Leave it out, or raise both max_pixels and PIL.Image.MAX_IMAGE_PIXELS."
_KNOWN = f"Known are {', '.join(FORMATS)}; convert it, or leave it out."
_REPLACE = "Replace the file, or leave it out."
_CONVERT = "Convert it to 8 or 16 bits."


def _cannot(name: str, what: str, advice: str) -> UsageError:
    return UsageError(f"Cannot read the image {name}: {what}. {advice}")


def _is_colour(value: object) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) == 3
        and all(isinstance(v, int) and 0 <= v <= 255 for v in value)
    )


def _refuse_empty(file: str | Path | bytes, name: str) -> None:
    """What the file system knows; Pillow's own words for these do not lead to the cause."""
    if isinstance(file, bytes):
        size = len(file)
    else:
        try:
            status = os.stat(file)
        except OSError as e:
            raise _cannot(name, e.strerror or str(e), "Check the path and its permissions.") from e
        if not os.path.isfile(file):
            raise _cannot(name, "it is no regular file", "Give the path of a file.")
        size = status.st_size
    if size == 0:
        raise _cannot(name, "it is empty (0 bytes)", _REPLACE)


def _start(file: str | Path | bytes) -> str:
    """The first bytes, which often give away what a file really is: an HTML page, a pointer file."""
    if not isinstance(file, bytes):
        with open(file, "rb") as opened:
            file = opened.read(24)
    return f"it begins with {file[:24]!r}"


def _upright(picture: Picture) -> Picture:
    """Turned as its EXIF orientation says. Pillow has done it already for TIFF, and removed the entry."""
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    turn = turns.get(picture.getexif().get(_ORIENTATION, 1))
    if turn is None:
        return picture
    turned = picture.transpose(turn)
    turned.info.update(picture.info)  # the transparency of palettes lies there
    return turned


def _eight_bits(picture: Picture, name: str) -> Picture:
    """16-bit grey as 8-bit grey: 65,535 becomes 255, rounded to the nearest."""
    from PIL import Image as pillow

    values = np.asarray(picture).astype(np.int64)
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > 0xFFFF:
        what = f"its 32-bit values ({low} to {high}) have no agreed range"
        raise _cannot(name, what, _CONVERT)
    return pillow.fromarray(((values * 255 + 0x7FFF) // 0xFFFF).astype(np.uint8))


def _over(picture: Picture, background: tuple[int, int, int]) -> Picture:
    from PIL import Image as pillow

    return pillow.alpha_composite(pillow.new("RGBA", picture.size, (*background, 255)), picture)
