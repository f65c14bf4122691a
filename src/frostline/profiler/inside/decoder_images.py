"""PIL, timed: `open` gives the key, the `load` that reads the pixels is the decode."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from time import perf_counter
from typing import Any

from .decoder_keys import MARK, key_of
from .decoder_sizes import image_bytes
from .decoder_video import Say


class _OpenedImage:
    """What an image carries from open() to load(). A path is looked up at once, content when it is read."""

    __slots__ = ("_key", "_source", "seconds")

    def __init__(self, source: Any, seconds: float) -> None:
        self.seconds = seconds
        self._source = source
        self._key: str | None = None if hasattr(source, "getbuffer") else key_of(source)

    def key(self) -> str:
        if self._key is None:
            self._key = key_of(self._source)
        self._source = None
        return self._key


def _opened(image: Any) -> _OpenedImage:
    """What the image carries; made from the image itself if open() was not ours (imported before)."""
    opened: _OpenedImage | None = getattr(image, MARK, None)
    if opened is None:
        source = getattr(image, "filename", "") or getattr(image, "fp", None)
        opened = _OpenedImage(source, 0.0)
        setattr(image, MARK, opened)
    return opened


def timed_open(original: Any, watch: Callable[[type], None]) -> Any:
    """`PIL.Image.open`; `watch` is told the class of what was opened."""

    @wraps(original)
    def open(*args: Any, **kwargs: Any) -> Any:
        start = perf_counter()
        image = original(*args, **kwargs)
        seconds = perf_counter() - start
        if hasattr(image, "tile"):
            setattr(image, MARK, _OpenedImage(args[0] if args else kwargs.get("fp"), seconds))
            watch(type(image))
        return image

    return open


def timed_load(original: Any, say: Say, inside_of: Callable[[], dict[int, bool]]) -> Any:
    """`load()` of `PIL.ImageFile.ImageFile` or of a format's own class: tells once if pixels were read."""

    @wraps(original)
    def load(image: Any, /, *args: Any, **kwargs: Any) -> Any:
        inside = inside_of()
        reads = bool(getattr(image, "tile", False))
        if id(image) in inside:  # WebP fills in the tiles before it calls the load() of ImageFile
            inside[id(image)] |= reads
            return original(image, *args, **kwargs)
        key = _opened(image).key() if reads else ""
        inside[id(image)] = reads
        start = perf_counter()
        try:
            result = original(image, *args, **kwargs)
        finally:
            reads = inside.pop(id(image))
        if reads:
            seconds = perf_counter() - start
            opened, frame = _opened(image), image.tell()
            key = key or opened.key()
            key += f"#{frame}" if key and frame else ""
            start, seconds = start - opened.seconds, seconds + opened.seconds
            say("PIL.Image", key, start, seconds, image_bytes(image))
            opened.seconds = 0.0
        return result

    return load
