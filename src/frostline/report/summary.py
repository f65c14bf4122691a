"""A profile in a few lines: the figures at the top, how they were measured, and what measuring cost."""

from __future__ import annotations

from frostline.report.figures import between, ms, number, percent, signed
from frostline.results import Epoch, Profile
from frostline.wording import duration, many

_SHOWN = 0.01
"""Of an epoch's time: less between epochs is not told."""


def headline(profile: Profile) -> list[tuple[str, str]]:
    """(label, figure): the step, its rate, the epoch, the device and how much of it was used."""
    wall, machine, epoch = profile.wall, profile.machine, profile.epoch
    if not wall.count:
        return [("step", "none was timed"), ("device", machine.device)]
    spread = between(wall.low, wall.high)
    found = [("step", ms(wall.ms) + (f" ({spread})" if spread else ""))]
    if profile.samples_per_s is not None:
        rate = profile.samples_per_s
        told = f"{number(rate, 0 if rate >= 100 else None)} samples/s"
        if epoch and pauses(epoch) and profile.samples:
            over = profile.samples * epoch.steps / epoch.seconds
            told += f", {number(over, 0 if over >= 100 else None)} over an epoch"
        found.append(("rate", told))
    if epoch:
        found.append(("epoch", _epoch(epoch)))
    found.append(("device", machine.device))
    if machine.busy is not None:
        found.append(("busy", percent(machine.busy)))
    if machine.mfu is not None:
        found.append(("MFU", percent(machine.mfu)))
    return found


def _epoch(epoch: Epoch) -> str:
    """
    >>> _epoch(Epoch(842, 841, 843, 100)), _epoch(Epoch(0.06, 0.06, 0.06, 4, 0.0125))
    ('14 min', '60.0 ms, 12.5 ms of it between epochs')
    """
    ends = duration(epoch.low), duration(epoch.high)
    spread = f" ({ends[0]} – {ends[1]})" if ends[0] != ends[1] else ""
    if not pauses(epoch):
        return duration(epoch.seconds) + spread
    return f"{_time(epoch.seconds)}{spread}, {_time(epoch.between_s)} of it between epochs"


def pauses(epoch: Epoch) -> bool:
    """Whether an epoch takes longer than its steps."""
    return epoch.between_s >= _SHOWN * epoch.seconds > 0


def _time(seconds: float) -> str:
    return ms(1000 * seconds) if seconds < 1 else f"{seconds:.1f} s" if seconds < 10 else duration(seconds)


def setting(profile: Profile) -> str:
    """How it was measured, in a line."""
    wall, machine = profile.wall, profile.machine
    warm = f" after {profile.warmup:,} of warm-up" if profile.warmup else ""
    found = [f"{many(wall.count, 'step')} timed{warm}", f"a step ends at {profile.boundary}"]
    if profile.samples:
        found.append(f"{number(profile.samples, 0)} samples a step")
    found += [many(machine.cores, "core"), f"torch {machine.torch}", f"Python {machine.python}"]
    return ", ".join(found + ([f"{machine.ranks} ranks"] if machine.ranks > 1 else []))


def cost(profile: Profile) -> str:
    """
    >>> from frostline.results import Cost, Machine, Steps, Verdict
    >>> step, machine = Steps(6, 5, 7, 50), Machine("cpu", 2, "", "")
    >>> made = Profile("", "", step, None, (), Verdict("unclear", ""), machine)
    >>> cost(made)
    'What profiling itself costs was not measured in this run.'
    """
    if profile.cost is None:
        return "What profiling itself costs was not measured in this run."
    found = profile.cost
    spread = f"{signed(found.low)} to {signed(found.high)}"
    return f"Profiling itself cost {signed(found.share)} of the step in pass A ({spread})."
