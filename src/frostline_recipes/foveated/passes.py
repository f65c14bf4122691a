"""What a pass over a clip is to tell, what it told, and how far off it was.

Shapes: B clips, T frames, Q query width, E width of the language model, L places of a caption, C channels and
h x w of the latents.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import frostline as fl
from frostline.errors import UsageError

_NOT_A_TOKEN = -100


@dataclass(frozen=True, eq=False)
class Targets:
    """What a pass is to tell: caption tokens [B, L] and which of them are there, latents [B, T, C, h, w]."""

    tokens: Tensor | None = None
    there: Tensor | None = None
    latents: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Pass:
    """One look at all frames, and what came of it."""

    queries: Tensor
    """[B, T, Q]"""
    extracted: Tensor
    """[B, T, width of the gaze]"""
    attention: Tensor
    """[B, T, heads, N], fp32"""
    hidden: Tensor
    """[B, T, E], the language model's states at the frames"""
    caption_B: Tensor | None = None
    """Cross-entropy of each clip's caption, the mean over its tokens; None where it was not asked for."""
    reconstruct_B: Tensor | None = None
    """Squared error of each clip's next latents."""
    crossed: Tensor | None = None
    """[some clips, T, width of the gaze], what the query of another frame of the clip extracts from each;
    None where there is no other."""

    @property
    def loss_caption(self) -> Tensor | None:
        return None if self.caption_B is None else self.caption_B.mean()

    @property
    def loss_reconstruct(self) -> Tensor | None:
        return None if self.reconstruct_B is None else self.reconstruct_B.mean()

    @property
    def judged_B(self) -> Tensor:
        """What a verdict is on, for each clip: its caption where there is one."""
        return self.loss_B if self.caption_B is None else self.caption_B

    @property
    def loss_B(self) -> Tensor:
        """What the objective adds up to, for each clip."""
        parts = [loss for loss in (self.caption_B, self.reconstruct_B) if loss is not None]
        if not parts:
            raise UsageError(
                "This pass was made without its losses: mode='evaluate' makes those of all passes."
            )
        return torch.stack(parts).sum(0)

    @property
    def loss(self) -> Tensor:
        return self.loss_B.mean()


@dataclass(frozen=True, eq=False)
class Passes:
    """The coarse pass and the fine ones after it, in order."""

    passes: list[Pass]

    def __iter__(self) -> Iterator[Pass]:
        return iter(self.passes)

    def __len__(self) -> int:
        return len(self.passes)

    def __getitem__(self, i: int) -> Pass:
        return self.passes[i]


def losses(passes: Passes, lambda_coarse: float = 1.0) -> dict[str, Tensor]:
    """What is trained: the last fine pass and `lambda_coarse` times the coarse one; or the one there is.

    loss_fine and loss_coarse are what a verdict is on: of a joint objective the captions. Its latents are
    loss_reconstruct_…, and the sums of both loss_total_….
    """
    first, last = passes[0].loss, passes[-1].loss
    if len(passes) == 1:
        return {"loss": first, **_named(passes[0], "coarse")}
    return {
        "loss": last + lambda_coarse * first, **_named(passes[-1], "fine"), **_named(passes[0], "coarse"),
    }  # fmt: skip


def _named(one: Pass, name: str) -> dict[str, Tensor]:
    judged = {f"loss_{name}": one.judged_B.mean()}
    return judged | {called: loss.detach() for called, loss in parts(one, name).items()}


def parts(one: Pass, name: str) -> dict[str, Tensor]:
    """Of a joint objective, which a verdict is not on: the loss of the latents, and the sum of both."""
    if one.caption_B is None or one.loss_reconstruct is None:
        return {}
    return {f"loss_reconstruct_{name}": one.loss_reconstruct, f"loss_total_{name}": one.loss}


def of(batch: Mapping[str, Any], name: str) -> Any:
    """A field of the batch, or what to do where it is not there."""
    if name not in batch:
        needs = {"tokens": "captions", "latents": "latents to predict", "frames": "frames to encode"}
        raise UsageError(
            f"This model needs {needs.get(name, 'stored features')}, and the batch has no {name!r}, only "
            f"{', '.join(map(repr, batch))}. Freeze what this objective and attention read, or choose others."
        )
    return batch[name]


def padded(tokens: fl.Ragged, length: int | None) -> tuple[Tensor, Tensor]:
    """Captions [B, L], and which of their places are real. With a `length` nothing waits for the device.

    >>> padded(fl.Ragged(torch.tensor([7, 8, 9]), torch.tensor([0, 1, 3])), 3)[0].tolist()
    [[7, 0, 0], [8, 9, 0]]
    """
    if not tokens.values.numel():
        raise UsageError(
            "All captions of this batch are empty; objective='caption' needs some to learn from."
        )
    longest = int(tokens.lengths.max()) if length is None else length
    column = torch.arange(longest, device=tokens.offsets.device)
    there = column < tokens.lengths[:, None]
    index = (tokens.offsets[:-1, None] + column).clamp(max=tokens.values.shape[0] - 1)
    return torch.where(there, tokens.values[index], 0), there


def caption_loss(logits: Tensor, tokens: Tensor, there: Tensor) -> Tensor:
    """Cross-entropy in fp32, the mean over each clip's tokens [B].

    By clips and not by tokens, so that a batch taken in parts gives the same as the whole.
    """
    targets = torch.where(there, tokens, _NOT_A_TOKEN)
    each = F.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=_NOT_A_TOKEN, reduction="none"
    )
    return each.view_as(targets).sum(1) / there.sum(1).clamp(min=1)


def reconstruct_loss(head: nn.Module, latents: Tensor, hidden: Tensor) -> Tensor:
    """Squared error in fp32 of the latents [B, 1 … T − 1, C, h, w], each told from the one before, [B]."""
    if latents.shape[1] < 2:
        raise UsageError(f"Latents {list(latents.shape)} have no next frame to predict; give 2 or more.")
    before, after = latents[:, :-1], latents[:, 1:]
    kept = before.to(next(head.parameters()).dtype)  # they may be stored in half precision
    told: Tensor = head(kept.flatten(0, 1), hidden[:, :-1].flatten(0, 1))
    return (told.float().view_as(after) - after.float()).square().flatten(1).mean(1)
