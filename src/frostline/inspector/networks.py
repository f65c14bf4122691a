"""What can be said of a stage's networks without running them: what trains, and what is in train mode."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import FunctionType

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from frostline.inspector.reach import Reach, joined
from frostline.inspector.report import listed


def training_reasons(found: Reach, where: str) -> list[str]:
    """Parameters that require a gradient: how many, which, and where the frozen part ends.

    where: the place in which to do something about it, as "in load_encoder".
    """
    reasons = []
    for label, module in found.modules.items():
        named = [(joined(label, name), p) for name, p in module.named_parameters()]
        trained = [name for name, p in named if p.requires_grad]
        if trained:
            some = sum(p.numel() for _, p in named if p.requires_grad)
            total = sum(p.numel() for _, p in named)
            what = f"{count(some)} of {count(total)} parameters ({some / max(total, 1):.0%})"
            told = _prefix([(name, p.requires_grad) for name, p in named])
            reasons.append(
                f"it trains: {what} require a gradient, from {trained[0]!r} to {trained[-1]!r}{told}. Call "
                f".requires_grad_(False) {where}; if it is to be trained, it belongs to the model"
            )
    return reasons


def count(n: int) -> str:
    """
    >>> count(21_800_000), count(512)
    ('21.8 M', '512')
    """
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if n >= size:
            return f"{n / (1e3 if unit == 'k' else size):.1f} {unit}"
    return str(n)


def _prefix(flags: list[tuple[str, bool]]) -> str:
    """Where the frozen first part of a partly trained network ends, in words."""
    first = next(i for i, (_, trains) in enumerate(flags) if trains)
    if first == 0:
        return ""
    name = flags[first][0]
    numbered = re.match(r"(.*?)\.?(\d+)\.", name)
    if numbered and int(numbered[2]) > 0:
        blocks, last = numbered[1] or "children", int(numbered[2]) - 1
        span = f"{blocks} 0–{last} are" if last else f"{blocks} 0 is"
        return f" ({span} frozen, {name} trains)"
    return f" (frozen up to {flags[first - 1][0]}; {name} trains)"


def mode_reasons(found: Reach, where: str) -> list[str]:
    """Modules in train mode that compute something else there than in evaluation."""
    groups: dict[str, list[str]] = {}
    for name, module in found.named_modules():
        if module.training:
            for why in _why_it_matters(module):
                groups.setdefault(why, []).append(name or type(module).__name__)
    return [
        f"{why.format(names=listed(names), are='are' if len(names) > 1 else 'is')}: call .eval() {where}"
        for why, names in groups.items()
    ]


def _why_it_matters(module: nn.Module) -> Iterator[str]:
    p = getattr(module, "p", getattr(module, "drop_prob", None))
    if isinstance(module, _DropoutNd):
        if p:
            yield f"dropout {{names}} (p={p:g}) {{are}} in train mode"
    elif isinstance(module, _BatchNorm):
        yield (
            "batch norm {names} {are} in train mode (it changes its running statistics, and makes a row "
            "depend on the rows beside it)"
        )
    elif isinstance(module, _InstanceNorm):
        if module.track_running_stats:
            yield "instance norm {names} {are} in train mode (it changes its running statistics)"
    elif isinstance(module, nn.RReLU):
        yield "randomised activation {names} {are} in train mode"
    elif isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        if module.dropout:
            yield f"dropout inside {{names}} (p={module.dropout:g}) {{are}} in train mode"
    elif not type(module).__module__.startswith("torch.nn.") and reads_training(type(module)) and p != 0:
        yield "{names}, whose code asks for self.training, {are} in train mode"


def reads_training(cls: type) -> bool:
    """Whether a class's own code reads `self.training`; what it inherits from torch does not count."""
    parts = [
        part
        for base in cls.__mro__
        if not base.__module__.startswith("torch.nn.") and base is not object
        for name, part in vars(base).items()
        if isinstance(part, FunctionType) and name not in ("train", "eval", "__init__")
    ]
    return any("training" in part.__code__.co_names for part in parts)
