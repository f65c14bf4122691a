"""A few steps as bars over time: host, device and workers below each other, what is nested one row lower.

Thousands of short bars would make a page that no browser likes and nobody can read: neighbours of one kind
that are too short to see become one bar, which says how many it stands for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from frostline.report.figures import ms, number
from frostline.report.picture import box, ink, text
from frostline.results import Span

_MOST = 1500
"""Bars, at most."""
_TINY = 0.0005
"""Of the whole timeline: half a pixel of a window, and five when it is magnified ten times."""
_DEPTHS = 6
_ROW, _GAP, _NAME, _AXIS = 18, 2, 20, 22


@dataclass(frozen=True)
class Bar:
    """One or more spans."""

    span: Span
    end: float
    count: int = 1
    busy: float = 0.0
    """Their own times together."""


def draw(spans: Sequence[Span]) -> str:
    """The timeline as inline SVG; empty when there is none.

    >>> drawn = draw([Span("host", "forward", "<model>", 0.0, 4.0), Span("host", "sync", "item", 4.0, 1.0)])
    >>> "&lt;model&gt;" in drawn, drawn.count("<rect")
    (True, 2)
    """
    usable = [span for span in spans if math.isfinite(span.start) and math.isfinite(span.ms) and span.ms >= 0]
    if not usable:
        return ""
    first = min(span.start for span in usable)
    whole = max(span.start + span.ms for span in usable) - first or 1.0
    drawn, y = [], float(_AXIS)
    tracks = _thinned(_tracks(usable), whole)
    for name, rows in tracks.items():
        drawn.append(text(0, y + _NAME - 6, name))
        y += _NAME
        for row in rows:
            drawn += [_drawn(bar, first, whole, y) for bar in row]
            y += _ROW + _GAP
        y += 6
    marks = [_mark(step, (at - first) / whole * 100, y) for step, at in _starts(usable)]
    axis = text(100, 12, ms(whole), "end")
    head = f'<svg class="timeline" role="img" aria-label="A few steps over time" height="{y:g}">'
    return f"{head}{''.join(marks)}{axis}{''.join(drawn)}</svg>"


def _drawn(bar: Bar, first: float, whole: float, y: float) -> str:
    start, wide = bar.span.start - first, bar.end - bar.span.start
    x, across = 100 * start / whole, 100 * wide / whole
    at = f"from {number(start)} ms on (step {bar.span.step})"
    if bar.count == 1:
        title = f"{bar.span.name}: {ms(bar.busy)}, {at}"
        return box(x, y, across, _ROW, ink(bar.span.kind), title, bar.span.name)
    # paler: there are gaps in it, and it must not look busier than it was
    title = f"{bar.count:,} short ones, {bar.span.name} first: {ms(bar.busy)} of {ms(wide)}, {at}"
    return box(x, y, across, _ROW, f"{ink(bar.span.kind)} merged", title)


def _mark(step: int, x: float, bottom: float) -> str:
    line = f'<line class="grid" x1="{x:.3f}%" x2="{x:.3f}%" y1="0" y2="{bottom:g}"></line>'
    return line + (
        f'<svg x="{x:.3f}%" width="90" height="{_AXIS}"><text x="4" y="12">step {step}</text></svg>'
    )


def _starts(spans: Sequence[Span]) -> list[tuple[int, float]]:
    """Where each step begins: with its first bar on the host, which is where the step is counted."""
    host = [span for span in spans if span.track == "host"] or spans
    found: dict[int, float] = {}
    for span in host:
        found[span.step] = min(span.start, found.get(span.step, span.start))
    return sorted(found.items())


# --- rows ---------------------------------------------------------------------------------------------


def _tracks(spans: Sequence[Span]) -> dict[str, list[list[Bar]]]:
    """The rows of each track: host, device, then the rest by name."""
    rank = {"host": 0, "device": 1}
    names = sorted({span.track for span in spans}, key=lambda name: (rank.get(name, 2), len(name), name))
    return {name: _rows([span for span in spans if span.track == name]) for name in names}


def _rows(spans: Iterable[Span]) -> list[list[Bar]]:
    """One row a depth. What runs at the same time (streams, threads) moves down to where there is room.

    >>> both = Span("device", "copy", "a", 0.0, 4.0), Span("device", "forward", "b", 1.0, 2.0)
    >>> [[bar.span.name for bar in row] for row in _rows(both)]
    [['a'], ['b']]
    """
    rows: list[list[Bar]] = []
    for span in sorted(spans, key=lambda span: (span.start, span.depth)):
        place = min(max(span.depth, 0), _DEPTHS - 1)
        while place < min(len(rows), _DEPTHS - 1) and rows[place] and rows[place][-1].end > span.start + 1e-9:
            place += 1
        rows += [[] for _ in range(place + 1 - len(rows))]
        rows[place].append(Bar(span, span.start + span.ms, 1, span.ms))
    return [row for row in rows if row]


def _thinned(tracks: dict[str, list[list[Bar]]], whole: float) -> dict[str, list[list[Bar]]]:
    tiny = _TINY * whole
    while True:
        found = {name: [_merged(row, tiny) for row in rows] for name, rows in tracks.items()}
        if sum(len(row) for rows in found.values() for row in rows) <= _MOST or tiny > whole:
            return found
        tiny *= 2


def _merged(row: Sequence[Bar], tiny: float) -> list[Bar]:
    """Bars of one kind that are shorter than `tiny`, and no further apart, as one.

    >>> row = [Bar(Span("host", "sync", "item", 0.01 * n, 0.001), 0.01 * n + 0.001) for n in range(4)]
    >>> [bar.count for bar in _merged(row, 0.1)], [bar.count for bar in _merged(row, 0.0001)]
    ([4], [1, 1, 1, 1])
    """
    found: list[Bar] = []
    for bar in row:
        last = found[-1] if found else None
        short = bar.end - bar.span.start < tiny
        if last and short and _joins(last, bar, tiny):
            found[-1] = replace(
                last, end=max(last.end, bar.end), count=last.count + bar.count, busy=last.busy + bar.busy
            )
        else:
            found.append(bar)
    return found


def _joins(last: Bar, bar: Bar, tiny: float) -> bool:
    was_short = last.count > 1 or last.end - last.span.start < tiny
    near = bar.span.start - last.end < tiny
    return was_short and near and last.span.kind == bar.span.kind and last.span.step == bar.span.step
