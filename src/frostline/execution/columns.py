"""A field of several samples on its way through the stages: a tensor `[rows, …]`, or a list of values."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from frostline.errors import StageFailed

Column = Tensor | list[Any]


class Uneven(StageFailed):
    """Samples of one call differ in shape or type: those named are unlike the most common."""

    @staticmethod
    def remedy(usual: str, other: str) -> str:
        """What to do about two kinds of values, as `kind_of` tells them.

        >>> Uneven.remedy("float32 []", "int64 []")
        'needs one type: convert in an earlier stage'
        >>> Uneven.remedy("float32 [3]", "float32 [4]")
        'needs one shape: resize or pad in an earlier stage, or give batch_size=1'
        """
        shapes = {kind.partition(" ")[2] or "[]" for kind in (usual, other)}  # "float" has no shape
        if len(shapes) == 1:
            return "needs one type: convert in an earlier stage"
        return "needs one shape: resize or pad in an earlier stage, or give batch_size=1"


def numeric(value: Any) -> bool:
    """Whether numpy holds numbers here that torch has a type for; not text, times or objects."""
    if not isinstance(value, np.ndarray | np.generic):
        return False
    return (value.dtype.kind in "biuf" and value.dtype.itemsize <= 8) or value.dtype.str[1:] in ("c8", "c16")


def as_value(value: Any) -> Any:
    """A sample's value as it travels: arrays become tensors, numbers stay what they are."""
    if isinstance(value, np.ndarray) and numeric(value):
        native = value.astype(value.dtype.newbyteorder("="), copy=False)
        # copied when it may not be written to, as a picture of Pillow: torch would warn. 0-d stays 0-d.
        return torch.from_numpy(np.require(native, requirements=["C", "W"]))
    return value


def stackable(column: Column) -> bool:
    return isinstance(column, Tensor) or all(
        isinstance(v, Tensor | bool | int | float) or numeric(v) for v in column
    )


def stack(stage: str, name: str, keys: Sequence[str], column: Column, device: torch.device) -> Column:
    """Values of samples as one tensor on the device; text and the like stay a list."""
    if isinstance(column, Tensor):
        return _moved(column, device)
    if not column or not stackable(column):
        return column
    rows = [torch.as_tensor(as_value(value)) for value in column]
    kinds = {(row.shape, row.dtype) for row in rows}
    if len(kinds) > 1:
        raise Uneven(stage, *_uneven(name, keys, rows))
    if device.type != "cuda":
        return torch.stack(rows).to(device)
    out = torch.empty((len(rows), *rows[0].shape), dtype=rows[0].dtype, pin_memory=True)
    torch.stack(rows, out=out)
    return _moved(out, device)


_streams = threading.local()


def _moved(column: Tensor, device: torch.device) -> Tensor:
    """On the device; pinned memory goes to a GPU beside the kernels that are queued there."""
    if device.type != "cuda" or column.device.type != "cpu" or not column.is_pinned():
        # to other devices non_blocking may hand over memory before it is written
        return column.to(device, non_blocking=device.type == "cuda")
    name = str(device)
    if not hasattr(_streams, name):
        setattr(_streams, name, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    side, now = getattr(_streams, name), torch.cuda.current_stream(device)
    with torch.cuda.stream(side):
        moved = column.to(device, non_blocking=True)
    now.wait_stream(side)
    moved.record_stream(now)
    return moved


def _uneven(name: str, keys: Sequence[str], rows: Sequence[Tensor]) -> tuple[list[str], str]:
    """Which samples are unlike the most common shape, and what to do about it."""
    said = [kind_of(row) for row in rows]
    usual = max(set(said), key=lambda kind: (said.count(kind), -said.index(kind)))
    odd = {key: kind for key, kind in zip(keys, said, strict=True) if kind != usual}
    some = "; ".join(f"{key!r} is {kind}" for key, kind in [*odd.items()][:5])
    remedies = dict.fromkeys(Uneven.remedy(usual, kind) for kind in odd.values())
    return [*odd], (
        f"{name!r} is {usual} for the others of the call, but {some}. A call of several samples "
        f"{'; it '.join(remedies)}"
    )


def kind_of(value: Any) -> str:
    """A value's dtype and shape, or its type, for messages and for comparing.

    >>> kind_of(torch.zeros(3, 4)), kind_of("text")
    ('float32 [3, 4]', 'str')
    """
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype.name} {list(value.shape)}"
    return type(value).__name__


def unstorable(name: str, value: Any) -> str | None:
    """Why no field can hold a tensor: its numbers do not lie in memory one after the other.

    >>> unstorable("x", torch.eye(2)) is None
    True
    >>> print(unstorable("x", torch.eye(2).to_sparse()))
    'x' is a sparse tensor (sparse_coo), and a store holds dense ones. Return x.to_dense() from its stage
    """
    if not isinstance(value, Tensor):
        return None
    if value.is_nested:
        return f"{name!r} is a nested tensor. Return one tensor for each sample, and the field is ragged"
    if value.is_meta:
        return f"{name!r} has a shape but no values (device 'meta'). Compute it with a network that is loaded"
    if value.layout is not torch.strided:
        kind = str(value.layout).removeprefix("torch.")
        dense = f"Return {name}.to_dense() from its stage"
        return f"{name!r} is a sparse tensor ({kind}), and a store holds dense ones. {dense}"
    if value.is_quantized:
        kind = str(value.dtype).removeprefix("torch.")
        return f"{name!r} is a quantized tensor ({kind}). Return {name}.dequantize() from its stage"
    return None


def padded(column: Column, rows: int) -> Column:
    """Filled up to `rows` by repeating the last one: a real value, so that nothing divides by zero."""
    missing = rows - len(column)
    if missing <= 0:
        return column
    if isinstance(column, Tensor):
        return torch.cat([column, column[-1:].expand(missing, *column.shape[1:])])
    return [*column, *(column[-1:] * missing)]


def joined(pieces: Sequence[Column]) -> Column:
    if len(pieces) == 1:
        return pieces[0]
    if all(isinstance(piece, Tensor) for piece in pieces):
        tensors = [piece for piece in pieces if isinstance(piece, Tensor)]
        if len({(t.shape[1:], t.dtype) for t in tensors}) == 1:
            return torch.cat(tensors)
    return [row for piece in pieces for row in piece]


def taken(column: Column, places: Sequence[int]) -> Column:
    """The rows at these places."""
    if isinstance(column, Tensor):
        return column[torch.tensor(places, dtype=torch.int64, device=column.device)]
    return [column[i] for i in places]


def row_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    return len(value) if isinstance(value, str | bytes) else 8
