"""The update: gradients are looked at, clipped and applied, unless one of them is no number.

A step that is bound by Python and launches pays for every line here, so hundreds of parameters are handled
by single calls, and the norm is worked out where somebody asks for it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from copy import deepcopy
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from frostline.errors import UsageError
from frostline.rewind import Buffers
from frostline.scaling import Scaler

Figures = dict[str, Tensor]

BUILT: WeakKeyDictionary[torch.optim.Optimizer, list[dict[str, Any]]] = WeakKeyDictionary()
"""The options of each optimiser's groups as they were given, before a schedule or a step changed one."""

_LARGE = 1 << 16
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


class Update:
    """Called when the gradients are there; afterwards they are gone.

    >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> update = Update(torch.optim.SGD([weight], 1.0))
    >>> weight.square().sum().div(2).backward()
    >>> update({"loss": torch.tensor(12.5)}, Buffers(torch.nn.Identity()), norm=True)
    {'loss': tensor(12.5000), 'grad_norm': tensor(5.), 'bad': tensor(0.)}
    >>> weight.tolist(), weight.grad
    ([0.0, 0.0], None)
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        clip: float | None = None,
        scaler: Scaler | None = None,
    ) -> None:
        if _needs_closure(optimizer):
            raise UsageError(_CLOSURE.format(type(optimizer).__qualname__))
        self.optimizer, self.clip, self.scaler = optimizer, clip, scaler
        BUILT.setdefault(optimizer, [_given(group) for group in optimizer.param_groups])
        self.syncs = 0
        """Times that it waited for the device, to learn whether it may happen."""
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._chose_fused = _fuse(optimizer)
        self._fused = bool(optimizer.param_groups) and all(g.get("fused") for g in optimizer.param_groups)
        self._contiguous = [p.is_contiguous() for p in self.parameters]
        self._device = next((p.device for p in self.parameters), torch.device("cpu"))
        self._without_a_look = self._fused and self._device.type == "cuda"
        # torch's check has no bfloat16 on CUDA (pytorch issue 127176); norms of other types are looked at
        usual = all(p.dtype == torch.float32 and p.device == self._device for p in self.parameters)
        self._at_once = usual and self._device.type in ("cpu", "cuda")
        self._one = torch.ones((), device=self._device)
        self._born_in: object = None
        self._born: tuple[float, ...] = ()

    def __call__(self, figures: Figures, buffers: Buffers, *, norm: bool = False) -> Figures:
        """norm: add `grad_norm`, the norm before clipping. What is done does not depend on it."""
        gradients = [gradient for p in self.parameters if (gradient := p.grad) is not None]
        if any(gradient.is_sparse for gradient in gradients):
            gradients = self._values()
        elif self._fused:
            gradients = self._laid_out()
        if not gradients:
            raise UsageError(_NO_GRADIENT)
        if self.scaler is not None:
            self.scaler.unscale(gradients)
        looked_at = self.clip is not None or not self._at_once
        size = self._norm(gradients) if norm or looked_at else None
        if self.clip is not None and size is not None:
            self._clip(gradients, size, self.clip)
        if size is not None and (looked_at or (self._device.type == "cpu" and math.isfinite(float(size)))):
            bad = self._no_numbers([size], figures["loss"])
        else:
            bad = self._no_numbers(gradients, figures["loss"])
        self._apply(bad, buffers)
        found = {**figures, "grad_norm": size} if norm and size is not None else {**figures}
        found["bad"] = bad
        if self.scaler is not None:
            found |= _scaled(self.scaler, bad, figures["loss"])
        self.optimizer.zero_grad(set_to_none=True)
        return found

    def _values(self) -> list[Tensor]:
        """The gradients; of sparse ones, which fused kernels do not take, the rows they have, each once."""
        if self._chose_fused:
            self._fused = self._chose_fused = self._without_a_look = False
            for group in self.optimizer.param_groups:
                group["fused"] = None
        found = []
        for parameter in self.parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
                found.append(parameter.grad.values())
            elif parameter.grad is not None:
                found.append(parameter.grad)
        return found

    def _laid_out(self) -> list[Tensor]:
        """The gradients, each in memory as its parameter, for fused kernels: a CPU's go by nothing else.

        torch's own always are; those that somebody assigned may not be.
        """
        found = []
        for parameter, contiguous in zip(self.parameters, self._contiguous, strict=True):
            gradient = parameter.grad
            if gradient is None:
                continue
            if not (contiguous and gradient.is_contiguous()):
                parameter.grad = gradient = laid_out(gradient, parameter)
            found.append(gradient)
        return found

    def _norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """The norm of all together; torch's own groups them by device and type first, which takes longer."""
        if not self._at_once and len({gradient.dtype for gradient in gradients}) > 1:
            return torch.nn.utils.get_total_norm(gradients)
        norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm([*gradients])))
        return norm

    def _clip(self, gradients: list[Tensor], norm: Tensor, most: float) -> None:
        if not self._at_once:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, most, norm)
            return
        # what torch does, without its grouping
        torch._foreach_mul_(gradients, torch.clamp(most / (norm + 1e-6), max=1.0))

    def _no_numbers(self, tensors: list[Tensor], loss: Tensor) -> Tensor:
        """1.0 where one of them is not finite, else 0.0; on the device.

        With a scale of 1, what a GradScaler looks with leaves every bit as it is.
        """
        if not self._at_once:
            return (~(torch.isfinite(tensors[0]) & torch.isfinite(loss))).float()
        if self._device.type == "cpu":
            tensors = _unsure(tensors)
        bad = torch.zeros((), device=self._device)
        told = loss
        if loss.dtype != torch.float32 or loss.device != self._device:
            told = (loss * 0).to(self._device, torch.float32)  # 0, or no number
        torch._amp_foreach_non_finite_check_and_unscale_([*tensors, told], bad, self._one)
        return bad

    def _apply(self, bad: Tensor, buffers: Buffers) -> None:
        """The optimiser's step, unless it is bad; buffers go back as well then."""
        if self._without_a_look and not self._unborn():
            self.optimizer.found_inf, self.optimizer.grad_scale = bad, None  # type: ignore[attr-defined]
            try:
                self.optimizer.step()
            finally:
                del self.optimizer.found_inf, self.optimizer.grad_scale  # type: ignore[attr-defined]
            buffers.restore(where=bad)
            return
        self.syncs += self._device.type != "cpu"
        if bool(bad):
            buffers.restore()
            return
        if self._fused:
            _late(self.optimizer)
        self.optimizer.step()

    def _unborn(self) -> bool:
        """Whether a step would make momentum out of memory that nobody has written.

        torch's fused SGD takes fresh memory for it and writes there in the first step. Skipped on the device,
        that step leaves it as it was found, and the next is no longer the first.
        """
        if not isinstance(self.optimizer, torch.optim.SGD):
            return False
        groups, state = self.optimizer.param_groups, self.optimizer.state
        now = (len(state), *(group["momentum"] for group in groups))
        if self._born_in is state and self._born == now:
            return False
        without = [
            p.grad is not None
            for group in groups
            for p in group["params"]
            if group["momentum"] and state.get(p, {}).get("momentum_buffer") is None
        ]
        if not without:  # all have theirs, until another state is loaded or momentum begins
            self._born_in, self._born = state, now
        return any(without)


def laid_out(value: Tensor, parameter: Tensor) -> Tensor:
    """What belongs to a parameter, number by number, in memory as the parameter is.

    >>> laid_out(torch.zeros(2, 3), torch.zeros(3, 2).t()).stride()
    (1, 2)
    """
    if value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def _unsure(tensors: list[Tensor]) -> list[Tensor]:
    """Those that have to be looked at one number at a time, on a CPU.

    A sum only reads, which takes half as long for large tensors. It is a number only if they all are; where
    it is none, they may still be, and it went beyond the largest.
    """
    large = [tensor for tensor in tensors if tensor.numel() >= _LARGE]
    if not large or not math.isfinite(sum(float(tensor.sum()) for tensor in large)):
        return tensors
    return [tensor for tensor in tensors if tensor.numel() < _LARGE]


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step calls the loss by itself, several times, as that of L-BFGS does."""
    _, *wanted = inspect.signature(type(optimizer).step).parameters.values()
    free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(one.default is one.empty and one.kind not in free for one in wanted)


def _given(group: dict[str, Any]) -> dict[str, Any]:
    """A group's options, in memory of their own: a schedule fills a rate that is a tensor in place."""
    options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
    for name, value in options.items():
        if isinstance(value, Tensor):
            options[name] = value.detach().clone()
        elif isinstance(value, list | dict | np.ndarray):
            options[name] = deepcopy(value)
    return options


def _late(optimizer: torch.optim.Optimizer) -> None:
    """Momentum for parameters whose first gradient comes later than that of others.

    torch's fused SGD makes it for all of a group or for none, and fails in between. Zeros are what its first
    step would begin with, without dampening.
    """
    for group in optimizer.param_groups:
        if not group.get("momentum") or group.get("dampening"):
            continue
        states = [(p, optimizer.state[p]) for p in group["params"] if p.grad is not None]
        if any(state.get("momentum_buffer") is not None for _, state in states):
            for parameter, state in states:
                if state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(parameter)


def _scaled(scaler: Scaler, bad: Tensor, loss: Tensor) -> Figures:
    """The scaler learns what came of its scale. An overflow is not bad: it is how a scale is found."""
    scaler.update(bad)
    overflow = bad * torch.isfinite(loss)
    usual = overflow * (scaler.scale >= 1)
    return {"overflow": overflow, "bad": bad - usual, "scale": scaler.scale.clone()}


def _fuse(optimizer: torch.optim.Optimizer) -> bool:
    """Use the fused kernel where the device has one and nobody chose otherwise; whether that was done.

    It takes a third of the time and less, and on a GPU it takes `found_inf`, with which an update is skipped
    without a look from the CPU.
    """
    groups = optimizer.param_groups
    free = all(g.get("fused") is None and g.get("foreach") is None for g in groups)
    able = all(_fusible(p, optimizer.state.get(p, {})) for g in groups for p in g["params"])
    usual = type(optimizer) in _FUSED and not any(g.get("differentiable") for g in groups)
    if not (free and able and usual):
        return False
    for group in groups:
        group["fused"] = True
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    return True


def _fusible(parameter: Tensor, state: dict[str, Any]) -> bool:
    """Whether the kernel can take it: it would write into what lies between the numbers of a slice.

    Adagrad counts steps from the beginning, and beside the parameter only where it was made fused.
    """
    counted = state.get("step", parameter)
    near = not isinstance(counted, Tensor) or counted.device == parameter.device
    kind = parameter.device.type in ("cuda", "cpu") and parameter.is_floating_point()
    return near and kind and _is_dense(parameter)


def _is_dense(tensor: Tensor) -> bool:
    """Whether its numbers fill one piece of memory, in whatever order.

    >>> whole = torch.zeros(4, 6)
    >>> _is_dense(whole.t()), _is_dense(whole[:, ::2]), _is_dense(whole[:1].expand(4, 6))
    (True, False, False)
    """
    filled = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != filled:
            return False
        filled *= size
    return True


_CLOSURE = (
    "{}.step(…) needs a closure that works out the loss anew, as often as it likes; a training step has one "
    "forward and backward pass. Use an optimiser whose step() does without, such as AdamW or SGD."
)

_NO_GRADIENT = (
    "No parameter of the optimiser got a gradient. Does optimizer(model) take model.parameters(), do they "
    "require gradients, and does the loss depend on them?"
)
