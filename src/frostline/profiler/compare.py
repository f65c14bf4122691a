"""What changed between two profiles, and whether their steps can show it.

Speed is in samples/s (document 002's "3.5×" was 5.8×: the batch had grown as well).
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from frostline.profiler.intervals import FEW, of_ratio
from frostline.results import Profile, Steps

_MOST_ROWS = 15


@dataclass(frozen=True)
class Change:
    """A figure of both; None: only the other one has it."""

    name: str
    before: float | None
    after: float | None

    @property
    def difference(self) -> float:
        return (self.after or 0.0) - (self.before or 0.0)


@dataclass(frozen=True)
class Comparison:
    """Of profile b with profile a. All ratios are speeds: above 1, b is faster."""

    ratio: float | None
    """None: one of them timed no step."""
    low: float | None
    high: float | None
    """A 95 % interval; None: too few steps for one."""
    by_sample: bool
    """The batches differ: speed is in samples/s, and the rows are a sample's, not a step's."""
    steps: tuple[Steps, Steps]
    samples_per_s: Change
    rows: tuple[Change, ...]
    noise_ms: float
    """What rows may differ by without meaning it: as much as the means of their steps do."""
    remedies: tuple[Change, ...]
    verdicts: tuple[str, str]
    warnings: tuple[str, ...] = ()

    @property
    def differs(self) -> bool | None:
        """Whether the steps show a difference; None: they cannot say."""
        return None if self.low is None or self.high is None else not self.low <= 1 <= self.high


def compare(a: Profile, b: Profile) -> Comparison:
    """What changed from a to b.

    >>> from frostline.results import Machine, Verdict
    >>> def made(ms: float) -> Profile:
    ...     times = tuple(ms * (0.98, 1.0, 1.02)[k % 3] for k in range(9))
    ...     step = Steps(ms, 0.99 * ms, 1.01 * ms, 9, times)
    ...     return Profile("", "", step, None, (), Verdict("unclear", ""), Machine("cpu", 2, "", ""))
    >>> round(compare(made(130), made(100)).ratio, 2), compare(made(130), made(130)).differs
    (1.3, False)
    """
    by_sample = bool(a.samples and b.samples and a.samples != b.samples)
    per = (a.samples or 1.0, b.samples or 1.0) if by_sample else (1.0, 1.0)
    ratio = a.wall.ms / per[0] / (b.wall.ms / per[1]) if a.wall.ms and b.wall.ms else None
    low, high = _interval(a.wall, b.wall, per[1] / per[0]) if ratio else (None, None)
    bounds = [{r.name: r.bound for r in p.remedies} for p in (a, b)]
    return Comparison(
        ratio, low, high, by_sample,
        (a.wall, b.wall), Change("samples/s", a.samples_per_s, b.samples_per_s),
        _changes(_rows(a, per[0]), _rows(b, per[1])),
        sum((_half(p) / n) ** 2 for p, n in zip((a, b), per, strict=True)) ** 0.5,
        _changes(*bounds), (a.verdict.kind, b.verdict.kind), tuple(_warnings(a, b)),
    )  # fmt: skip


# --- intervals ----------------------------------------------------------------------------------------


def _interval(a: Steps, b: Steps, factor: float) -> tuple[float | None, float | None]:
    """Of a's step over b's, times the factor."""
    if min(a.count, b.count) < FEW:
        return None, None
    if min(len(a.times), len(b.times)) < FEW:  # nothing to draw from: the ends of both intervals
        known = a.low < a.high and b.low < b.high and b.low > 0
        return (factor * a.low / b.high, factor * a.high / b.low) if known else (None, None)
    low, high = of_ratio(_about(a), _about(b))
    return factor * low, factor * high


def _about(steps: Steps) -> list[float]:
    """Single steps about pass A's own figure: the host's clock may not see a queue end."""
    scale = steps.ms * len(steps.times) / total if (total := sum(steps.times)) > 0 else 1.0
    return [scale * time for time in steps.times]


def _half(profile: Profile) -> float:
    steps = profile.attributed or profile.wall
    return max(0.0, steps.high - steps.low) / 2


# --- what changed -------------------------------------------------------------------------------------


def _rows(profile: Profile, per: float) -> dict[str, float]:
    found: dict[str, float] = {}
    for row in profile.rows:
        found[row.name] = found.get(row.name, 0.0) + row.ms / per
    return found


def _changes(before: dict[str, float], after: dict[str, float]) -> tuple[Change, ...]:
    """The largest first."""
    names = dict.fromkeys([*before, *after])
    found = [Change(name, before.get(name), after.get(name)) for name in names]
    return tuple(sorted(found, key=lambda change: -abs(change.difference)))


def _warnings(a: Profile, b: Profile) -> Iterator[str]:
    """Why the two may not be comparable; compared they are all the same."""
    pairs = [
        ("devices", a.machine.device, b.machine.device),
        ("numbers of ranks", a.machine.ranks, b.machine.ranks),
        ("versions of torch", a.machine.torch, b.machine.torch),
        ("boundaries of a step", a.boundary, b.boundary),
    ]
    for what, first, second in pairs:
        if first != second:
            yield f"Different {what}: {first} and {second}."
    if a.samples != b.samples:
        if a.samples and b.samples:
            said = "speed is compared in samples/s, and rows by the sample"
        else:
            said = "steps are compared, which need not be the same amount of work"
        yield f"Different batches: {_batch(a)} and {_batch(b)} samples a step; {said}."


def _batch(profile: Profile) -> str:
    return "unknown" if not profile.samples else f"{profile.samples:,g}"


# --- as text ------------------------------------------------------------------------------------------


def lines(comparison: Comparison, width: int = 100) -> list[str]:
    """The comparison as text, no line wider than `width`."""
    found = [line for said in _said(comparison) for line in _wrapped(said, width)]
    unit = "ms a sample" if comparison.by_sample else "ms a step"
    found += _table(f"where it goes, {unit}", comparison.rows, width, _ms, comparison.noise_ms)
    found += _table("remedies, at most", comparison.remedies, width, lambda bound: f"{bound:.2f}×", None)
    return found


def _said(found: Comparison) -> Iterator[str]:
    yield headline(found)
    yield f"step: {' → '.join(map(_step, found.steps))}"
    if found.samples_per_s.before or found.samples_per_s.after:
        rates = found.samples_per_s.before, found.samples_per_s.after
        yield f"samples/s: {' → '.join('unknown' if rate is None else _rate(rate) for rate in rates)}"
    first, second = found.verdicts
    yield f"verdict: {first}, as before" if first == second else f"verdict: {first} → {second}"
    yield from (f"WARNING: {warning}" for warning in found.warnings)
    if found.differs is not None:
        yield "Intervals hold what varies within a run; clocks, caches and neighbours also vary between runs."


def headline(found: Comparison) -> str:
    """
    >>> steps, rate = (Steps(60, 59, 61, 9), Steps(60, 59, 61, 9)), Change("samples/s", None, None)
    >>> headline(Comparison(1.0, 0.98, 1.03, False, steps, rate, (), 0.0, (), ("unclear", "unclear")))
    'no difference that these steps can show: 0.98–1.03×'
    """
    if found.ratio is None:
        return "Nothing to compare: one of the two timed no step."
    unit = " in samples/s" if found.by_sample else ""
    if found.low is None or found.high is None:
        return f"{found.ratio:.2f}× as fast{unit}, from too few steps to say how surely"
    spread = f"{found.low:.2f}–{found.high:.2f}×"
    if not found.differs:
        return f"no difference that these steps can show{unit}: {spread}"
    slower = "" if found.ratio >= 1 else ", so slower"
    return f"{found.ratio:.2f}× as fast{unit} ({spread}){slower}"


def _ms(value: float) -> str:
    return f"{value:,.{1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3}f}".replace("-", "−")


def _step(steps: Steps) -> str:
    if not steps.count:
        return "none timed"
    return f"{_ms(steps.ms)} ms" + (
        f" ({_ms(steps.low)}–{_ms(steps.high)})" if steps.low < steps.high else ""
    )


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(_plain(text), width, subsequent_indent="  ") or [""]


def _plain(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _table(
    title: str, changes: Sequence[Change], width: int, said: Callable[[float], str], noise: float | None
) -> list[str]:
    """Before, after and the difference; what is within the noise is marked, where noise is known."""
    from rich.cells import set_cell_size

    if not changes:
        return []
    room = max(8, width - 3 * 10 - 14)
    found = ["", f"{title[:room]:<{room}}{'before':>10}{'after':>10}{'change':>10}"]
    for change in changes[:_MOST_ROWS]:
        ends = ["–" if end is None else said(end) for end in (change.before, change.after)]
        moved = f"{'+' if change.difference > 0 else ''}{said(change.difference)}".replace("-", "−")
        if noise is None and None in (change.before, change.after):  # a bound of nothing is no figure
            moved = "new" if change.before is None else "gone"
        name = set_cell_size(set_cell_size(_plain(change.name), room - 1), room)
        mark = "  within noise" if noise is not None and abs(change.difference) <= noise else ""
        found.append(f"{name}{ends[0]:>10}{ends[1]:>10}{moved:>10}{mark}")
    left = len(changes) - _MOST_ROWS
    return found + ([f"and {left} more, which changed less"] if left > 0 else [])
