"""A workload to try things on: pictures made on the spot, a small frozen network, a head to be trained.

frostline show examples/pictures.py
frostline freeze examples/pictures.py n=200
frostline train examples/pictures.py --steps 200
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import frostline as fl
from frostline import stages

TINY = {"model_type": "dinov2", "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3}
"""A DINOv2 in small, with seeded weights; the name of one, or a folder, would load real ones."""


def make_pictures(folder: Path, n: int) -> None:
    """n JPEG files of noise, each its own; what is there already stays."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    for i in range(n):
        place = folder / f"{i:05d}.jpg"
        if not place.exists():
            pixels = torch.rand(12, 16, 3, generator=torch.Generator().manual_seed(i))
            Image.fromarray((255 * pixels).byte().numpy()).resize((320, 240)).save(place)


def brighten(features: Tensor, rng: object) -> Tensor:
    """Runs every epoch, on what the store holds."""
    return features * (1 + 0.1 * rng.standard_normal())  # type: ignore[attr-defined]


def as_it_is(features: Tensor) -> Tensor:
    return features


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["mixed"]).square().mean()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-3)


def workload(*, folder: str = "pictures", n: int = 48, size: int = 56, batch_size: int = 16) -> fl.Workload:
    """Features of small pictures.

    folder: where the pictures are, or are made
    n: how many are made
    size: their side in pixels, a multiple of 14
    batch_size: pictures a training step
    """
    make_pictures(Path(folder), n)
    network = fl.lazy(stages.vision_tower, config=TINY | {"image_size": size}, seed=0, output="cls")
    data = fl.Pipeline(
        fl.Source.files(f"{folder}/*.jpg"),
        fl.Stage("image", stages.Image(size=size), reads="path"),
        fl.Stage("pixels", stages.Preprocess(size, [0.5] * 3, [0.25] * 3), reads="image", on="device"),
        fl.Stage("features", network, reads="pixels", on="device", batch_size=16),
        fl.Stage("mixed", brighten, reads="features", random=True, eval=as_it_is),
    )
    return fl.Workload(
        data, model=fl.lazy(nn.Linear, 48, 8), loss=loss, optimizer=adamw,
        splits={"train": 0.8, "val": 0.1, "test": 0.1}, batch_size=batch_size,
    )  # fmt: skip
