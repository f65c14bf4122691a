"""Frozen vision networks of timm, where it is installed (it needs torchvision)."""

from __future__ import annotations

from os import PathLike, fspath
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from frostline.errors import MissingExtra, UsageError
from frostline.stages import hub

Output = Literal["pooled", "tokens", "patches", "cls"]


def timm_model(
    name: str,
    *,
    output: Output = "pooled",
    weights: str | PathLike[str] | None = None,
    pretrained: bool = True,
    dtype: str | torch.dtype | None = None,
    seed: int | None = None,
) -> TimmModel:
    """A frozen network of timm by its name, such as "vit_small_patch16_dinov3.lvd1689m".

    >>> try:
    ...     timm_model("vit_small_patch16_dinov3.lvd1689m", output="everything")
    ... except UsageError as error:
    ...     print(error)
    output is 'everything'; one of 'pooled', 'tokens', 'patches', 'cls'

    output: "pooled" [B, D], what its classifier would get; "tokens" [B, N, D], all features before pooling;
        "patches" without class and register tokens; "cls" [B, D].
    weights: a local .safetensors file, instead of those that timm fetches.
    pretrained: False builds it with random weights of this `seed` (None: 0).
    dtype: of the weights and the result; None is float32.
    """
    if output not in get_args(Output):
        raise UsageError(f"output is {output!r}; one of {', '.join(map(repr, get_args(Output)))}")
    fetches = pretrained and weights is None
    if seed is not None and pretrained:
        raise UsageError(f"seed is {seed}, but the weights are not random; it goes with pretrained=False")
    if weights is not None and Path(weights).suffix != ".safetensors":
        raise UsageError(
            f"weights is {fspath(weights)!r}; a .safetensors file (pickled ones are never opened)"
        )
    try:
        import timm
    except ImportError as e:
        raise MissingExtra.needed("Loading a timm model", package="timm", extra="timm") from e
    kind = hub.dtype_named(dtype)
    _refuse_unknown(timm, name, fetches)
    with hub.seeded(seed):
        network = timm.create_model(name, pretrained=fetches, num_classes=0)
    if weights is not None:
        _load(network, Path(weights))
    return TimmModel(network.to(kind), output=output)


class TimmModel(nn.Module):
    """A timm network that takes [B, 3, H, W] or [B, T, 3, H, W] and returns one plain tensor."""

    network: Any

    def __init__(self, network: Any, *, output: Output) -> None:
        super().__init__()
        self.output = output
        self.network = network
        hub.frozen(self)
        if output == "cls" and self._prefix() < 1:
            raise UsageError(
                f"output='cls' cannot be had: {type(network).__name__} has no class token. "
                "Use output='pooled'."
            )

    def train(self, mode: bool = True) -> TimmModel:
        """Stays in eval mode: in train mode networks drop out, and DINOv3 draws its positions at random."""
        return super().train(False)

    def _prefix(self) -> int:
        return int(getattr(self.network, "num_prefix_tokens", 0))

    def forward(self, pixels: Tensor) -> Tensor:
        if pixels.dim() not in (4, 5) or not pixels.is_floating_point():
            raise UsageError(
                f"A timm model takes floats [B, 3, H, W] or [B, T, 3, H, W], and got {list(pixels.shape)} "
                f"of {pixels.dtype}. Put stages.Preprocess before it."
            )
        flat = pixels.flatten(0, -4).to(next(self.network.parameters()).dtype)
        found = self._features(flat)
        return found.reshape(*pixels.shape[:-3], *found.shape[1:])

    def _features(self, flat: Tensor) -> Tensor:
        found: Tensor = self.network.forward_features(flat)
        if self.output == "pooled":
            pooled: Tensor = self.network.forward_head(found, pre_logits=True)
            return pooled
        if self.output == "cls":
            return found[:, 0]
        if (
            found.dim() == 4
        ):  # [B, h, w, D] of hierarchical transformers, [B, D, h, w] of convolutional networks
            last = getattr(self.network, "output_fmt", "NCHW") == "NHWC"
            return found.flatten(1, 2) if last else found.flatten(2).transpose(1, 2)
        return found[:, self._prefix() :] if self.output == "patches" else found


def _refuse_unknown(timm: Any, name: str, fetches: bool) -> None:
    known = timm.list_models(pretrained=fetches)
    base = name.split(".")[0]
    if (
        name in known
        or name in timm.list_models(base, pretrained=fetches)
        or name.startswith(("hf-hub:", "hf_hub:"))
    ):
        return
    if (
        fetches
        and base in timm.list_models()
        and name == base
        and timm.list_models(f"{base}.*", pretrained=True)
    ):
        return  # a bare name takes its default weights
    has = "with pretrained weights " if fetches else ""
    raise UsageError(f"timm has no model {has}named {name!r}.{hub.close_to(name, known)}")


def _load(network: nn.Module, path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found = load_file(path)
    except (OSError, SafetensorError) as e:
        raise UsageError(f"Cannot read weights from {str(path)!r}: {e}") from e
    own = set(network.state_dict())
    problems = [f"{key} is missing" for key in sorted(own - set(found))]
    heads = ("head.", "fc.", "classifier.")  # num_classes=0 leaves the classifier out
    problems += [f"{key} is unknown" for key in sorted(set(found) - own) if not key.startswith(heads)]
    if problems:
        raise UsageError(
            f"The weights in {str(path)!r} do not fit {type(network).__name__}:", problems=problems[:10]
        )
    network.load_state_dict({key: found[key] for key in own})
