"""decord's VideoReader and torchcodec's VideoDecoder, timed. Every call that gives frames is one decode."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from time import perf_counter
from typing import Any

from .decoder_keys import MARK, arguments_key, key_of
from .decoder_sizes import frames_bytes
from .decoder_video import Say


class OpenedReader:
    """What a decord or torchcodec reader carries: its file, the time of opening, where `next()` stands."""

    def __init__(self, file_key: str) -> None:
        self.file_key, self.seconds = file_key, 0.0
        self._place, self._nexts = "", 0

    def moved(self, place: str) -> None:
        self._place, self._nexts = place, 0

    def key(self, name: str, args: Any, kwargs: Any) -> str:
        if not self.file_key:
            return ""
        if name in ("next", "__next__"):
            self._nexts += 1
            return f"{self.file_key}#{self._place}+{self._nexts}"
        return f"{self.file_key}#{where}" if (where := arguments_key(args, kwargs)) else ""


def timed_reader_methods(say: Say, what: str, inside: Callable[[], dict[int, bool]]) -> dict[str, Any]:
    """Makers of wrappers for a class of readers: of its `__init__`, of what moves it, of what reads."""

    def opening(original: Any) -> Any:
        @wraps(original)
        def init(reader: Any, /, *args: Any, **kwargs: Any) -> None:
            opened = OpenedReader(key_of(args[0] if args else kwargs.get("uri", kwargs.get("source"))))
            start = perf_counter()
            original(reader, *args, **kwargs)
            opened.seconds = perf_counter() - start
            reader.__dict__[MARK] = opened

        return init

    def seeking(original: Any) -> Any:
        @wraps(original)
        def seek(reader: Any, /, *args: Any, **kwargs: Any) -> Any:
            opened = reader.__dict__.get(MARK)
            if opened is not None and id(reader) not in inside():
                opened.moved(f"{original.__name__}{args}{kwargs or ''}")
            return original(reader, *args, **kwargs)

        return seek

    def reading(original: Any) -> Any:
        @wraps(original)
        def read(reader: Any, /, *args: Any, **kwargs: Any) -> Any:
            busy = inside()
            if id(reader) in busy:  # decord's __getitem__ calls its get_batch or next
                return original(reader, *args, **kwargs)
            opened = reader.__dict__.get(MARK)
            key = opened.key(original.__name__, args, kwargs) if opened is not None else ""
            busy[id(reader)] = True
            start = perf_counter()
            try:
                result = original(reader, *args, **kwargs)
            finally:
                del busy[id(reader)]
            seconds = perf_counter() - start
            if opened is not None:
                start, seconds = start - opened.seconds, seconds + opened.seconds
                opened.seconds = 0.0
            say(what, key, start, seconds, frames_bytes(result))
            return result

        return read

    return {"open": opening, "seek": seeking, "read": reading}
