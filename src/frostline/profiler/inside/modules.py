"""Which modules a script calls, how often, with what, and which of them nothing can change.

A few steps of the warm-up are watched with hooks on all modules. From then on only modules that matter are
hooked, one by one: hooks on all of them cost a tenth of a small forward.
"""

from __future__ import annotations

import gc
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from . import hooks
from .batches import first_tensor, length, n_rows

_ABOUT_HOOKS = r"Using `torch.compile\(module\)` when there are global hooks"
_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")
_DROPS = ("DropPath", "StochasticDepth", "DropBlock2d", "DropBlock3d", "PatchDropout")
"""What libraries have for dropping; torch's own are known by their class."""
_HOOKED, _HOOK_S = 0.01, 12e-6
"""Of a step that the hooks of pass B may take; and what those of one call take (measured: 8 to 15 µs)."""
_DEEPEST = 3
_LEAST_S = 2e-4
"""Calls shorter than this are told with what is around them."""


@dataclass
class Use:
    """One module, as it was called while it was watched."""

    module: nn.Module
    depth: int
    order: int
    calls: int = 0
    seconds: float = 0.0
    rows: Counter[int] = field(default_factory=Counter)
    quiet: int = 0
    """Calls without gradients."""
    parent: int | None = None
    name: str = ""
    prefix: nn.Module | None = None
    """The last part of it before which nothing is trained, where only its beginning is frozen."""
    before: set[int] = field(default_factory=set)
    """The frozen modules up to there."""
    out_bytes: float = 0.0
    """Of its result, a row."""
    random: bool = False
    """It was called in training mode, and draws numbers or goes by the whole batch then."""


@dataclass
class _Call:
    """A call that is not over."""

    who: int
    began: float
    known: bool = False
    """A layer was called in it that says what a row is."""
    one: torch.Size | None = None
    """The shape of the one row that this layer was given."""


class Modules:
    """Watches calls of all modules, between `begin` and `end`."""

    def __init__(self, outermost: Callable[[nn.Module], None]) -> None:
        self._outermost = outermost
        self.uses: dict[int, Use] = {}
        self.steps = 0
        self._stacks: dict[int, list[_Call]] = {}
        self._owner = threading.get_ident()
        self._handles: list[Any] = []

    def begin(self) -> None:
        warnings.filterwarnings("ignore", message=_ABOUT_HOOKS)
        self._filter = warnings.filters[0]
        self._handles = hooks.of_all(self._enter, self._leave)

    def begin_counting(self) -> None:
        """The first step ended: what was called before it may have been anything."""
        for use in self.uses.values():
            use.calls = use.quiet = 0
            use.seconds, use.random = 0.0, False
            use.rows.clear()

    def called(self) -> list[Use]:
        """The modules that steps call."""
        wrapped = {
            id(_unwrapped(u.module)) for u in self.uses.values() if _unwrapped(u.module) is not u.module
        }
        return [
            use
            for key, use in self.uses.items()
            if use.calls
            and (use.depth == 0 or key not in wrapped)
            and type(use.module).__name__ != "GraphModule"
        ]

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()
        if self._handles and self._filter in warnings.filters:
            warnings.filters.remove(self._filter)  # type: ignore[attr-defined]
        self._handles = []
        self._stacks.clear()
        for module in _compiled_in_place():  # their calls run no hooks
            if id(module) not in self.uses:
                self.uses[id(module)] = Use(module, 0, len(self.uses), calls=1)
        if self.uses:
            self._name()
            for use in self.uses.values():
                if use.depth == 0:
                    self._find_prefix(use)

    @property
    def watching(self) -> bool:
        return bool(self._handles)

    def _enter(self, module: nn.Module, args: Any) -> None:
        if in_worker():
            return
        thread = threading.get_ident()
        stack = self._stacks.setdefault(thread, [])
        parent = stack[-1].who if stack else None
        use = self.uses.get(id(module))
        if use is None:
            use = self.uses[id(module)] = Use(module, len(stack), len(self.uses), parent=parent)
        use.depth = min(use.depth, len(stack))
        use.calls += 1
        use.quiet += not torch.is_grad_enabled()
        use.random = use.random or (module.training and _draws(module))
        if parent is None and thread == self._owner:
            self._outermost(module)
        stack.append(_Call(id(module), time.perf_counter()))
        if (rank := _rank(module)) is not None:
            one = _one_row(args, rank)
            for call in stack:
                if not call.known:
                    call.known, call.one = True, one

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if in_worker():
            return
        stack = self._stacks.get(threading.get_ident(), [])
        while stack:
            call = stack.pop()
            if call.who == id(module):
                use = self.uses[call.who]
                use.seconds += time.perf_counter() - call.began
                alone = call.one is not None and _shape(args) == call.one
                use.rows[1 if alone else n_rows(args) or n_rows(output)] += 1
                given = first_tensor(output)
                size = 0 if given is None else given.numel() * given.element_size()
                use.out_bytes = 0.0 if given is None else size / max(1, length(given))
                return

    # what was found

    def _name(self) -> None:
        """Paths from the outermost modules; a part that the script calls by itself keeps its place."""
        called = [use for use in self.uses.values() if use.depth == 0]
        inside = {id(m) for use in called for m in use.module.modules() if m is not use.module}
        roots = [use for use in called if id(use.module) not in inside]
        kinds = Counter(_kind(use.module) for use in roots)
        numbers: Counter[str] = Counter()
        for use in roots:
            kind = _kind(use.module)
            numbers[kind] += 1
            root = kind if kinds[kind] == 1 else f"{kind}#{numbers[kind]}"
            for path, module in use.module.named_modules():
                found = self.uses.get(id(module))
                if found is not None and not found.name:
                    found.name = ".".join(filter(None, [root, _plain(use.module, path)]))
        for use in self.uses.values():
            if not use.name:  # in a plain list: no path leads there
                kind = _kind(use.module)
                numbers[kind] += 1
                use.name = f"{kind}#{numbers[kind]}"

    def up_to(self, use: Use) -> list[nn.Module]:
        """The frozen modules that a partly trained one begins with."""
        return [self.uses[key].module for key in use.before]

    def worth(self, step_s: float) -> list[Use]:
        """Those that pass B tells apart: outermost ones, and what is inside of them and takes its time, as
        long as the hooks of all of them take no share of the step that is felt."""
        fit = [
            use
            for use in self.called()
            if use.depth <= _DEEPEST and (use.depth == 0 or use.seconds >= _LEAST_S * use.calls)
        ]
        fit.sort(key=lambda use: (use.depth > 0, -use.seconds))
        ends = {id(use.prefix) for use in self.uses.values() if use.prefix is not None}
        kept: dict[int, Use] = {}
        left = max(_HOOKED * step_s, 4 * _HOOK_S)
        for use in fit:
            left -= _HOOK_S * use.calls / max(1, self.steps)
            if use.depth == 0 or left >= 0:
                kept[id(use.module)] = use
        return [*kept.values(), *(u for k, u in self.uses.items() if k in ends and k not in kept and u.calls)]

    def felt(self, step_s: float) -> bool:
        """Whether watching took a share of the steps that is felt."""
        calls = sum(use.calls for use in self.uses.values()) / max(1, self.steps)
        return _HOOK_S * calls > _HOOKED * step_s

    def frozen(self) -> Iterator[tuple[Use, str]]:
        """The outermost modules that nothing in the training changes, and why; without those that give
        another result each time."""
        return ((use, why) for use, why in self._unchanged() if self._random(use.module) is None)

    def random(self) -> list[str]:
        """What is said of those."""
        each = [(use, self._random(use.module)) for use, _ in self._unchanged()]
        return [
            f"{use.name} is frozen, but what it gives differs each time, as {part.name} is in training mode; "
            f"after {use.name}.eval() it could be stored"
            for use, part in each
            if part is not None
        ]

    def _random(self, module: nn.Module) -> Use | None:
        """A part of it that draws numbers."""
        parts = (self.uses.get(id(part)) for part in module.modules())
        return next((part for part in parts if part is not None and part.random), None)

    def _unchanged(self) -> Iterator[tuple[Use, str]]:
        trained: set[int] | None = None  # looking through all objects takes its time
        found: dict[int, bool] = {key: True for use in self.uses.values() for key in use.before}
        for use in sorted(self.called(), key=lambda use: use.depth):
            key = id(use.module)
            above: int | None = key
            while above is not None and above not in found:
                above = self.uses[above].parent
            if above is not None:
                continue
            parameters = [*use.module.parameters()]
            if not parameters:
                continue
            fixed = not any(p.requires_grad for p in parameters)
            quiet = use.quiet == use.calls
            if quiet and not fixed:
                trained = _trained() if trained is None else trained
                quiet = not any(id(p) in trained for p in parameters)
            if fixed or quiet:
                found[key] = True
                yield use, "parameters" if fixed else "no_grad"

    def _find_prefix(self, use: Use) -> None:
        """The part of a module that is done before anything trained is called, where it is more than one
        frozen module: that would be told of by itself."""
        own = {id(m) for m in use.module.modules()}
        leaves = [
            u
            for k, u in self.uses.items()
            if k in own and u.calls and (_owns(u.module) or u.random) and self._called_by(u, use)
        ]
        before: list[Use] = []
        for leaf in sorted(leaves, key=lambda u: u.order):
            if leaf.random or any(p.requires_grad for p in leaf.module.parameters(recurse=False)):
                break
            before.append(leaf)
        if not before or len(before) == len(leaves):
            return
        done = [self._whole(use.module, leaf.module) for leaf in before]
        if len({id(m) for m in done}) > 1:
            use.prefix, use.before = done[-1], {id(m) for m in done}

    def _called_by(self, use: Use, outer: Use) -> bool:
        """Whether a call comes from another one: a part may be called by the script itself instead."""
        key: int | None = id(use.module)
        while key is not None and key != id(outer.module):
            key = self.uses[key].parent
        return key is not None

    def _whole(self, root: nn.Module, leaf: nn.Module) -> nn.Module:
        """The outermost module around a leaf in which nothing is trained or random."""
        for module in root.modules():  # outer ones come first
            around = module is not root and id(module) in self.uses and self.uses[id(module)].calls
            fixed = around and not _trains(module) and self._random(module) is None
            if fixed and any(m is leaf for m in module.modules()):
                return module
        return leaf

    def summary(self, moved: Collection[int] = ()) -> list[dict[str, Any]]:
        """moved: modules whose parameters changed although no optimiser has them."""
        why = {id(use.module): reason for use, reason in self.frozen() if id(use.module) not in moved}
        for key in moved:
            self.uses[key].prefix = None
        learning = self._learning()
        return [_told(use, why.get(id(use.module), ""), learning, self) for use in self.called()]

    def _learning(self) -> set[int]:
        """The parameters that calls give gradients to: none of a target network, which is copied to."""
        loud = [use for use in self.uses.values() if use.quiet < use.calls]
        return {id(p) for use in loud for p in use.module.parameters() if p.requires_grad}


def _told(use: Use, frozen: str, learning: Collection[int], modules: Modules) -> dict[str, Any]:
    parameters = [*use.module.parameters()]
    prefix = modules.uses[id(use.prefix)].name if use.prefix is not None else ""
    return {
        "name": use.name, "kind": _kind(use.module), "depth": use.depth, "calls": use.calls,
        "steps": modules.steps, "rows": [rows for rows, _ in use.rows.most_common(4)], "frozen": frozen,
        "parameters": sum(p.numel() for p in parameters), "compiled": is_compiled(use.module),
        "trainable": sum(p.numel() for p in parameters if id(p) in learning), "prefix": prefix,
        "seconds": use.seconds, "quiet": use.quiet, "out_bytes": use.out_bytes,
    }  # fmt: skip


def in_worker() -> bool:
    """Whether this is a DataLoader's worker: its transforms may be modules, but nothing is trained there."""
    return torch.utils.data.get_worker_info() is not None


def is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _rank(module: nn.Module) -> int | None:
    """Dimensions of one row of what a layer takes; None where it does not say."""
    if isinstance(module, nn.modules.conv._ConvNd):
        return len(module.kernel_size) + 1
    return 1 if isinstance(module, nn.Linear) else None


def _one_row(args: Any, rank: int) -> torch.Size | None:
    """The shape of the one row that a layer is given; None where it is given several.

    >>> _one_row((torch.ones(3, 8, 8),), 3), _one_row((torch.ones(1, 3, 8, 8),), 3)
    (torch.Size([3, 8, 8]), torch.Size([3, 8, 8]))
    >>> _one_row((torch.ones(2, 3, 8, 8),), 3)
    """
    shape = _shape(args) or torch.Size()
    if len(shape) == rank + 1 and shape[0] == 1:
        return torch.Size(shape[1:])
    return torch.Size(shape) if len(shape) == rank else None


def _shape(args: Any) -> torch.Size | None:
    given = first_tensor(args)
    return None if given is None or given.is_nested else given.shape


def _owns(module: nn.Module) -> bool:
    """Whether it has parameters of its own, not only those of its parts."""
    return any(True for _ in module.parameters(recurse=False))


def _draws(module: nn.Module) -> bool:
    """Whether in training mode what it gives is random, or depends on the other rows of the batch."""
    if isinstance(module, nn.modules.batchnorm._BatchNorm | nn.RReLU):
        return True
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        return float(module.dropout) > 0
    kind = type(module).__name__
    if isinstance(module, nn.modules.dropout._DropoutNd) or kind in _DROPS:
        return any(isinstance(p := getattr(module, name, 0), float) and p > 0 for name in ("p", "drop_prob"))
    return False


def _trains(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


def _kind(module: nn.Module) -> str:
    return type(_unwrapped(module)).__name__


def _unwrapped(module: nn.Module) -> nn.Module:
    """What torch.compile and data parallelism were put around."""
    inner = getattr(module, "_orig_mod", None)
    if inner is None and type(module).__name__ in _WRAPPERS:
        inner = module.module
    return module if inner is None else _unwrapped(inner)


def _plain(root: nn.Module, path: str) -> str:
    """A path without what wrappers add to it."""
    parts = [part for part in path.split(".") if part != "_orig_mod"]
    wrapped = type(getattr(root, "_orig_mod", root)).__name__ in _WRAPPERS
    return ".".join(parts[1:] if wrapped and parts[0] == "module" else parts)


def alive(kind: type) -> list[Any]:
    """All objects of a class. By their type: asking some objects for their class loads half a library."""
    return [o for o in gc.get_objects() if issubclass(type(o), kind)]


def _compiled_in_place() -> list[nn.Module]:
    return [m for m in alive(nn.Module) if getattr(m, "_compiled_call_impl", None) is not None]


def _trained() -> set[int]:
    """The parameters that some optimiser has."""
    found = [o for o in alive(torch.optim.Optimizer) if hasattr(o, "param_groups")]
    return {id(p) for o in found for group in o.param_groups for p in group["params"]}
