"""One file of a folder that is imported or exported: what it holds, its values, and how it is written.

Files come from anywhere, so nothing in them is believed: no pickled object is loaded (`weights_only=True`,
`allow_pickle=False`), claimed sizes are compared with the file before memory is taken, and whatever goes
wrong becomes a `BadFile` with the reason in one line.
"""

from __future__ import annotations

import json
import math
import re
import stat
import zipfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from frostline.store.container import DTYPES

SUFFIXES = (".pt", ".pth", ".npy", ".npz", ".safetensors")
ALONE = "value"  # the field of a file that holds one tensor and no names
_VIEW_BYTES = 1 << 30  # an expanded view may claim any size; up to here it is taken at its word
_DEFLATE_MOST = 1032  # deflate cannot do better than 1032 : 1, so a larger claim is a lie
_DTYPE_OF_CODE = {code: name for name, (code, _, _) in DTYPES.items()}


class BadFile(Exception):
    """Why a file cannot be taken; caught by the import, which counts and quarantines."""


@dataclass(frozen=True)
class Kind:
    """What one value is: "tensor" with dtype and shape, or "str", "int", "float", "bool", "none", "json"."""

    type: str
    dtype: str = ""
    shape: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}" if self.type == "tensor" else self.type


def look(path: Path, texts: Collection[str] = ()) -> dict[str, Kind]:
    """What a file holds, from its header where it has one. `texts`: strings kept in safetensors metadata."""
    return _guarded(path, _look, texts)  # type: ignore[no-any-return]


def load(path: Path, texts: Collection[str] = ()) -> dict[str, Any]:
    """The values of a file: tensors, strings, numbers, JSON values."""
    return _guarded(path, _load, texts)  # type: ignore[no-any-return]


def _guarded(path: Path, read: Any, texts: Collection[str]) -> Any:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise BadFile("is not a regular file")
        if not status.st_size:
            raise BadFile("is empty (0 bytes)")
        return read(path, texts)
    except BadFile:
        raise
    except Exception as e:  # a damaged or hostile file can raise anything; it becomes the reason
        raise BadFile(_reason(path, e)) from e


def _reason(path: Path, error: Exception) -> str:
    text = str(error)
    named = re.search(r"GLOBAL (\S+)", text) or re.search(r"`?(\S+?)`? was not an allowed global", text)
    if "weights_only" in text or "Weights only" in text or "Python objects in dtype" in text:
        what = f"holds pickled objects ({named[1]})" if named else "is damaged, or holds pickled objects"
        return f"{what}, which are never loaded"
    if isinstance(error, OSError) and error.strerror and not isinstance(error, zipfile.BadZipFile):
        text = error.strerror
    first = " ".join(text.splitlines()[0].split())[:160] if text else type(error).__name__
    return f"cannot be read as {path.suffix} ({first})"


def _look(path: Path, texts: Collection[str]) -> dict[str, Kind]:
    suffix = path.suffix.lower()
    if suffix == ".npz":
        with zipfile.ZipFile(path) as archive:
            return {_member(i): _npz_kind(archive, i) for i in archive.infolist()}
    if suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            kinds = {name: _safe_kind(name, s.get_dtype(), s.get_shape()) for name, s in slices.items()}
            return {**kinds, **{name: Kind("str") for name in texts if name in (file.metadata() or {})}}
    if suffix == ".npy":
        array = _load_npy(path)
        return {ALONE: _numpy_kind(ALONE, array.dtype, array.shape)}
    return {name: kind_of(name, value) for name, value in _load(path, texts).items()}  # mapped, not read


def _load(path: Path, texts: Collection[str]) -> dict[str, Any]:
    suffix = path.suffix.lower()
    if suffix in (".pt", ".pth"):
        return _flat(_load_pt(path))
    if suffix == ".npy":
        return {ALONE: _plain(ALONE, _load_npy(path))}
    if suffix == ".npz":
        with zipfile.ZipFile(path) as archive:
            return {_member(i): _plain(_member(i), _read_member(archive, i)) for i in archive.infolist()}
    with safe_open(path, "pt") as file:
        values: dict[str, Any] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata() or {}
    return {**values, **{name: metadata[name] for name in texts if name in metadata}}


# torch


def _load_pt(path: Path) -> Any:
    with path.open("rb") as file:
        zipped = file.read(4) == b"PK\x03\x04"
    if zipped and not zipfile.is_zipfile(path):
        raise BadFile("is cut short: the end of the archive is missing")
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except (EOFError, RuntimeError) as e:
        raise BadFile(f"is not a whole file of torch.save ({str(e).splitlines()[0][:120]})") from e


def _flat(loaded: Any, prefix: str = "") -> dict[str, Any]:
    """Names → values; a dict inside a dict gets dotted names if it holds tensors, and is JSON otherwise."""
    if not isinstance(loaded, dict):
        if prefix or not isinstance(loaded, Tensor):
            raise BadFile(f"holds a {type(loaded).__name__}; expected a tensor, or a dict of named values")
        return {ALONE: loaded}
    values: dict[str, Any] = {}
    for name, value in loaded.items():
        if not isinstance(name, str):
            raise BadFile(f"has a name that is no string: {name!r}")
        inner = _flat(value, f"{prefix}{name}.") if isinstance(value, dict) and _has_tensor(value) else {}
        for key, item in (inner or {prefix + name: value}).items():
            if key in values:
                raise BadFile(f"has the name {key!r} twice, once as a dict inside a dict")
            values[key] = item
    return values


def _has_tensor(value: Any) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return isinstance(value, Tensor) or any(_has_tensor(v) for v in inside)


def kind_of(name: str, value: Any) -> Kind:
    """What a loaded value is; BadFile when no field could hold it."""
    if isinstance(value, Tensor):
        return _tensor_kind(name, value)
    if isinstance(value, bool | float | str | None):
        return Kind("none" if value is None else type(value).__name__)
    if isinstance(value, int):
        return Kind("int" if -(1 << 63) <= value < 1 << 63 else "json")
    if _has_tensor(value):
        raise BadFile(f"{name!r} is a {type(value).__name__} of tensors; stack them, or give each a name")
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as e:
        raise BadFile(f"{name!r} is a {type(value).__name__} that JSON cannot hold ({e})") from e
    return Kind("json")


def _tensor_kind(name: str, x: Tensor) -> Kind:
    dtype = str(x.dtype).removeprefix("torch.")
    if x.layout != torch.strided or x.is_quantized or dtype not in DTYPES:
        layout = str(x.layout).removeprefix("torch.")
        raise BadFile(f"{name!r} is a {layout} {dtype} tensor, which a store cannot hold")
    size, held = x.numel() * x.element_size(), x.untyped_storage().nbytes()
    if size > max(_VIEW_BYTES, held):
        raise BadFile(f"{name!r} claims {size:,} bytes out of {held:,} (an expanded view)")
    return Kind("tensor", dtype, tuple(x.shape))


# numpy and safetensors


def _load_npy(path: Path) -> Any:
    array = np.load(path, mmap_mode="c", allow_pickle=False)  # copy-on-write: torch wants memory it may write
    if isinstance(array, np.ndarray):
        return array
    array.close()  # an .npz under a wrong name
    raise BadFile("is an archive of arrays; rename it to .npz")


def _member(info: zipfile.ZipInfo) -> str:
    return info.filename.removesuffix(".npy")


def _npz_kind(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Kind:
    """From the header of one array in an .npz; its claimed size must be the size that is there."""
    size, packed = info.file_size, info.compress_size
    if size > _DEFLATE_MOST * packed + 4096:
        raise BadFile(f"{_member(info)!r} claims {size:,} bytes out of {packed:,} compressed ones")
    with archive.open(info) as file:
        old = np.lib.format.read_magic(file) == (1, 0)
        read = np.lib.format.read_array_header_1_0 if old else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
        header = file.tell()
    if not dtype.hasobject and math.prod(shape) * dtype.itemsize != size - header:
        raise BadFile(f"{_member(info)!r} is {dtype} {list(shape)} by its header, which its bytes do not fit")
    return _numpy_kind(_member(info), dtype, shape)


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Any:
    _npz_kind(archive, info)  # the claimed size is compared before memory is taken
    with archive.open(info) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def _numpy_kind(name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Kind:
    if dtype.kind == "U":
        return Kind("str") if shape == () else Kind("json")
    if dtype.hasobject:
        raise BadFile("holds pickled objects (an object array), which are never loaded")
    if dtype.kind not in "biuf" or dtype.newbyteorder("=").name not in DTYPES:
        raise BadFile(f"{name!r} is of dtype {dtype}, which a store cannot hold")
    return Kind("tensor", dtype.newbyteorder("=").name, tuple(shape))


def _plain(name: str, array: Any) -> Any:
    if _numpy_kind(name, array.dtype, array.shape).type != "tensor":
        return array.tolist()
    native = np.require(array, array.dtype.newbyteorder("="), ["C", "A", "W"])
    return torch.from_numpy(native).reshape(array.shape)


def _safe_kind(name: str, code: str, shape: list[int]) -> Kind:
    if code not in _DTYPE_OF_CODE:
        raise BadFile(f"{name!r} is of dtype {code}, which a store cannot hold")
    return Kind("tensor", _DTYPE_OF_CODE[code], tuple(shape))


# writing


def save(path: Path, values: dict[str, Any]) -> None:
    """Write one row. Texts are values of the dict (.pt), text arrays (.npz), or metadata (.safetensors)."""
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    texts = {name: value for name, value in values.items() if not isinstance(value, Tensor)}
    if path.suffix == ".pt":
        torch.save({name: v.clone() if isinstance(v, Tensor) else v for name, v in values.items()}, path)
    elif path.suffix == ".safetensors":
        save_file({name: x.contiguous() for name, x in tensors.items()}, path, metadata=texts or None)
    elif path.suffix == ".npy":
        with path.open("wb") as file:
            np.lib.format.write_array(file, next(iter(tensors.values())).numpy(), allow_pickle=False)
    else:
        arrays = {name: v.numpy() if isinstance(v, Tensor) else np.array(v) for name, v in values.items()}
        _save_npz(path, arrays)


def _save_npz(path: Path, arrays: dict[str, Any]) -> None:
    """As np.savez, which cannot take a field called "file" and puts the time into the bytes."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)
