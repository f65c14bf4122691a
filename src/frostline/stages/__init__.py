"""Ready-made stages: images, video, pixels on the device, frozen networks, tokens, latents.

    from frostline import stages

    fl.Stage("image", stages.Image(size=256, fit="cover"), reads="path")
    fl.Stage("pixels", fl.lazy(stages.Preprocess.of, "facebook/dinov2-small"), reads="image", on="device")
    fl.Stage("features", fl.lazy(stages.vision_tower, "facebook/dinov2-small"), reads="pixels", on="device")

Thin on purpose: Pillow, PyAV, transformers and diffusers do the work, each in an extra of its own. What runs
on the CPU is a frozen dataclass: its fields are all there is to it, so threads may share it and a worker
process may be sent it. Networks come from loader functions, for `fl.lazy`. Nothing here is imported before it
is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from frostline.stages.images import Image as Image
    from frostline.stages.latents import autoencoder as autoencoder
    from frostline.stages.packets import open_clip as open_clip
    from frostline.stages.pixels import Preprocess as Preprocess
    from frostline.stages.timm import timm_model as timm_model
    from frostline.stages.tokens import Tokenizer as Tokenizer
    from frostline.stages.towers import vision_tower as vision_tower
    from frostline.stages.video import Video as Video

_HOMES = {
    "Image": "frostline.stages.images",
    "Preprocess": "frostline.stages.pixels",
    "Tokenizer": "frostline.stages.tokens",
    "Video": "frostline.stages.video",
    "autoencoder": "frostline.stages.latents",
    "open_clip": "frostline.stages.packets",
    "timm_model": "frostline.stages.timm",
    "vision_tower": "frostline.stages.towers",
}
"""Where each name lives; the `TYPE_CHECKING` imports above say the same to type checkers."""

__all__ = [  # written out: type checkers read no expressions here
    "Image",
    "Preprocess",
    "Tokenizer",
    "Video",
    "autoencoder",
    "open_clip",
    "timm_model",
    "vision_tower",
]


if not TYPE_CHECKING:  # seen by type checkers, it would make every misspelt name an `object`

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(
                f"module 'frostline.stages' has no attribute {name!r}; it has {', '.join(__all__)}"
            )
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value  # the next look-up does not come here
        return value


def __dir__() -> list[str]:
    return list(__all__)
