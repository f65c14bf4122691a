"""A vision encoder of transformers inside the model, for frames: all it makes of them, in one run.

Only needed where features cannot be stored: the encoder trains, or queries go through its layers. Shapes: B
clips, T frames, N tokens, D width, d width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from frostline.errors import UsageError


@dataclass(frozen=True, eq=False)
class Turn:
    """DINOv3's rotary positions, of the patches alone: what comes before them stays as it is."""

    cos: Tensor
    sin: Tensor
    """[patches, d]"""

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., N, d]"""
        before = x.shape[-2] - self.cos.shape[-2]
        prefix, patches = x[..., :before, :], x[..., before:, :]
        half = patches.shape[-1] // 2
        turned = torch.cat([-patches[..., half:], patches[..., :half]], -1)
        return torch.cat([prefix, (patches * self.cos + turned * self.sin).to(x.dtype)], -2)


class Encoder(nn.Module):
    """uint8 frames [B, T, 3, H, W] to features [B, T, N, D], by one run over B·T frames.

    >>> from frostline import stages
    >>> tiny = {"model_type": "dinov2", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    >>> encoder = Encoder(stages.vision_tower(config=tiny), stages.Preprocess(None, (0.5,) * 3, (0.2,) * 3))
    >>> encoder(torch.zeros(2, 3, 3, 28, 28, dtype=torch.uint8)).shape
    torch.Size([2, 3, 5, 8])
    """

    network: Any

    def __init__(self, network: nn.Module, preprocess: nn.Module, *, trainable: bool = False) -> None:
        """network: a DINOv2 or DINOv3 model of transformers, or a tower of stages.vision_tower around one.
        preprocess: what stages.Preprocess does to frames before that network."""
        super().__init__()
        self.network: Any = getattr(network, "network", network)
        self.preprocess, self.trainable = preprocess, trainable
        self.network.requires_grad_(trainable).eval()
        for name, parameter in self.network.named_parameters():
            if name.endswith("mask_token"):  # stands for patches that are hidden, and here none is
                parameter.requires_grad_(False)
        _parts(self.network)  # another kind of network is refused here

    @property
    def blocks(self) -> Any:
        """The layers; looked up, since a module kept twice would be saved twice."""
        return _parts(self.network)[0]

    @property
    def last_norm(self) -> nn.Module:
        return _parts(self.network)[1]

    def train(self, mode: bool = True) -> Encoder:
        """Stays in eval mode, even when its weights train: DINOv3 would draw its positions at random."""
        return super().train(False)

    def forward(self, frames: Tensor) -> Tensor:
        features: Tensor = self._run(frames).last_hidden_state
        return features.view(*frames.shape[:2], *features.shape[1:])

    def layers(self, frames: Tensor) -> tuple[list[Tensor], Turn | None]:
        """What goes into each layer, [B, T, N, D], and how that layer turns its keys, if it does."""
        found = self._run(frames, output_hidden_states=True)
        inputs = found.hidden_states[: len(self.blocks)]
        states = [state.view(*frames.shape[:2], *state.shape[1:]) for state in inputs]
        if not hasattr(self.network, "rope_embeddings"):
            return states, None
        pixels = self.preprocess(frames[:1, :1]).flatten(0, 1)  # its positions depend on the size alone
        return states, Turn(*self.network.rope_embeddings(pixels))

    def _run(self, frames: Tensor, **options: bool) -> Any:
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.trainable):
            return self.network(pixel_values=self.preprocess(frames).flatten(0, 1), **options)


def projections(layer: Any) -> tuple[nn.Module, nn.Module, nn.Module, nn.Module]:
    """A layer's projections to query, key and value, and out again."""
    inner = layer.attention
    if hasattr(inner, "q_proj"):
        return inner.q_proj, inner.k_proj, inner.v_proj, inner.o_proj
    return inner.attention.query, inner.attention.key, inner.attention.value, inner.output.dense


def _parts(network: Any) -> tuple[Any, nn.Module]:
    """The layers and the last norm, wherever this version of transformers keeps them."""
    for owner, norm in (("encoder", "layernorm"), ("model", "norm"), ("", "norm")):
        place: Any = getattr(network, owner, None) if owner else network
        if hasattr(place, "layer") and hasattr(network, norm):
            return place.layer, getattr(network, norm)
    raise UsageError(
        f"A gaze from frames takes DINOv2 or DINOv3 of transformers, and got {type(network).__name__}: "
        "its layers are not where theirs are."
    )
