"""Where a trained model looks: `frostline run foveated-look checkpoint=runs/foveated/… clip=…`.

For every clip a folder with grid.png (all passes), heads.png (the last pass, head by head) and gaze.mp4, and
over all of them index.html, with the captions and the curves of the training. Shapes: T frames looked at, F
frames of the film, N tokens of a frame.
"""

from __future__ import annotations

import csv
import hashlib
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import frostline as fl
from frostline import stages
from frostline.errors import UsageError
from frostline_recipes.foveated import glyphs, heat, page, sheet
from frostline_recipes.foveated import metrics as verdicts
from frostline_recipes.foveated.heat import Floats
from frostline_recipes.foveated.networks import Ended

_FRAMES = 240
"""Of a film, at most."""
_NAME_BYTES = 200
"""Of a folder's name; file systems take 255."""
log = logging.getLogger("frostline")
_EXPLAINED = (
    "Coarse looks at every frame with one learned query; fine 1 looks again with the queries that the "
    "language model asks after that pass, fine 2 with those it asks after fine 1.",
    "Entropy is 1 for an even look and 0 for a look at one token; what goes to tokens that are no patch, as "
    "the class token, counts in it and is not drawn. On target is the share of frames whose "
    "strongest patch (the cross) lies on the target (the ring), mass on target the share of the attention to "
    "patches that does.",
)


@dataclass(frozen=True, eq=False)
class Sample:
    """All that is drawn of a clip."""

    key: str
    frames: Tensor
    """uint8 [T, 3, H, W], those that were looked at"""
    times: Floats
    """[T] seconds"""
    attention: Mapping[str, Tensor]
    """[T, heads, N] of each pass: "coarse", "fine 1", …"""
    prefix: int
    grid: tuple[int, int]
    truth: Floats | None = None
    """[T, 2], where the target is (x, y), in 0…1"""
    captions: Mapping[str, str] = field(default_factory=dict)
    film: tuple[Tensor, Floats, Floats | None] | None = None
    """All frames [F, 3, H, W], their times and truths, for the film; None: those that were looked at"""


def look(sample: Sample, folder: Path) -> dict[str, dict[str, float]]:
    """Draw a clip into a folder: grid.png, heads.png, gaze.mp4; → the figures of every pass."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {
        name: heat.looks(name, attention, prefix=sample.prefix, grid=sample.grid)
        for name, attention in sample.attention.items()
    }
    passes = [mean for mean, _ in drawn.values()]
    heads = [
        replace(head, name=head.name.split(", ")[-1]) for head in drawn[[*drawn][-1]][1]
    ]  # of the last pass
    frames, times, truth = sample.frames, sample.times, sample.truth
    (folder / "grid.png").write_bytes(sheet.png(sheet.sheet(frames, times, passes, truth=truth)))
    (folder / "heads.png").write_bytes(sheet.png(sheet.sheet(frames, times, heads, truth=truth)))
    all_frames, all_times, all_truth = sample.film or (frames, times, truth)
    ends = [passes[0], passes[-1]] if len(passes) > 1 else passes
    sheet.film(folder / "gaze.mp4", all_frames, all_times, ends, times, truth=all_truth)
    return {one.name: heat.figures(one, truth) for one in passes}


def workload(*, checkpoint: str, clip: str = "", n: int = 4, split: str = "test") -> fl.Workload:
    """Pictures of where a trained model looks.

    checkpoint: a run's folder, or a checkpoint in it.
    clip:       the key of one of its clips, a part of one, or the path of a video; default: the first n.
    n:          how many clips.
    split:      of which samples, where the training had splits.
    """
    if n < 1:
        raise UsageError(f"foveated-look: n is {n}; at least 1 clip.")
    return fl.Workload(None, run=lambda ctx: run(ctx, checkpoint, clip, n, split))


def run(ctx: Any, checkpoint: str, clip: str, n: int, split: str) -> dict[str, Any]:
    """The experiment. A clip is a unit: killed, it goes on with the next."""
    from frostline_recipes.foveated.workload import load

    checkpoint = os.path.expanduser(checkpoint)
    model, trained = load(checkpoint)
    # A run's folder is that of its newest checkpoint: after more training, pictures are of another model.
    weights = _content(model)
    model = model.to(ctx.device).eval()
    data = next(iter(trained.pipelines.values()))
    rows = chosen(trained, clip, n, split)
    words = _words(trained)
    shown = []
    for i, row in enumerate(ctx.progress(rows, what="clips")):
        folder = ctx.out / f"{i:02d}-{_slug(row['key'])}"
        pictures = [folder / name for name in ("grid.png", "gaze.mp4", "heads.png")]
        of = {**ctx.parameters, "weights": weights, "clip": _digest(row["path"]), "row": _plain(row)}
        drawn = partial(_one, ctx, folder, model, data, row, words)
        made = ctx.once(f"look {row['key']}", drawn, of=of, files=pictures)
        grid, film, heads = (picture.read_bytes() for picture in pictures)
        shown.append(page.Shown(row["key"], grid, film, heads, made["captions"], made["figures"]))
    metrics = _metrics(checkpoint)
    about = f"{checkpoint}: attention in multiples of an even look; brighter is more."
    warmup_steps = trained.training["warmup_steps"] if isinstance(trained.training, Mapping) else 0
    said = [about, *_EXPLAINED, *_evaluated(metrics, warmup_steps)]
    text = page.page("Where the model looks", shown, about=said, curves=page.curves(metrics))
    (ctx.out / "index.html").write_text(text, encoding="utf-8")
    return {
        "clips": len(shown),
        **_means([one.figures for one in shown]),
        "page": str(ctx.out / "index.html"),
    }


def _one(
    ctx: Any, folder: Path, model: Any, data: fl.Pipeline, row: Mapping[str, Any], words: Words
) -> dict[str, Any]:
    """One clip through the model, drawn; → what the page says of it."""
    # live, by itself: the store of the training must not become one of this clip alone
    alone = fl.Workload(fl.Pipeline(fl.Source.table([row]), *data.steps, outputs=data.outputs), run=run)
    frames, frame_times = _video(data)(row["path"])  # first: it says what is wrong with a clip
    film, film_times = film_frames(row["path"], data)
    batch = next(iter(ctx.feed(workload=alone, batch_size=1, live=True)))
    tells = getattr(model, "objective", "caption") != "reconstruct"
    with torch.no_grad():
        passes = [*model(batch, mode="look")]
        looked = ("coarse", "fine")[: len(passes)] if tells else ()
        told = {who: model.caption(batch, words.most, mode=who, end=words.end)[0] for who in looked}
    names = ["coarse", *(f"fine {k}" for k in range(1, len(passes)))]
    times = batch["times"][0].double().cpu().numpy()
    looked_at = np.abs(frame_times.numpy()[None, :] - times[:, None]).argmin(1)
    covers = model.gaze.covers
    side = round(covers * frames.shape[-1])  # what no patch lies on is not drawn: maps would be stretched
    captions = {"truth": row.get("caption") or "", **{who: words.text(ids) for who, ids in told.items()}}
    sample = Sample(
        str(row["key"]), frames[looked_at, :, :side, :side], times,
        {name: one.attention[0] for name, one in zip(names, passes, strict=True)},
        model.gaze.prefix, model.gaze.grid, truth(row["path"], times, covers), captions,
        (film[..., :side, :side], film_times, truth(row["path"], film_times, covers)),
    )  # fmt: skip
    return {
        "figures": look(sample, folder),
        "captions": {who: text for who, text in captions.items() if text},
    }


# --- clips --------------------------------------------------------------------------------------------


def chosen(trained: fl.Workload, clip: str, n: int, split: str) -> list[dict[str, Any]]:
    """The clips to look at, as rows of the source; where none is asked for, the first that can be decoded."""
    data = next(iter(trained.pipelines.values()))
    source = data.source
    keys = [*source.keys]
    if not clip:
        rows = _of_split(trained, keys, (source.raw(i) for i in range(len(keys))), split)
        good = [*islice((row for row in rows if _decodes(row, data)), n)]
        if not good:
            raise UsageError(
                f"foveated-look: none of the {len(rows):,} clips of split={split!r} can be decoded, as said "
                "above. Mend them, or give clip= another one."
            )
        return good
    exact = [i for i, key in enumerate(keys) if key == clip]
    found = exact or [i for i, key in enumerate(keys) if clip in key]
    if found:
        return [_row(keys[i], source.raw(i)) for i in found[:n]]
    file = Path(clip).expanduser()
    if file.is_file():
        return [{**dict.fromkeys(source.fields, ""), "key": file.name, "path": str(file)}]
    some = ", ".join(keys[:5]) + (" …" if len(keys) > 5 else "")
    raise UsageError(
        f"clip={clip!r} is neither a file nor (a part of) the key of one of the {len(keys):,} clips that the "
        f"model was trained and tested on: {some}"
    )


def _decodes(row: Mapping[str, Any], data: fl.Pipeline) -> bool:
    """Whether training had it: what cannot be decoded was quarantined there, and is left out here, aloud."""
    try:
        _video(data)(row["path"])
    except UsageError as e:
        log.warning("foveated-look: left out: %s", e)
        return False
    return True


def _row(key: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    return {**raw, "key": key}


def _of_split(trained: fl.Workload, keys: Sequence[str], rows: Any, split: str) -> list[dict[str, Any]]:
    if trained.splits is None:
        return [_row(key, raw) for key, raw in zip(keys, rows, strict=True)]
    by = trained.splits if isinstance(trained.splits, str) else trained.group
    groups: dict[str, list[dict[str, Any]]] = {}
    for key, raw in zip(keys, rows, strict=True):
        groups.setdefault(str(trained.split_of(str(raw[by]) if by else key)), []).append(_row(key, raw))
    if split not in groups:
        raise UsageError(f"foveated-look: no clip is of split={split!r}; there are {', '.join(groups)}.")
    return groups[split]


def film_frames(path: str, data: fl.Pipeline) -> tuple[Tensor, Floats]:
    """The frames of a film, cut and scaled as the pipeline does it: uint8 [F, 3, H, W], and their times."""
    video = _video(data)
    there = max(video.frames, min(_FRAMES, _count(path)))
    try:
        frames, times = replace(video, frames=there)(path)
    except UsageError:  # fewer can be decoded than the file says: as many as the model was given
        frames, times = video(path)
    return frames, times.numpy()


def _video(data: fl.Pipeline) -> stages.Video:
    """What decodes the clips of a pipeline."""
    own = [stage.fn for stage in data.stages if isinstance(stage.fn, stages.Video)]
    return own[0] if own else stages.Video(frames=16, size=256)


def _count(path: str) -> int:
    """Frames of a film, as its packets tell; 0 where it cannot be read: decoding says why."""
    import av

    try:
        with stages.open_clip(path) as clip:
            return sum(packet.size > 0 for packet in clip.demux(video=0))
    except (av.FFmpegError, OSError, IndexError):
        return 0


def truth(path: str, times: Floats, covers: float = 1.0) -> Floats | None:
    """[T, 2] where the target of a clip of the embedded set is; None: it is no such clip.

    covers: the share of a frame's side that is drawn, which is then 0…1.
    """
    file = Path(path)
    table = file.parent.parent / "captions.csv"
    if not table.is_file():
        return None
    with table.open(newline="", encoding="utf-8", errors="replace") as text:  # it may be anybody's
        rows = csv.DictReader(text)
        if not {"path", "index", "seed", "seconds", "objects", "target"} <= {*(rows.fieldnames or ())}:
            return None
        row = next((r for r in rows if Path(r["path"] or "").name == file.name), None)
    if row is None:
        return None
    world = glyphs.script(
        int(row["index"]), seed=int(row["seed"]), seconds=float(row["seconds"]),
        objects=int(row["objects"]), scale=float(row.get("scale") or 1),
    )  # fmt: skip
    return np.array([glyphs.where(world, float(t)) for t in times]) / covers


# --- words --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Words:
    """How training read captions, so that what the model tells is read alike."""

    tokenizer: Any = None
    most: int = 32
    """Tokens of a caption."""
    end: int | None = None
    """The token that ends one; None: what the language model itself says."""

    def text(self, ids: Sequence[int]) -> str:
        if self.tokenizer is None:
            return " ".join(map(str, ids))
        return str(self.tokenizer.decode(ids, skip_special_tokens=True)).strip()


def _words(trained: fl.Workload) -> Words:
    """Of the workload's own pipeline."""
    every = [stage.fn for data in trained.pipelines.values() for stage in data.stages]
    end = next((fn.end for fn in every if isinstance(fn, Ended)), None)
    inner = (fn.tokenizer if isinstance(fn, Ended) else fn for fn in every)
    found = next((fn for fn in inner if isinstance(fn, stages.Tokenizer)), None)
    if found is None:
        return Words()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(found.name, trust_remote_code=False)
    return Words(tokenizer, found.max_length or Words.most, end)


def _metrics(checkpoint: str) -> list[dict[str, Any]]:
    """Of the run that a checkpoint lies in; nothing where there is none."""
    place = Path(checkpoint).absolute()
    found = next(
        (p / "metrics.jsonl" for p in (place, *place.parents[:2]) if (p / "metrics.jsonl").is_file()), None
    )
    return page.read_metrics(found) if found else []


def _evaluated(metrics: Sequence[Mapping[str, Any]], warmup_steps: int) -> list[str]:
    """What the last evaluation of the training said: the verdict, and what to be warned of."""
    row = next((row for row in reversed(metrics) if row.get("kind") == "eval" and "entropy" in row), None)
    if row is None:
        return []
    figures = {name: float(value) for name, value in row.items() if isinstance(value, int | float)}
    told = verdicts.lines(figures, warming=row["step"] < warmup_steps)
    return [f"Last evaluation of the training, at step {row['step']:,}: {line}" for line in told]


def _content(model: torch.nn.Module) -> str:
    """A digest of all weights and buffers."""
    found = hashlib.sha256()
    for name, value in model.state_dict().items():
        found.update(f"{name} {value.dtype} {list(value.shape)} ".encode())
        found.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def _digest(path: str) -> str:
    """Of a file's content; "" where it cannot be read: decoding says why."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def _plain(row: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in row.items()}


def _slug(key: str) -> str:
    name = re.sub(r"[^\w.-]+", "-", key).encode()[-_NAME_BYTES:].decode(errors="ignore")
    return name.strip(".-") or "clip"


def _means(figures: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, float]:
    """Over the clips, for the coarse pass and the last fine one."""
    ends = {"coarse": [one["coarse"] for one in figures if "coarse" in one],
            "fine": [one[last] for one in figures if (last := [*one][-1]) != "coarse"]}  # fmt: skip
    return {
        f"{name}_{who}": float(np.mean([row[name] for row in rows]))
        for who, rows in ends.items()
        for name in ("entropy", "on_target")
        if rows and all(name in row for row in rows)
    }
