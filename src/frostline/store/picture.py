"""A row's image or video as a PNG, written with zlib alone.

Shapes that are pictures: [3|1, H, W], [H, W, 3], and with a time axis in front a video, shown as a grid of at
most 24 frames. Anything else is not: features look like pictures to no one.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

MOST_FRAMES = 24
_MOST_SIDE = 4096  # pixels; larger pictures are thinned out
_LEAST_SIDE = 4
_GAP = 2
_BACKGROUND = 255

Pixels = np.ndarray[Any, np.dtype[np.uint8]]


def is_picture(shape: tuple[int, ...], dtype: str) -> bool:
    """Whether values of this shape and type are shown as a picture.

    >>> is_picture((3, 224, 224), "uint8"), is_picture((24, 325, 384), "bfloat16")
    (True, False)
    """
    if dtype != "uint8" and not dtype.startswith(("float", "bfloat")):
        return False
    return _layout(shape) is not None


def _layout(shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The permutation that makes one frame [H, W, C], or None where the shape is not a picture's."""
    if len(shape) not in (3, 4) or 0 in shape:
        return None
    *_, a, b, c = shape
    if a in (1, 3) and min(b, c) >= _LEAST_SIDE:
        return (1, 2, 0)
    return (0, 1, 2) if c == 3 and min(a, b) >= _LEAST_SIDE else None


def render(value: Tensor) -> Pixels:
    """Pixels [H, W, 3] of an image or video (see `is_picture`)."""
    layout = _layout(tuple(value.shape))
    if layout is None:
        raise ValueError(f"a value of shape {list(value.shape)} is not a picture")
    frames = value if value.dim() == 4 else value[None]
    chosen = torch.linspace(0, len(frames) - 1, min(MOST_FRAMES, len(frames))).round().to(torch.int64)
    frames = frames[chosen].permute(0, *(axis + 1 for axis in layout))
    thin = max(1, -(-max(frames.shape[1:3]) // _MOST_SIDE))
    pixels = _to_bytes(frames[:, ::thin, ::thin])
    grid = _grid(np.broadcast_to(pixels, (*pixels.shape[:3], 3)))
    thin = max(1, -(-max(grid.shape[:2]) // _MOST_SIDE))
    return np.ascontiguousarray(grid[::thin, ::thin])


def _to_bytes(x: Tensor) -> Pixels:
    """Bytes as they are; floats by their range: [0, 1], [−1, 1], [0, 255], and any other one stretched."""
    if x.dtype == torch.uint8:
        plain: Pixels = x.numpy()
        return plain
    wide = x.to(torch.float32)
    finite = wide[torch.isfinite(wide)]
    low, high = (float(finite.min()), float(finite.max())) if finite.numel() else (0.0, 1.0)
    if low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    elif low >= -1 and high <= 1:
        low, high = -1.0, 1.0
    elif low >= 0 and high <= 255:
        low, high = 0.0, 255.0
    scaled = (wide.nan_to_num(low, high, low) - low) * (255 / max(high - low, 1e-30))
    out: Pixels = scaled.clamp(0, 255).round().to(torch.uint8).numpy()
    return out


def _grid(frames: Pixels) -> Pixels:
    """Frames [T, H, W, 3] side by side, row by row, in about the shape of a screen."""
    count, height, width, _ = frames.shape
    if count == 1:
        only: Pixels = frames[0]
        return only
    columns = min(count, max(1, round((count * 1.5 * height / width) ** 0.5)))
    rows = -(-count // columns)
    out = np.full((rows * (height + _GAP) - _GAP, columns * (width + _GAP) - _GAP, 3), _BACKGROUND, np.uint8)
    for i, frame in enumerate(frames):
        top, left = i // columns * (height + _GAP), i % columns * (width + _GAP)
        out[top : top + height, left : left + width] = frame
    return out


def png(pixels: Pixels) -> bytes:
    """A PNG file's bytes for pixels [H, W, 3].

    >>> png(np.zeros((1, 1, 3), np.uint8))[:4]
    b'\\x89PNG'
    """
    height, width, _ = pixels.shape
    lines = np.zeros((height, 1 + 3 * width), np.uint8)  # each line begins with its filter: 0, none
    lines[:, 1:] = pixels.reshape(height, 3 * width)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = _chunk(b"IHDR", head) + _chunk(b"IDAT", zlib.compress(lines.tobytes(), 6)) + _chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def write_picture(value: Tensor, path: Path) -> tuple[int, int]:
    """Write a PNG of the value; gives its width and height."""
    pixels = render(value)
    path.write_bytes(png(pixels))
    return pixels.shape[1], pixels.shape[0]
