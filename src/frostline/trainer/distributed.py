"""Several processes that train one model: what torchrun started, and what they say to each other.

Gradients are added up after the backward pass, in buckets. DDP would send them while it runs; but then a rank
that runs out of memory in the middle leaves the others waiting for ever, and shares of a batch would have to
be equal. Small decisions go through a gloo group of their own, which never waits for a GPU.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from frostline.errors import UsageError
from frostline.ranks import Alone

_BUCKET = 32 << 20
_PATIENCE = timedelta(hours=24)
"""Rank 0 freezes and evaluates while the others wait."""


class Single(Alone):
    """One process, and nobody to ask."""

    rank = 0

    def wait(self) -> None:
        return

    def close(self) -> None:
        return


class Several(Single):
    """One of several processes, as torchrun starts them."""

    def __init__(self, device: torch.device) -> None:
        # Its functions have the group of all as a default. Imported later (the first optimiser does it), they
        # keep that group for ever: its threads outlive `close`, and now and then crash an ending interpreter.
        import torch.distributed.nn.functional  # noqa: F401

        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=_PATIENCE)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._talk: Any = dist.new_group(backend="gloo", timeout=_PATIENCE) if backend != "gloo" else None

    def agree(self, *, fits: bool, rows: int) -> tuple[bool, int]:
        votes = torch.tensor([int(not fits), rows])
        dist.all_reduce(votes, group=self._talk)
        return int(votes[0]) == 0, int(votes[1])

    def most(self, number: int) -> int:
        """The largest of all ranks' numbers."""
        vote = torch.tensor([number])
        dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=self._talk)
        return int(vote[0])

    def wait(self) -> None:
        dist.barrier(group=self._talk)

    def gather(self, value: Any) -> list[Any]:
        """What all ranks said, on every rank: JSON, small."""
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        room = self.most(len(data))
        padded = torch.cat([data, torch.full((room - len(data),), ord(" "), dtype=torch.uint8)])
        found = [torch.empty_like(padded) for _ in range(self.world)]
        dist.all_gather(found, padded, group=self._talk)
        return [json.loads(one.numpy().tobytes()) for one in found]

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            dist.all_reduce(flat)
            parts = torch.split(flat, [tensor.numel() for tensor in bucket])
            for tensor, part in zip(bucket, parts, strict=True):
                tensor.copy_(part.view_as(tensor))

    def copy_first(self, tensors: Sequence[Tensor]) -> None:
        """Every rank has rank 0's values afterwards."""
        for tensor in tensors:
            dist.broadcast(tensor.detach(), 0)  # the same memory, and nothing for autograd to record

    def close(self) -> None:
        dist.destroy_process_group()


def _buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Tensors of one dtype together, in order, about 32 MB each; the same on every rank."""
    found: list[list[Tensor]] = []
    last: dict[torch.dtype, tuple[list[Tensor], int]] = {}
    for tensor in tensors:
        bucket, size = last.get(tensor.dtype, ([], 0))
        if not bucket or size > _BUCKET:
            bucket, size = [], 0
            found.append(bucket)
        bucket.append(tensor)
        last[tensor.dtype] = (bucket, size + tensor.numel() * tensor.element_size())
    return found


def ranks(device: str | torch.device | None) -> tuple[Single, torch.device]:
    """The group this process belongs to, and the device it computes on."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ
    try:
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as e:
        raise UsageError(f"device={str(device)!r}: torch knows no such device; cpu, cuda or cuda:1.") from e
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device={str(device)!r}: torch sees no CUDA device here. Use device='cpu'.")
    if not several:
        return Single(), chosen
    if chosen.type == "cuda":
        chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(chosen)
    return Several(chosen), chosen
