"""Video files to frames, spread over the whole clip by their real time stamps.

The time stamps come from the file's packets, not from a frame count, a rate or a duration in its header:
those are wrong for variable frame rates, cut files and streams. Decoding is in `decoders.py`, one function
for each library.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from frostline.errors import UsageError
from frostline.stages import decoders, geometry
from frostline.stages.geometry import Filter, Fit, Size
from frostline.stages.packets import cannot

Backend = Literal["pyav", "torchcodec", "opencv", "auto"]

_MODULES = {"pyav": "av", "torchcodec": "torchcodec", "opencv": "cv2"}
"""In the order in which "auto" tries them."""


@dataclass(frozen=True)
class Video:
    """A path to (frames, times): uint8 [N, 3, H, W], and the seconds at which they are shown, float64 [N].

    >>> clip = Video(frames=8, size=224, fit="cover", min_s=2.0)
    >>> clip.backend
    'pyav'

    The frames are those nearest to N times evenly spaced from the clip's first frame to its last (N = 1: the
    one in the middle), all different. The times are those in the file. Rotation in the file's metadata is
    applied (not by "torchcodec"), mirroring by "pyav" alone. A file that cannot be decoded, is shorter than
    N frames or lies outside min_s..max_s raises `UsageError` with its path, so that freezing quarantines it.

    As a stage: `fl.Stage("clip", Video(…), reads="path", writes=("frames", "times"))`.
    """

    frames: int = 24
    """How many: N."""
    size: Size | None = 256
    """An integer (a square; the shorter side with fit="shortest") or (height, width). None: as it is."""
    fit: Fit = "stretch"
    """"stretch" to the size, "cover" it and cut the middle out, "contain" the whole with a black margin, or
    scale the "shortest" side to it."""
    start: float = 0.0
    """Where the frames begin, as a share of the clip's time."""
    end: float = 1.0
    """Where they end, as a share of the clip's time."""
    min_s: float | None = None
    """Shorter clips are refused, in seconds."""
    max_s: float | None = None
    """Longer clips are refused, in seconds."""
    resample: Filter = "bicubic"
    """The filter of the resize: libswscale's with "pyav", Pillow's with the others."""
    backend: Backend = "pyav"
    """"auto" becomes, right away, the first of pyav, torchcodec, opencv that is installed; that choice is
    then part of what the frames were computed from. Decoders differ in pixels: name one."""

    def __post_init__(self) -> None:
        problems = geometry.size_problems(self.size, self.fit, self.resample)
        if self.frames < 1:
            problems.append(f"frames is {self.frames}; at least 1")
        if not 0.0 <= self.start <= self.end <= 1.0:
            problems.append(
                f"start..end is {self.start}..{self.end}; shares of the clip, 0 ≤ start ≤ end ≤ 1"
            )
        for name, value in (("min_s", self.min_s), ("max_s", self.max_s)):
            if value is not None and not (math.isfinite(value) and value >= 0):
                problems.append(f"{name} is {value}; a number of seconds, at least 0, or None")
        if self.min_s is not None and self.max_s is not None and self.min_s > self.max_s:
            problems.append(f"min_s is {self.min_s} and max_s {self.max_s}; no clip is both")
        if self.backend not in get_args(Backend):
            problems.append(f"backend is {self.backend!r}; one of {', '.join(map(repr, get_args(Backend)))}")
        if problems:
            raise UsageError("Video(...) cannot work:", problems=problems)
        if self.backend == "auto":
            found = next((name for name, module in _MODULES.items() if find_spec(module)), "pyav")
            object.__setattr__(self, "backend", found)

    def __call__(self, path: str | Path) -> tuple[Tensor, Tensor]:
        name = os.fspath(path)
        _refuse_empty(name)
        decode = {"pyav": decoders.pyav, "torchcodec": decoders.torchcodec, "opencv": decoders.opencv}
        target = decoders.Target(name, self.size, self.fit, self.resample)
        pictures, times = decode[self.backend](target, lambda times, end_s: self._choose(name, times, end_s))
        if len({picture.shape for picture in pictures}) > 1:
            raise cannot(name, "the size of its frames changes on the way", "Give a size.")
        frames = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).contiguous()
        return frames, torch.from_numpy(np.asarray(times, np.float64))

    def _choose(self, name: str, times: NDArray[np.float64], end_s: float) -> NDArray[np.int64]:
        """Which frames, out of ascending time stamps; `end_s` is when the last one is gone."""
        if len(times) == 0:
            raise cannot(name, "it holds no frame", "Replace the file, or leave it out.")
        lasts = end_s - times[0]
        if lasts < (self.min_s or 0.0) or lasts > (self.max_s if self.max_s is not None else math.inf):
            limits = f"min_s={self.min_s}, max_s={self.max_s}"
            raise cannot(name, f"it lasts {lasts:.3f} s ({limits})", "Leave it out, or change them.")
        first, span = times[0], times[-1] - times[0]
        inside = np.flatnonzero(
            (times >= first + self.start * span - 1e-9) & (times <= first + self.end * span + 1e-9)
        )
        if len(inside) < self.frames:
            span_ = f"from {self.start:.0%} to {self.end:.0%} of its time"
            what = f"it has {len(inside)} frames {span_}, of {len(times)}"
            raise cannot(name, what, f"Ask for fewer than frames={self.frames}, or leave it out.")
        low, high = first + self.start * span, first + self.end * span
        return inside[spread(times[inside], self.frames, low, high)]


def spread(times: NDArray[np.float64], n: int, low: float, high: float) -> NDArray[np.int64]:
    """Indices of the n different entries of ascending `times` nearest to n even points from low to high.

    >>> spread(np.array([0.0, 0.1, 0.2, 0.3, 5.0, 10.0]), 3, 0.0, 10.0)
    array([0, 4, 5])
    """
    points = np.linspace(low, high, n) if n > 1 else np.array([(low + high) / 2])
    right = np.clip(np.searchsorted(times, points), 1, max(1, len(times) - 1))
    left = right - 1
    right = np.minimum(right, len(times) - 1)
    nearest = np.where(points - times[left] <= times[right] - points, left, right)
    # Where frames are sparse, two points share a frame: the later one moves on, and the tail makes room.
    steps = np.arange(n)
    ascending = np.maximum.accumulate(nearest - steps) + steps
    return np.minimum(ascending, len(times) - n + steps).astype(np.int64)


def _refuse_empty(name: str) -> None:
    try:
        size = os.stat(name).st_size
    except OSError as e:
        raise cannot(name, e.strerror or str(e), "Check the path and its permissions.") from e
    if not os.path.isfile(name):
        raise cannot(name, "it is no regular file", "Give the path of a file.")
    if size == 0:
        raise cannot(name, "it is empty (0 bytes)", "Replace the file, or leave it out.")
