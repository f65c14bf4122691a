"""How the small networks that come with the recipe were made; nobody needs to run this again.

    python -m frostline_recipes.foveated.pretrain --out small               both encoders, the tokenizer

The encoder has DINOv2's architecture and learns to say of every patch which kind of glyph is there, of which
colour, and whether it wears the bracket: what a general encoder knows of the world, for a world of glyphs. It
sees worlds of another seed than the embedded set's, never a caption, and nothing about which glyph matters.
The tokenizer is byte-level BPE, whose merges make a token of each word that captions of the set use.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from frostline_recipes.foveated import painting, worlds
from frostline_recipes.foveated.networks import MEAN, STD

SEED = 1_000_003
"""Of the worlds that the encoder learns from; the embedded set's default is 0."""
COLOURS = list(painting.COLOURS)


@dataclass(frozen=True)
class Kind:
    """An encoder that comes with the recipe, and the worlds that it is for."""

    name: str
    size: int
    patch: int
    width: int
    layers: int
    heads: int
    objects: int
    scale: float


KINDS = {
    "small": Kind("encoder", 256, 16, 96, 4, 3, 6, 1.0),
    "tiny": Kind("encoder-tiny", 64, 8, 64, 3, 2, 3, 1.8),
}


class Frames(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Frame i is world i // 16 at a moment of its own; labels [3, patches]: kind, colour and bracket."""

    def __init__(self, kind: Kind, n: int) -> None:
        self.kind, self.n = kind, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        world = _world(self.kind, i // 16)  # drawing one takes as long as painting it thirty times
        rng = np.random.default_rng([SEED, i])
        share = rng.uniform(0, worlds.CUE) if rng.random() < 0.4 else rng.uniform(0, 1)
        t = float(share * world.seconds)
        return torch.from_numpy(worlds.frame(world, t)), torch.from_numpy(labels(self.kind, world, t))


@lru_cache(maxsize=2)
def _world(kind: Kind, i: int) -> worlds.Script:
    return worlds.script(i, seed=SEED, size=kind.size, objects=kind.objects, scale=kind.scale)


def labels(kind: Kind, world: worlds.Script, t: float) -> Any:
    """[3, patches]: kind and colour of the glyph whose centre is near a patch (0: none), and the bracket."""
    side = kind.size // kind.patch
    middles = (np.arange(side) + 0.5) / side
    x, y = np.meshgrid(middles, middles)
    found = np.zeros((3, side, side), np.int64)
    for k, (glyph, (gx, gy)) in enumerate(zip(world.glyphs, worlds.places(world, t), strict=True)):
        look, distance = glyph.look(t), np.maximum(abs(x - gx), abs(y - gy))
        near = distance < 0.55 * painting.GLYPH * kind.scale
        found[0][near], found[1][near] = 1 + painting.KINDS.index(look.kind), 1 + COLOURS.index(look.colour)
        if k == world.target and worlds.cued(world, t):
            found[2][distance < 0.55 * painting.BRACKET * kind.scale] = 1
    return found.reshape(3, -1)


class Labelled(nn.Module):
    """The encoder with a linear head on every patch."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        from transformers import Dinov2Config, Dinov2Model

        config = Dinov2Config(
            image_size=kind.size, patch_size=kind.patch, hidden_size=kind.width, layerscale_value=0.1,
            num_hidden_layers=kind.layers, num_attention_heads=kind.heads, mlp_ratio=4,
        )  # fmt: skip
        self.encoder = Dinov2Model(config)
        self.head = nn.Linear(kind.width, 7 + 7 + 2)

    def forward(self, frames: Tensor) -> tuple[Tensor, ...]:
        mean, std = (torch.tensor(v, device=frames.device).view(3, 1, 1) for v in (MEAN, STD))
        tokens = self.encoder((frames.float() / 255 - mean) / std).last_hidden_state[:, 1:]
        found: tuple[Tensor, ...] = self.head(tokens).transpose(1, 2).split([7, 7, 2], dim=1)
        return found


def train_encoder(
    kind: Kind, out: Path, *, steps: int, batch: int, workers: int, device: str
) -> dict[str, float]:
    torch.manual_seed(0)
    model = Labelled(kind).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    loader = torch.utils.data.DataLoader(Frames(kind, steps * batch), batch, num_workers=workers)
    began, shares = time.perf_counter(), {}
    for step, (frames, truth) in enumerate(loader):
        frames, truth = frames.to(device), truth.to(device)
        told = model(frames)
        each = [nn.functional.cross_entropy(said, truth[:, k]) for k, said in enumerate(told)]
        loss = torch.stack(each).sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 49 or step + 1 == steps:
            shares = right(told, truth)
            figures = ", ".join(f"{name} {share:.3f}" for name, share in shares.items())
            left = (time.perf_counter() - began) / (step + 1) * (steps - step - 1)
            print(
                f"step {step + 1} of {steps}: loss {float(loss.detach()):.3f}, {figures}; {left:.0f} s left",
                flush=True,
            )
    model.encoder.to("cpu").eval().save_pretrained(out / kind.name)
    return shares


def right(told: tuple[Tensor, ...], truth: Tensor) -> dict[str, float]:
    """The share of patches with a glyph that are named rightly."""
    found = {}
    for k, name in enumerate(("kind", "colour", "bracket")):
        there = truth[:, k] > 0
        found[name] = float((told[k].argmax(1) == truth[:, k])[there].float().mean())
    return found


def make_tokenizer(out: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    made.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    texts = [worlds.caption(worlds.script(i, seed=SEED)) for i in range(2000)]
    made.train_from_iterator(texts, trainer)
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    wrapped.save_pretrained(out / "tokenizer")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    make_tokenizer(given.out)
    how = {"steps": given.steps, "batch": given.batch, "workers": given.workers, "device": given.device}
    for name, kind in KINDS.items():
        if given.only in (None, name):
            train_encoder(kind, given.out, **how)


if __name__ == "__main__":
    main()
