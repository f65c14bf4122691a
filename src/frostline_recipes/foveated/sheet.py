"""A clip's looks side by side: a sheet of frames (PNG) and a film (H.264), with labels to read at 100 %."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from fractions import Fraction
from io import BytesIO
from typing import Any

import numpy as np
from torch import Tensor

from frostline.errors import MissingExtra, UsageError
from frostline_recipes.foveated import heat
from frostline_recipes.foveated.heat import Floats, Look, Pixels

_GROUND, _INK, _FAINT = (18, 18, 22), (232, 232, 236), (150, 150, 160)
_LEFT, _TIME, _LABEL, _GAP, _FOOT, _LINE = 78, 20, 18, 6, 46, 28
_SCALE = 250
"""What the scale of colours takes of the foot, with the figures at its ends."""
_LEGEND = {"of what an even look gives a patch": 245, "strongest": 95, "target": 80}
"""And what the words beside it take."""
_LONGEST_S, _FASTEST = 12.0, 25
"""A film lasts at most so long, and has at most so many frames a second."""


def sheet(
    frames: Tensor,
    times: Floats,
    shown: Sequence[Look],
    *,
    truth: Floats | None = None,
    tile: int = 160,
    columns: int = 8,
) -> Any:
    """A picture: frames from left to right, the clip itself in the first row, a look in each further one.

    frames: uint8 [T, 3, H, W]; times: [T] seconds; truth: [T, 2] where the target is (x, y), in 0…1. After
    `columns` frames the rows begin again below.
    """
    from PIL import Image, ImageDraw

    _refuse(frames, times, shown, truth)
    n, top = len(frames), heat.top_of(shown)
    height = round(tile * frames.shape[2] / frames.shape[3])
    across = min(columns, n)
    block = _TIME + height + _GAP + len(shown) * (height + _LABEL + _GAP)
    wide = max(_LEFT + across * (tile + _GAP) + _GAP, _LEFT + max(_LEGEND.values()))
    legend = _legend(wide, truth is not None)
    foot = math.ceil(n / columns) * block
    picture = Image.new("RGB", (wide, foot + _FOOT + legend[-1][2] * _LINE), _GROUND)
    draw = ImageDraw.Draw(picture)
    for t in range(n):
        x, y = _LEFT + t % columns * (tile + _GAP), t // columns * block
        _text(draw, (x + tile / 2, y + _TIME / 2), f"{times[t]:.1f} s", anchor="mm")
        y += _TIME
        if t % columns == 0:
            _text(draw, (_LEFT - 10, y + height / 2), "clip", anchor="rm")
        _paste(picture, frames[t].numpy().transpose(1, 2, 0), (x, y, tile, height))
        y += height + _GAP
        for look in shown:
            if t % columns == 0:
                _label(draw, look.name, y + height / 2)
            _paste(picture, heat.laid_over(frames[t], look.maps[t], top), (x, y, tile, height))
            _marks(draw, (x, y, tile, height), look.peaks_at()[t], None if truth is None else truth[t])
            told = f"entropy {look.entropy[t]:.2f}  ·  peak {_times(look.peaks[t])}"
            _text(draw, (x + tile / 2, y + height + _LABEL / 2), told, size=12, ink=_FAINT, anchor="mm")
            y += height + _LABEL + _GAP
    _foot(picture, top, foot + 16, legend)
    return picture


def png(picture: Any) -> bytes:
    out = BytesIO()
    picture.save(out, "PNG", compress_level=4)  # optimize=True: 5 % smaller, and fourteen times slower
    return out.getvalue()


def film(
    path: str | os.PathLike[str],
    frames: Tensor,
    times: Floats,
    shown: Sequence[Look],
    looked_at: Floats,
    *,
    truth: Floats | None = None,
    panel: int = 320,
) -> None:
    """The clip beside each look at it, as H.264. Between the times that were looked at, looks are mixed.

    frames: uint8 [F, 3, H, W] at times [F], as many as there are; looked_at: [T] of the looks; truth: [F, 2].
    """
    try:
        import av
    except ImportError as e:
        raise MissingExtra.needed("Writing gaze.mp4", package="av", extra="video") from e
    _refuse(frames, times, (), truth)
    wide, high = panel // 2 * 2, round(panel * frames.shape[2] / frames.shape[3] / 2) * 2
    lasts = max(float(times[-1] - times[0]), 1e-3) * len(frames) / max(1, len(frames) - 1)
    seconds = max(min(lasts, _LONGEST_S), len(frames) / _FASTEST)
    rate = Fraction(len(frames) / seconds).limit_denominator(1000)
    top = heat.top_of(shown)
    speed = f"  ({lasts / seconds:.1f}x speed)" if lasts / seconds > 1.05 else ""
    with av.open(os.fspath(path), "w", options={"movflags": "faststart"}) as container:
        stream = container.add_stream("libx264", rate=rate, options={"crf": "20"})
        stream.width, stream.height = (1 + len(shown)) * (wide + 2) - 2, high + 28
        stream.pix_fmt = "yuv420p"
        for f in range(len(frames)):
            panels: dict[str, Pixels] = {f"{times[f]:.1f} s{speed}": frames[f].numpy().transpose(1, 2, 0)}
            for look in shown:
                now = heat.between(look.maps, looked_at, float(times[f]))
                panels[look.name] = heat.laid_over(frames[f], now, top)
            picture = _strip(panels, (wide, high), None if truth is None else truth[f])
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())


def _strip(panels: Mapping[str, Pixels], size: tuple[int, int], truth: Floats | None) -> Pixels:
    """Panels side by side with their names above."""
    from PIL import Image, ImageDraw

    wide, high = size
    picture = Image.new("RGB", (len(panels) * (wide + 2) - 2, high + 28), _GROUND)
    draw = ImageDraw.Draw(picture)
    for k, (name, pixels) in enumerate(panels.items()):
        box = (k * (wide + 2), 28, wide, high)
        _text(draw, (box[0] + 8, 14), name, size=15, anchor="lm")
        _paste(picture, pixels, box)
        if k:
            _marks(draw, box, None, truth)
    return np.asarray(picture)


def _paste(picture: Any, pixels: Pixels, box: tuple[int, int, int, int]) -> None:
    from PIL import Image

    x, y, wide, high = box
    picture.paste(Image.fromarray(pixels).resize((wide, high), Image.Resampling.LANCZOS), (x, y))


def _marks(draw: Any, box: tuple[int, int, int, int], peak: Floats | None, truth: Floats | None) -> None:
    """A ring around the target, a cross where the look is strongest; dark below, to be seen on anything."""
    x, y, wide, high = box
    for ink, width in (((0, 0, 0), 3), ((255, 255, 255), 1)):
        if truth is not None:
            at, r = (x + truth[0] * wide, y + truth[1] * high), 0.095 * wide
            draw.ellipse((at[0] - r, at[1] - r, at[0] + r, at[1] + r), outline=ink, width=width)
        if peak is not None:
            px, py = x + peak[0] * wide, y + peak[1] * high
            draw.line((px - 4, py, px + 4, py), fill=ink, width=width)
            draw.line((px, py - 4, px, py + 4), fill=ink, width=width)


def _label(draw: Any, name: str, y: float) -> None:
    """A row's name, a line for each of its parts."""
    parts = name.split(", ")
    for k, part in enumerate(parts):
        _text(draw, (_LEFT - 10, y + (k - (len(parts) - 1) / 2) * 17), part, anchor="rm")


def _legend(across: int, truth: bool) -> list[tuple[str, int, int]]:
    """(words, x, line) beside the scale of colours; on a narrow sheet they go on in the next line."""
    x, line, placed = _LEFT + _SCALE, 0, []
    for words, wide in _LEGEND.items():
        if words == "target" and not truth:
            continue
        if x + wide > across:
            x, line = _LEFT, line + 1
        placed.append((words, x, line))
        x += wide
    return placed


def _foot(picture: Any, top: float, y: int, legend: Sequence[tuple[str, int, int]]) -> None:
    """The scale of colours, and what the marks mean."""
    from PIL import ImageDraw

    draw, wide = ImageDraw.Draw(picture), 200
    multiples = np.broadcast_to(np.linspace(1, top, wide), (12, wide))
    _paste(picture, heat.colours(heat.share_of(multiples, top)), (_LEFT, y, wide, 12))
    _text(draw, (_LEFT - 10, y + 6), "1x", anchor="rm", ink=_FAINT)
    _text(draw, (_LEFT + wide + 10, y + 6), _times(top), anchor="lm", ink=_FAINT)
    nothing, middle = None, np.full(2, 0.5)
    for words, x, line in legend:
        at = y + 6 + line * _LINE
        if words == "strongest":
            _marks(draw, (x, at - 10, 20, 20), middle, nothing)
        if words == "target":
            _marks(draw, (x - 57, at - 70, 140, 140), nothing, middle)
        beside = {"strongest": 26, "target": 33}.get(words, 0)
        _text(draw, (x + beside, at), words, anchor="lm", ink=_FAINT)


def _text(
    draw: Any, at: tuple[float, float], text: str, *, size: int = 14, ink: Any = _INK, anchor: str = "lm"
) -> None:
    from PIL import ImageFont

    draw.text(at, text, font=ImageFont.load_default(size=size), fill=ink, anchor=anchor)


def _times(multiple: float) -> str:
    return f"{multiple:.0f}x" if multiple >= 9.95 else f"{multiple:.1f}x"  # Pillow's own font has no ×


def _refuse(frames: Tensor, times: Floats, shown: Sequence[Look], truth: Floats | None) -> None:
    problems = []
    if frames.ndim != 4 or frames.shape[1] != 3 or str(frames.dtype) != "torch.uint8":
        problems.append(f"frames are {frames.dtype} {list(frames.shape)}; expected uint8 [T, 3, H, W]")
    n = len(frames)
    if not n or len(times) != n:
        problems.append(f"{len(times)} times for {n} frames; one for each, at least one")
    problems += [
        f"{look.name!r} looks at {len(look.maps)} frames, and there are {n}"
        for look in shown
        if len(look.maps) != n
    ]
    if truth is not None and truth.shape != (n, 2):
        problems.append(f"truth is {list(truth.shape)}; expected [{n}, 2], the target's (x, y) in 0…1")
    if problems:
        raise UsageError("These looks cannot be drawn:", problems=problems)
