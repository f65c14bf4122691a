"""Hooks of ours on the script's modules, which nothing that it saves, copies or exports knows of.

Hooks lie in a module's own attributes, so `torch.save(model)`, `copy.deepcopy(model)` and `torch.jit.script`
would find them. While one is on, modules are taken apart for these without it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as everywhere

from .patches import Patches

_HELD_IN = (
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)  # fmt: skip
_on: dict[int, nn.Module] = {}
"""The hooks that are on, by torch's own numbers: each is of one hook only."""
_patches = Patches()
failures: list[str] = []
"""Errors of ours in hooks: noted, each once, and none of the script's."""


class Hook:
    """One that is on."""

    def __init__(self, handle: Any, module: nn.Module) -> None:
        self._handle = handle
        if not _on:
            _hide()
        _on[handle.id] = module

    def remove(self) -> None:
        self._handle.remove()
        if _on.pop(self._handle.id, None) is not None and not _on:
            _patches.undo()


def before(module: nn.Module, ours: Callable[..., None], *, with_kwargs: bool = False) -> Hook:
    """Calls `ours` with the module and what it is given, before each of its calls."""
    called = guarded(ours, module)
    return Hook(module.register_forward_pre_hook(called, with_kwargs=with_kwargs), module)


def after(module: nn.Module, ours: Callable[..., None]) -> Hook:
    """Calls `ours` after each of its calls, also where that raises."""
    return Hook(module.register_forward_hook(guarded(ours, module), always_call=True), module)


def of_all(before: Callable[..., None], after: Callable[..., None]) -> list[Any]:
    """Before and after the calls of all modules."""
    return [
        everywhere.register_module_forward_pre_hook(guarded(before)),
        everywhere.register_module_forward_hook(guarded(after), always_call=True),
    ]


def guarded(ours: Callable[..., None], only: nn.Module | None = None) -> Callable[..., None]:
    """What is compiled or traced has nothing of ours in it; and a copy, made in a way that we do not know of,
    is not the module that we look at. A function, as copies of functions are the functions themselves."""
    me = id(only)

    def called(module: nn.Module, *given: Any) -> None:
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return
        if only is not None and id(module) != me:
            return
        try:
            ours(module, *given)
        except Exception as e:  # noqa: BLE001 -- whatever it is; Stop is no Exception
            told = f"{type(e).__name__}: {e}"
            if told not in failures:
                failures.append(told)

    return called


def _hide() -> None:
    recursive: Any = torch.jit._recursive
    script = recursive.create_script_module

    def __reduce_ex__(module: nn.Module, protocol: Any) -> Any:
        found = super(nn.Module, module).__reduce_ex__(protocol)
        if not isinstance(found, tuple):  # the name of something global
            return found
        how, args, *rest = found
        return (how, tuple(_without(value) for value in args), *(_without(value) for value in rest))

    def create_script_module(*args: Any, **kwargs: Any) -> Any:
        taken = _taken_off()
        try:
            return script(*args, **kwargs)
        finally:
            for held, each in taken:
                held.clear()
                held.update(each)

    _patches.set(nn.Module, "__reduce_ex__", __reduce_ex__)
    _patches.set(recursive, "create_script_module", create_script_module)


def _without(state: Any) -> Any:
    """A module's attributes as they would be without us."""
    if not isinstance(state, dict) or not any(key in _on for name in _HELD_IN for key in state.get(name, ())):
        return state
    held = {name: state[name] for name in _HELD_IN if name in state}
    return state | {
        name: OrderedDict((k, v) for k, v in each.items() if k not in _on) for name, each in held.items()
    }


def _taken_off() -> list[tuple[Any, Any]]:
    """All of them, for a while; and what is to be put back."""
    taken: list[tuple[Any, Any]] = []
    for module in {id(module): module for module in _on.values()}.values():
        for held in (vars(module)[name] for name in _HELD_IN):
            taken.append((held, OrderedDict(held)))
            for key in [key for key in held if key in _on]:
                del held[key]
    return taken
