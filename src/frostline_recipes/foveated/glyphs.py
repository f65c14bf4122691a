"""The embedded set: little worlds whose caption can only be told by following one glyph among equals.

Six glyphs move over a textured background. During the first sixth of a clip one of them wears a white
bracket; after that nothing marks it. Every glyph changes its colour once and later its kind, at moments of
its own, and the caption tells what the marked one was and what it became. Looks, paths and moments of the
marked glyph follow the same distribution as those of the others, so neither a colour nor a place gives it
away: the second half of the caption has to be read where the glyph has gone, after the cue is over.

One world is in `worlds.py`, its pixels in `painting.py`; `make` here writes a set of them as H.264 clips
with a list of captions.
"""

from __future__ import annotations

import csv
import fcntl
import hashlib
import json
import logging
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from frostline.errors import FrostlineError, MissingExtra, UsageError
from frostline_recipes.foveated.painting import BRACKET, COLOURS, GLYPH, KINDS
from frostline_recipes.foveated.worlds import (
    APART,
    CUE,
    Glyph,
    Look,
    Script,
    caption,
    cued,
    frame,
    places,
    script,
    where,
)

__all__ = [  # a world's names too: whoever uses the set needs one module
    "APART",
    "BRACKET",
    "COLOURS",
    "CUE",
    "GLYPH",
    "KINDS",
    "SPLITS",
    "Glyph",
    "Look",
    "Script",
    "caption",
    "cued",
    "film",
    "frame",
    "make",
    "places",
    "script",
    "where",
]

SPLITS = ("train", "val", "test")
log = logging.getLogger("frostline")


@dataclass(frozen=True)
class _Set:
    """What a set is made from; its folder's name says all of it."""

    n: int
    seed: int
    size: int
    seconds: float
    fps: int
    objects: int
    scale: float
    changes: int
    splits: tuple[float, ...]

    def name(self) -> str:
        told = json.dumps([_VERSION, asdict(self)])
        mark = hashlib.sha256(told.encode()).hexdigest()[:8]
        return f"glyphs-{self.n}x{self.seconds:g}s-{self.size}px-seed{self.seed}-{mark}"

    def world(self, i: int) -> Script:
        return script(
            i, seed=self.seed, size=self.size, seconds=self.seconds, objects=self.objects, scale=self.scale,
            changes=self.changes,
        )  # fmt: skip

    def split(self, i: int) -> str:
        """By index, train first. A split that has a share has at least one clip."""
        val, test = (max(1, round(self.n * share)) if share else 0 for share in self.splits[1:])
        return SPLITS[(i >= self.n - test - val) + (i >= self.n - test)]

    def problems(self, called: Mapping[str, str]) -> list[str]:
        """Everything that makes such a set impossible. called: other names of its parameters."""
        found = []
        n, size, fps, scale = (called.get(name, name) for name in ("n", "size", "fps", "scale"))
        shares = self.splits
        if len(shares) != 3 or min(shares) < 0 or shares[0] <= 0 or abs(sum(shares) - 1) > 1e-6:
            found.append(f"splits is {shares}; shares of train, val and test that add up to 1, train above 0")
        elif self.n < 1 or self.split(0) != "train":
            found.append(f"{n} is {self.n}; at least one clip for each split")
        if self.seed < 0:
            found.append(f"seed is {self.seed}; at least 0")
        if self.size < 32 or self.size % 2:
            found.append(
                f"{size} is {self.size}; an even number of pixels, at least 32 (H.264 halves the colours)"
            )
        if self.fps < 1 or not 12 <= self.seconds * self.fps < math.inf:
            found.append(
                f"{self.seconds:g} s at {fps}={self.fps}; at least 12 frames, so that two show the cue"
            )
        if not 1 <= self.objects <= 8:
            found.append(f"objects is {self.objects}; 1 to 8, more find no room to keep apart")
        if not 0.5 <= self.scale <= 2:
            found.append(f"{scale} is {self.scale:g}; 0.5 to 2")
        if self.changes not in (1, 2):
            found.append(f"changes is {self.changes}; 1 (of colour) or 2 (of colour, then of kind)")
        return found


_TELL_S = 10.0
_VERSION = 3
"""To be raised when worlds are drawn or painted differently, so that old sets are not taken for new ones."""


def make(
    folder: str | os.PathLike[str],
    *,
    n: int = 2000,
    seed: int = 0,
    size: int = 256,
    seconds: float = 24.0,
    fps: int = 4,
    objects: int = 6,
    scale: float = 1.0,
    changes: int = 2,
    splits: Sequence[float] = (0.8, 0.1, 0.1),
    workers: int | None = None,
    called: Mapping[str, str] | None = None,
) -> Path:
    """The folder of a set, below `folder`; made now unless it is there. Other arguments make another folder.

    objects, scale: how many glyphs there are, and how large, in their usual size (30 of 256 pixels).
    changes:        1: every glyph changes its colour once; 2: and later its kind.
    called:         what n, size, fps and scale are called where they were given, for errors.
    It holds clips/000000.mp4 … and captions.csv with path, caption, split, and what is true of each clip. It
    is written aside and renamed when it is whole. Whoever asks for the same set meanwhile waits for it.
    """
    shares = tuple(map(float, splits))
    asked = _Set(n, seed, size, float(seconds), fps, objects, float(scale), changes, shares)
    if problems := asked.problems(called or {}):
        raise UsageError("The embedded set cannot have such clips:", problems=problems)
    place = Path(folder) / asked.name()
    if place.is_dir():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with _alone(place.parent):
        if not place.is_dir():
            _write(asked, place, min(n, workers or _cores()))
    return place


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time; the lock goes with the process, however that ends."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _write(asked: _Set, place: Path, workers: int) -> None:
    for left in place.parent.glob(f".{place.name}.part-*"):  # by a process that was killed: the lock is ours
        shutil.rmtree(left, ignore_errors=True)
    aside = place.with_name(f".{place.name}.part-{os.getpid()}")
    (aside / "clips").mkdir(parents=True)
    log.warning(
        "Making %s clips of %g s in %s by %d processes", f"{asked.n:,}", asked.seconds, place, workers
    )
    try:
        _film(asked, aside, workers)
        with (aside / "captions.csv").open("w", newline="", encoding="utf-8") as text:
            rows = [_row(asked, i) for i in range(asked.n)]
            table = csv.DictWriter(text, list(rows[0]))
            table.writeheader()
            table.writerows(rows)
            text.flush()
            os.fsync(text.fileno())
        aside.rename(place)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _row(asked: _Set, i: int) -> dict[str, Any]:
    """One line of captions.csv. `script(index, seed=…, seconds=…, objects=…)` gives all the rest."""
    world = asked.world(i)
    target = world.glyphs[world.target]
    return {
        "path": _clip(i), "caption": caption(world), "split": asked.split(i), "index": i, "seed": asked.seed,
        "seconds": asked.seconds, "objects": asked.objects, "scale": asked.scale, "target": world.target,
        "colour_s": round(target.colour_s, 4), "kind_s": round(target.kind_s, 4),
        "colour_before": target.before.colour, "kind_before": target.before.kind,
        "colour_after": target.after.colour, "kind_after": target.after.kind,
    }  # fmt: skip


def _clip(i: int) -> str:
    return f"clips/{i:06d}.mp4"


def _film(asked: _Set, into: Path, workers: int) -> None:
    """Makes all clips, each process every `workers`-th; their first failure ends all."""
    # Plain processes, not multiprocessing: nothing is asked of the caller's main module, and none is left
    # waiting for work when this process is killed.
    code = "import sys; from frostline_recipes.foveated import glyphs; glyphs._share(sys.argv[1])"
    tasks = [
        json.dumps({"set": asdict(asked), "into": str(into), "first": k, "step": workers, "for": os.getpid()})
        for k in range(workers)
    ]
    with ExitStack() as stack:
        start = [sys.executable, "-c", code]
        running = [
            stack.enter_context(subprocess.Popen([*start, task], stderr=subprocess.PIPE, text=True))
            for task in tasks
        ]
        for process in running:
            stack.callback(process.kill)
        _watch(running, into / "clips", asked.n)
        for process in running:
            _, said = process.communicate()
            if process.returncode:
                why = (said.strip().splitlines() or [f"status {process.returncode}"])[-1]
                raise FrostlineError(f"Making clips in {into.parent} failed: {why}. Nothing of it is kept.")


def _watch(running: Sequence[subprocess.Popen[str]], clips: Path, n: int) -> None:
    """Until all have ended, or one has failed; says now and then how far they are."""
    began = told = time.monotonic()
    while any(process.poll() is None for process in running) and not any(p.returncode for p in running):
        time.sleep(0.05)
        if time.monotonic() - told > _TELL_S:
            told = time.monotonic()
            made = max(1, sum(1 for _ in clips.iterdir()))
            left = (told - began) / made * (n - made)
            log.warning("%s of %s clips made, about %.0f s left", f"{made:,}", f"{n:,}", left)


def _share(task: str) -> None:
    """What one process does."""
    given = json.loads(task)
    asked = _Set(**given["set"])
    for i in range(given["first"], asked.n, given["step"]):
        if os.getppid() != given["for"]:  # nobody waits for the set any more
            return
        film(asked.world(i), Path(given["into"]) / _clip(i), fps=asked.fps)


def film(world: Script, path: str | os.PathLike[str], *, fps: int = 4) -> None:
    """Writes a world as an H.264 clip."""
    try:
        import av
    except ImportError as e:
        raise MissingExtra.needed("Making clips", package="av", extra="video") from e
    with open(path, "wb") as file:
        with av.open(file, "w", format="mp4") as container:
            # "veryfast" takes 0.2 s a clip of 96 frames, the default 0.45 s, for much the same picture.
            # Without mbtree, whose fast code is not repeatable in small pictures: 3 results in 40 runs at 64.
            options = {"crf": "22", "preset": "veryfast", "threads": "1", "x264-params": "mbtree=0"}
            stream = container.add_stream("libx264", rate=fps, options=options)
            stream.width = stream.height = world.size
            stream.pix_fmt = "yuv420p"
            for k in range(round(world.seconds * fps)):
                pixels = np.ascontiguousarray(frame(world, k / fps).transpose(1, 2, 0))
                container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
            container.mux(stream.encode())
        file.flush()
        os.fsync(file.fileno())
