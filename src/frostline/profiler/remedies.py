"""What each remedy could give at most."""

from __future__ import annotations

import math
from collections.abc import Sequence

from frostline.profiler.verdict import STARTS, Seen, begins, borne_out, of_epoch, own_lines, replayed, shares
from frostline.results import ModuleUse, Remedy

_WORTH = 1.03
"""Remedies that give less are not told."""


def remedies(seen: Seen) -> tuple[Remedy, ...]:
    """What would help, the most first. Bounds: the step over what would be left of it."""
    if seen.wall is None or not seen.step:
        return ()
    found = [*_loading(seen), *_moving(seen), *_calling(seen), *_storing(seen), *_coding(seen)]
    return tuple(sorted((r for r in found if r.bound >= _WORTH), key=lambda r: -r.bound))


def bound(step: float, gone: float) -> float:
    """
    >>> bound(10.0, 5.0)
    2.0
    """
    return step / (step - gone) if gone < step else math.inf


def _loading(seen: Seen) -> list[Remedy]:
    share = shares(seen)["input"]
    starts = _starting(seen)
    if not share:
        return starts
    worst = max(seen.loaders, key=lambda loader: loader.wait_ms, default=None)
    what = "prepare batches faster, or once"
    if worst is not None and worst.needed is not None and worst.needed > worst.workers:
        what = f"num_workers={worst.needed} instead of {worst.workers}, or store what they prepare"
        if worst.needed > seen.machine.cores:
            what = (
                f"store what is prepared: {worst.needed} workers were needed, on {seen.machine.cores} cores"
            )
    why = f"{seen.wait_ms:.1f} of {seen.step:.1f} ms are waits"
    if borne_out(seen):
        why = replayed(seen)
    if starts:
        share, why = of_epoch(seen, share), f"{begins(seen)}; {why}"
    return [*starts, Remedy("an infinitely fast loader", bound(1, share), what, why)]


def _starting(seen: Seen) -> list[Remedy]:
    if seen.starting < STARTS or seen.start is None:
        return []
    what = "longer epochs, which go through the data more than once"
    if seen.start.anew:
        what = f"persistent_workers=True: they start anew for each epoch; or {what}"
    return [Remedy("epochs that begin at once", bound(1, seen.starting), what, begins(seen))]


def _least(seen: Seen) -> float:
    """What a step takes at least that copies nothing; where it was not tried, what kernels take alone."""
    there = seen.trial("compute")
    if there is not None:
        return min(there.ms, seen.step)
    return seen.kernels_ms


def _moving(seen: Seen) -> list[Remedy]:
    found = []
    gone = min(seen.exposed_copy_ms + seen.idle_ms("copy"), seen.step - _least(seen))
    if gone > 0:
        what = "copy the next batch on a stream of its own"
        if any(c.kind == "pageable" for c in seen.copies):
            what = "pin_memory=True in the loader and .to(device, non_blocking=True)"
        why = f"{gone:.2f} ms a step"
        if (there := seen.trial("compute")) is not None:
            why += f"; with a batch that lies on the device a step takes {there.ms:.2f} ms"
        found.append(Remedy("copies that cost nothing", bound(seen.step, gone), what, why))
    waits = seen.idle_ms("sync")
    if waits:
        places = ", ".join(s.where for s in seen.syncs[:3])
        what = (
            f"read figures every few steps: {places}" if places else "make no tensors of Python numbers there"
        )
        why = f"{waits:.2f} ms a step the device is idle after them"
        found.append(Remedy("no waiting for the device", bound(seen.step, waits), what, why))
    idle = seen.idle_ms("launch", "optimizer")
    if idle:
        what = "a larger batch, torch.compile(mode='reduce-overhead') or CUDA graphs"
        why = f"{idle:.2f} ms a step the device waits for launches"
        found.append(Remedy("work that starts by itself", bound(seen.step, idle), what, why))
    return found


def with_backward(seen: Seen, module: ModuleUse) -> float:
    """A module's milliseconds, with a share of the backward pass where it has one."""
    forward = seen.row("forward")
    trained = not module.frozen
    back = seen.row("backward") * module.ms / forward if trained and forward else 0.0
    return module.ms + min(back, seen.row("backward"))


def _calling(seen: Seen) -> list[Remedy]:
    found = []
    for module in often_called(seen):
        took = with_backward(seen, module)
        gone = took * (1 - 1 / module.calls)
        single = module.rows == (1,)
        name = f"one call of {module.name} instead of {module.calls:g}"
        what = "put the rows of all calls into one batch" if single else "compute what the calls share once"
        what += ", if none needs what another gave"
        why = f"{took:.1f} ms a step in {module.calls:g} calls"
        found.append(Remedy(name, bound(seen.told_ms, gone), what, why))
    return found


def often_called(seen: Seen) -> list[ModuleUse]:
    """Modules called several times a step by something that is not itself."""
    batches = sum(loader.calls for loader in seen.loaders) or 1.0
    found: list[ModuleUse] = []
    for module in sorted(seen.modules, key=lambda m: m.depth):
        several = module.calls >= 2.5 * max(1.0, batches)
        outer = [m for m in found if module.name.startswith(f"{m.name}.")]
        if several and not outer and module.ms >= 0.05 * seen.told_ms:
            found.append(module)
    return found


def _storing(seen: Seen) -> list[Remedy]:
    found = []
    for module in seen.modules:
        if storable(module, seen) and module.ms >= 0.03 * seen.told_ms:
            name, what = f"storing what {module.name} computes", "fl.freeze, or fl.cached(module, store)"
            why = f"{module.ms:.1f} ms a step; nothing in it is trained"
            found.append(Remedy(name, bound(seen.told_ms, module.ms), what, why))
        elif not prefix_known(module, seen.modules) and module.prefix_ms >= 0.03 * seen.told_ms:
            name, what = f"storing what {module.prefix} gives", "store its output and train from there"
            why = f"{module.prefix_ms:.1f} ms a step before anything trained"
            found.append(Remedy(name, bound(seen.told_ms, module.prefix_ms), what, why))
    return found


def _coding(seen: Seen) -> list[Remedy]:
    what = "do it once, less often, or in another process"
    why = "about {:.0%} of the step, between parts that are known"
    lines = own_lines(seen)
    return [Remedy(f"{line} made free", bound(1, share), what, why.format(share)) for line, share in lines]


def storable(module: ModuleUse, seen: Seen) -> bool:
    """Frozen by itself, and its inputs come again: in another epoch of a loader, or before our eyes."""
    share = seen.repeated.get(module.name, 0.0)
    never = seen.items_again > 0.2 and share < 0.1 * seen.items_again  # augmented, or fed by something live
    epochs = seen.training and any(loader.batches for loader in seen.loaders)
    again = (epochs and not never) or share >= 0.05
    return bool(module.frozen) and again and not inside_frozen(module, seen.modules)


def prefix_known(module: ModuleUse, others: Sequence[ModuleUse]) -> bool:
    """Whether the frozen beginning is a module that is told of by itself, or there is none."""
    names = [o.name for o in others if o.frozen]
    return not module.prefix or any(module.prefix == n or module.prefix.startswith(f"{n}.") for n in names)


def inside_frozen(module: ModuleUse, others: Sequence[ModuleUse]) -> bool:
    return any(o.frozen and module.name.startswith(f"{o.name}.") for o in others)
