"""Frozen vision networks of transformers: pixels in, plain tensors out.

Weights come from safetensors files only; a model whose weights are pickled (`pytorch_model.bin`) is refused,
and so is one of whose weights some are missing, which transformers would fill with random numbers. Shapes: B
batch, T frames, N tokens, D width.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from os import PathLike, fspath
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from frostline.errors import UsageError
from frostline.stages import hub

Output = Literal["tokens", "patches", "cls", "pooled"]


def vision_tower(
    name_or_folder: str | PathLike[str] | None = None,
    *,
    output: Output = "tokens",
    layer: int = -1,
    dtype: str | torch.dtype | None = None,
    config: Mapping[str, Any] | None = None,
    seed: int | None = None,
) -> VisionTower:
    """A frozen vision network by its name on the hub, or from a folder made by `save_pretrained`.

    >>> tiny = {"model_type": "dinov2", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> tower = vision_tower(config=tiny, output="patches", seed=0)
    >>> tower(torch.zeros(2, 3, 28, 28)).shape
    torch.Size([2, 4, 16])

    For a stage, `fl.lazy(stages.vision_tower, "facebook/dinov2-small", output="patches")`. Of a model with
    text and vision (CLIP, SigLIP) only the vision part is loaded.

    output: "tokens" [B, N, D], all of them; "patches" [B, N, D] without class and register tokens; "cls" [B,
    D],
        the class token; "pooled" [B, D], what the network itself makes of a picture.
    layer: -1 is the network's result, with its last norm where it has one; -2 and so on, or k for "after
    block k",
        are hidden states without a norm.
    dtype: of the weights and the result; None is float32.
    config: instead of a name: a network of this configuration with random weights of this `seed` (None: 0).
    """
    hub.one_source("vision_tower(...)", name_or_folder, config, seed)
    if output not in get_args(Output):
        raise UsageError(f"output is {output!r}; one of {', '.join(map(repr, get_args(Output)))}")
    if output == "pooled" and layer != -1:
        raise UsageError(
            f"output='pooled' with layer={layer}: only the result of the whole network is pooled"
        )
    hub.library("transformers", "Loading a vision tower")
    kind = hub.dtype_named(dtype)
    if config is not None:
        network = _built(config, seed)
    else:
        network = _loaded(str(fspath(name_or_folder or "")), pooled=output == "pooled")
    return VisionTower(network.to(kind), output=output, layer=layer)


class VisionTower(nn.Module):
    """A vision network that takes [B, 3, H, W] or [B, T, 3, H, W] and returns one plain tensor.

    >>> tiny = {"model_type": "vit", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    >>> vision_tower(config=tiny, output="cls")(torch.zeros(2, 5, 3, 224, 224)).shape
    torch.Size([2, 5, 8])

    Pictures of another size than the network was made for get interpolated position embeddings.
    """

    network: Any

    def __init__(self, network: Any, *, output: Output, layer: int) -> None:
        super().__init__()
        self.output, self.layer = output, layer
        blocks = getattr(network.config, "num_hidden_layers", None)
        if layer != -1 and blocks is not None and not -blocks - 1 <= layer <= blocks:
            raise UsageError(
                f"layer is {layer}; this {type(network).__name__} has {blocks} blocks: "
                f"{-blocks - 1} … {blocks}"
            )
        accepted = inspect.signature(network.forward).parameters
        self._interpolates = "interpolate_pos_encoding" in accepted
        self.network = network
        hub.frozen(self)

    def train(self, mode: bool = True) -> VisionTower:
        """Stays in eval mode: in train mode DINOv3 draws its positions at random, and others drop out."""
        return super().train(False)

    def forward(self, pixels: Tensor) -> Tensor:
        if pixels.dim() not in (4, 5) or not pixels.is_floating_point():
            raise UsageError(
                f"A vision tower takes floats [B, 3, H, W] or [B, T, 3, H, W], and got "
                f"{list(pixels.shape)} of {pixels.dtype}. Put stages.Preprocess before it."
            )
        flat = pixels.flatten(0, -4).to(self.network.dtype)
        found = self._wanted(self._called(flat), flat)
        return found.reshape(*pixels.shape[:-3], *found.shape[1:])

    def _called(self, flat: Tensor) -> Any:
        options: dict[str, bool] = {}
        if self.layer != -1:
            options["output_hidden_states"] = True
        if self._interpolates and list(flat.shape[-2:]) != _pair(
            getattr(self.network.config, "image_size", None)
        ):
            options["interpolate_pos_encoding"] = True
        return self.network(pixel_values=flat, **options)

    def _wanted(self, result: Any, flat: Tensor) -> Tensor:
        if self.output == "pooled":
            if result.get("pooler_output") is None:
                raise self._has_no("pooled output")
            pooled: Tensor = result.pooler_output
            return pooled.flatten(1)
        hidden: Tensor = result.last_hidden_state if self.layer == -1 else result.hidden_states[self.layer]
        if hidden.dim() == 4:  # a convolutional network: [B, D, h, w]
            if self.output == "cls":
                raise self._has_no("class token")
            return hidden.flatten(2).transpose(1, 2)
        if self.output == "tokens":
            return hidden
        before = hidden.shape[1] - self._patches(flat)
        if self.output == "cls":
            if before < 1:
                raise self._has_no("class token")
            return hidden[:, 0]
        if before < 0:
            raise self._has_no("token for each patch")
        return hidden[:, before:]

    def _patches(self, flat: Tensor) -> int:
        """How many patches a picture has; class and register tokens come before them."""
        sides = _pair(getattr(self.network.config, "patch_size", None))
        if sides is None:
            raise self._has_no("patch_size in its configuration")
        return int((flat.shape[-2] // sides[0]) * (flat.shape[-1] // sides[1]))

    def _has_no(self, what: str) -> UsageError:
        return UsageError(
            f"output={self.output!r} cannot be had: {type(self.network).__name__} has no {what}. "
            "Choose another output, such as 'tokens'."
        )


def _pair(size: Any) -> list[int] | None:
    if size is None:
        return None
    return [int(size)] * 2 if isinstance(size, int) else [int(s) for s in size]


def _built(config: Mapping[str, Any], seed: int | None) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModel

    kind = str(config.get("model_type"))
    if kind not in CONFIG_MAPPING:
        raise UsageError(
            f"config has model_type {kind!r}, which transformers does not know."
            f"{hub.close_to(kind, CONFIG_MAPPING.keys())}"
        )
    try:
        whole = AutoConfig.for_model(**config)
        with hub.seeded(seed):
            return AutoModel.from_config(_vision_part(whole))
    except (TypeError, ValueError, KeyError) as e:
        raise UsageError(f"transformers cannot build a {kind!r} from this config: {e}") from e


def _loaded(name: str, *, pooled: bool) -> Any:
    from transformers import MODEL_MAPPING, AutoConfig

    place = hub.place(name)
    hub.refuse_pickled(place)
    try:
        config = _vision_part(AutoConfig.from_pretrained(place, trust_remote_code=False))
        if type(config) not in MODEL_MAPPING:
            raise UsageError(
                f"{name!r} is a {config.model_type!r}, which transformers has no vision network for."
            )
        with hub.quiet():
            network, info = MODEL_MAPPING[type(config)].from_pretrained(
                place, config=config, use_safetensors=True, dtype=torch.float32, output_loading_info=True
            )
    except (OSError, ValueError) as e:
        if isinstance(e, UsageError):
            raise
        raise hub.not_found(name, "the vision tower", e) from e
    _refuse_missing(name, info, pooled=pooled)
    return network


def _vision_part(config: Any) -> Any:
    return getattr(config, "vision_config", config)


def _refuse_missing(name: str, info: Mapping[str, Any], *, pooled: bool) -> None:
    """Weights that the files lack were filled at random; only a pooler that nobody reads may be."""
    lacking = sorted(map(str, [*info.get("missing_keys", ()), *info.get("mismatched_keys", ())]))
    needed = [key for key in lacking if pooled or not key.startswith("pooler.")]
    if needed:
        raise UsageError(
            f"The weights of {name!r} are not all there, and transformers would make up the rest at random"
            f"{'; output=pooled needs its pooler' if pooled else ''}:",
            problems=[*needed[:10], *([f"and {len(needed) - 10} more"] if len(needed) > 10 else [])],
        )
