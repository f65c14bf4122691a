"""What a block of steps is watched with, besides the step's hook and the loaders' clock.

B, lines and trace have spans; lines also a thread that samples, trace the tracer; look has a dispatch mode.
All of it is put on before the steps that settle, and is off again when the block has ended.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from . import cuda
from .calls import Calls
from .kernels import Kernels
from .looks import Look
from .modules import Use
from .parts import Parts
from .samples import Samples
from .spans import Spans

_WITH_SPANS = ("B", "lines", "trace")


class Instruments:
    """trace: where the tracer's own file goes; None: nobody asked for one."""

    def __init__(self, trace: Path | None) -> None:
        self.found: dict[str, Any] = {}
        """What blocks have shown so far: spans, copies, kernels, look."""
        self.samples = Samples()
        self.spans: Spans | None = None
        self.parts: Parts | None = None
        self._calls: Calls | None = None
        self._kernels: Kernels | None = None
        self._look: Look | None = None
        self._tellers: Sequence[Any] = ()
        self._collects = False
        self._begun = ""
        self._trace = trace

    def put_on(self, phase: str, modules: Callable[[], list[Use]], tellers: Sequence[Any]) -> None:
        """modules: asked for those to be told apart, where spans are put on; tellers: those that enter spans
        by themselves, into their attribute `spans`."""
        if phase not in _WITH_SPANS:
            return
        self._collects = gc.isenabled()
        gc.disable()  # spans are objects too: what they set off is not the script's
        label = torch.profiler.record_function if phase == "trace" else None
        self.spans = Spans(cuda=cuda.used(), label=label)
        self.parts = Parts(self.spans, cuda.used())
        self.parts.install()
        self._calls = Calls(modules(), self.spans)
        self._tell(tellers)

    def start(self, phase: str) -> None:
        """The steps that count begin."""
        self._begun = phase
        if phase == "lines" and self.spans is not None:
            self.samples.begin(self.spans)
        if phase == "trace":
            self._kernels = Kernels(cuda=cuda.used())
            self._kernels.begin()
        if phase == "look":
            self._look = Look()
            self._look.__enter__()  # type: ignore[no-untyped-call]

    def restart(self) -> None:
        """The last thing before the block's first step: what the steps that settle left is forgotten."""
        if self.spans is not None and self.parts is not None:
            self.parts.copies.clear()
            self.spans.restart()

    def take_off(self, steps: int) -> None:
        """The block has ended, after so many steps that count."""
        if self._kernels is not None:
            self.found["kernels"] = self._kernels.end(steps, self._trace)
            self._kernels = None
        if self.spans is not None:
            self.samples.end()
            spans, parts = self.spans, self.parts
            self.drop()
            if self._begun == "B" and parts is not None:
                self._add_spans(spans, parts)
        if self._look is not None:
            self._look.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._add_look(self._look, steps)
            self._look = None
        self._begun = ""

    def drop(self) -> None:
        """Spans are off, and nothing comes of them: also in a child that was forked meanwhile."""
        self.samples.end()
        if self._calls is None or self.parts is None:
            return
        if self._collects:
            gc.enable()
        self._calls.remove()
        self.parts.uninstall()
        self.spans = self.parts = self._calls = None
        self._tell(self._tellers)

    def _tell(self, tellers: Sequence[Any]) -> None:
        self._tellers = tellers if self.spans is not None else ()
        for teller in tellers:
            teller.spans = self.spans

    def _add_spans(self, spans: Spans, parts: Parts) -> None:
        found = self.found.setdefault("spans", [])
        told = {"spans": spans.lines(), "bounds": spans.bounds(), "cuda": spans.cuda, "lag": spans.lag()}
        found.append(told)
        copies = self.found.setdefault("copies", [])
        for (kind, waits), (calls, size, seconds) in parts.copies.items():
            copies.append({"kind": kind, "blocking": waits, "calls": calls, "bytes": size, "s": seconds})

    def _add_look(self, look: Look, steps: int) -> None:
        steps = max(1, steps)
        self.found["look"] = {
            "steps": steps, "flops": look.flops / steps, "operators": look.operators / steps,
            "uncounted": look.uncounted,
            "flops_by_dtype": {name: flops / steps for name, flops in look.flops_by_dtype.items()},
            "waits": [
                {"where": where, "what": what, "calls": n / steps, "s": seconds / steps}
                for (where, what), (n, seconds) in look.waits.items()
            ],
        }  # fmt: skip
