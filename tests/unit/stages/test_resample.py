"""The resize beside Pillow's own: the same bits, for every filter, up and down, and at the borders."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from frostline.stages.resample import resized

pillow = pytest.importorskip("PIL.Image")


@pytest.mark.parametrize("by", ["nearest", "bilinear", "bicubic", "lanczos"])
def test_the_bits_are_pillows(by: str) -> None:
    rng = np.random.default_rng(0)
    for _ in range(25):
        height, width, to_height, to_width = (int(v) for v in rng.integers(1, 130, 4))
        pixels = rng.choice([0, 1, 127, 128, 254, 255], (height, width, 3)).astype(np.uint8)
        want = np.asarray(
            pillow.fromarray(pixels).resize((to_width, to_height), pillow.Resampling[by.upper()])
        )
        x = torch.from_numpy(pixels).permute(2, 0, 1)
        got = resized(x, (to_height, to_width), by=by).permute(1, 2, 0)
        if not np.array_equal(got.numpy(), want):
            # Pillow 13 begins with the columns where the height shrinks more.
            assert to_height < height
            turned = resized(x.transpose(1, 2), (to_width, to_height), by=by).permute(2, 1, 0)
            assert np.array_equal(turned.numpy(), want), (height, width, to_height, to_width)


@pytest.mark.parametrize("by", ["bilinear", "bicubic"])
def test_floats_are_torchs_antialiased_interpolation(by: str) -> None:
    pixels = torch.randint(
        0, 256, (2, 3, 50, 70), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    want = torch.nn.functional.interpolate(pixels.float(), (20, 90), mode=by, antialias=True)
    assert (resized(pixels, (20, 90), by=by, exact=False) - want).abs().max() < 1e-3


def test_without_antialias_a_shrunk_picture_takes_fewer_neighbours() -> None:
    line = torch.zeros(1, 1, 9, dtype=torch.uint8)
    line[..., 0] = 255
    assert resized(line, (1, 3), by="bilinear", antialias=False)[0, 0, 0] == 0
    assert resized(line, (1, 3), by="bilinear")[0, 0, 0] > 0


@pytest.mark.gpu
def test_a_device_gives_the_same_bits() -> None:
    pixels = torch.randint(
        0, 256, (4, 3, 133, 99), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    for by in ("nearest", "bilinear", "bicubic", "lanczos"):
        assert torch.equal(resized(pixels.cuda(), (64, 70), by=by).cpu(), resized(pixels, (64, 70), by=by))
