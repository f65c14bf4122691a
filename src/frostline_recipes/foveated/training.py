"""The model and its training, on whatever makes the batches."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import frostline as fl
from frostline_recipes.foveated import metrics, networks
from frostline_recipes.foveated.encoder import Encoder
from frostline_recipes.foveated.gaze import Deep, Shallow
from frostline_recipes.foveated.model import Foveated, Objective
from frostline_recipes.foveated.networks import Vision

EVALUATED = 1024
"""Clips of an evaluation within training; one takes as long as 1.6 training steps a batch."""
_ENCODER, _ENCODER_RATE = "gaze.encoder.", 0.05
"""An encoder in the model, and what it learns at, times the learning rate."""
_WORDS = ("llm.lm_head.*", "llm.model.embed_tokens.*")
"""Without captions no word is read or told."""


@dataclass(frozen=True)
class Settings:
    """How a model is made and trained; the parameters of the recipe say what they mean."""

    objective: Objective
    fine_iterations: int
    lambda_coarse: float
    batch_size: int
    grad_accum: int
    learning_rate: float | None
    warmup_steps: int
    precision: str
    max_tokens: int
    eval_every: int | None
    seed: int
    attention: str = "shallow"
    train_encoder: bool = False
    encoder_learning_rate: float | None = None

    @property
    def tells(self) -> bool:
        """Whether captions are told."""
        return self.objective != "reconstruct"

    @property
    def encoder_inside(self) -> bool:
        """Whether the model has the encoder in it, and sees frames, not features."""
        return self.attention == "deep" or self.train_encoder

    @property
    def coarse_only(self) -> bool:
        return self.fine_iterations == 0

    @property
    def fewest_frames(self) -> int:
        return 1 if self.objective == "caption" else 2

    def problems(self) -> list[str]:
        """Everything that no training can work with."""
        found = []
        if self.fine_iterations < 0:
            found.append(f"fine_iterations is {self.fine_iterations}; at least 0 (0: the coarse pass alone)")
        for name, least in (("grad_accum", 1), ("batch_size", 1), ("max_tokens", 1), ("warmup_steps", 0)):
            if getattr(self, name) < least:
                found.append(f"{name} is {getattr(self, name)}; at least {least}")
        for name in ("learning_rate", "encoder_learning_rate"):
            rate = getattr(self, name)
            if rate is not None and not 0 < rate < math.inf:
                found.append(f"{name} is {rate:g}; above 0, or none for the default")
        if self.encoder_learning_rate is not None and not self.train_encoder:
            found.append("encoder_learning_rate is of an encoder that learns: train_encoder=true")
        if not 0 <= self.lambda_coarse < math.inf:
            found.append(f"lambda_coarse is {self.lambda_coarse:g}; a number, at least 0")
        return found


def trained(pipeline: fl.Pipeline, vision: Vision, llm: str, how: Settings, *, splits: Any) -> fl.Workload:
    """The workload: a model for this encoder and language model, its loss, and its training."""
    own = llm in networks.OWN_LLMS
    rate = how.learning_rate or (1e-3 if own else 1e-4)
    unused = (*(("ask.*", "first") if how.coarse_only else ()), *(() if how.tells else _WORDS))
    return fl.Workload(
        pipeline,
        model=fl.lazy(build, vision, llm, how),
        loss=functools.partial(
            metrics.loss, lambda_coarse=how.lambda_coarse, coarse_only=how.coarse_only
        ),
        optimizer=functools.partial(adamw, rate=rate, encoder_rate=how.encoder_learning_rate),
        evaluate=functools.partial(
            metrics.evaluate, coarse_only=how.coarse_only, rows=how.batch_size,
            warmup_steps=how.warmup_steps, lambda_coarse=how.lambda_coarse,
        ),
        metric=fl.Metric("loss", better="lower", margin=0.01),
        splits=splits,
        batch_size=how.batch_size * how.grad_accum,
        training={
            "precision": how.precision, "clip": 1.0, "seed": how.seed, "warmup_steps": how.warmup_steps,
            "microbatch": how.batch_size if how.grad_accum > 1 else None, "eval_every": how.eval_every,
            "eval_rows": EVALUATED, "unused": unused,
        },
        checks=[captions_begin_near_uniform] if how.tells and own else [],
    )  # fmt: skip


def build(vision: Vision, llm: str, how: Settings) -> Foveated:
    """The model that is trained; parts without weights of their own start from the training's seed."""
    seed = torch.initial_seed()  # as the trainer set it: --seed goes before the parameter
    words = networks.language_model(llm, seed=seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inside = None
        if how.encoder_inside:
            pixels = networks.preprocess(vision.size, vision.mean, vision.std)
            inside = Encoder(networks.encoder(vision.name), pixels, trainable=how.train_encoder)
        gaze: nn.Module
        patches: Any = {"grid": vision.grid, "prefix": vision.prefix, "covers": vision.covers}
        if how.attention == "deep":
            gaze = Deep(inside, **patches)  # type: ignore[arg-type]
        else:
            gaze = Shallow(vision.width, heads=heads(vision.width), encoder=inside, **patches)
        return Foveated(
            gaze, words, fine_iterations=how.fine_iterations, objective=how.objective,
            caption_length=how.max_tokens if how.tells else None,
        )  # fmt: skip


def heads(width: int) -> int:
    """Of 64 numbers each, or of 32; where neither divides the width, as near to 64 as its divisors allow.

    >>> [heads(width) for width in (384, 96, 100, 16)]
    [6, 3, 2, 1]
    """
    even = next((size for size in (64, 32) if width % size == 0), None)
    if even is not None:
        return width // even
    divisors = [n for n in range(1, width + 1) if width % n == 0]
    return min(divisors, key=lambda n: abs(n - width / 64))


def adamw(model: nn.Module, *, rate: float, encoder_rate: float | None = None) -> torch.optim.Optimizer:
    """encoder_rate: of an encoder that learns too; at the rate of new weights it would lose what it knows."""
    learned = {name: p for name, p in model.named_parameters() if p.requires_grad}
    inside = [p for name, p in learned.items() if name.startswith(_ENCODER)]
    others = [p for name, p in learned.items() if not name.startswith(_ENCODER)]
    groups: list[dict[str, Any]] = [{"params": others}]
    if inside:
        groups.append({"params": inside, "lr": encoder_rate or _ENCODER_RATE * rate})
    fused = True if next(iter(learned.values())).is_cuda else None
    return torch.optim.AdamW(groups, rate, weight_decay=0.01, betas=(0.9, 0.98), fused=fused)


def captions_begin_near_uniform(model: Any, batch: Any, figures: Any, fresh: bool = True) -> str | None:
    """Before the first step a language model with random weights tells nothing: ln V, or labels are wrong."""
    uniform = math.log(model.llm.config.vocab_size)
    told = float(figures["loss_coarse"])
    if fresh and model.objective == "caption" and abs(told - uniform) > 1.0:
        return f"the first caption loss is {told:.2f}; with so many words it should be near {uniform:.2f}"
    return None
