"""Counts and times image and video decoding and preprocessing, without changing any result.

Functions are replaced by wrappers in the modules that define them, as soon as these are imported; readers
and images carry their key with them. One decode is one call of `tell(what, key, start, seconds, bytes)`:

>>> told = []
>>> decodes = Decodes(lambda what, key, start, seconds, bytes: told.append(what))
>>> decodes.install_all()  # whatever is imported by now; `install(name)` after a later import
>>> decodes.uninstall()

`start` and `seconds` are on the clock of `time.perf_counter()`. Equal keys mean equal inputs (see
`decoder_keys`), "" means unknown. `bytes` are the result's (see `decoder_sizes`), 0 means unknown. A call
that raises is no decode. Nested work is told at both levels: an image processor that opens a file is told,
and so is the file.

`tell` is called in whatever thread decodes, and from finalizers (a container that was never closed): it must
not take a lock that its own thread may hold already.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import wraps
from time import perf_counter
from types import ModuleType
from typing import Any

from .decoder_images import timed_load, timed_open
from .decoder_keys import arguments_key, key_of
from .decoder_readers import timed_reader_methods
from .decoder_sizes import bytes_of
from .decoder_video import Run, Say, TimedContainer, timed_capture, timed_codec_decode

# Functions that decode in one call: the module, what the parameter with the input is called, their names.
_FUNCTIONS = {
    "cv2": {"imread": "filename", "imdecode": "buf"},
    "torchvision.io": {
        "read_image": "path",
        "read_video": "filename",
        **dict.fromkeys(
            ("decode_image", "decode_jpeg", "decode_png", "decode_gif", "decode_webp", "decode_avif"), "input"
        ),
    },
}
_DECORD = {"open": ["__init__"], "seek": ["seek", "seek_accurate", "skip_frames"]}
_DECORD["read"] = ["get_batch", "__getitem__", "next", "__next__"]
_TORCHCODEC = {"open": ["__init__"], "read": ["__getitem__", "get_frame_at", "get_frames_at"]}
_TORCHCODEC["read"] += ["get_frames_in_range", "get_frame_played_at", "get_frames_played_at"]
_TORCHCODEC["read"] += ["get_frames_played_in_range", "get_all_frames"]
_READERS = {"decord": _DECORD, "torchcodec.decoders": _TORCHCODEC}
_READER_CLASS = {"decord": "VideoReader", "torchcodec.decoders": "VideoDecoder"}

# Base classes of transformers whose methods are preprocessing.
_PROCESSORS = {
    "transformers.image_processing_utils": ("BaseImageProcessor", ("__call__", "preprocess")),
    "transformers.tokenization_utils_base": (
        "PreTrainedTokenizerBase",
        ("__call__", "encode", "encode_plus", "batch_encode_plus"),
    ),
}
MODULES: tuple[str, ...] = ("PIL.Image", "PIL.ImageFile", "av", *_FUNCTIONS, *_READERS, *_PROCESSORS)


class Decodes:
    def __init__(self, tell: Say) -> None:
        self._tell = tell
        self._telling = True
        self._undo: list[tuple[Any, str, Any, Any]] = []  # owner, name, original, replacement
        self._done: set[tuple[Any, str]] = set()  # (owner, name) that are replaced; (class, ""): seen
        self._runs: dict[int, Run] = {}  # id of an open PyAV container
        self._local = threading.local()

    def install(self, name: str) -> None:
        """Wraps what the module `name` defines; it has been imported. A second time does nothing."""
        module = sys.modules.get(name)
        if module is None:
            return
        self._telling = True
        if name in ("PIL.Image", "PIL.ImageFile"):
            self._install_pil(module)
        elif name == "av":
            self._install_av(module)
        elif name in _PROCESSORS:
            base, methods = _PROCESSORS[name]
            self._install_processors(getattr(module, base, None), methods)
        for function, parameter in _FUNCTIONS.get(name, {}).items():
            self._patch(module, function, self._timed_function(f"{name}.{function}", parameter))
        if name == "cv2":
            self._patch(module, "VideoCapture", lambda original: timed_capture(original, self._say))
        if name in _READERS:
            self._install_reader(name, getattr(module, _READER_CLASS[name], None))

    def install_all(self) -> None:
        for name in MODULES:
            self.install(name)

    def flush(self) -> None:
        """Tells what open containers have read so far; for a process about to end without closing them."""
        for run in list(self._runs.values()):
            run.end()

    def uninstall(self) -> None:
        """Everything as it was. Wrappers that somebody else has wrapped since stay, and tell nothing."""
        self.flush()
        self._telling = False
        for owner, name, original, replacement in reversed(self._undo):
            if vars(owner).get(name) is replacement:
                setattr(owner, name, original)
        self._undo.clear()
        self._done.clear()

    def _say(self, what: str, key: str, start: float, seconds: float, size: int) -> None:
        if self._telling:
            self._tell(what, key, start, seconds, size)

    def _inside(self) -> dict[int, bool]:
        """The objects (by id) at work in this thread: their methods call each other, the outermost tells."""
        try:
            return self._local.inside  # type: ignore[no-any-return]
        except AttributeError:
            inside: dict[int, bool] = {}
            self._local.inside = inside
            return inside

    def _patch(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replaces what `owner` itself defines as `name`, unless that is closed (most types written in C)."""
        original = vars(owner).get(name)
        if original is None or (owner, name) in self._done:
            return
        replacement = make(original)
        try:
            setattr(owner, name, replacement)
        except TypeError:
            return
        self._done.add((owner, name))
        self._undo.append((owner, name, original, replacement))

    def _timed_function(self, what: str, parameter: str) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            @wraps(original)
            def timed(*args: Any, **kwargs: Any) -> Any:
                key = key_of(args[0] if args else kwargs.get(parameter))
                if key and len(args) + len(kwargs) > 1:  # a part of a video, a reduced size
                    how = arguments_key(args[1:], {k: v for k, v in kwargs.items() if k != parameter})
                    key = f"{key}#{how}" if how else ""
                start = perf_counter()
                result = original(*args, **kwargs)
                seconds = perf_counter() - start
                if result is not None:  # what OpenCV gives for a file that it cannot read
                    self._say(what, key, start, seconds, bytes_of(result))
                return result

            return timed

        return make

    # ---- PIL: opening gives the key, the first load() decodes

    def _install_pil(self, module: ModuleType) -> None:
        if module.__name__ == "PIL.Image":
            self._patch(module, "open", lambda original: timed_open(original, self._watch_image_class))
        base = getattr(sys.modules.get("PIL.ImageFile"), "ImageFile", None)
        if base is not None:
            for cls in _with_subclasses(base):
                self._patch(cls, "load", self._timed_load)

    def _watch_image_class(self, cls: type) -> None:
        """Formats are imported when first met, and some (WebP, TIFF) decode in a load() of their own."""
        if (cls, "") not in self._done and self._telling:
            self._done.add((cls, ""))
            for base in cls.__mro__:
                if hasattr(base, "load_prepare"):  # ImageFile and below, not Image
                    self._patch(base, "load", self._timed_load)

    def _timed_load(self, original: Any) -> Any:
        return timed_load(original, self._say, self._inside)

    # ---- PyAV

    def _install_av(self, module: ModuleType) -> None:
        for owner in (module, sys.modules.get("av.container")):
            if owner is not None:
                self._patch(owner, "open", self._timed_av_open)
        codec = getattr(sys.modules.get("av.codec"), "CodecContext", None)
        if codec is not None:  # an open type in PyAV 18.1; where it is closed, demuxing alone is timed
            self._patch(codec, "decode", lambda original: timed_codec_decode(original, self._runs))

    def _timed_av_open(self, original: Any) -> Any:
        @wraps(original)
        def open(*args: Any, **kwargs: Any) -> Any:
            source = args[0] if args else kwargs.get("file")
            mode = args[1] if len(args) > 1 else kwargs.get("mode")
            key = key_of(source) if mode in (None, "r") else ""
            start = perf_counter()
            container = original(*args, **kwargs)
            if not self._telling or not hasattr(container, "demux"):  # an output container
                return container
            run = self._runs[id(container)] = Run(self._say, "av", key)
            run.add(start)
            return TimedContainer(container, run, self._forget_run)

        return open

    def _forget_run(self, container: int) -> None:
        self._runs.pop(container, None)

    # ---- decord, torchcodec, transformers: methods of Python classes

    def _install_reader(self, name: str, cls: type | None) -> None:
        makers = timed_reader_methods(self._say, f"{name.split('.')[0]}.{_READER_CLASS[name]}", self._inside)
        for kind, methods in _READERS[name].items():
            for method in methods if cls is not None else ():
                self._patch(cls, method, makers[kind])

    def _install_processors(self, base: type | None, methods: tuple[str, ...]) -> None:
        if base is None:
            return

        def watch(original: Any) -> Any:
            @wraps(original)
            def init(processor: Any, /, *args: Any, **kwargs: Any) -> None:
                original(processor, *args, **kwargs)
                watch_class(type(processor))

            return init

        def watch_class(cls: type) -> None:
            """Models' classes are imported when they are first used, and many override what is wrapped."""
            if (cls, "") not in self._done and self._telling:
                self._done.add((cls, ""))
                for above in cls.__mro__:
                    for method in methods if issubclass(above, base) else ():
                        self._patch(above, method, self._timed_processor)

        self._patch(base, "__init__", watch)
        for cls in _with_subclasses(base):
            watch_class(cls)

    def _timed_processor(self, original: Any) -> Any:
        @wraps(original)
        def process(processor: Any, /, *args: Any, **kwargs: Any) -> Any:
            inside = self._inside()
            if id(processor) in inside:  # __call__ calls preprocess
                return original(processor, *args, **kwargs)
            key = arguments_key(args, kwargs)
            inside[id(processor)] = True
            start = perf_counter()
            try:
                result = original(processor, *args, **kwargs)
            finally:
                del inside[id(processor)]
            seconds = perf_counter() - start
            self._say(f"transformers.{type(processor).__name__}", key, start, seconds, bytes_of(result))
            return result

        return process


def _with_subclasses(cls: type) -> list[type]:
    found = [cls]
    for known in found:
        below: list[type] = type.__subclasses__(known)
        found.extend(sub for sub in below if sub not in found)
    return found
