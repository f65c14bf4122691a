"""Hooks on single modules: spans in pass B, and a look at what frozen ones are given.

A frozen module that is given what it was given before computes again what is known. Rows of its input are
told apart by their content, all of it: pictures may differ in a few pixels only.
"""

from __future__ import annotations

import hashlib
import statistics
import threading
import time
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

try:
    from xxhash import xxh3_64_digest as _fast
except ImportError:  # the script's Python may not have it; the other one is ten times slower
    _fast: Any = None  # type: ignore[no-redef]

from . import cuda, hooks
from .batches import tensors
from .modules import Use
from .patches import Patches
from .spans import Spans

OURS = "frostline"
"""The kind of spans in which the profiler itself works: no part of the step."""
_ODD, _OTHER = 0x9E3779B97F4A7C15 - (1 << 64), 0xC2B2AE3D27D4EB4F - (1 << 64)
"""Odd numbers with mixed bits, as signed 64-bit ones."""
_AT_ONCE = 64 << 20
"""Bytes of rows whose products are held at once on the device."""


class Calls:
    """Spans around the calls of some modules."""

    def __init__(self, uses: list[Use], spans: Spans) -> None:
        self._handles: list[hooks.Hook] = []
        self._patches = Patches()
        self._open: dict[tuple[int, int], list[int]] = {}
        """(module, thread) → its open spans."""
        self._spans = spans
        for use in uses:
            if isinstance(use.module, torch.jit.ScriptModule):
                continue  # takes no hooks
            if getattr(use.module, "_compiled_call_impl", None) is not None:
                self._around(use)
            else:
                self._hook(use)

    def _hook(self, use: Use) -> None:
        spans, name, opened, me = self._spans, use.name, self._open, id(use.module)

        def before(module: nn.Module, args: Any) -> None:
            opened.setdefault((me, threading.get_ident()), []).append(spans.enter("forward", name))

        def after(module: nn.Module, args: Any, output: Any) -> None:
            stack = opened.get((me, threading.get_ident()))
            if stack:
                spans.leave(stack.pop())

        # after hooks that are there already: the profiler's own looks are not the module's time
        self._handles += [hooks.before(use.module, before), hooks.after(use.module, after)]

    def _around(self, use: Use) -> None:
        """`module.compile()`: hooks are inside of what was compiled, so the call itself is wrapped."""
        spans, name, original = self._spans, use.name, use.module._compiled_call_impl

        def timed(*args: Any, **kwargs: Any) -> Any:
            place = spans.enter("forward", name)
            try:
                return original(*args, **kwargs)  # type: ignore[misc]
            finally:
                spans.leave(place)

        self._patches.set(use.module, "_compiled_call_impl", timed)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._patches.undo()


class Inputs:
    """What one module was given, row by row, and how often that had been given before."""

    def __init__(self, module: nn.Module, frozen: list[nn.Module] | None = None) -> None:
        """frozen: those of its parts that nothing should change; by default all of it."""
        self.calls = self.looked = self.rows = self.repeats = 0
        self.paused = self.ours = False
        """Not looked at: it would be felt, or what is handed out is what the profiler had kept."""
        self.fed = False
        """What it is given depends on something that is trained: it never comes again."""
        self.failed = ""
        self.spans: Spans | None = None
        self._took: deque[float] = deque(maxlen=9)
        self._fixed = [p for part in frozen or [module] for p in part.parameters()]
        self._versions, self._sums = _versions(self._fixed), _sums(self._fixed)
        self._known: set[bytes] = set()
        self._waiting: list[list[Tensor]] = []
        self._weights: dict[tuple[int, torch.device], Tensor] = {}
        self._handle = hooks.before(module, self._before, with_kwargs=True)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.ours or cuda.capturing():
            return
        self.calls += 1
        if self.paused or self.failed:
            return
        self.fed = self.fed or any(t.requires_grad for t in tensors((args, kwargs)))
        try:
            self._look((args, kwargs))
        except Exception as e:  # noqa: BLE001 -- ours, whatever it is: the script goes on
            self.failed = f"{type(e).__name__}: {e}"

    def _look(self, call: Any) -> None:
        found = [*tensors(call)]
        given = [t.detach() for t in found if t.layout == torch.strided and not t.is_nested and t.numel()]
        rows = next((t.shape[0] for t in given if t.dim()), 0)
        if not rows or any(t.is_nested for t in found):
            return
        place = self.spans.enter(OURS, "looking at inputs") if self.spans is not None else -1
        began = time.perf_counter()
        self.looked += 1
        self.rows += rows
        with torch.no_grad():
            each = [_in_rows(t, rows) for t in given]
            if any(t.device.type != "cpu" for t in given):
                self._waiting.append([self._mixed(t) for t in each])
            else:
                self._count(_joined([_digests(t) for t in each], rows))
        self._took.append(time.perf_counter() - began)
        if self.spans is not None:
            self.spans.leave(place)

    @property
    def typical_s(self) -> float:
        """Seconds that a look takes; the first of them also loads and builds."""
        return statistics.median(self._took) if self._took else 0.0

    def _mixed(self, value: Tensor) -> Tensor:
        """Two sums of a row's bits by weights, on the device: nothing waits for them."""
        bits = _words(value)
        key = (bits.shape[1], bits.device)
        if key not in self._weights:
            place = torch.arange(1, bits.shape[1] + 1, device=bits.device)
            mixed = (place * _ODD) ^ ((place * _OTHER) >> 29)
            self._weights[key] = torch.stack([mixed | 1, (mixed * _OTHER) | 1])
        first, second = self._weights[key]
        width = torch.full((len(bits),), value.shape[1], device=bits.device)
        return torch.stack([_weighed(bits, first), _weighed(bits, second), width], 1)

    def look(self) -> None:
        """Reads what waits on the device; ask when it has settled."""
        waiting, self._waiting = self._waiting, []
        for found in waiting:
            each = [[row.tobytes() for row in part.cpu().numpy()] for part in found]
            self._count(_joined(each, max(map(len, each))))

    def _count(self, digests: list[bytes]) -> None:
        for digest in digests:
            self.repeats += digest in self._known
            self._known.add(digest)

    def moved(self) -> bool:
        """Whether a parameter was written to since this began: then it is not frozen. `p.data.mul_()`, as
        moving averages have it, leaves a parameter's version alone, so values are compared too."""
        return _versions(self._fixed) != self._versions or _sums(self._fixed) != self._sums

    def remove(self) -> None:
        self._handle.remove()


def _versions(parameters: list[nn.Parameter]) -> int:
    return sum(p._version for p in parameters)


def _sums(parameters: list[nn.Parameter]) -> list[float]:
    """Of a few parameters' first values."""
    some = parameters[:: max(1, len(parameters) // 8)][:8]
    with torch.no_grad():
        return [
            float(getattr(p, "_local_tensor", p).detach().flatten()[:4096].float().sum())
            for p in some
            if not p.is_meta
        ]


def _in_rows(value: Tensor, rows: int) -> Tensor:
    """As bytes, a line a row; what has no rows is one line for all of them."""
    whole = not value.dim() or value.shape[0] != rows
    lines = 1 if whole else rows
    width = value.numel() // lines
    # one number is contiguous whatever its stride, and then has no bytes
    return value.contiguous().as_strided((lines, width), (width, 1)).view(torch.uint8)


def _words(value: Tensor) -> Tensor:
    """Bytes as whole numbers of eight."""
    missing = -value.shape[1] % 8
    return (nn.functional.pad(value, (0, missing)) if missing else value).view(torch.int64)


def _weighed(bits: Tensor, weights: Tensor) -> Tensor:
    """Each row's sum by weights; a few rows at a time, as the script may need the memory itself."""
    rows = max(1, _AT_ONCE // (8 * bits.shape[1]))
    return torch.cat([(bits[i : i + rows] * weights).sum(1) for i in range(0, len(bits), rows)])


def _digests(value: Tensor) -> list[bytes]:
    return [_digest(row) for row in value.numpy()]


def _digest(row: Any) -> bytes:
    return _fast(row) if _fast is not None else hashlib.blake2b(row, digest_size=8).digest()


def _joined(each: list[list[bytes]], rows: int) -> list[bytes]:
    """All tensors' digests of a row."""
    return [b"".join(part[min(i, len(part) - 1)] for part in each) for i in range(rows)]
