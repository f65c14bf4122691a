"""Where the step goes, as it is shown: shares that add up, and whether the rows reconcile."""

from __future__ import annotations

from dataclasses import dataclass

from frostline.report.figures import ms, signed
from frostline.results import Profile, Row

RECONCILED = 0.05
"""Rows that differ from pass A's step by more than this do not explain it, and the report says so."""


@dataclass(frozen=True)
class Part:
    """A row as it is shown."""

    row: Row
    share: float | None
    """Of what all rows add up to; None: longer than the step itself, so a share of it makes no sense."""

    @property
    def overlap(self) -> bool:
        return self.row.kind == "overlap" or self.row.ms < 0

    @property
    def note(self) -> str:
        beside = "longer than the step: it runs beside it" if self.share is None else ""
        return "; ".join(filter(None, (self.row.note, beside)))


def parts(profile: Profile) -> tuple[Part, ...]:
    """The rows in their order, what overlaps last.

    >>> from frostline.results import Machine, Steps, Verdict
    >>> rows = Row("data", "data", 54, 0.79), Row("forward", "forward", 28, 0.42)
    >>> step, machine = Steps(68, 67, 69, 50), Machine("cpu", 2, "", "")
    >>> wrong = Profile("train.py", "SGD.step", step, None, rows, Verdict("unclear", ""), machine)
    >>> [round(part.share, 2) for part in parts(wrong)]  # 121 % of the step as it was written
    [0.66, 0.34]

    Shares are worked out here again, from the rows' sum: whatever was written, they add up to 100 %.
    """
    total = sum(row.ms for row in profile.rows)
    found = [Part(row, _share(row.ms, total)) for row in profile.rows]
    return tuple(sorted(found, key=lambda part: part.overlap))


def _share(ms: float, total: float) -> float | None:
    return ms / total if total > 0 and abs(ms) <= total else None


def reconciliation(profile: Profile) -> str:
    """
    >>> from frostline.results import Machine, Steps, Verdict
    >>> row, step = Row("data", "data", 61.2, 1), Steps(60.8, 60, 61, 50)
    >>> reconciliation(Profile("", "", step, None, (row,), Verdict("unclear", ""), Machine("cpu", 2, "", "")))
    "rows add up to 61.2 ms; pass A's step took 60.8 ms (+0.7 %)"
    """
    found = f"rows add up to {ms(sum(row.ms for row in profile.rows))}"
    if profile.reconciled is None:
        return f"{found}; pass A timed no step"
    found += f"; pass A's step took {ms(profile.wall.ms)}"
    return f"{found} ({signed(profile.reconciled)})"


def warning(profile: Profile) -> str:
    """Why the rows must not be taken at face value; empty when they may."""
    off = profile.reconciled
    if off is None or abs(off) <= RECONCILED:
        return ""
    away = ms(abs(sum(row.ms for row in profile.rows) - profile.wall.ms))
    side = "more" if off > 0 else "less"
    return (
        f"The rows do not reconcile: they come to {away} {side} than the step that pass A timed "
        f"({signed(off)}). "
        "Rates and the verdict rest on pass A; take the rows as a rough picture."
    )
