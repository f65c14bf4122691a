"""Where the model looks: one query a frame is answered by that frame's patches.

Shapes: B clips, T frames, N tokens of a frame (prefix tokens, then patches row by row), D encoder width,
Q query width, C width of the position code, H heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from frostline.errors import UsageError
from frostline_recipes.foveated.encoder import Encoder, Turn, projections
from frostline_recipes.foveated.passes import of


@dataclass(frozen=True, eq=False)
class Normed:
    """What a shallow gaze keeps of a batch: its normalised features [B, T, N, D]."""

    features: Tensor

    def at(self, t: int) -> Normed:
        """Frame t alone."""
        return Normed(self.features[:, t : t + 1])

    def clips(self, n: int) -> Normed:
        """The first n clips."""
        return Normed(self.features[:n])

    @property
    def size(self) -> tuple[int, int]:
        """Clips and frames."""
        return self.features.shape[0], self.features.shape[1]


@dataclass(frozen=True, eq=False)
class Layers:
    """What a deep gaze keeps of a batch: keys and values [B, T, H, N, d] of each layer of the encoder."""

    kept: list[tuple[Tensor, Tensor]]

    def at(self, t: int) -> Layers:
        """Frame t alone."""
        return Layers([(k[:, t : t + 1], v[:, t : t + 1]) for k, v in self.kept])

    def clips(self, n: int) -> Layers:
        """The first n clips."""
        return Layers([(k[:n], v[:n]) for k, v in self.kept])

    @property
    def size(self) -> tuple[int, int]:
        """Clips and frames."""
        return self.kept[0][0].shape[0], self.kept[0][0].shape[1]


class Shallow(nn.Module):
    """Multi-head attention of one query a frame over the encoder's last features.

    >>> gaze = Shallow(8, query_width=8, heads=2, grid=(3, 4), prefix=1)
    >>> seen = gaze.prepare({"features": torch.randn(2, 5, 13, 8)})
    >>> extracted, attention = gaze(torch.randn(2, 5, 8), seen)
    >>> extracted.shape, attention.shape
    (torch.Size([2, 5, 8]), torch.Size([2, 5, 2, 13]))

    Keys and values are `key(LN(x)) + where_k(code)` and `value(LN(x)) + where_v(code)`, with a fixed Fourier
    code of each patch's centre: a query can name a place, and what it extracts says where that was, whatever
    the encoder stores. They are never made: with one query a frame, (key x)·q = x·(keyᵀ q) and Σ a·(value x)
    = value(Σ a·x), which spares the [B, T, N, D] projections, their gradients and nearly all the arithmetic.
    The norm's gain is part of `key` and `value`, so frozen features need no gradient at all.
    """

    code: Tensor

    def __init__(
        self,
        width: int,
        *,
        query_width: int | None = None,
        heads: int = 6,
        grid: tuple[int, int],
        prefix: int = 1,
        covers: float = 1.0,
        encoder: nn.Module | None = None,
    ) -> None:
        """
        width: of the features. grid: patches down and across. prefix: tokens before the patches (class,
        registers). covers: the share of a frame's side that the patches lie on, for pictures. encoder: makes
        features [B, T, N, D] from frames, where the batch has these instead.
        """
        super().__init__()
        _refuse_bad(width, heads, grid, prefix)
        self.width, self.query_width, self.heads = width, query_width or width, heads
        self.grid, self.prefix, self.tokens = grid, prefix, prefix + grid[0] * grid[1]
        self.covers, self.encoder = covers, encoder
        self.register_buffer("code", position_code(grid, prefix), persistent=False)
        places = self.code.shape[1]
        self.query = _linear(self.query_width, width)  # no bias: it would look the same way for every query
        self.key = _linear(width, width)  # no bias: it shifts all scores of a query alike
        self.value = _linear(width, width, bias=True)
        self.where_k = _linear(places, width, gain=math.sqrt(2))  # the code's squares add up to C / 2
        self.where_v = _linear(places, width, gain=math.sqrt(2))

    def prepare(self, batch: Mapping[str, Any]) -> Normed:
        """Once a batch, for all passes."""
        features = of(batch, "features") if self.encoder is None else self.encoder(of(batch, "frames"))
        _refuse_other(features, self.tokens, self.width, self.prefix, self.grid)
        kept = _half(features, self.query.weight.dtype)
        with torch.autocast(features.device.type, enabled=False):  # it would make a copy in fp32 of them all
            normed = F.layer_norm(features.to(torch.promote_types(features.dtype, kept)), (self.width,))
        return Normed(normed.to(kept))

    def forward(self, query: Tensor, seen: Normed) -> tuple[Tensor, Tensor]:
        """query [B, T, Q] → what was extracted [B, T, D], and attention [B, T, H, N] in fp32."""
        x_BTND = seen.features
        q_BTHd = self.query(query).unflatten(-1, (self.heads, -1))
        onto_BTHD = torch.einsum("bthd,hdi->bthi", q_BTHd, self._split(self.key))
        onto_BTHC = torch.einsum("bthd,hdi->bthi", q_BTHd, self._split(self.where_k))
        code_NC = self.code.to(x_BTND.dtype)
        what_BTHN = onto_BTHD.to(x_BTND.dtype) @ x_BTND.transpose(-1, -2)
        where_BTHN = onto_BTHC.to(x_BTND.dtype) @ code_NC.T
        attention = ((what_BTHN.float() + where_BTHN.float()) / math.sqrt(q_BTHd.shape[-1])).softmax(-1)
        weights = attention.to(x_BTND.dtype)
        what = torch.einsum("bthi,hdi->bthd", weights @ x_BTND, self._split(self.value))
        place = torch.einsum("bthi,hdi->bthd", weights @ code_NC, self._split(self.where_v))
        return (what + place).flatten(-2) + self.value.bias, attention

    def _split(self, linear: nn.Linear) -> Tensor:
        """Its weight by heads, [H, D / H, in]."""
        return linear.weight.view(self.heads, -1, linear.in_features)


class Deep(nn.Module):
    """The query goes through every layer of the encoder as a token of its own that the patches never see.

    >>> from frostline import stages
    >>> tiny = {"model_type": "dinov2", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    >>> encoder = Encoder(stages.vision_tower(config=tiny), stages.Preprocess(None, (0.5,) * 3, (0.2,) * 3))
    >>> gaze = Deep(encoder, grid=(2, 2))
    >>> seen = gaze.prepare({"frames": torch.zeros(1, 3, 3, 28, 28, dtype=torch.uint8)})
    >>> extracted, attention = gaze(torch.randn(1, 3, 8), seen)
    >>> extracted.shape, attention.shape
    (torch.Size([1, 3, 8]), torch.Size([1, 3, 2, 5]))

    So the patches are the same for all queries: the encoder runs once a batch, and each layer's keys and
    values of it serve all passes. The attention told of is the last layer's, and what it gathers is what is
    extracted: not the token itself, which is mostly the query, so that the language model would be told what
    it asked whatever was looked at.
    """

    def __init__(
        self, encoder: Encoder, *, grid: tuple[int, int], prefix: int = 1, covers: float = 1.0
    ) -> None:
        super().__init__()
        config = encoder.network.config
        _refuse_bad(config.hidden_size, config.num_attention_heads, grid, prefix)
        self.encoder, self.covers, self.heads = encoder, covers, int(config.num_attention_heads)
        self.width = self.query_width = int(config.hidden_size)
        self.grid, self.prefix, self.tokens = grid, prefix, prefix + grid[0] * grid[1]
        last = encoder.blocks[-1]
        after = (projections(last)[3], last.layer_scale1, last.norm2, last.mlp, last.layer_scale2)
        for part in (*after, encoder.last_norm):  # nothing that is extracted goes through them
            part.requires_grad_(False)

    def prepare(self, batch: Mapping[str, Any]) -> Layers:
        """Once a batch, for all passes."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.encoder.trainable):
            states, turn = self.encoder.layers(of(batch, "frames"))
            _refuse_other(states[0], self.tokens, self.width, self.prefix, self.grid)
            pairs = zip(self.encoder.blocks, states, strict=True)
            return Layers([self._keys(layer, state, turn) for layer, state in pairs])

    def _keys(self, layer: Any, state: Tensor, turn: Turn | None) -> tuple[Tensor, Tensor]:
        _, key, value, _ = projections(layer)
        normed = layer.norm1(state)
        keys, values = (p(normed).unflatten(-1, (self.heads, -1)).transpose(-2, -3) for p in (key, value))
        return (keys if turn is None else turn(keys)), values

    def forward(self, query: Tensor, seen: Layers) -> tuple[Tensor, Tensor]:
        """query [B, T, D] → what its last look gathered [B, T, D], and attention [B, T, H, N] in fp32."""
        x_BTD = query
        *before, (last, (k, v)) = zip(self.encoder.blocks, seen.kept, strict=True)
        for layer, (keys, values) in before:
            answer = F.scaled_dot_product_attention(self._asked(layer, x_BTD), keys, values)
            x_BTD = x_BTD + layer.layer_scale1(projections(layer)[3](answer.flatten(-3)))
            x_BTD = x_BTD + layer.layer_scale2(layer.mlp(layer.norm2(x_BTD)))
        q = self._asked(last, x_BTD)
        attention = ((q @ k.transpose(-1, -2)).float() / math.sqrt(q.shape[-1])).softmax(-1)
        return (attention.to(v.dtype) @ v).flatten(-3), attention.squeeze(-2)

    def _asked(self, layer: Any, x_BTD: Tensor) -> Tensor:
        """Of one place: [B, T, H, 1, d]."""
        asked: Any = projections(layer)[0](layer.norm1(x_BTD))
        split: Tensor = asked.unflatten(-1, (self.heads, 1, -1))
        return split


def position_code(grid: tuple[int, int], prefix: int) -> Tensor:
    """Sines and cosines of each patch's centre [N, C], from once over the picture to two patches a period.

    >>> position_code((2, 2), prefix=1).shape
    torch.Size([5, 8])
    """
    octaves = max(1, math.ceil(math.log2(max(grid)))) + 1
    sides = [(torch.arange(n, dtype=torch.float32) + 0.5) / n for n in grid]
    centres = torch.cartesian_prod(*sides)  # [patches, 2], row by row
    angles = centres[:, :, None] * math.pi * 2.0 ** torch.arange(octaves)
    code = torch.cat([angles.sin(), angles.cos()], -1).flatten(1)
    return F.pad(code, (0, 0, prefix, 0))


def _linear(inside: int, outside: int, *, bias: bool = False, gain: float = 1.0) -> nn.Linear:
    """Variance in = variance out. torch's own start makes scores a third as large: nearly uniform."""
    linear = nn.Linear(inside, outside, bias=bias)
    nn.init.normal_(linear.weight, std=gain / math.sqrt(inside))
    if bias:
        nn.init.zeros_(linear.bias)
    return linear


def _half(x: Tensor, without: torch.dtype) -> torch.dtype:
    """What autocast multiplies in; cast once here, or it would cast anew for each product of each pass."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else without


def _refuse_bad(width: int, heads: int, grid: tuple[int, int], prefix: int) -> None:
    problems = []
    if heads < 1 or width < 1 or width % max(heads, 1):
        problems.append(f"width is {width} and heads {heads}; a width that the heads divide")
    if min(grid) < 1:
        problems.append(f"grid is {grid}; patches down and across, each at least 1")
    if prefix < 0:
        problems.append(f"prefix is {prefix}; how many tokens come before the patches, at least 0")
    if problems:
        raise UsageError("A gaze cannot be made:", problems=problems)


def _refuse_other(features: Tensor, tokens: int, width: int, prefix: int, grid: tuple[int, int]) -> None:
    if features.dim() != 4 or features.shape[-2:] != (tokens, width):
        raise UsageError(
            f"Features {list(features.shape)} do not fit this gaze: it wants [B, T, {tokens}, {width}], "
            f"{prefix} tokens and {grid[0]} x {grid[1]} patches a frame. They come from another encoder, or "
            "from frames of another size: run frostline freeze again, or name the encoder they are from."
        )
