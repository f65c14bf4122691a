"""Latents of diffusers' autoencoders: the mean, scaled, and so the same every time.

Shapes: B batch, T frames, H height, W width, c latent channels, f how much smaller latents are.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from frostline.errors import UsageError
from frostline.stages import hub

KINDS = ("AutoencoderKL", "AutoencoderTiny")


def autoencoder(
    name_or_folder: str | PathLike[str] | None = None,
    *,
    subfolder: str | None = None,
    dtype: str | torch.dtype | None = None,
    config: Mapping[str, Any] | None = None,
    seed: int | None = None,
) -> LatentEncoder:
    """A frozen AutoencoderKL or AutoencoderTiny, by name or folder, as an encoder.

    >>> tiny = {"block_out_channels": [4], "norm_num_groups": 2, "latent_channels": 4, "layers_per_block": 1}
    >>> encoder = autoencoder(config=tiny, seed=0)
    >>> encoder(torch.zeros(2, 3, 16, 16)).shape
    torch.Size([2, 4, 16, 16])

    For a stage, `fl.lazy(stages.autoencoder, "stabilityai/sd-vae-ft-mse")`.

    subfolder: where it lies in a repository of a whole pipeline; "vae" is found without being named.
    dtype: of the weights and the latents; None is float32.
    config: instead of a name: one of this configuration with random weights of this `seed` (None: 0).
    """
    hub.one_source("autoencoder(...)", name_or_folder, config, seed)
    hub.library("diffusers", "Loading an autoencoder")
    kind = hub.dtype_named(dtype)
    if config is not None:
        network = _built(dict(config), seed)
    else:
        network = _loaded(str(fspath(name_or_folder or "")), subfolder)
    nn.Module.to(network, kind)  # the plain one: diffusers' own logs a warning about modules it does not name
    return LatentEncoder(network)


class LatentEncoder(nn.Module):
    """Pictures [B, 3, H, W] or [B, T, 3, H, W] to latents [B, c, H/f, W/f] or [B, T, c, H/f, W/f].

    >>> encoder = autoencoder(config={"_class_name": "AutoencoderTiny"}, seed=0)
    >>> encoder(torch.zeros(1, 2, 3, 32, 32, dtype=torch.uint8)).shape
    torch.Size([1, 2, 4, 4, 4])

    Floats are taken as lying in [-1, 1]; uint8 is brought there. The result is (mean − shift) × scaling
    factor, as the diffusion models that go with the autoencoder expect; `decode` is the way back.
    """

    network: Any

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.scale = float(getattr(network.config, "scaling_factor", None) or 1.0)
        self.shift = float(getattr(network.config, "shift_factor", None) or 0.0)
        self.factor = _factor(network)
        self.network = network
        hub.frozen(self)

    def train(self, mode: bool = True) -> LatentEncoder:
        """Stays in eval mode: it is frozen."""
        return super().train(False)

    def forward(self, images: Tensor) -> Tensor:
        self._refuse_shape(images)
        flat = images.flatten(0, -4)
        if flat.dtype == torch.uint8:
            flat = flat.float() / 127.5 - 1
        result = self.network.encode(flat.to(self.network.dtype))
        # The tiny one has no distribution: what it returns is what the other one has as its scaled mean.
        mean: Tensor = result.latent_dist.mean if hasattr(result, "latent_dist") else result.latents
        return ((mean - self.shift) * self.scale).reshape(*images.shape[:-3], *mean.shape[1:])

    def decode(self, latents: Tensor) -> Tensor:
        """Latents back to pictures in about [-1, 1]: to look at, or to measure what was lost."""
        flat = latents.flatten(0, -4).to(self.network.dtype) / self.scale + self.shift
        pictures: Tensor = self.network.decode(flat).sample
        return pictures.reshape(*latents.shape[:-3], *pictures.shape[1:])

    def _refuse_shape(self, images: Tensor) -> None:
        problems = []
        if images.dim() not in (4, 5):
            problems.append("expected [B, 3, H, W] or [B, T, 3, H, W]")
        elif images.shape[-2] % self.factor or images.shape[-1] % self.factor:
            problems.append(f"height and width must be multiples of {self.factor}; resize or crop before")
        if not images.is_floating_point() and images.dtype != torch.uint8:
            problems.append(f"dtype is {images.dtype}; floats in [-1, 1], or uint8")
        if problems:
            raise UsageError(f"An autoencoder cannot take a tensor {list(images.shape)}:", problems=problems)


def _factor(network: Any) -> int:
    config = network.config
    blocks = getattr(config, "block_out_channels", None) or config.encoder_block_out_channels
    return int(2 ** (len(blocks) - 1))


def _class(config: Mapping[str, Any], what: str) -> Any:
    import diffusers

    kind = str(config.get("_class_name", KINDS[0]))
    if kind not in KINDS:
        raise UsageError(f"{what} is a {kind!r}; known are {' and '.join(KINDS)}.{hub.close_to(kind, KINDS)}")
    return getattr(diffusers, kind)


def _built(config: dict[str, Any], seed: int | None) -> Any:
    made = _class(config, "config")
    unknown = sorted(k for k in config if k not in made._get_init_keys(made) and not k.startswith("_"))
    if unknown:
        raise UsageError(f"config has entries that {made.__name__} does not know:", problems=unknown)
    wide = len(config.get("block_out_channels", (64,)))
    if made.__name__ == KINDS[0]:  # diffusers wants the kinds of blocks named, and refuses one for several
        config.setdefault("down_block_types", ("DownEncoderBlock2D",) * wide)
        config.setdefault("up_block_types", ("UpDecoderBlock2D",) * wide)
    try:
        with hub.seeded(seed):
            return made.from_config(config)
    except (TypeError, ValueError) as e:
        raise UsageError(f"diffusers cannot build a {made.__name__} from this config: {e}") from e


def _loaded(name: str, subfolder: str | None) -> Any:
    if subfolder is None and (Path(name).expanduser() / "vae" / "config.json").is_file():
        subfolder = "vae"
    local = Path(name).expanduser().is_dir()
    place = hub.place(str(Path(name).expanduser() / subfolder) if local and subfolder else name)
    hub.refuse_pickled(place)
    options = {} if local or subfolder is None else {"subfolder": subfolder}
    from diffusers import AutoencoderKL

    try:
        made = _class(AutoencoderKL.load_config(place, **options), repr(name))
        network, info = made.from_pretrained(
            place,
            use_safetensors=True,
            torch_dtype=torch.float32,
            low_cpu_mem_usage=False,  # the other way needs accelerate
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError, RuntimeError) as e:
        if isinstance(e, UsageError):
            raise
        raise hub.not_found(name, "the autoencoder", e) from e
    if info["missing_keys"]:
        raise UsageError(
            f"The weights of {name!r} are not all there, and diffusers would make up the rest at random:",
            problems=sorted(info["missing_keys"])[:10],
        )
    return network
