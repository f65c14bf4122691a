"""A block of samples from a worker process: a line of JSON, then bytes. No pickle.

Rows that fit their place in the slab are written there; others travel through the pipe.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from frostline.errors import StageFailed, UsageError
from frostline.execution.columns import numeric
from frostline.execution.early import Block
from frostline.execution.slab import Layout
from frostline.flat import flat_bytes

Pipe: TypeAlias = "Connection[Any, Any]"


@dataclass(frozen=True)
class Put:
    """Where in the slab a group of samples goes: the slot, and the place of the first of them."""

    layout: Layout
    slot: Tensor
    first: int


@dataclass(frozen=True)
class InSlab:
    """Stands for a row that lies in the slab."""

    place: int


def send(pipe: Pipe, asked: list[str], block: Block, put: Put | None = None) -> None:
    """A block; or, when something in it cannot travel, the reason, which `receive` raises.

    asked: the keys that were asked for, also those that failed: they give each row its place.
    """
    try:
        head, buffers = _packed(asked, block, put)
    except UsageError as e:
        head, buffers = {"error": str(e)}, []
    pipe.send_bytes(json.dumps(head).encode())
    for buffer in buffers:
        pipe.send_bytes(buffer)


def _packed(asked: list[str], block: Block, put: Put | None) -> tuple[dict[str, Any], list[Any]]:
    buffers: list[Any] = []
    places = [asked.index(key) for key in block.keys] if block.failed else range(len(asked))
    columns = {}
    for name, column in block.columns.items():
        rows = put.layout.column(put.slot, name) if put and name in put.layout.columns else None
        packed = []
        for place, value in zip(places, column, strict=True):
            if put is not None and rows is not None and put.layout.fits(name, value):
                rows[put.first + place].copy_(value)
                packed.append({"slab": put.first + place})
            else:
                packed.append(_pack(name, value, buffers))
        columns[name] = packed
    failed = {key: [e.stage, e.reason] for key, e in block.failed.items()}
    return {"keys": block.keys, "columns": columns, "failed": failed}, buffers


def _pack(name: str, value: Any, buffers: list[Any]) -> dict[str, Any]:
    if isinstance(value, Tensor):
        buffers.append(flat_bytes(value).numpy().data)
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape)]}
    if numeric(value):
        array = np.asarray(value, order="C")
        buffers.append(array.tobytes())
        return {"numpy": [array.dtype.str, list(array.shape), isinstance(value, np.generic)]}
    if isinstance(value, bytes):
        buffers.append(value)
        return {"bytes": len(value)}
    refuse_untransportable(name, value)
    return {"json": value}


def refuse_untransportable(name: str, value: Any) -> None:
    """UsageError for what JSON would change or cannot hold."""
    if type(value) is float:
        return  # NaN too, which does not equal itself
    try:
        same = json.loads(json.dumps(value)) == value and not isinstance(value, tuple)
    except (TypeError, ValueError):
        same = False
    if not same:
        raise UsageError(
            f"{name!r} is a {type(value).__name__}: only tensors, numbers, text, bytes and JSON can come "
            f"back from a worker process. Use threads."
        )


def receive(pipe: Pipe) -> Block:
    """The block; a row that lies in the slab is an `InSlab`."""
    head = json.loads(pipe.recv_bytes())
    if "error" in head:
        raise UsageError(head["error"])
    columns: dict[str, Any] = {
        name: [_unpack(pipe, value) for value in column] for name, column in head["columns"].items()
    }
    failed = {key: StageFailed(stage, [key], reason) for key, (stage, reason) in head["failed"].items()}
    return Block(head["keys"], columns, failed)


def _unpack(pipe: Pipe, value: dict[str, Any]) -> Any:
    if "slab" in value:
        return InSlab(value["slab"])
    if "json" in value:
        return value["json"]
    data = pipe.recv_bytes()
    if "bytes" in value:
        return data
    if "numpy" in value:
        kind, shape, scalar = value["numpy"]
        array = np.frombuffer(bytearray(data), dtype=np.dtype(kind)).reshape(shape)
        return array[()] if scalar else array
    name, shape = value["tensor"]
    dtype = getattr(torch, name)
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
