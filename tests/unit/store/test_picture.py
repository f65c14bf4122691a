"""Pictures of rows: what counts as one, the pixels, and a PNG that others can read."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from frostline.store.picture import is_picture, png, render, write_picture


def pixels_of(data: bytes) -> np.ndarray:
    """A reader of its own for 8-bit RGB without filters; checks every chunk's CRC."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    place, packed, head = 8, b"", b""
    while place < len(data):
        (length,) = struct.unpack(">I", data[place : place + 4])
        kind, body = data[place + 4 : place + 8], data[place + 8 : place + 8 + length]
        assert struct.unpack(">I", data[place + 8 + length : place + 12 + length])[0] == zlib.crc32(
            kind + body
        )
        head, packed = (body, packed) if kind == b"IHDR" else (head, packed + body)
        place += 12 + length
    width, height, depth, colour = struct.unpack(">IIBB", head[:10])
    assert (depth, colour) == (8, 2)
    lines = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(height, 1 + 3 * width)
    assert not lines[:, 0].any()
    return lines[:, 1:].reshape(height, width, 3)


@pytest.mark.parametrize(
    ("shape", "dtype", "yes"),
    [
        ((3, 8, 9), "uint8", True),
        ((1, 8, 9), "float32", True),
        ((8, 9, 3), "uint8", True),
        ((5, 3, 8, 9), "bfloat16", True),
        ((5, 8, 9, 3), "float16", True),
        ((24, 325, 384), "bfloat16", False),
        ((3, 8, 9), "int64", False),
        ((8, 9), "uint8", False),
        ((3, 2, 9), "uint8", False),
        ((0, 3, 8, 9), "uint8", False),
        ((3,), "uint8", False),
        ((), "float32", False),
    ],
)
def test_what_is_a_picture(shape, dtype, yes) -> None:
    assert is_picture(shape, dtype) is yes


def test_an_image_keeps_its_pixels_whatever_its_layout(tmp_path: Path) -> None:
    image = torch.randint(0, 256, (3, 5, 7), dtype=torch.uint8)
    want = image.permute(1, 2, 0).numpy()
    assert write_picture(image, tmp_path / "a.png") == (7, 5)
    np.testing.assert_array_equal(pixels_of((tmp_path / "a.png").read_bytes()), want)
    np.testing.assert_array_equal(render(image.permute(1, 2, 0)), want)
    grey = render(image[:1])
    assert (grey == want[:, :, :1]).all()


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-1.0, 1.0), (0.0, 255.0), (-7.0, 12.0)])
def test_floats_are_shown_by_their_range(low, high) -> None:
    image = torch.linspace(low, high, 5 * 7).reshape(1, 5, 7)
    shown = render(image)
    assert (shown.min(), int(np.median(shown)), shown.max()) == (0, 128, 255)


def test_a_dark_image_stays_dark_and_odd_values_do_no_harm() -> None:
    assert render(torch.full((3, 5, 7), 0.1)).max() == 26
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.5] * 4).reshape(1, 4, 4)
    assert render(odd)[0, :, 0].tolist() == [0, 255, 0, 128]
    assert render(torch.full((1, 4, 4), float("nan"))).max() == 0


def test_a_video_is_a_grid_of_at_most_24_frames() -> None:
    video = torch.arange(100, dtype=torch.uint8)[:, None, None, None].expand(100, 3, 8, 8)
    shown = render(video)
    frames = {int(v) for v in np.unique(shown)} - {255}
    assert len(frames) == 24
    assert {0, 99} <= frames
    assert shown.shape == (4 * 10 - 2, 6 * 10 - 2, 3)
    assert render(video[:1]).shape == (8, 8, 3)


def test_huge_pictures_are_thinned_out() -> None:
    assert render(torch.zeros(1, 4, 1).expand(1, 4, 50_000).to(torch.uint8)).shape[1] <= 4096
    assert max(render(torch.zeros(24, 3, 8, 3000, dtype=torch.uint8)).shape) <= 4096


def test_what_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="not a picture"):
        render(torch.zeros(24, 325, 384))


def test_the_smallest_png() -> None:
    assert pixels_of(png(np.full((1, 1, 3), 9, np.uint8))).tolist() == [[[9, 9, 9]]]
