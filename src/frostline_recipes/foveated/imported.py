"""`foveated` from features that somebody else made: a store that `frostline store import` wrote.

    frostline store import preprocessed/ --out stores/imported
    frostline train frostline_recipes.foveated.imported:workload store=stores/imported --live --steps 2000

A row has features [S, N, D], latents [S, 4, h, w] and a caption, as the .pt files of document 001 have them
(`dino_features`, `latents`, `caption`), and no times: the model asks for none. With --live rows are read from
the imported store itself; without, they are copied once more into the store of the training, which then feeds
from memory or the device. There are no frames, hence no deep attention, and no pictures of the gaze.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import frostline as fl
from frostline.errors import UsageError
from frostline_recipes.foveated import networks
from frostline_recipes.foveated.model import Objective
from frostline_recipes.foveated.networks import Vision
from frostline_recipes.foveated.splits import SPLITS, divided
from frostline_recipes.foveated.training import Settings, trained


def workload(
    *,
    store: str,
    features: str = "dino_features",
    latents: str = "latents",
    caption: str = "caption",
    prefix: int = 1,
    num_frames: int = 16,
    llm: str = "small",
    fine_iterations: int = 2,
    lambda_coarse: float = 1.0,
    objective: Objective = "caption",
    batch_size: int = 64,
    grad_accum: int = 1,
    learning_rate: float | None = None,
    warmup_steps: int = 200,
    precision: Literal["fp32", "tf32", "bf16"] = "fp32",
    max_tokens: int = 64,
    eval_every: int | None = 300,
    seed: int = 0,
) -> fl.Workload:
    """The foveated model on imported features.

    store:   what `frostline store import` wrote.
    features, latents, caption: what the fields are called there.
    prefix:  tokens of a frame before its patches: 1 for a class token, 5 with four registers.
    num_frames: frames a clip that the model sees, out of those stored.

    The rest is as in `foveated`.
    """
    how = Settings(
        objective=objective, fine_iterations=fine_iterations, lambda_coarse=lambda_coarse,
        batch_size=batch_size, grad_accum=grad_accum, learning_rate=learning_rate,
        warmup_steps=warmup_steps, precision=precision, max_tokens=max_tokens, eval_every=eval_every,
        seed=seed,
    )  # fmt: skip
    if problems := how.problems():
        raise UsageError("foveated cannot work:", problems=problems)
    wanted = {"features": features}
    if objective != "caption":
        wanted["latents"] = latents
    if how.tells:
        wanted["caption"] = caption
    store, llm = map(os.path.expanduser, (store, llm))
    networks.find(encoder="small", llm=llm, vae="small", size=256, latents=False)
    rows = Rows(_opened(store), wanted)
    vision = _seen(rows, prefix, num_frames, how.fewest_frames)
    seen = [name for name in wanted if name != "caption"]
    steps = []
    if how.tells:
        steps.append(networks.tokens(llm, max_tokens))
        networks.look_at_captions(steps[0], _captions(rows), llm, max_tokens)
    outputs = [*seen, *(name for stage in steps for name in stage.writes)]
    picked = fl.Pick(seen, num_frames, eval="spread")
    pipeline = fl.Pipeline(rows.source(), *steps, picked, outputs=outputs)
    return trained(pipeline, vision, llm, how, splits="split" if rows.split else SPLITS)


def _opened(folder: str) -> fl.Store:
    if not Path(folder, "manifest.json").is_file():
        raise UsageError(
            f"store={folder!r} is no store: there is no manifest.json in it. A folder of .pt files becomes "
            "one by `frostline store import FOLDER --out stores/imported`; then give store=stores/imported."
        )
    return fl.Store.open(folder)


class Rows:
    """Rows of a store, under the names that the model reads; keys are told without reading a row."""

    def __init__(self, store: fl.Store, wanted: Mapping[str, str]) -> None:
        missing = [f"{what}={name!r}" for what, name in wanted.items() if name not in store.fields]
        if missing:
            told = ", ".join(f"{name} {list(field.shape)}" for name, field in store.fields.items())
            raise UsageError(
                f"{store} has no field for {', '.join(missing)}. It has {told}. Say which of them it is, or "
                "choose an objective that does not read it."
            )
        self.store, self.wanted = store, dict(wanted)
        self.split = divided([*store.keys])
        self.column_names = ["key", *wanted, *(["split"] if self.split else [])]

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, i: int | str) -> Any:
        if isinstance(i, str):
            return [*self.store.keys]
        row = self.store.rows([i], [*self.wanted.values()])
        found = {name: row[field][0] for name, field in self.wanted.items()}
        key = self.store.keys[i]
        return {"key": key, **found, **({"split": self.split[key]} if self.split else {})}

    def source(self) -> fl.Source:
        """Of the store as it is now: another commit is another version."""
        version = hashlib.sha256(self.store.commit.dump()).hexdigest()
        return fl.Source.dataset(self, key="key", version=version)

    def shape(self, what: str) -> tuple[int | None, ...]:
        return tuple(self.store.fields[self.wanted[what]].shape)


def _seen(rows: Rows, prefix: int, num_frames: int, fewest: int) -> Vision:
    """What the features' shape says of the encoder that made them; all that does not fit is told."""
    shape, problems = rows.shape("features"), []
    frames, tokens, width = (shape[0] or 0, shape[1] or 0, shape[2] or 0) if len(shape) == 3 else (0, 0, 0)
    side = math.isqrt(max(0, tokens - prefix))
    name = rows.wanted["features"]
    if len(shape) != 3 or side < 1 or prefix + side * side != tokens:
        problems.append(
            f"{name} is {list(shape)}; expected [frames, tokens, width], with prefix={prefix} tokens before "
            "a square of patches: 325 are 1 + 18 x 18"
        )
    elif shape[0] is None:
        problems.append(
            f"{name} is [any, {tokens}, {width}]: the number of frames differs from file to file, and the "
            "model needs the same of all. Import again with --ragged never --max-bad N: up to N files that "
            "differ from most are then set aside"
        )
    elif not fewest <= num_frames <= frames:
        problems.append(f"num_frames is {num_frames}, and {frames} are stored; at least {fewest}")
    latents = rows.shape("latents") if "latents" in rows.wanted else (frames, 4, 1, 1)
    if len(latents) != 4 or (latents[0] or 0, latents[1]) != (frames, 4):
        problems.append(f"{rows.wanted['latents']} is {list(latents)}; expected [{frames or 'any'}, 4, h, w]")
    if problems:
        raise UsageError(f"foveated cannot learn from {rows.store}:", problems=problems)
    return Vision("imported", width, 1, prefix, side)


def _captions(rows: Rows) -> list[str]:
    """All of them, none empty; nothing else is read."""
    name = rows.wanted["caption"]
    field = rows.store.fields[name]
    if field.dtype != "str":
        raise UsageError(
            f"caption={name!r} is {field.dtype} {list(field.shape)} in {rows.store}; expected text. Say "
            "which field holds captions; objective=reconstruct needs none."
        )
    told: list[str] = rows.store.column(name)
    bare = [key for key, text in zip(rows.store.keys, told, strict=True) if not text.strip()]
    if bare:
        more = [f"… and {len(bare) - 10:,} more"] if len(bare) > 10 else []
        raise UsageError(
            f"{len(bare):,} of {len(told):,} rows of {rows.store} have an empty {name}, which this objective "
            "needs. Fill them in the files that were imported, or take these files out, and import again; "
            "objective=reconstruct needs none:",
            problems=bare[:10] + more,
        )
    return told
