"""Modules that were put into a model (adapters, LoRA): are they called, and does it matter?"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn

from frostline.errors import UsageError
from frostline.inspector.report import listed


def named_modules_of(model: nn.Module, injected: Any) -> dict[str, nn.Module]:
    """The modules that are meant, given as modules, names, or classes."""
    given = [injected] if isinstance(injected, str | type | nn.Module) else list(injected)
    found: dict[str, nn.Module] = {}
    missing = []
    for one in given:
        matches = {name: module for name, module in model.named_modules() if _is(one, name, module)}
        found |= matches
        missing += [] if matches else [_shown(one)]
    if missing:
        raise UsageError(
            "fl.audit(…, injected=…): these are no part of the model; give modules, their names in "
            "named_modules(), or their class:",
            problems=missing,
        )
    return found


def _is(given: Any, name: str, module: nn.Module) -> bool:
    if isinstance(given, str):
        return name == given
    return isinstance(module, given) if isinstance(given, type) else module is given


def _shown(given: Any) -> str:
    return repr(given) if isinstance(given, str) else getattr(given, "__name__", type(given).__name__)


class Calls:
    """Counts the calls of modules, and whether a gradient came back through what they returned."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self.modules = modules
        self.count = dict.fromkeys(modules, 0)
        self.matters: dict[str, bool] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> Calls:
        self._handles = [m.register_forward_hook(self._hook(name)) for name, m in self.modules.items()]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self.count[name] += 1
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    self.matters.setdefault(name, False)
                    tensor.register_hook(partial(self._came_back, name))  # type: ignore[no-untyped-call]

        return hook

    def _came_back(self, name: str, gradient: Tensor) -> None:
        self.matters[name] = self.matters[name] or bool(gradient.any())

    def never_called(self) -> list[str]:
        return [name for name, n in self.count.items() if not n]

    def without_effect(self) -> list[str]:
        return [name for name, mattered in self.matters.items() if not mattered]


def _tensors(output: Any) -> Iterable[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    parts = output.values() if isinstance(output, dict) else output
    return [p for p in parts if isinstance(p, Tensor)] if isinstance(output, dict | tuple | list) else []


def injected_findings(model: nn.Module, calls: Calls) -> list[str]:
    found, total = [], len(calls.modules)
    never = calls.never_called()
    if never:
        inside = any(isinstance(_parent(model, name), nn.MultiheadAttention) for name in never)
        why = " (nn.MultiheadAttention reads out_proj.weight itself and does not call it)" if inside else ""
        found.append(
            f"{total} modules injected, {total - len(never)} called; never: {listed(never)}{why}. What "
            "they hold has no effect: wrap a module that is called"
        )
    silent = calls.without_effect()
    if silent:
        found.append(
            f"{len(silent)} of {total} injected modules are called, but the loss does not depend on what "
            f"they return: {listed(silent)}"
        )
    return found


def _parent(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])
