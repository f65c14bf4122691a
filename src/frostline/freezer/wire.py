"""A block of samples through a pipe: a line of JSON, then the bytes of its tensors. No pickle."""

from __future__ import annotations

import json
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from frostline.errors import StageFailed, UsageError
from frostline.execution import Block
from frostline.execution.columns import Column, numeric

Pipe: TypeAlias = "Connection[Any, Any]"


def send(pipe: Pipe, block: Block) -> None:
    """A block; or, when something in it cannot travel, the reason, which `receive` raises."""
    try:
        head, buffers = _packed(block)
    except UsageError as e:
        head, buffers = {"error": str(e)}, []
    pipe.send_bytes(json.dumps(head).encode())
    for buffer in buffers:
        pipe.send_bytes(buffer)


def _packed(block: Block) -> tuple[dict[str, Any], list[Any]]:
    buffers: list[Any] = []
    columns = {
        name: [_pack(name, value, buffers) for value in column] for name, column in block.columns.items()
    }
    failed = {key: [e.stage, e.reason] for key, e in block.failed.items()}
    return {"keys": block.keys, "columns": columns, "failed": failed}, buffers


def _pack(name: str, value: Any, buffers: list[Any]) -> Any:
    if isinstance(value, Tensor):
        x = value.detach().contiguous()
        buffers.append(x.reshape(-1).view(torch.uint8).numpy().data if x.numel() else b"")
        return {"tensor": [str(x.dtype).removeprefix("torch."), list(x.shape)]}
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
    head = json.loads(pipe.recv_bytes())
    if "error" in head:
        raise UsageError(head["error"])
    columns: dict[str, Column] = {
        name: [_unpack(pipe, value) for value in column] for name, column in head["columns"].items()
    }
    failed = {key: StageFailed(stage, [key], reason) for key, (stage, reason) in head["failed"].items()}
    return Block(head["keys"], columns, failed)


def _unpack(pipe: Pipe, value: dict[str, Any]) -> Any:
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
    return (
        torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
        if data
        else torch.empty(shape, dtype=dtype)
    )
