"""Keys: the same string for the same input, so that repeated decodes and preprocessing can be counted.

A file is its absolute path, size and modification time; bytes are their hash; texts and arrays are hashed,
large arrays by a sample. Nothing here changes what it looks at: positions of files are put back, lazily
opened images stay unloaded, device tensors are not touched (that would wait for the device). What cannot be
told apart cheaply has the key "": unknown.

>>> key_of("/nowhere/at/all.png"), key_of(b"abc") == key_of(b"abc"), key_of(b"abc") == key_of(b"abd")
('', True, False)
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import Enum
from hashlib import blake2b
from typing import Any

WHOLE_BYTES = 4 << 20  # encoded content up to this size is hashed whole (about 1 ms per MB)
END_BYTES = 1 << 20  # of larger content: the size, and this much of the beginning and of the end
SAMPLE_BYTES = 64 << 10  # decoded arrays up to this size are hashed whole; of larger ones about this much
MARK = "_frostline_opened"  # attribute under which an opened image or reader carries its key

# What looking at an unknown object can raise. io.UnsupportedOperation is an OSError and a ValueError;
# BufferError: a BytesIO that is being written; EOFError: a broken animation; RuntimeError: a tensor without
# storage (fake, functional).
UNKNOWN = (OSError, ValueError, TypeError, AttributeError, BufferError, EOFError, RuntimeError)

# Seekable objects of these modules read from memory or local files. Any other (fsspec, S3) may fetch from
# far away: reading it twice would change what is being measured, so its content is not looked at.
_NEAR = ("_io", "io", "mmap", "tarfile", "tempfile", "zipfile")


def key_of(source: Any) -> str:
    """The key of what is to be decoded: a path, bytes, a file object, a tensor or array of bytes."""
    try:
        if isinstance(source, (str, os.PathLike)):
            return _file_key(os.fsdecode(source), os.stat(source))
        if isinstance(source, bytes) and len(source) < 4096 and os.path.isfile(source):
            return _file_key(os.fsdecode(source), os.stat(source))
        if hasattr(source, "read"):
            return _stream_key(source)
        return _bytes_key(_flat(source))
    except UNKNOWN:
        return ""


def arguments_key(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """One hash over all arguments of a call, settings too; "" if one of them is of an unknown kind."""
    digest = blake2b(digest_size=8)
    try:
        _feed(digest, args)
        for name in sorted(kwargs):
            _feed(digest, name)
            _feed(digest, kwargs[name])
    except UNKNOWN:
        return ""
    return digest.hexdigest()


def _file_key(path: str, status: os.stat_result) -> str:
    return f"{os.path.abspath(path)}|{status.st_size}|{status.st_mtime_ns}"


def _stream_key(source: Any) -> str:
    with suppress(*UNKNOWN):  # members of archives have a name too, but no descriptor: hashed below
        name, status = source.name, os.fstat(source.fileno())
        if isinstance(name, (str, bytes, os.PathLike)) and stat.S_ISREG(status.st_mode):
            return _file_key(os.fsdecode(name), status)
    if hasattr(source, "getbuffer"):  # BytesIO: nothing is moved, nothing is copied
        with source.getbuffer() as view:
            return _bytes_key(view)
    if type(source).__module__ not in _NEAR or not source.seekable():
        return ""
    here = source.tell()
    try:
        size = source.seek(0, os.SEEK_END)
        source.seek(0)
        if size <= WHOLE_BYTES:
            return _bytes_key(source.read())
        head = source.read(END_BYTES)
        source.seek(size - END_BYTES)
        return _ends_key(size, head, source.read(END_BYTES))
    finally:
        source.seek(here)


def _bytes_key(data: Any) -> str:
    view = memoryview(data).cast("B")
    if view.nbytes <= WHOLE_BYTES:
        return blake2b(view, digest_size=8).hexdigest()
    return _ends_key(view.nbytes, view[:END_BYTES], view[-END_BYTES:])


def _ends_key(size: int, head: Any, tail: Any) -> str:
    digest = blake2b(str(size).encode(), digest_size=8)
    digest.update(head)
    digest.update(tail)
    return digest.hexdigest()


def _flat(value: Any) -> Any:
    """The memory of bytes, an array or a host tensor, as something that has the buffer protocol."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise TypeError("a device tensor is not read: that would wait for the device")
        value = value.detach().numpy()
    return value


def _is_torch_setting(value: Any) -> bool:
    return type(value).__module__ == "torch" and type(value).__name__ in ("device", "dtype")


def _feed(digest: blake2b, value: Any, depth: int = 0) -> None:
    """Adds `value` to the hash; TypeError for what it does not know. Kinds and lengths are part of it."""
    if isinstance(value, str):
        digest.update(b"s%d:" % len(value) + value.encode("utf-8", "surrogatepass"))
    elif isinstance(value, (bytes, bytearray, memoryview)):
        digest.update(b"b" + _bytes_key(value).encode())
    elif value is None or isinstance(value, (bool, int, float, slice, Enum)) or _is_torch_setting(value):
        digest.update(repr(value).encode() + b";")
    elif isinstance(value, os.PathLike):
        digest.update(b"p" + os.fsencode(value) + b"\0")
    elif isinstance(value, (list, tuple, Mapping)) and depth < 8:
        parts = list(value.items()) if isinstance(value, Mapping) else value
        digest.update(b"[%d:" % len(parts))
        for part in parts:
            _feed(digest, part, depth + 1)
    elif hasattr(value, "getbands") and hasattr(value, "crop"):
        _feed_image(digest, value)
    else:
        _feed_array(digest, _flat(value))


def _feed_image(digest: blake2b, image: Any) -> None:
    """A PIL image: by its file while it is not loaded (hashing must not load it), else by rows of it."""
    state = vars(image)
    if (
        state.get("tile") or state.get("_im", state.get("im")) is None
    ):  # WebP has no tiles before it is loaded
        opened = getattr(image, MARK, None)
        key = opened.key() if opened is not None else key_of(getattr(image, "filename", "") or image.fp)
        if not key:
            raise ValueError("an unloaded image of unknown origin")
        digest.update(b"f" + key.encode())
        return
    width, height = image.size
    digest.update(f"i{image.mode}{width}x{height}:".encode())
    rows = max(8, SAMPLE_BYTES // max(1, width * len(image.getbands())))
    if rows >= height:
        digest.update(image.tobytes())
        return
    for row in range(rows):
        top = row * (height - 1) // (rows - 1)
        digest.update(image.crop((0, top, width, top + 1)).tobytes())


def _feed_array(digest: blake2b, array: Any) -> None:
    if not hasattr(array, "__array_interface__") or array.dtype.hasobject:
        raise TypeError(f"no key is known for a {type(array).__name__}")
    digest.update(f"a{array.dtype}{array.shape}:".encode())
    # In the order of memory, whatever the order of the axes: a transposed image needs no copy to be flat.
    axes = sorted(range(array.ndim), key=lambda axis: -abs(array.strides[axis]))
    flat = array.transpose(axes).reshape(-1)
    step = max(1, array.nbytes // SAMPLE_BYTES)
    while step > 1 and (step % 2 == 0 or step % 3 == 0):
        step += 1  # a multiple would see the same channel every time
    digest.update(flat[::step].tobytes())
