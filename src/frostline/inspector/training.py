"""One step of training, looked at: what gets no gradient, what moves and must not, what is never called."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from frostline.errors import UsageError
from frostline.execution.call import described
from frostline.inspector.injected import Calls, injected_findings, named_modules_of
from frostline.inspector.reach import reach
from frostline.inspector.report import TrainingAudit, listed
from frostline.inspector.snapshot import Snapshot, content
from frostline.inspector.watching import generators_kept, seed_all

Loss = Callable[[nn.Module, Any], Any]


def look_at_training(
    model: nn.Module, batch: Any, *, loss: Loss, optimizer: Any, injected: Any = ()
) -> TrainingAudit:
    """Loss, gradient and optimiser step on the model itself, all of which is undone afterwards.

    optimizer: a function of the model, or an optimiser.
    injected:  modules, names or classes of modules that were put into the model and must matter.
    """
    wrapped = named_modules_of(model, injected)
    with _undone(model), Calls(wrapped) as calls:
        made = _try("make the optimiser", lambda: _optimizer(model, optimizer))
        with _optimizer_kept(made):
            return _Step(model, batch, loss, made).audit(calls)


class _Step:
    def __init__(self, model: nn.Module, batch: Any, loss: Loss, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.batch, self.loss, self.optimizer = model, batch, loss, optimizer
        self.named = dict(model.named_parameters())
        self.trained = {name: p for name, p in self.named.items() if p.requires_grad}

    def audit(self, calls: Calls) -> TrainingAudit:
        frozen = {name: content(p) for name, p in self.named.items() if not p.requires_grad}
        statistics = {name: content(b) for name, b in self._frozen_buffers()}
        silent = self._backward()
        _try("do the optimiser's step", self.optimizer.step)
        moved = [name for name, was in frozen.items() if content(self.named[name]) != was]
        drifted = [n for n, b in self._frozen_buffers() if n in statistics and content(b) != statistics[n]]
        if silent or calls.without_effect():
            self._nudge()  # what is multiplied by an initial zero (LoRA) has no gradient in the first step
            silent = [name for name in self._backward() if name in silent]
        findings = [*self._gradient_findings(silent), *self._moved_findings(moved, drifted)]
        findings += [*self._optimizer_findings(), *injected_findings(self.model, calls)]
        return TrainingAudit(tuple(findings))

    def _backward(self) -> list[str]:
        """One loss and its gradient; the trainable parameters that got none."""
        self.model.zero_grad(set_to_none=True)
        seed_all(1)
        value = _try("compute the loss", lambda: self.loss(self.model, self.batch))
        value = value["loss"] if isinstance(value, dict) and "loss" in value else value
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
            raise UsageError(
                f"fl.audit: loss(model, batch) returned {_shown(value)}; expected one number that depends on "
                'a trainable parameter, as a tensor or {"loss": tensor}.'
            )
        _try("compute the gradient", value.backward)
        return [n for n, p in self.trained.items() if p.grad is None or not bool(p.grad.any())]

    def _nudge(self) -> None:
        with torch.no_grad():
            for p in self.trained.values():
                steps = torch.arange(p.numel(), device=p.device, dtype=torch.float32)
                p.add_((torch.cos(steps) * 1e-2).view(p.shape).to(p.dtype))

    def _frozen_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Statistics of modules whose own parameters are all frozen."""
        for name, module in self.model.named_modules():
            own = [*module.parameters(recurse=False)]
            if own and not any(p.requires_grad for p in own):
                for buffer, tensor in module.named_buffers(recurse=False):
                    yield (f"{name}.{buffer}" if name else buffer), tensor

    def _gradient_findings(self, silent: list[str]) -> Iterator[str]:
        if silent:
            yield (
                f"{_parameters(silent, 'trainable')} got no gradient: {by_module(silent)}. Use them in the "
                "loss, or freeze them with .requires_grad_(False)"
            )

    def _moved_findings(self, moved: list[str], drifted: list[str]) -> Iterator[str]:
        if moved:
            yield (
                f"{_parameters(moved, 'frozen')} moved in one step: {by_module(moved)}. Keep them out of the "
                "optimiser (weight decay moves them too), and do not write to them in the forward pass"
            )
        if drifted:
            yield (
                f"statistics of frozen modules moved: {listed(drifted)}. Keep these modules in eval mode "
                "while training (override train())"
            )

    def _optimizer_findings(self) -> Iterator[str]:
        held = {p for group in self.optimizer.param_groups for p in group["params"]}
        missing = [name for name, p in self.trained.items() if p not in held]
        idle = [name for name, p in self.named.items() if not p.requires_grad and p in held]
        if missing:
            yield (
                f"{_parameters(missing, 'trainable')} not in the optimiser: {by_module(missing)}. Give them "
                "to it, or freeze them"
            )
        if idle:
            yield (
                f"{_parameters(idle, 'frozen')} in the optimiser: {by_module(idle)}. Give it only those with "
                "requires_grad"
            )


def by_module(names: Iterable[str], most: int = 4) -> str:
    """
    >>> by_module(["head.weight", "head.bias", "scale"])
    'head (weight, bias), scale'
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        module, _, own = name.rpartition(".")
        groups.setdefault(module, []).append(own)
    told = [f"{m} ({', '.join(own)})" if m else ", ".join(own) for m, own in groups.items()]
    return ", ".join(told[:most]) + (f" and {len(told) - most} more modules" if len(told) > most else "")


def _parameters(names: list[str], kind: str) -> str:
    return f"{len(names)} {kind} parameter{'s' if len(names) > 1 else ''}"


def _shown(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"a tensor {list(value.shape)} with{'' if value.requires_grad else 'out'} a gradient"


def _optimizer(model: nn.Module, optimizer: Any) -> torch.optim.Optimizer:
    made = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer(model)
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(f"optimizer(model) returned {type(made).__name__}; expected a torch optimiser")
    return made


def _try(what: str, act: Callable[[], Any]) -> Any:
    try:
        return act()
    except UsageError:
        raise
    except Exception as e:
        raise UsageError(
            f"fl.audit could not {what} for one training step: {described(e)}. Correct it, or leave the "
            "training step out with training=False."
        ) from e


@contextmanager
def _optimizer_kept(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    state = copy.deepcopy(optimizer.state_dict())
    try:
        yield
    finally:
        optimizer.load_state_dict(state)


@contextmanager
def _undone(model: nn.Module) -> Iterator[None]:
    """The model as it was, whatever happens in between: weights, gradients, modes, generators."""
    before = Snapshot(reach(model))
    gradients = [(p, p.grad) for p in model.parameters()]
    for p, _ in gradients:
        p.grad = None
    with generators_kept():
        try:
            model.train()
            yield
        finally:
            before.restore()
            for p, gradient in gradients:
                p.grad = gradient
