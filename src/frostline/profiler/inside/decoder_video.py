"""Readers of video, timed: PyAV containers and OpenCV captures.

A container is read bit by bit, so "one decode" is a run: what was read between opening (or a seek) and the
next seek, the end of the file, `close()`, or the object's end. A data set that keeps its containers open and
seeks for every sample is thus told sample by sample. The key of a run is the file's, then "#" and the range
that was read: two clips of one film are two inputs, the same clip twice is a repetition.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from functools import wraps
from time import perf_counter
from typing import Any

from .decoder_keys import MARK, key_of
from .decoder_sizes import bytes_of, frame_bytes

Say = Callable[[str, str, float, float, int], None]


class _Here(threading.local):
    busy = False  # this thread is inside a container's decode(), whose time covers the codec's


_here = _Here()


class Run:
    """Sums the time and the frames' bytes of one run over a container and tells it once."""

    def __init__(self, say: Say, what: str, file_key: str) -> None:
        self._say, self._what, self._file_key = say, what, file_key
        self._reset("")

    def _reset(self, place: str) -> None:
        self._pid = os.getpid()
        self._place = place
        self._start, self._seconds, self.items, self._bytes = 0.0, 0.0, 0, 0
        self._first: Any = None
        self._last: Any = None

    def add(self, start: float) -> None:
        """The time from `start` until now belongs to the run."""
        seconds = perf_counter() - start
        if self._pid != os.getpid():  # forked: what was read before is the parent's to tell
            self._reset(self._place)
        if not self._seconds:
            self._start = start
        self._seconds += seconds

    def saw(self, position: Any) -> None:
        if not self.items:
            self._first = position
        if position is not None:  # the packet that flushes the decoder has none
            self._last = position
        self.items += 1

    def gave(self, size: int) -> None:
        """A frame of so many bytes; after `add`, which begins anew in a forked process."""
        self._bytes += size

    def end(self, place: str = "") -> None:
        """Tells the run if anything was read; the next one begins at `place`."""
        items, seconds, start, size = self.items, self._seconds, self._start, self._bytes
        key = f"{self._file_key}#{self._place}{self._first}-{self._last}:{items}" if self._file_key else ""
        mine = self._pid == os.getpid()
        if items or not mine:
            self._reset(place)  # before telling: the end may come again while that is under way
        else:
            self._place = place  # opened, sought, nothing read yet: that time belongs to what is read next
        if items and mine:
            self._say(self._what, key, start, seconds, size)


class TimedContainer:
    """Stands for a PyAV input container: everything is the container's own, reading is timed."""

    __slots__ = ("__weakref__", "_container", "_forget", "_run")

    def __init__(self, container: Any, run: Run, forget: Callable[[int], object]) -> None:
        for name, value in (("_container", container), ("_run", run), ("_forget", forget)):
            object.__setattr__(self, name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # isinstance(container, av.container.InputContainer) holds
        return type(self._container)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._container, name)

    def __reduce_ex__(self, protocol: Any) -> Any:  # copying and pickling fail as they do without us
        return self._container.__reduce_ex__(protocol)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._container, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._container, name)

    def __dir__(self) -> list[str]:
        return dir(self._container)

    def __repr__(self) -> str:
        return repr(self._container)

    def __eq__(self, other: object) -> bool:  # `stream.container == container` holds, `is` cannot
        return self._container is (other._container if type(other) is TimedContainer else other)

    def __hash__(self) -> int:
        return hash(self._container)

    def __enter__(self) -> TimedContainer:
        self._container.__enter__()
        return self

    def __exit__(self, *exception: object) -> Any:
        try:
            return self._container.__exit__(*exception)
        finally:
            self._run.end()

    def __del__(self) -> None:
        self._forget(id(self._container))
        self._run.end()

    def close(self) -> None:
        try:
            self._container.close()
        finally:
            self._run.end()

    def seek(self, *args: Any, **kwargs: Any) -> Any:
        self._run.end()
        start = perf_counter()
        try:
            return self._container.seek(*args, **kwargs)
        finally:
            self._run.add(start)

    def decode(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        return self._timed(self._container.decode(*args, **kwargs), ends=True)

    def demux(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        # Packets may be collected first and decoded later: that run ends with close(), a seek, or the object.
        return self._timed(self._container.demux(*args, **kwargs), ends=False)

    def _timed(self, items: Iterator[Any], ends: bool) -> Iterator[Any]:
        run = self._run  # `self` lives as long as this generator, so that the run does not end before it
        while True:
            start = perf_counter()
            _here.busy = True
            try:
                item = next(items, None)
            finally:
                _here.busy = False
                run.add(start)
            if item is None:
                break
            run.saw(getattr(item, "pts", None))
            run.gave(frame_bytes(item))  # 0 of a packet: what decodes it adds its frames
            yield item
        if ends:
            run.end()


def timed_codec_decode(original: Any, runs: dict[int, Run]) -> Any:
    """`CodecContext.decode`, which a packet's and a stream's `decode` call: adds to the run of the packet's
    container, for scripts that decode what `container.demux()` gives."""

    @wraps(original)
    def decode(codec: Any, packet: Any = None) -> Any:
        stream = None if _here.busy else getattr(packet, "stream", None)
        run = None if stream is None else runs.get(id(stream.container))
        if run is None:
            return original(codec, packet)
        start = perf_counter()
        try:
            frames = original(codec, packet)
        finally:
            run.add(start)
        if isinstance(frames, list):
            run.gave(sum(map(frame_bytes, frames)))
        return frames

    return decode


def timed_capture(original: type, say: Say) -> type:
    """`cv2.VideoCapture` as a subclass that times reading."""

    class VideoCapture(original):  # type: ignore[misc]
        __doc__ = original.__doc__
        __wrapped__ = original

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            _open_capture(self, say, super().__init__, args, kwargs)

        def open(self, *args: Any, **kwargs: Any) -> Any:
            _end_capture(self)
            return _open_capture(self, say, super().open, args, kwargs)

        def read(self, *args: Any, **kwargs: Any) -> Any:
            return _read_capture(self, super().read, args, kwargs, counts=True)

        def grab(self) -> Any:
            return _read_capture(self, super().grab, (), {}, counts=True)

        def retrieve(self, *args: Any, **kwargs: Any) -> Any:
            return _read_capture(self, super().retrieve, args, kwargs, counts=False)

        def set(self, *args: Any, **kwargs: Any) -> Any:  # a position, mostly
            _end_capture(self, place=f"{args}")
            return super().set(*args, **kwargs)

        def release(self) -> Any:
            _end_capture(self)
            return super().release()

        def __del__(self) -> None:
            _end_capture(self)

    VideoCapture.__name__ = original.__name__
    VideoCapture.__qualname__, VideoCapture.__module__ = original.__qualname__, original.__module__
    return VideoCapture


def _open_capture(capture: Any, say: Say, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    source = args[0] if args else kwargs.get("filename")
    run = capture.__dict__[MARK] = Run(say, "cv2.VideoCapture", key_of(source))
    start = perf_counter()
    try:
        return call(*args, **kwargs)
    finally:
        run.add(start)


def _read_capture(capture: Any, call: Callable[..., Any], args: Any, kwargs: Any, counts: bool) -> Any:
    run = capture.__dict__[MARK]
    start = perf_counter()
    try:
        result = call(*args, **kwargs)
    finally:
        run.add(start)
    if not (result[0] if isinstance(result, tuple) else result):
        run.end()  # the end of the file
        return result
    if counts:
        run.saw(None)
    if isinstance(result, tuple):  # (True, the frame); grab() gives none
        run.gave(bytes_of(result[1]))
    return result


def _end_capture(capture: Any, place: str = "") -> None:
    run = capture.__dict__.get(MARK)
    if run is not None:
        run.end(place)
