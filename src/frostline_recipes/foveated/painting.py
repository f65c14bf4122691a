"""How a glyph, the cue's bracket and a background become pixels.

Masks are drawn once, eight times too large, and shrunk, so that edges are smooth; laying one over a picture
then costs some microseconds.

Shapes: [3, H, W] pictures, [k, k] masks.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

Pixels = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

COLOURS = {
    "red": (225, 30, 30),
    "green": (25, 165, 50),
    "blue": (40, 70, 245),
    "yellow": (250, 225, 30),
    "pink": (250, 90, 215),
    "cyan": (40, 220, 230),
}
"""No white, which is the cue's, and no two that are near after H.264 has halved the colours' resolution."""
KINDS = ("disc", "square", "triangle", "cross", "ring", "star")

GLYPH, BRACKET, STROKE = 30 / 256, 44 / 256, 2.5 / 256
"""A glyph's width, the bracket's and its stroke's, in widths of the picture."""

_FINE, _STEPS = 8, 4
"""Masks are drawn `_FINE` times larger, and kept for `_STEPS` places within a pixel in each direction."""


def stamp(
    canvas: Pixels, kind: str, colour: tuple[int, int, int], x: float, y: float, scale: float = 1.0
) -> None:
    """Lays a glyph over the picture with its centre at (x, y) in pixels, `scale` times its usual size."""
    size = canvas.shape[1]
    left, top = round(x * _STEPS), round(y * _STEPS)
    mask = _mask(kind, size, left % _STEPS, top % _STEPS, scale)
    half = mask.shape[0] // 2
    x0, y0 = left // _STEPS - half, top // _STEPS - half
    cut_x, cut_y = max(0, -x0), max(0, -y0)
    mask = mask[cut_y : size - y0, cut_x : size - x0]
    spot = canvas[:, y0 + cut_y : y0 + cut_y + mask.shape[0], x0 + cut_x : x0 + cut_x + mask.shape[1]]
    paint = np.array(colour, np.float32)[:, None, None]
    spot[:] = (spot + (paint - spot) * mask + 0.5).astype(np.uint8)


@lru_cache(maxsize=512)
def _mask(kind: str, size: int, dx: int, dy: int, scale: float) -> Floats:
    """[k, k] how much of each pixel the glyph covers; its centre is (dx, dy) steps off the middle."""
    width = (BRACKET if kind == "bracket" else GLYPH) * size * scale
    half = math.ceil(width / 2) + 2
    side = 2 * half
    image = Image.new("L", (side * _FINE, side * _FINE))
    middle_x, middle_y = (half + dx / _STEPS) * _FINE, (half + dy / _STEPS) * _FINE
    _draw(ImageDraw.Draw(image), kind, middle_x, middle_y, width / 2 * _FINE, STROKE * size * scale * _FINE)
    return np.asarray(image.reduce(_FINE), np.float32) / np.float32(255)


def _draw(on: ImageDraw.ImageDraw, kind: str, x: float, y: float, r: float, stroke: float) -> None:
    """Draws a kind with radius r. The radii differ a little so that all kinds look equally large."""

    def round_(radius: float, fill: int) -> None:
        on.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)

    def corners(count: int, *radii: float) -> None:
        angles = [-math.pi / 2 + 2 * math.pi * k / count for k in range(count)]
        spots = [(radii[k % len(radii)], a) for k, a in enumerate(angles)]
        on.polygon([(x + q * math.cos(a), y + q * math.sin(a)) for q, a in spots], fill=255)

    if kind == "disc":
        round_(0.93 * r, 255)
    elif kind == "ring":
        round_(r, 255)
        round_(0.52 * r, 0)
    elif kind == "triangle":
        y += 0.2 * r
        corners(3, 1.2 * r)
    elif kind == "star":
        corners(10, 1.15 * r, 0.48 * r)
    elif kind == "cross":
        on.rectangle((x - r, y - 0.32 * r, x + r, y + 0.32 * r), fill=255)
        on.rectangle((x - 0.32 * r, y - r, x + 0.32 * r, y + r), fill=255)
    else:
        q = 0.88 * r if kind == "square" else r
        on.rectangle((x - q, y - q, x + q, y + q), fill=255)
        if kind == "bracket":
            q -= stroke
            on.rectangle((x - q, y - q, x + q, y + q), fill=0)


@lru_cache(maxsize=16)
def background(seed: int, size: int) -> Pixels:
    """uint8 [3, size, size]: grey with low-contrast noise of several scales, a little of it in colour."""
    draw = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed)))
    noise = np.full((3, size, size), draw.uniform(85, 125), np.float32)
    for cells, grey, tint in ((3, 10, 6), (8, 9, 5), (24, 8, 3), (64, 6, 0)):
        noise += grey * _smooth(draw, cells, size)
        for plane in noise if tint else ():
            plane += tint * _smooth(draw, cells, size)
    return np.clip(noise, 0, 255).astype(np.uint8)


def _smooth(draw: np.random.Generator, cells: int, size: int) -> Floats:
    """[size, size] normal noise of so many cells across, enlarged smoothly."""
    coarse = Image.fromarray(draw.standard_normal((cells, cells), np.float32))
    return np.asarray(coarse.resize((size, size), Image.Resampling.BICUBIC))
