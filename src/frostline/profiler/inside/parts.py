"""The parts of a step besides modules and loaders: wrapped in pass B, and as they were at all other times."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from .patches import Patches
from .spans import Spans

_READS = ("item", "cpu", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "nonzero")
"""Methods of a tensor that make the host wait for what the device has yet to compute."""


class Parts:
    """Tells `spans` about backward, optimiser, zero_grad, clipping, copies, syncs and saves."""

    def __init__(self, spans: Spans, cuda: bool) -> None:
        self._spans, self._cuda, self._patches = spans, cuda, Patches()
        self._open: list[int] = []
        self.copies: dict[tuple[str, bool], list[float]] = {}
        """(kind, the host waits) → calls, bytes, seconds of the host."""

    def install(self) -> None:
        self._wrap(torch.autograd, "_engine_run_backward", "backward", "backward")
        self._wrap(torch.optim.Optimizer, "zero_grad", "zero_grad", "zero_grad")
        self._wrap(torch.nn.Module, "zero_grad", "zero_grad", "zero_grad")
        for home in (torch.nn.utils, torch.nn.utils.clip_grad):
            for name in ("clip_grad_norm_", "clip_grad_value_"):
                self._wrap(home, name, "clip", "clipping gradients")
        self._wrap(torch, "save", "save", "torch.save")
        if self._cuda:
            self._on_cuda()

    def uninstall(self) -> None:
        self._patches.undo()

    def _on_cuda(self) -> None:
        self._wrap(torch.cuda, "synchronize", "sync", "torch.cuda.synchronize")
        for owner in (torch.cuda.Stream, torch.cuda.Event):
            self._wrap(owner, "synchronize", "sync", f"torch.cuda.{owner.__name__}.synchronize")
        for name in ("to", "cuda", "copy_"):
            self._patches.set(torch.Tensor, name, self._copying(getattr(Tensor, name), name))
        for name in _READS:
            self._patches.set(torch.Tensor, name, self._reading(getattr(Tensor, name), name))

    def _wrap(self, owner: Any, name: str, kind: str, told: str) -> None:
        original = getattr(owner, name)
        spans = self._spans

        @wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(*args, **kwargs)
            place = spans.enter(kind, told)
            try:
                return original(*args, **kwargs)
            finally:
                spans.leave(place)

        self._patches.set(owner, name, timed)

    def _copying(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        spans = self._spans

        @wraps(original)
        def copied(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not _crosses(name, tensor, args, kwargs):
                return original(tensor, *args, **kwargs)
            source = args[0] if name == "copy_" else tensor
            down = source.is_cuda
            kind = "to the host" if down else "pinned" if source.is_pinned() else "pageable"
            free = bool(kwargs.get("non_blocking") or (name == "copy_" and len(args) > 1 and args[1]))
            free = free or (name in ("to", "cuda") and any(a is True for a in args))
            place = spans.enter("sync" if down else "copy", f"copy {kind}" if down else f"{kind} copy")
            began = spans.found[place].start
            try:
                return original(tensor, *args, **kwargs)
            finally:
                spans.leave(place)
                if not down:
                    held = self.copies.setdefault((kind, kind == "pageable" or not free), [0.0, 0.0, 0.0])
                    held[0] += 1
                    held[1] += source.numel() * source.element_size()
                    held[2] += spans.found[place].end - began

        return copied

    def _reading(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        spans = self._spans

        @wraps(original)
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not tensor.is_cuda:
                return original(tensor, *args, **kwargs)
            place = spans.enter("sync", f".{name}()" if name.isalpha() else f"{name.strip('_')}(tensor)")
            try:
                return original(tensor, *args, **kwargs)
            finally:
                spans.leave(place)

        return read

    # the optimiser: a span that is open between two hooks of the agent

    def begin_optimizer(self, optimizer: Any) -> None:
        self._open.append(self._spans.enter("optimizer", f"{type(optimizer).__name__}.step"))

    def end_optimizer(self) -> None:
        if self._open:
            self._spans.leave(self._open.pop())


def _crosses(name: str, tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call moves data between host and device."""
    if name == "cuda":
        return not tensor.is_cuda
    if name == "copy_":
        return bool(args) and isinstance(args[0], Tensor) and args[0].is_cuda != tensor.is_cuda
    wanted = kwargs.get("device", args[0] if args else None)
    if isinstance(wanted, Tensor):
        return wanted.is_cuda != tensor.is_cuda
    if isinstance(wanted, int) and not isinstance(wanted, bool):
        return not tensor.is_cuda
    if isinstance(wanted, str | torch.device):
        return (torch.device(wanted).type == "cuda") != tensor.is_cuda
    return False
