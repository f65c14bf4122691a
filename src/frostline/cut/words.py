"""A plan for people: seconds, the sentence that says why, and the table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from frostline.cut.costs import CutPlan, Option
from frostline.wording import duration, many, size


def seconds(value: float) -> str:
    """
    >>> seconds(0), seconds(0.000_035), seconds(0.0123), seconds(4.21), seconds(300)
    ('0', '35 µs', '12.3 ms', '4.2 s', '5 min')
    """
    if value == 0:
        return "0"
    if value < 0.1:
        return f"{value * 1e6:.0f} µs" if value < 0.001 else f"{value * 1e3:.1f} ms"
    return f"{value:.1f} s" if value < 10 else duration(value)


def why(chosen: Option, options: Sequence[Option], epochs: float, worth: float) -> str:
    """Why this cut, in a sentence."""
    nothing = next(o for o in options if not o.fields)
    run = f"{epochs:g} epoch{'' if epochs == 1 else 's'}"
    if chosen.fields:
        instead = f"{seconds(chosen.epoch_s)} an epoch instead of {seconds(nothing.epoch_s)}"
        took = f"{seconds(chosen.total_s)} instead of {seconds(nothing.total_s)} for {run}"
        freeze = f"{seconds(chosen.freeze_s)} to freeze {size(chosen.bytes)}"
        return (
            f"Store {chosen.name}: {freeze}, then {instead}; it pays from epoch {chosen.break_even}, {took}."
        )
    can = [o for o in options if o.fields and o.why_not is None]
    live = f"Store nothing: live, {run} take {seconds(nothing.total_s)}"
    if not can:
        reasons = [o.why_not for o in options if o.why_not]
        what = f"no cut is possible ({reasons[0]})" if reasons else "nothing here is the same in every epoch"
        return f"{live}, and {what}."
    best = min(can, key=lambda o: o.total_s)
    if best.break_even is None:
        return f"{live}, and an epoch would not be shorter with {best.name} stored."
    when = f"{best.name} takes {seconds(best.total_s)} and pays from epoch {best.break_even} at the earliest"
    close = f"; a gain below {worth:.0%} is not told from none" if best.total_s < nothing.total_s else ""
    return f"{live}; the best cut, {when}{close}."


def lines(plan: CutPlan) -> Iterator[str]:
    """The stages, the cuts, what lossy codecs would do, and what to know about the figures."""
    yield f"a sample, measured on {many(plan.measured, 'sample')} of {plan.samples:,}:"
    yield from _grid(_stage_rows(plan), right=(1, 2))
    yield ""
    yield f"all samples, for a run of {plan.epochs:g} epochs (→ the best):"
    yield from _grid(_option_rows(plan), right=(2, 3, 4, 5, 6, 7, 8, 9))
    yield from (f"  {o.name}: {o.why_not}" for o in plan.options if o.why_not)
    if plan.offers:
        yield ""
        yield "smaller, if their error is no matter (not chosen unless asked for):"
        yield from _grid(_offer_rows(plan), right=(1, 2))
    yield from (f"note: {note}" for note in plan.notes)
    yield ""
    yield plan.why


def _stage_rows(plan: CutPlan) -> Iterator[list[str]]:
    yield ["stage", "alone", "at work", "on", "", "bytes"]
    for s in plan.stages:
        held = ", ".join(f"{name} {size(n)}" for name, n in s.bytes.items())
        state = "" if s.on == "source" else "frozen" if s.frozen else "each epoch"
        yield [s.name, seconds(s.seconds), seconds(s.together.wall), s.on, state, held]


def _option_rows(plan: CutPlan) -> Iterator[list[str]]:
    yield [
        "",
        "stored",
        "bytes",
        "freeze",
        "read",
        "prepare",
        "compute",
        "epoch",
        "pays from",
        "run",
        "held in",
    ]
    for o in plan.options:
        mark = "→" if o is plan.chosen else "✗" if o.why_not else ""
        computed = seconds(o.compute_s) if o.compute_s is not None else "?"
        pays = f"epoch {o.break_even}" if o.break_even is not None else "never" if o.fields else ""
        figures = map(seconds, (o.freeze_s, o.read_s, o.prepare_s))
        yield [
            mark, o.name, size(o.bytes), *figures, computed, seconds(o.epoch_s), pays, seconds(o.total_s),
            o.tier or "",
        ]  # fmt: skip


def _offer_rows(plan: CutPlan) -> Iterator[list[str]]:
    yield ["option", "bytes", "error", ""]
    for o in plan.offers:
        yield [o.flag, size(o.bytes), f"{o.error:.2g}", f"of {size(o.raw_bytes)} a sample"]


def _grid(rows: Iterator[list[str]], right: Sequence[int] = ()) -> Iterator[str]:
    cells = [*rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    for row in cells:
        padded = (
            c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        yield f"  {'  '.join(padded).rstrip()}"
