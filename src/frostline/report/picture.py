"""The time bar and the steps' times as inline SVG.

Lengths across are percentages and heights are pixels, so that a picture fills any window and its letters keep
their size. Letters that do not fit into their box are cut off by it (a nested `svg`); hovering says it all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from frostline.report.figures import between, ms, percent, plain
from frostline.report.times import Part, parts
from frostline.results import Profile, Steps

KINDS = (
    "data", "prepare", "decode", "copy", "forward", "backward", "optimizer", "zero_grad", "clip", "sync",
    "save", "other",
)  # fmt: skip
_LANE, _BAR, _LABEL = 52, 28, 18
_PLOT, _DOTS = 130, 2000
_HATCH = (
    '<defs><pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><path class="total" d="M0 0h3v7h-3z"></path></pattern></defs>'
)
_LABELLED = 2.5
"""Percent of the width that a box must have to carry letters."""


def ink(kind: str) -> str:
    """The class that colours a kind: never a name that somebody else made up.

    >>> ink("forward"), ink('"><script>')
    ('k-forward', 'k-other')
    """
    return f"k-{kind if kind in KINDS else 'other'}"


def box(x: float, y: float, wide: float, high: float, style: str, title: str, label: str = "") -> str:
    """A rectangle that says its title when hovered over; x and wide in percent."""
    told = f"<title>{escape(plain(title))}</title>"
    room = f'x="{x:.3f}%" y="{y:g}" width="{max(wide, 0.03):.3f}%" height="{high:g}"'
    if not label or wide < _LABELLED:
        return f'<rect class="{style}" {room}>{told}</rect>'
    inside = f'<rect class="{style}" width="100%" height="100%"></rect>'
    words = f'<text class="on" x="5" y="{high / 2 + 4:g}">{escape(plain(label))}</text>'
    return f"<svg {room}>{told}{inside}{words}</svg>"


def text(x: float, y: float, said: str, anchor: str = "start") -> str:
    return f'<text x="{x:.3f}%" y="{y:g}" text-anchor="{anchor}">{escape(plain(said))}</text>'


# --- the time bar -------------------------------------------------------------------------------------


def time_bar(profile: Profile) -> str:
    """Three lanes on one scale: the rows, what they come to without the overlap, and pass A's step.

    >>> from frostline.results import Machine, Row, Verdict
    >>> made = Profile(
    ...     "", "", Steps(60.8, 60.1, 61.5, 50), None, (Row("data", "loading", 61.2, 1.0),),
    ...     Verdict("unclear", ""), Machine("cpu", 2, "", ""),
    ... )
    >>> time_bar(made).count("<rect")
    3
    """
    found = parts(profile)
    rows = [part for part in found if not part.overlap]
    whole = sum(part.row.ms for part in rows)
    widest = max(whole, profile.wall.high, profile.wall.ms)
    if not rows or whole <= 0:
        return ""
    scale = 100 / widest
    overlap = -sum(part.row.ms for part in found if part.overlap)
    lanes = [
        ("the rows, end to end", _stack(rows, scale)),
        (_rest_said(whole, overlap), _rest(whole, overlap, scale)),
        (f"the step of pass A: {_step_said(profile.wall)}", _step(profile.wall, scale)),
    ]
    drawn = [text(0, _LANE * k + 13, said) + shapes for k, (said, shapes) in enumerate(lanes)]
    head = f'<svg class="bar" role="img" aria-label="Where the step goes" height="{_LANE * len(lanes)}">'
    return f"{head}{_HATCH}{''.join(drawn)}</svg>"


def _top(lane: int) -> int:
    return _LANE * lane + _LABEL


def _stack(rows: Sequence[Part], scale: float) -> str:
    drawn, x = [], 0.0
    for part in rows:
        wide = part.row.ms * scale
        drawn.append(box(x, _top(0), wide, _BAR, ink(part.row.kind), row_title(part), part.row.name))
        x += wide
    return "".join(drawn)


def row_title(part: Part) -> str:
    share = "" if part.share is None else f", {percent(part.share)}"
    note = f" ({part.note})" if part.note else ""
    return f"{part.row.name}: {ms(part.row.ms)}{share}{note}"


def _rest_said(whole: float, overlap: float) -> str:
    if overlap <= 0:
        return f"together: {ms(whole)}"
    return f"without the overlap of {ms(overlap)} (hatched): {ms(whole - overlap)}"


def _rest(whole: float, overlap: float, scale: float) -> str:
    hidden = max(0.0, min(overlap, whole))
    left = whole - hidden
    found = box(0, _top(1), left * scale, _BAR, "total", f"rows without the overlap: {ms(left)}")
    if hidden:
        found += box(left * scale, _top(1), hidden * scale, _BAR, "hatched", f"overlap: {ms(hidden)}")
    return found


def _step_said(wall: Steps) -> str:
    spread = between(wall.low, wall.high)
    return ms(wall.ms) + (f" ({spread})" if spread else "")


def _step(wall: Steps, scale: float) -> str:
    found = box(0, _top(2), wall.ms * scale, _BAR, "total", f"pass A: {_step_said(wall)}")
    if wall.low >= wall.high:
        return found
    y = _top(2) + _BAR / 2
    x, end = f"{wall.low * scale:.3f}%", f"{wall.high * scale:.3f}%"
    return found + f'<line class="whisker" x1="{x}" x2="{end}" y1="{y}" y2="{y}"></line>'


# --- the steps of pass A ------------------------------------------------------------------------------


def strip(wall: Steps) -> str:
    """Each step's time as a dot, the mean as a line in its interval. Empty: there are none."""
    times = [(n, t) for n, t in enumerate(wall.times, 1) if math.isfinite(t)]
    if len(times) < 2:
        return ""
    shown = times[:: math.ceil(len(times) / _DOTS)]
    fastest, slowest = min(t for _, t in times), max(t for _, t in times)
    low, high = min(fastest, wall.low, wall.ms), max(slowest, wall.high, wall.ms)
    room = (high - low) or 1.0

    def y(value: float) -> float:
        return 12 + (_PLOT - 36) * (high - value) / room

    def x(step: int) -> float:
        return 1 + 98 * (step - 1) / (len(wall.times) - 1)

    band = box(0, y(wall.high), 100, max(2.0, y(wall.low) - y(wall.high)), "band", f"mean {_step_said(wall)}")
    mean = f'<line class="mean" x1="0" x2="100%" y1="{y(wall.ms):.1f}" y2="{y(wall.ms):.1f}"></line>'
    dots = [
        f'<circle cx="{x(n):.3f}%" cy="{y(t):.1f}" r="2.5"><title>step {n}: {ms(t)}</title></circle>'
        for n, t in shown
    ]
    words = [text(0, 10, f"slowest {ms(slowest)}"), text(0, _PLOT - 4, f"fastest {ms(fastest)}")]
    words.append(text(100, _PLOT - 4, f"{len(wall.times):,} steps, in order", "end"))
    head = f'<svg class="strip" role="img" aria-label="The time of each step" height="{_PLOT}">'
    return f"{head}{band}{mean}{''.join(dots)}{''.join(words)}</svg>"
