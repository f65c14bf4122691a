"""What a video file holds, from its packets: nothing is decoded.

Of a packet only what describes it is kept, so that a long clip is never in memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from frostline.errors import UsageError

Times = NDArray[np.float64]

MAX_PIXELS = 89_478_485
"""Of one frame, as for images."""

CONTAINERS = (
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,mpegvideo,m4v,flv,live_flv,asf,ogg,mxf,mxf_opatom,"
    "nut,dv,rm,wtv,gxf,swf,gif,apng,ivf,yuv4mpegpipe,h261,h263,h264,hevc,vvc,av1,obu,vc1,vc1test,mjpeg,"
    "mjpeg_2000,dirac,dnxhd,cavsvideo,wav,mp3,flac,aac"
)
"""What FFmpeg may take a file for. It also knows formats that are lists of other files, and draws text."""


def cannot(path: str, what: str, advice: str) -> UsageError:
    """
    >>> print(cannot("a.mp4", "it is empty (0 bytes)", "Leave it out."))
    Cannot decode the video 'a.mp4': it is empty (0 bytes). Leave it out.
    """
    return UsageError(f"Cannot decode the video {path!r}: {what}. {advice}")


class Packet(NamedTuple):
    """One packet of any stream of the file."""

    stream: int
    pts: int | None
    """When it is shown, in units of its stream; None where the file does not say."""
    lasts: int
    end_s: float
    key: bool
    broken: bool
    discard: bool
    """To be decoded but not shown, as what lies before a cut."""


@dataclass(frozen=True)
class Index:
    """The frames of a video stream."""

    pts: list[int]
    """In the order of showing."""
    position: dict[int, int]
    """Of a pts in the order of decoding."""
    keys: list[int]
    """The pts of the key frames, ascending."""
    second: float
    """How many seconds a unit of pts is."""
    last_lasts: int
    """How long the last frame is shown, in units of pts."""

    def times(self) -> Times:
        return np.asarray(self.pts, np.float64) * self.second

    def end_s(self) -> float:
        return (self.pts[-1] + self.last_lasts) * self.second if self.pts else 0.0

    def key_of(self, pts: int) -> int:
        """The last key frame shown no later; what comes after a key frame never needs what is before it."""
        place = bisect_right(self.keys, pts)
        return self.keys[place - 1] if place else self.pts[0]


def scanned(path: str) -> Index | None:
    """None where packets carry no time stamps, or the same ones, as in raw streams and some AVI files."""
    with opened(path) as (container, stream):
        read = [_described(p) for p in container.demux() if p.size]
        own = [p for p in read if p.stream == stream.index]
        if any(p.broken for p in own) or _falls_short(container, stream, read, len(own)):
            raise cannot(path, "it is cut off or damaged", "Replace the file, or leave it out.")
        second = float(stream.time_base)
    shown = [p for p in own if not p.discard]
    stamps = [p.pts for p in shown if p.pts is not None]
    if len(set(stamps)) < len(shown):
        return None
    ascending = sorted(stamps)
    last = next((p.lasts for p in shown if p.pts == ascending[-1]), 0) if stamps else 0
    position = {pts: i for i, pts in enumerate(stamps)}
    keys = sorted(p.pts for p in shown if p.key and p.pts is not None)
    return Index(ascending, position, keys, second, last or _gap(ascending))


def _described(packet: Any) -> Packet:
    lasts = int(packet.duration or 0)
    end = float((packet.pts + lasts) * packet.time_base) if packet.pts is not None else 0.0
    return Packet(
        packet.stream_index,
        packet.pts,
        lasts,
        end,
        bool(packet.is_keyframe),
        bool(packet.is_corrupt),
        bool(packet.is_discard),
    )


def _falls_short(container: Any, stream: Any, read: Sequence[Packet], frames: int) -> bool:
    """Cut between two packets, a file looks whole; what its header promised says that it is not."""
    if "mov" in container.format.name:  # lists every frame
        return frames < len(stream.index_entries)
    if "matroska" not in container.format.name or container.duration is None:  # others tell a guess
        return False
    promised = float(container.duration) / 1e6
    return max((p.end_s for p in read), default=0.0) < 0.95 * promised - 0.5


def _gap(stamps: Sequence[int]) -> int:
    """The usual distance of two frames, where the file does not say how long the last one is shown."""
    return int(np.median(np.diff(stamps))) if len(stamps) > 1 else 0


def open_clip(path: str) -> Any:
    """PyAV's container of a file, for reading, also where a title is damaged (PyAV agrees since 19).

    The file alone: one that names others, as a playlist does, is none.
    """
    import av

    lenient = {"metadata_errors": "replace"} if int(av.__version__.split(".")[0]) < 19 else {}
    alone = {"format_whitelist": CONTAINERS, "protocol_whitelist": "file"}
    return av.open(path, options=alone, **lenient)


class opened:
    """A file's first real video stream, decoded in one thread; cover pictures of audio files are none."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> tuple[Any, Any]:
        self._container = open_clip(self._path)
        try:
            stream = self._stream()
        except UsageError:
            self._container.close()
            raise
        stream.thread_type, stream.codec_context.thread_count = "NONE", 1
        return self._container, stream

    def _stream(self) -> Any:
        from av.stream import Disposition

        streams = [s for s in self._container.streams.video if not s.disposition & Disposition.attached_pic]
        if not streams:
            raise cannot(self._path, "it has no video stream", "Leave it out.")
        stream = streams[0]
        if stream.codec_context is None:
            raise cannot(self._path, "it is damaged, or in a codec unknown to FFmpeg", "Convert it.")
        if stream.width * stream.height > MAX_PIXELS:
            what = f"a frame of {stream.width}x{stream.height} has more than {MAX_PIXELS:,} pixels"
            raise cannot(self._path, what, "Leave it out.")
        return stream

    def __exit__(self, *_: object) -> None:
        self._container.close()
