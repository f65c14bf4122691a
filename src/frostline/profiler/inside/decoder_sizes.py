"""Sizes: the bytes of what a decoder gave, as storing it would take them; 0: unknown.

They are asked for, never made: nothing is converted, loaded or copied, no device is waited for. Of long lists
some items stand for all.

>>> bytes_of([1, 2, 3]), bytes_of({"ids": [[1, 2], [3]], "text": "abc"}), bytes_of(object())
(24, 27, 0)
"""

from __future__ import annotations

import math
import sys
from collections import UserDict
from collections.abc import Sequence
from typing import Any

_LOOKED = 64  # items of nested lists that are looked at
_DEEP = 8  # lists in lists: one may hold itself
_NUMBER = 8  # bytes of a plain Python number, once it is in an array


def bytes_of(result: Any) -> int:
    """Tensors, arrays, images, texts and numbers, also in lists, tuples and mappings (`BatchFeature`);
    what else is among them counts nothing."""
    return round(_sum(result, _LOOKED, _DEEP))


def image_bytes(image: Any) -> int:
    """A loaded PIL image, by its mode; a palette itself is not counted."""
    width, height = image.size
    return int(width * height * _pixel_bytes(image))


def frame_bytes(frame: Any) -> int:
    """PyAV's VideoFrame as RGB, which most scripts ask it for; frames of sound count nothing."""
    video = _kind("av", "VideoFrame")
    return int(frame.width * frame.height * 3) if video is not None and isinstance(frame, video) else 0


def frames_bytes(result: Any) -> int:
    """What decord and torchcodec give: tensors, `Frame` and `FrameBatch` around one, decord's own arrays."""
    for data in (result, getattr(result, "data", None)):
        if (size := _array_bytes(data)) is not None:
            return size
    shape = getattr(result, "shape", None)
    if isinstance(shape, tuple) and all(isinstance(n, int) for n in shape):
        return math.prod(shape)  # decord's frames are uint8
    return 0


def _sum(value: Any, most: int, deep: int) -> float:
    """At most about `most` items are looked at in each of `deep` levels."""
    if (size := _array_bytes(value)) is not None:
        return size
    if isinstance(value, (bool, int, float)):
        return _NUMBER
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, UserDict):
        value = value.data
    if isinstance(value, dict):
        value = [*dict.values(value)]
    if isinstance(value, (list, tuple)):
        return _sum_list(value, most, deep - 1) if value and deep else 0.0
    image = _kind("PIL.Image", "Image")
    return image_bytes(value) if image is not None and isinstance(value, image) else 0.0


def _sum_list(values: Sequence[Any], most: int, deep: int) -> float:
    if type(values[0]) in (int, float) and type(values[-1]) in (int, float):  # token ids
        return _NUMBER * len(values)
    n = min(len(values), most)
    looked = [values[i * len(values) // n] for i in range(n)]
    return sum(_sum(value, most // n, deep) for value in looked) * len(values) / n


def _array_bytes(value: Any) -> int | None:
    """None: neither a tensor nor an array. An array of Python objects has no size that is known."""
    tensor, array = _kind("torch", "Tensor"), _kind("numpy", "ndarray")
    if tensor is not None and isinstance(value, tensor):
        return int(value.numel() * value.element_size())
    if array is not None and isinstance(value, array):
        return 0 if value.dtype.hasobject else int(value.nbytes)
    return None


def _pixel_bytes(image: Any) -> int:
    if image.mode in ("I", "F"):
        return 4
    return 2 if image.mode.startswith("I;16") else len(image.getbands())


def _kind(module: str, name: str) -> Any:
    """A class of a library; None: that is not imported."""
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) else None
