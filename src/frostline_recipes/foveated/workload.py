"""`foveated`: a video-language model that chooses where to look, from frames or from stored features.

frostline train foveated --steps 2000                                   the embedded set, made on the spot
frostline train foveated videos=clips/ captions=captions.csv encoder=dinov2-s14 llm=smollm2-135m --max-hours 2
"""

from __future__ import annotations

import functools
import inspect
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

import frostline as fl
from frostline import stages
from frostline.errors import UsageError
from frostline_recipes.foveated import data, glyphs, metrics, networks
from frostline_recipes.foveated.encoder import Encoder
from frostline_recipes.foveated.gaze import Deep, Shallow
from frostline_recipes.foveated.model import Foveated, Objective
from frostline_recipes.foveated.networks import Vision

EMBEDDED = "glyphs"


def workload(
    *,
    videos: str = EMBEDDED,
    captions: str | None = None,
    num_frames: int = 16,
    stored_frames: int = 24,
    frame_size: int = 256,
    min_s: float = 20.0,
    max_s: float = 60.0,
    limit: int | None = None,
    n_clips: int = 2000,
    objects: int = 6,
    glyph_scale: float = 1.0,
    changes: int = 2,
    clip_size: int = 256,
    clip_fps: int = 4,
    encoder: str = "small",
    llm: str = "small",
    vae: str = "small",
    attention: Literal["shallow", "deep"] = "shallow",
    train_encoder: bool = False,
    fine_iterations: int = 2,
    lambda_coarse: float = 1.0,
    objective: Objective = "caption",
    batch_size: int = 64,
    grad_accum: int = 1,
    learning_rate: float | None = None,
    warmup_steps: int = 200,
    precision: Literal["fp32", "tf32", "bf16"] = "fp32",
    encoder_precision: Literal["fp32", "bf16"] = "fp32",
    compile_encoder: bool = False,
    frames_a_call: int = 96,
    max_tokens: int = 64,
    eval_every: int | None = None,
    seed: int = 0,
) -> fl.Workload:
    """Each frame becomes one token; a coarse pass looks with one query, fine passes where the model asks.

    videos:          a folder, a pattern or a list of clips; "glyphs": the embedded set, made when needed.
    captions:        a list with them, where `videos` has none.
    num_frames:      frames a clip that the model sees, out of `stored_frames` spread over the whole clip.
    limit:           at most so many clips.
    n_clips:         of the embedded set; they show `objects` glyphs, glyph_scale times their usual size, that
                     change their colour (changes=1) and then their kind, in clip_size pixels at clip_fps.
    encoder:         small, dinov2-s14, dinov3-s16, a folder, or a name on the hub. Likewise llm and vae.
    attention:       shallow, over stored features; deep, through all layers of the encoder, from frames.
    train_encoder:   the encoder learns too: frames are stored, not features.
    fine_iterations: fine passes; 0 trains the coarse pass alone, as a control.
    objective:       caption, reconstruct (next latents) or joint.
    frames_a_call:   frames that a frozen network is given at once, by freezing and live alike: whole clips.
    grad_accum:      batches of batch_size that make one update.
    learning_rate:   default: 1e-3 for the small language model, 1e-4 for a trained one.
    """
    least = 1 if objective == "caption" else 2
    _refuse(least, num_frames, stored_frames, fine_iterations, grad_accum, batch_size, objects)
    vision = networks.find(encoder=encoder, llm=llm, vae=vae, size=frame_size)
    told = objective != "reconstruct"
    tokens = stages.Tokenizer(networks.tokenizer_of(llm), max_length=max_tokens) if told else None
    made = {
        "n": n_clips, "objects": objects, "scale": glyph_scale, "changes": changes, "size": clip_size,
        "fps": clip_fps,
    }  # fmt: skip
    source = clips(videos, captions, min_s, max_s, limit, told, made)
    stored = attention == "shallow" and not train_encoder
    steps: list[Any] = [
        fl.Stage(
            "clip", stages.Video(frames=stored_frames, size=frame_size, fit="cover"), reads="path",
            writes=("frames", "times"),
        )
    ]  # fmt: skip
    chunk = max(1, frames_a_call // stored_frames)
    if stored:
        network = fl.lazy(features, frame_size, **networks.place(encoder))
        steps.append(
            fl.Stage(
                "features", network, reads="frames", on="device", batch_size=chunk, compile=compile_encoder,
                precision=None if encoder_precision == "fp32" else encoder_precision,
            )
        )  # fmt: skip
    if objective != "caption":
        steps.append(
            fl.Stage(
                "latents", fl.lazy(networks.autoencoder, vae), reads="frames", on="device", batch_size=chunk
            )
        )
    if tokens is not None:
        steps.append(
            fl.Stage("tokens", tokens, reads="caption", writes={"tokens": fl.Field((None,), "int64")})
        )
    seen = ["features" if stored else "frames", "times", *(["latents"] if objective != "caption" else [])]
    steps.append(fl.Pick(seen, num_frames, eval="spread"))
    return assembled(
        fl.Pipeline(source, *steps, outputs=[*seen, *(["tokens"] if told else [])]), vision, llm,
        splits="split" if "split" in source.fields else SPLITS, attention=attention,
        train_encoder=train_encoder, fine_iterations=fine_iterations, lambda_coarse=lambda_coarse,
        objective=objective, batch_size=batch_size, grad_accum=grad_accum, learning_rate=learning_rate,
        warmup_steps=warmup_steps, precision=precision, max_tokens=max_tokens, eval_every=eval_every,
        seed=seed,
    )  # fmt: skip


SPLITS = {"train": 0.8, "val": 0.1, "test": 0.1}
"""Where nobody says which clip is of which split."""


def assembled(
    pipeline: fl.Pipeline, vision: Vision, llm: str, *, splits: Any, fine_iterations: int,
    lambda_coarse: float, objective: Objective, batch_size: int, grad_accum: int, learning_rate: float | None,
    warmup_steps: int, precision: str, max_tokens: int, eval_every: int | None, seed: int,
    attention: str = "shallow", train_encoder: bool = False,
) -> fl.Workload:  # fmt: skip
    """The model, its loss and its training, on whatever makes the batches."""
    told, own = objective != "reconstruct", llm in networks.OWN_LLMS
    return fl.Workload(
        pipeline,
        model=fl.lazy(
            build, vision, llm, attention=attention, train_encoder=train_encoder, seed=seed,
            fine_iterations=fine_iterations, objective=objective, caption_length=max_tokens if told else None,
        ),
        loss=functools.partial(metrics.loss, lambda_coarse=lambda_coarse, coarse_only=fine_iterations == 0),
        optimizer=functools.partial(adamw, rate=learning_rate or (1e-3 if own else 1e-4)),
        evaluate=functools.partial(metrics.evaluate, coarse_only=fine_iterations == 0),
        metric=fl.Metric("loss", better="lower", margin=0.01),
        splits=splits,
        batch_size=batch_size * grad_accum,
        training={
            "precision": precision, "clip": 1.0, "seed": seed, "warmup_steps": warmup_steps,
            "microbatch": batch_size if grad_accum > 1 else None, "eval_every": eval_every,
            "unused": (*(() if fine_iterations else ("ask.*", "first")), *(() if told else _WORDS)),
        },
        checks=[caption_loss_starts_near_uniform] if told and own else [],
    )  # fmt: skip


_WORDS = ("llm.lm_head.*", "llm.model.embed_tokens.*")
"""Without captions no word is read or told."""


def clips(
    videos: str, captions: str | None, min_s: float, max_s: float, limit: int | None, need_captions: bool,
    made: Mapping[str, Any],
) -> fl.Source:  # fmt: skip
    """The source; the embedded set is made first where that is asked for."""
    if videos == EMBEDDED and not Path(EMBEDDED).exists():
        videos = str(glyphs.make(embedded_folder(), **made))
    return data.clips(
        videos, captions=captions, min_s=min_s, max_s=max_s, limit=limit, need_captions=need_captions
    )


def embedded_folder() -> Path:
    """Where sets of glyphs are kept: beside the stores, below the folder one works in."""
    return Path("stores") / "foveated-clips"


def features(frame_size: int, **tower: Any) -> nn.Module:
    """Frames uint8 [B, T, 3, H, W] to features [B, T, N, D], frozen. tower: of stages.vision_tower."""
    network = nn.Sequential(networks.preprocess(frame_size), stages.vision_tower(**tower))
    return network.eval().requires_grad_(False)


def build(
    vision: Vision,
    llm: str,
    *,
    attention: str,
    train_encoder: bool,
    seed: int,
    fine_iterations: int,
    objective: Objective,
    caption_length: int | None,
) -> Foveated:
    """The model that is trained; parts without weights of their own start from `seed`."""
    words = networks.language_model(llm, seed=seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inside = None
        if attention == "deep" or train_encoder:
            inside = Encoder(
                networks.encoder(vision.name), networks.preprocess(vision.size), trainable=train_encoder
            )
        gaze: nn.Module
        if attention == "deep":
            gaze = Deep(inside, grid=vision.grid, prefix=vision.prefix)  # type: ignore[arg-type]
        else:
            gaze = Shallow(
                vision.width, heads=vision.width // (64 if vision.width % 64 == 0 else 32),
                grid=vision.grid, prefix=vision.prefix, encoder=inside,
            )  # fmt: skip
        return Foveated(
            gaze, words, fine_iterations=max(1, fine_iterations), objective=objective,
            caption_length=caption_length,
        )  # fmt: skip


def adamw(model: nn.Module, *, rate: float) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    fused = True if trained[0].is_cuda else None
    return torch.optim.AdamW(trained, rate, weight_decay=0.01, betas=(0.9, 0.98), fused=fused)


def caption_loss_starts_near_uniform(model: Any, batch: Any, figures: Any) -> str | None:
    """Before the first step a language model with random weights tells nothing: ln V, or labels are wrong."""
    uniform = math.log(model.llm.config.vocab_size)
    told = float(figures["loss_coarse"])
    if model.objective == "caption" and abs(told - uniform) > 1.0:
        return f"the first caption loss is {told:.2f}; with so many words it should be near {uniform:.2f}"
    return None


def load(checkpoint: str) -> tuple[nn.Module, fl.Workload]:
    """The model of a checkpoint or run, and the workload with the parameters it was trained with."""
    from frostline.trainer import restored

    place = Path(checkpoint).absolute()
    found = next((p / "run.json" for p in (place, *place.parents[:2]) if (p / "run.json").is_file()), None)
    if found is None:
        raise UsageError(
            f"checkpoint={checkpoint!r}: there is no run.json in it, nor in the two folders above, so it is "
            "not known how it was trained. Give a run's folder, as runs/foveated/…, or a checkpoint in one."
        )
    parameters = json.loads(found.read_text())["config"]["parameters"]
    other = [name for name in parameters if name not in inspect.signature(workload).parameters]
    if other:
        raise UsageError(
            f"checkpoint={checkpoint!r} was trained with {', '.join(other)}, which foveated has not: by "
            "another recipe, or another version of this one."
        )
    trained = workload(**parameters)
    return restored(trained, checkpoint), trained


def _refuse(
    least: int,
    num_frames: int,
    stored_frames: int,
    fine_iterations: int,
    grad_accum: int,
    batch_size: int,
    objects: int,
) -> None:
    problems = []
    if not least <= num_frames <= stored_frames:
        told = f"num_frames is {num_frames} and stored_frames {stored_frames}"
        problems.append(f"{told}; {least} ≤ num_frames ≤ stored_frames")
    if fine_iterations < 0:
        problems.append(f"fine_iterations is {fine_iterations}; at least 0 (0: the coarse pass alone)")
    for name, value in (("grad_accum", grad_accum), ("batch_size", batch_size), ("objects", objects)):
        if value < 1:
            problems.append(f"{name} is {value}; at least 1")
    if problems:
        raise UsageError("foveated cannot work:", problems=problems)
