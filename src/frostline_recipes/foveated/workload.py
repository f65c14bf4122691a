"""`foveated`: a video-language model that chooses where to look, from frames or from stored features.

frostline train foveated --steps 2000                                   the embedded set, made on the spot
frostline train foveated videos=clips/ captions=captions.csv encoder=dinov2-s14 encoder_precision=bf16 \\
    llm=smollm2-135m precision=bf16 --store stores/mine --max-hours 2
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import nn

import frostline as fl
from frostline import stages
from frostline.errors import UsageError
from frostline_recipes.foveated import data, glyphs, networks
from frostline_recipes.foveated.model import Objective
from frostline_recipes.foveated.splits import SPLITS
from frostline_recipes.foveated.training import Settings, trained

EMBEDDED = "glyphs"
_CALLED = {"n": "n_clips", "scale": "glyph_scale", "size": "clip_size", "fps": "clip_fps"}
"""What parameters of `glyphs.make` are called here."""


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
    encoder_learning_rate: float | None = None,
    warmup_steps: int = 200,
    precision: Literal["fp32", "tf32", "bf16"] = "fp32",
    encoder_precision: Literal["fp32", "bf16"] = "fp32",
    compile_encoder: bool = False,
    frames_a_call: int = 96,
    max_tokens: int = 64,
    eval_every: int | None = 300,
    seed: int = 0,
) -> fl.Workload:
    """Each frame becomes one token; a coarse pass looks with one query, fine passes where the model asks.

    videos:            a folder, a pattern or a list of clips; "glyphs": the embedded set, made when needed.
    captions:          a list with them, where `videos` has none.
    num_frames:        frames a clip that the model sees, drawn anew each epoch out of the stored ones.
    stored_frames:     frames a clip that are decoded and stored, spread over all of it.
    frame_size:        pixels of a frame's side; wider or higher clips are cut to a square.
    min_s:             seconds that a clip lasts at least; shorter ones are left out.
    max_s:             seconds that a clip lasts at most; longer ones are left out.
    limit:             at most so many clips.
    n_clips:           clips of the embedded set, of 24 s each.
    objects:           glyphs in each of them.
    glyph_scale:       times a glyph's usual size.
    changes:           1: glyphs change their colour; 2: then their kind too.
    clip_size:         pixels of such a clip's side.
    clip_fps:          frames a second of such a clip.
    encoder:           small, tiny, dinov2-s14, dinov3-s16, a folder, or a name on the hub.
    llm:               small, tiny, smollm2-135m, a folder, or a name on the hub.
    vae:               small, sd-vae, a folder, or a name on the hub; used where latents are predicted.
    attention:         shallow, over stored features; deep, through all layers of the encoder, from frames.
    train_encoder:     the encoder learns too: frames are stored, not features.
    fine_iterations:   fine passes; 0 trains the coarse pass alone, as a control.
    lambda_coarse:     weight of the coarse pass's loss; that of the last fine pass has 1.
    objective:         caption, reconstruct (next latents) or joint.
    batch_size:        clips that are trained on at once.
    grad_accum:        batches of batch_size that make one update.
    learning_rate:     default: 1e-3 for llm=small and tiny, 1e-4 for a trained one.
    encoder_learning_rate: of an encoder that learns too; default: a twentieth of learning_rate.
    warmup_steps:      steps until the learning rate is reached; till then a ratio of 1 is no alarm.
    precision:         what training computes in; tf32 and bf16 are faster on a GPU.
    encoder_precision: what a frozen encoder computes in; with bf16 stored features take half the room.
    compile_encoder:   run a frozen encoder through torch.compile: slow to start, faster from then on.
    frames_a_call:     frames that a frozen network is given at once, by freezing and live alike: whole clips.
    max_tokens:        tokens of a caption; the rest is cut off.
    eval_every:        steps between two evaluations; none: at the end only.
    seed:              of first weights, the order of clips and the frames that are drawn.
    """
    how = Settings(
        objective=objective, fine_iterations=fine_iterations, lambda_coarse=lambda_coarse,
        batch_size=batch_size, grad_accum=grad_accum, learning_rate=learning_rate,
        warmup_steps=warmup_steps, precision=precision, max_tokens=max_tokens, eval_every=eval_every,
        seed=seed, attention=attention, train_encoder=train_encoder,
        encoder_learning_rate=encoder_learning_rate,
    )  # fmt: skip
    asked = {"encoder_precision": encoder_precision != "fp32", "compile_encoder": compile_encoder}
    _refuse(how, num_frames, stored_frames, asked, objects=objects, frames_a_call=frames_a_call)
    encoder, llm, vae = map(os.path.expanduser, (encoder, llm, vae))
    latents = objective != "caption"
    vision = networks.find(encoder=encoder, llm=llm, vae=vae, size=frame_size, latents=latents)
    made = {
        "n": n_clips, "objects": objects, "scale": glyph_scale, "changes": changes, "size": clip_size,
        "fps": clip_fps,
    }  # fmt: skip
    source = clips(videos, captions, min_s, max_s, limit, how.tells, made)
    chunk = max(1, frames_a_call // stored_frames)
    video = stages.Video(frames=stored_frames, size=frame_size, fit="cover")
    steps: list[Any] = [fl.Stage("clip", video, reads="path", writes=("frames", "times"))]
    seen = ["frames", "times"]
    if not how.encoder_inside:
        seen[0] = "features"
        network = fl.lazy(features, frame_size, vision.mean, vision.std, **networks.place(encoder))
        half = None if encoder_precision == "fp32" else encoder_precision
        looks = fl.Stage(
            "features", network, reads="frames", on="device", batch_size=chunk, compile=compile_encoder,
            precision=half,
        )  # fmt: skip
        steps.append(looks)
    if latents:
        seen.append("latents")
        shrink = fl.lazy(networks.autoencoder, vae)
        steps.append(fl.Stage("latents", shrink, reads="frames", on="device", batch_size=chunk))
    if how.tells:
        steps.append(networks.tokens(llm, max_tokens))
        told = (source.raw(i)["caption"] for i in range(len(source)))
        networks.look_at_captions(steps[-1], told, llm, max_tokens)
    steps.append(fl.Pick(seen, num_frames, eval="spread"))
    pipeline = fl.Pipeline(source, *steps, outputs=[*seen, *(["tokens"] if how.tells else [])])
    return trained(pipeline, vision, llm, how, splits="split" if "split" in source.fields else SPLITS)


def clips(
    videos: str, captions: str | None, min_s: float, max_s: float, limit: int | None, need_captions: bool,
    made: Mapping[str, Any],
) -> fl.Source:  # fmt: skip
    """The source; the embedded set is made first where that is asked for."""
    if videos == EMBEDDED and not Path(EMBEDDED).exists():
        videos = str(glyphs.make(embedded_folder(), **made, called=_CALLED))
    return data.clips(
        videos, captions=captions, min_s=min_s, max_s=max_s, limit=limit, need_captions=need_captions,
        divide=True,
    )  # fmt: skip


def embedded_folder() -> Path:
    """Where sets of glyphs are kept: beside the stores, below the folder one works in."""
    return Path("stores") / "foveated-clips"


def features(frame_size: int, mean: Sequence[float], std: Sequence[float], **tower: Any) -> nn.Module:
    """Frames uint8 [B, T, 3, H, W] to features [B, T, N, D], frozen. tower: of stages.vision_tower."""
    network = nn.Sequential(networks.preprocess(frame_size, mean, std), stages.vision_tower(**tower))
    return network.eval().requires_grad_(False)


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
    work = workload(**parameters)
    return restored(work, checkpoint), work


def _refuse(
    how: Settings, num_frames: int, stored_frames: int, of_frozen: Mapping[str, bool], **at_least_one: int
) -> None:
    """of_frozen: what was asked of an encoder whose features are stored."""
    problems = how.problems()
    given = [name for name, is_given in of_frozen.items() if is_given]
    if given and how.encoder_inside:
        why = "train_encoder=true" if how.train_encoder else "attention=deep"
        problems.append(
            f"{' and '.join(given)} say how features are computed that are stored; with {why} none are, and "
            "the encoder computes as the training does: precision=bf16, --compile"
        )
    least = how.fewest_frames
    if not least <= num_frames <= stored_frames:
        told = f"num_frames is {num_frames} and stored_frames {stored_frames}"
        problems.insert(0, f"{told}; {least} ≤ num_frames ≤ stored_frames")
    problems += [f"{name} is {value}; at least 1" for name, value in at_least_one.items() if value < 1]
    if problems:
        raise UsageError("foveated cannot work:", problems=problems)
