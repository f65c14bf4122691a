"""Chosen frames of a video file, by PyAV, torchcodec or OpenCV.

Each function takes what to decode and a rule that picks frames out of all time stamps, and returns the pixels
[H, W, 3] with the time stamps of the picked ones. One decoder thread each: freezing runs many of them at
once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frostline.errors import MissingExtra
from frostline.stages import geometry
from frostline.stages.geometry import Filter, Fit, Size
from frostline.stages.packets import Index, Times, cannot, opened, scanned

Pixels = NDArray[np.uint8]
Choose = Callable[[Times, float], NDArray[np.int64]]
Decoded = tuple[list[Pixels], Times]

SEEK_FRAMES = 8
"""What a seek costs, in decoded frames: 5 to 10 measured (H.264, 320x240 and 1280x720, keys every 12–250)."""

_SWSCALE = {
    "nearest": "POINT",
    "bilinear": "BILINEAR",
    "bicubic": "BICUBIC",
    "lanczos": "LANCZOS",
    "box": "AREA",
}


@dataclass(frozen=True)
class Target:
    """Which file, and what its frames become."""

    path: str
    size: Size | None
    fit: Fit
    resample: Filter


def pyav(target: Target, choose: Choose) -> Decoded:
    """With PyAV: seeks where a key frame saves more decoding than the seek costs, else straight through."""
    try:
        import av
    except ImportError as e:
        raise MissingExtra.needed("Decoding video", package="PyAV", extra="video") from e
    try:
        index = scanned(target.path)
        if index is not None:
            wanted = choose(index.times(), index.end_s())
            found = _by_time_stamp(target, index, wanted)
            if found is not None:
                return found, index.times()[wanted]
        return _by_count(target, choose)
    except av.FFmpegError as e:
        what = f"it is damaged, cut off or no video ({type(e).__name__}: {e.strerror})"
        raise cannot(target.path, what, "Replace the file, or leave it out.") from e


def _by_time_stamp(target: Target, index: Index, wanted: NDArray[np.int64]) -> list[Pixels] | None:
    """The frames at these places; None when one is not where its packet said, so that counting has to do."""
    found: list[Pixels] = []
    with opened(target.path) as (container, stream):
        frames, here = container.decode(stream), -1
        for pts in (index.pts[i] for i in wanted):
            key = index.key_of(pts)
            if index.position[key] > here + SEEK_FRAMES:
                # To the time stamp, not the decoding one: MP4 looks for the former.
                container.seek(key, stream=stream)
                frames = container.decode(stream)
            frame = next((f for f in frames if f.pts is None or f.pts >= pts), None)
            if frame is None or frame.pts != pts:
                return None
            found.append(_finished(frame, target))
            here = index.position[pts]
    return found


def _by_count(target: Target, choose: Choose) -> Decoded:
    """Decode once for the time stamps that decoding makes up, and again for the frames."""
    with opened(target.path) as (container, stream):
        step = float(1 / (stream.average_rate or 25))  # 25: what FFmpeg assumes of a raw stream
        stamps = [frame.time for frame in container.decode(stream)]
    counted = [i * step for i in range(len(stamps))]
    known = None not in stamps and all(a < b for a, b in pairwise(stamps))
    times = np.asarray(stamps if known else counted, np.float64)
    wanted = choose(times, float(times[-1]) + step if len(times) else 0.0)
    with opened(target.path) as (container, stream):
        chosen = set(wanted.tolist())
        found = [_finished(f, target) for i, f in enumerate(container.decode(stream)) if i in chosen]
    return found, times[wanted]


def _finished(frame: Any, target: Target) -> Pixels:
    """Upright RGB at the target's size; resize and colour conversion in one pass, 4× faster than two."""
    from av.video.reformatter import Interpolation

    if frame.is_corrupt:
        raise cannot(
            target.path, f"the frame at {frame.time} s is damaged", "Replace the file, or leave it out."
        )
    quarters = round(frame.rotation / 90) % 4
    shown = (frame.width, frame.height) if quarters % 2 else (frame.height, frame.width)
    height, width = geometry.scaled(*shown, target.size, target.fit)
    # Exact rounding and full chroma: the same bits on every processor, and closest to scaling in RGB.
    flags = Interpolation.ACCURATE_RND | Interpolation.BITEXACT | Interpolation.FULL_CHR_H_INT
    rgb = frame.reformat(
        width=height if quarters % 2 else width,
        height=width if quarters % 2 else height,
        format="rgb24",
        interpolation=Interpolation[_SWSCALE[target.resample]] | flags,
        threads=1,
    )
    # The rotation tells where a row of pixels goes; mirrored, as selfies are, its columns go the other way.
    pixels = rgb.to_ndarray()[:: -1 if _mirrored(frame) else 1]
    return geometry.centred(np.rot90(pixels, quarters), target.size, target.fit)


def _mirrored(frame: Any) -> bool:
    """Whether the file's display matrix turns a frame over: [a, b, u, c, d, v, …] with ad < bc."""
    told = frame.side_data.get("DISPLAYMATRIX")
    if told is None:
        return False
    a, b, _, c, d = np.frombuffer(told, np.int32)[:5].astype(np.float64)
    return bool(a * d < b * c)


def torchcodec(target: Target, choose: Choose) -> Decoded:
    """With torchcodec; the time stamps come from PyAV, since torchcodec tells them only of decoded frames."""
    try:
        import av
        from torchcodec.decoders import VideoDecoder
    except ImportError as e:
        raise MissingExtra.needed(
            "Decoding video with torchcodec", package="torchcodec (and PyAV)", extra="torchcodec"
        ) from e
    try:
        index = scanned(target.path)
    except av.FFmpegError as e:
        what = f"it is damaged, cut off or no video ({type(e).__name__}: {e.strerror})"
        raise cannot(target.path, what, "Replace the file, or leave it out.") from e
    if index is None:
        raise cannot(target.path, "its packets carry no time stamps", "Use backend='pyav'.")
    wanted = choose(index.times(), index.end_s())
    try:
        decoder = VideoDecoder(target.path, num_ffmpeg_threads=1, dimension_order="NHWC", seek_mode="exact")
        batch = decoder.get_frames_at(indices=wanted.tolist())
    except (RuntimeError, ValueError, IndexError) as e:
        raise cannot(target.path, f"torchcodec says: {e}", "Replace the file, or leave it out.") from e
    frames, times = batch.data.numpy(), batch.pts_seconds.numpy()
    if not np.allclose(times, index.times()[wanted], atol=1e-3):
        raise cannot(target.path, "torchcodec and its packets disagree on time stamps", "Use backend='pyav'.")
    return [_resized(frame, target) for frame in frames], index.times()[wanted]


def opencv(target: Target, choose: Choose) -> Decoded:
    """With OpenCV: decodes twice, since it tells a frame's time stamp only after decoding it."""
    try:
        import cv2
    except ImportError as e:
        raise MissingExtra.needed("Decoding video with OpenCV", package="OpenCV", extra="opencv") from e
    stamps = np.asarray([seconds for _, seconds in _grabbed(cv2, target.path)], np.float64)
    if len(stamps) > 1 and not (np.diff(stamps) > 0).all():
        raise cannot(target.path, "OpenCV reads no ascending time stamps from it", "Use backend='pyav'.")
    last = float(np.median(np.diff(stamps))) if len(stamps) > 1 else 0.0
    wanted = choose(stamps, float(stamps[-1]) + last if len(stamps) else 0.0)
    chosen, found = set(wanted.tolist()), []
    for i, (capture, _) in enumerate(_grabbed(cv2, target.path)):
        if i in chosen:
            good, frame = capture.retrieve()
            if not good:
                raise cannot(target.path, f"frame {i} is damaged", "Replace the file, or leave it out.")
            found.append(_resized(np.ascontiguousarray(frame[..., ::-1]), target))  # OpenCV says BGR
    return found, stamps[wanted]


def _grabbed(cv2: Any, path: str) -> Iterator[tuple[Any, float]]:
    capture = cv2.VideoCapture(path, cv2.CAP_FFMPEG, [cv2.CAP_PROP_N_THREADS, 1])
    try:
        if not capture.isOpened():
            raise cannot(path, "OpenCV cannot open it", "Replace the file, or leave it out.")
        while capture.grab():
            yield capture, capture.get(cv2.CAP_PROP_POS_MSEC) / 1000
    finally:
        capture.release()


def _resized(frame: Pixels, target: Target) -> Pixels:
    try:
        from PIL import Image
    except ImportError as e:
        raise MissingExtra.needed("Resizing frames", package="Pillow", extra="images") from e
    height, width = geometry.scaled(frame.shape[0], frame.shape[1], target.size, target.fit)
    picture = Image.fromarray(frame).resize((width, height), geometry.filter_named(target.resample))
    return geometry.centred(np.asarray(picture), target.size, target.fit)
