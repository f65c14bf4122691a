"""A few steps with every operator seen: where the host waits for the device, and how much is computed.

Python's own `float()` and `bool()` of a tensor read it back too, so the operators are watched, not methods.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections import defaultdict
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from . import cuda
from .samples import LIBRARIES, OURS

_WAITS = {
    "aten._local_scalar_dense": "reads a number back: .item(), float() or bool()",
    "aten.nonzero": "its result's size is known on the device only",
    "aten.masked_select": "its result's size is known on the device only",
    "aten._unique2": "its result's size is known on the device only",
    "aten.unique_dim": "its result's size is known on the device only",
    "aten.equal": "compares on the device, answers on the host",
    "aten.is_nonzero": "reads a number back",
}
_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_DATA = os.path.join(_TORCH, "utils", "data", "")
_ON_HOST = (os.path.join(_TORCH, "optim", ""), _DATA, os.path.join(OURS, "update.py"))
"""What these read are numbers of the host: counters of steps, seeds, what a data set does in there, and
gradients that frostline leaves to the device where there is one. A closure that an optimiser calls is the
script's."""
_HERE = os.path.dirname(os.path.abspath(__file__))


class Look(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators of some steps.

    >>> look = Look()
    >>> with look:
    ...     _ = float((torch.ones(2, 3) @ torch.ones(3, 4)).sum())
    >>> look.flops, [what for _, what in look.waits]
    (48.0, ['reads a number back: .item(), float() or bool()'])
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0.0
        self.flops_by_dtype: dict[str, float] = defaultdict(float)
        self.waits: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
        """(file:line, what) → times, seconds."""
        self.operators = 0
        self.uncounted = ""
        """An operator that torch's formulas could not count, and why."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func._overloadpacket
        what = _WAITS.get(str(packet)) or (_back(args, kwargs) if "copy" in packet.__name__ else None)
        if str(packet).startswith("aten.index") and _by_mask(args):
            what = "a mask selects: its result's size is known on the device only"
        if torch.is_inference_mode_enabled() and packet not in flop_registry:
            with self:  # composite operators arrive whole there: their parts are looked at
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        began = time.perf_counter()
        result = func(*args, **kwargs)
        self.operators += 1
        if what is not None and (place := _place(_on_device(args))):
            held = self.waits[place, what]
            held[0] += 1
            held[1] += time.perf_counter() - began if _on_device(args) else 0.0
        if packet in flop_registry:
            self._counted(packet, args, kwargs, result)
        return result

    def _counted(self, packet: Any, args: Any, kwargs: Any, result: Any) -> None:
        try:
            flops = float(flop_registry[packet](*args, **kwargs, out_val=result))
        except Exception as e:  # noqa: BLE001 -- torch's formulas do not know every shape; the step goes on
            self.uncounted = f"{packet}: {type(e).__name__}: {e}"
            return
        self.flops += flops
        self.flops_by_dtype[_dtype(packet, args)] += flops


def cannot() -> str:
    """Why no step can be looked at now; empty where one can."""
    if _compiled():
        return "torch.compile is used, and under a dispatch mode what it made would not run"
    if torch._C._current_graph_task_id() != -1:
        return "steps end within the backward pass, which has dispatch modes of its own"
    return ""


def _compiled() -> bool:
    """Whether there is something that torch.compile made. It would run as it is written instead, with other
    random numbers, and with fullgraph=True not at all."""
    if "torch._dynamo" not in sys.modules:
        return False
    return any(
        getattr(o, "_torchdynamo_orig_callable", None) is not None
        and not getattr(o, "_torchdynamo_disable", False)
        for o in gc.get_objects()
        if type(o) is FunctionType
    )


def _back(args: Any, kwargs: Any) -> str | None:
    """A copy from the device to the host that the host waits for."""
    tensors = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
    waits = not any(a is True for a in args) and not kwargs.get("non_blocking")
    if len(tensors) == 1 and tensors[0].is_cuda and waits:
        wanted = kwargs.get("device")
        return "copies to the host" if wanted is not None and torch.device(wanted).type == "cpu" else None
    if len(tensors) == 2 and tensors[1].is_cuda and not tensors[0].is_cuda and waits:
        return "copies to the host"
    return None


def _by_mask(args: Any) -> bool:
    return any(isinstance(t, Tensor) and t.dtype in (torch.bool, torch.uint8) for t in tree_iter(args[1:2]))


def _on_device(args: Any) -> bool:
    return any(isinstance(t, Tensor) and t.is_cuda for t in tree_iter(args))


def _dtype(packet: Any, args: Any) -> str:
    """What it is computed in: a GPU may round float32 to TF32, by default in convolutions."""
    found = next((t for t in tree_iter(args) if isinstance(t, Tensor)), None)
    if found is None:
        return "unknown"
    kind = "conv" if "conv" in packet.__name__ else "matmul"
    if found.is_cuda and found.dtype == torch.float32 and cuda.rounded(kind):
        return "tf32"
    return str(found.dtype).removeprefix("torch.")


def _place(on_device: bool) -> str:
    """Where in the user's own code this comes from, and through which line of a library; empty for what
    never waits: an optimiser's own counters lie on the host, and so does everything beside a GPU
    that is not on it."""
    if not on_device and cuda.used():
        return ""
    frame: Any = sys._getframe(2)
    mine = through = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if not on_device and file.startswith(_DATA if mine else _ON_HOST):
            return ""
        if not mine and not file.startswith(("<", _HERE)):
            told = f"{file}:{frame.f_lineno}"
            if not file.startswith(LIBRARIES):
                mine = told
            elif not through and not file.startswith(_TORCH):
                through = _short(told)
        frame = frame.f_back
    return f"{mine} ({through})" if mine and through else mine or through or "a library"


def _short(place: str) -> str:
    """A library's file by its package."""
    if place.startswith(OURS):
        return f"frostline{os.sep}{place[len(OURS) :]}"
    library = max((at for at in LIBRARIES if place.startswith(at)), key=len, default="")
    return place[len(library) :]
