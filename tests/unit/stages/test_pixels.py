"""`Preprocess` beside Pillow and beside the processors of transformers, and the tolerance that it states."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from frostline.errors import UsageError
from frostline.stages import Preprocess, geometry

pillow = pytest.importorskip("PIL.Image")

IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
PROCESSORS: dict[str, tuple[str, dict[str, object]]] = {
    "clip": ("CLIPImageProcessorPil", {}),
    "siglip": ("SiglipImageProcessorPil", {}),
    "vit": ("ViTImageProcessorPil", {}),
    "dinov2": (
        "BitImageProcessorPil",
        {"size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 224}, **IMAGENET},
    ),
    "lanczos": ("CLIPImageProcessorPil", {"resample": 1}),
    "nearest": ("ViTImageProcessorPil", {"resample": 0}),
    "crop beyond": (
        "CLIPImageProcessorPil",
        {"size": {"shortest_edge": 60}, "crop_size": {"height": 71, "width": 81}},
    ),
    "no resize": ("CLIPImageProcessorPil", {"do_resize": False, "crop_size": {"height": 64, "width": 80}}),
    "plain": ("ViTImageProcessorPil", {"do_normalize": False, "do_rescale": False}),
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


def smooth(height: int, width: int, seed: int = 0) -> np.ndarray:
    """A picture with edges and slopes, as photographs have."""
    rng = np.random.default_rng(seed)
    coarse = pillow.fromarray(rng.integers(0, 256, (height // 12 + 2, width // 12 + 2, 3), dtype=np.uint8))
    return np.asarray(coarse.resize((width, height), pillow.Resampling.BICUBIC))


def noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (height, width, 3), dtype=np.uint8)


def batch(*pictures: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).contiguous()


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize(
    "picture", [smooth(480, 640), smooth(333, 250), noise(301, 457), noise(90, 100), smooth(224, 224)]
)
def test_it_equals_the_processor_within_the_stated_tolerance(name: str, picture: np.ndarray) -> None:
    transformers = pytest.importorskip("transformers")
    kind, options = PROCESSORS[name]
    processor = getattr(transformers, kind)(**options)
    want = processor(pillow.fromarray(picture), return_tensors="pt")["pixel_values"].float()
    ours = Preprocess.of(processor)
    got = ours(batch(picture))
    assert got.shape == want.shape
    apart = (got - want).abs()
    beside = apart > 1e-6 * max(1.0, float(want.abs().max()))
    if not shrinks_in_height(picture, ours):
        assert not beside.any()
    assert beside.float().mean() < 0.1
    assert ((apart * ours.std / ours.rescale)[beside] < 2.01).all()  # in steps of 8 bits


def shrinks_in_height(picture: np.ndarray, ours: Preprocess) -> bool:
    """More than in width, which Pillow 13 then begins with; one number as size keeps proportions."""
    if ours.size is None or ours.interpolation == "nearest":
        return False
    height, width = geometry.sides(ours.size)
    return bool(isinstance(ours.size, tuple) and picture.shape[0] / height > picture.shape[1] / width)


def test_rounding_as_pillow_does_is_what_makes_it_close() -> None:
    picture = smooth(480, 640)
    want = np.asarray(pillow.fromarray(picture).resize((224, 224), pillow.Resampling.BICUBIC), np.float32)
    want = torch.from_numpy(want).permute(2, 0, 1)
    close = {}
    for rounding in (True, False):
        out = Preprocess((224, 224), None, None, rescale=1.0, rounding=rounding)(batch(picture))[0]
        close[rounding] = float(((out - want).abs() < 1e-3).float().mean())
    assert close[True] == 1.0
    assert close[False] < 0.5


def test_dinov3_is_not_rounded() -> None:
    config = {"image_processor_type": "DINOv3ViTImageProcessorFast", "size": {"height": 64, "width": 64}}
    ours = Preprocess.of({**config, **IMAGENET, "resample": 2, "rescale_factor": 1 / 255})
    assert not ours.rounding
    picture = batch(smooth(100, 130))
    scaled = torch.nn.functional.interpolate(
        picture.float() / 255, (64, 64), mode="bilinear", antialias=True, align_corners=False
    )
    want = (scaled - torch.tensor(IMAGENET["image_mean"]).view(3, 1, 1)) / torch.tensor(
        IMAGENET["image_std"]
    ).view(3, 1, 1)
    assert (ours(picture) - want).abs().max() < 1e-5


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "lanczos"])
def test_a_picture_does_not_depend_on_its_batch_mates(interpolation: str) -> None:
    ours = Preprocess((40, 50), [0.5] * 3, [0.5] * 3, interpolation=interpolation)  # type: ignore[arg-type]
    pictures = batch(*(smooth(90, 70, seed) for seed in range(6)))
    together = ours(pictures)
    assert all(torch.equal(ours(pictures[i : i + 1])[0], together[i]) for i in range(6))
    clips = ours(pictures.unflatten(0, (2, 3)))
    assert clips.shape == (2, 3, 3, 40, 50)
    assert torch.equal(clips.flatten(0, 1), together)


def test_it_moves_and_holds_nothing_to_train() -> None:
    ours = Preprocess(8, [0.5] * 3, [0.5] * 3)
    assert not list(ours.parameters())
    assert sorted(ours.state_dict()) == ["mean", "std"]
    assert ours(batch(noise(9, 9))).dtype == torch.float32


def test_the_input_is_left_alone() -> None:
    pictures = batch(noise(20, 20))
    before = pictures.clone()
    for size in (None, 20, 10):
        Preprocess(size, None, None, rescale=1.0, crop=5)(pictures)
        assert torch.equal(pictures, before)


def test_wrong_tensors_are_refused() -> None:
    ours = Preprocess(8, [0.5] * 3, [0.5] * 3)
    with pytest.raises(UsageError, match=r"\[3, 8, 8\].*\n.*expected \[B, C, H, W\]"):
        ours(torch.zeros(3, 8, 8, dtype=torch.uint8))
    with pytest.raises(UsageError) as error:
        ours(torch.zeros(2, 4, 8, 8))
    assert len(error.value.problems) == 2


def test_all_wrong_parameters_at_once() -> None:
    with pytest.raises(UsageError) as error:
        Preprocess(0, [0.5], [0.0, 1.0], interpolation="area", crop=-3, rescale=0.0)  # type: ignore[arg-type]
    assert len(error.value.problems) == 6
