"""What the tests of the stages share: small pictures and clips made on the spot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

Pixels = np.ndarray
MakeClip = Callable[..., Path]


def frame(i: int, height: int = 48, width: int = 64) -> Pixels:
    """A picture whose grey level says which one it is: 8·i, with a bright top left quarter."""
    pixels = np.full((height, width, 3), 8 * i % 256, np.uint8)
    pixels[: height // 2, : width // 2] = 255
    return pixels


@pytest.fixture
def make_clip(tmp_path: Path) -> MakeClip:
    """make_clip("a.mp4", stamps, …): `frame(i)` shown at stamps[i] (in 1/1000 s), H.264 with B-frames."""
    av = pytest.importorskip("av")

    def make(
        name: str = "clip.mp4",
        stamps: Sequence[int] = tuple(range(0, 1200, 40)),
        *,
        codec: str = "libx264",
        options: dict[str, str] | None = None,
        container: dict[str, str] | None = None,
        format: str | None = None,
    ) -> Path:
        from fractions import Fraction

        with av.open(str(tmp_path / name), "w", format=format, options=container or {}) as out:
            stream = out.add_stream(codec, rate=25, options=options or {})
            stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
            stream.codec_context.time_base = Fraction(1, 1000)
            for i, stamp in enumerate(stamps):
                picture = av.VideoFrame.from_ndarray(frame(i), "rgb24")
                picture.pts, picture.time_base = stamp, Fraction(1, 1000)
                out.mux(stream.encode(picture))
            out.mux(stream.encode(None))
        return tmp_path / name

    return make
