"""How the script uses its modules: calls, batches, what is trained, what ran compiled."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from frostline.report.figures import ms
from frostline.report.section import Section, calls, column, scaled
from frostline.results import ModuleUse, Profile
from frostline.wording import many

_MOST_MODULES = 12


def modules(profile: Profile) -> Section:
    """The ones that take longest, in the order of the script; parts that are used alike share a line."""
    alike: dict[tuple[object, ...], list[ModuleUse]] = {}
    for module in profile.modules:
        alike.setdefault(_use(module), []).append(module)
    groups = list(alike.values())
    shown = sorted(sorted(groups, key=_ms, reverse=True)[:_MOST_MODULES], key=groups.index)
    spent = column([_ms(group) for group in shown])
    rows = [
        (
            "· " * min(group[0].depth, 6) + _called(group), calls(group[0].calls),
            ", ".join(f"{n:,}" for n in group[0].rows[:3]) or "–",
            took, "yes" if group[0].compiled else "no", _trained(_together(group)),
        )
        for group, took in zip(shown, spent, strict=True)
    ]  # fmt: skip
    left = len(profile.modules) - sum(map(len, shown))
    return Section(
        "Modules, a step", tuple(rows), ("module", "calls", "batch", "ms", "compiled", "trained"),
        ("calls", "batch", "ms"), f"and {many(left, 'module')} that took less" if left else "",
    )  # fmt: skip


def _use(module: ModuleUse) -> tuple[object, ...]:
    """What the twelve blocks of a network have in common."""
    pattern = re.sub(r"\d+", "*", module.name)
    state = module.frozen, module.trainable, module.prefix
    return pattern, module.kind, module.depth, module.calls, module.rows, module.compiled, *state


def _ms(group: Sequence[ModuleUse]) -> float:
    return sum(module.ms for module in group)


def _together(group: Sequence[ModuleUse]) -> ModuleUse:
    sums = {name: sum(getattr(m, name) for m in group) for name in ("parameters", "trainable", "prefix_ms")}
    return dataclasses.replace(group[0], **sums)


def _called(group: Sequence[ModuleUse]) -> str:
    """
    >>> _called([ModuleUse(f"vit.blocks.{k}", "Block", 1, 2.0) for k in range(6)])
    'vit.blocks.0–5 (6 × Block)'
    """
    if len(group) == 1:
        return f"{group[0].name} ({group[0].kind})"
    pieces = [re.split(r"(\d+)", module.name) for module in group]
    name = "".join(a if a == b else f"{a}–{b}" for a, b in zip(pieces[0], pieces[-1], strict=True))
    return f"{name} ({len(group)} × {group[0].kind})"


def _trained(module: ModuleUse) -> str:
    """What of it is trained.

    >>> sizes = {"parameters": 21_800_000, "trainable": 10_800_000}
    >>> _trained(ModuleUse("vit", "ViT", 6, 9.0, **sizes, prefix="blocks.5", prefix_ms=4.4))
    '10.8 M of 21.8 M; up to blocks.5 frozen (4.40 ms)'
    """
    whole = scaled(module.parameters).rstrip()
    if module.frozen == "no_grad":
        return "no (under no_grad)"
    if not module.parameters:
        return "nothing to train"
    if not module.trainable:
        return f"no (none of {whole})"
    if module.trainable >= module.parameters:
        return f"all {whole}"
    prefix = f"; up to {module.prefix} frozen ({ms(module.prefix_ms)})" if module.prefix else ""
    return f"{scaled(module.trainable).rstrip()} of {whole}{prefix}"
