"""One HTML file, to be opened anywhere without a network: pictures, films and curves are inside of it."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

_WIDE, _HIGH, _LEFT, _RIGHT, _TOP, _FOOT = 560, 250, 56, 12, 14, 34
_INKS = {"loss_coarse": "#d1603d", "loss_fine": "#2f6fb2", "ratio": "#2e8b57"}
_OTHER = ("#7a4fa3", "#8a6d1d", "#555555")
_POINTS = 400
"""Of a curve, at most: more than a chart has pixels makes the page large, and shows nothing more."""


@dataclass(frozen=True)
class Shown:
    """What the page shows of one clip. captions: truth, then what was told, by who told it."""

    name: str
    grid: bytes
    film: bytes
    heads: bytes | None = None
    captions: Mapping[str, str] = field(default_factory=dict)
    figures: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """For each pass: entropy, peak, on_target, …"""


def page(title: str, shown: Sequence[Shown], *, about: Sequence[str] = (), curves: str = "") -> str:
    """The whole page. about: paragraphs above the clips."""
    parts = [
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(text)}</p>" for text in about),
        *map(_clip, shown),
        f"<h2>Training</h2>{curves}" if curves else "",
    ]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    sized = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    return f'<!doctype html>\n<html lang="en"><head>{head}{sized}</head><body>\n' + "\n".join(
        [*filter(None, parts), "</body></html>\n"]
    )


def _clip(shown: Shown) -> str:
    told = "".join(f"<dt>{escape(who)}</dt><dd>{escape(text)}</dd>" for who, text in shown.captions.items())
    film = f'<video src="{_inside(shown.film, "video/mp4")}" controls loop muted playsinline></video>'
    heads = (
        f'<details><summary>Each head of the last pass</summary><img alt="each head of the last pass" '
        f'src="{_inside(shown.heads, "image/png")}"></details>'
        if shown.heads is not None
        else ""
    )
    return (
        f"<section><h2>{escape(shown.name)}</h2>{f'<dl>{told}</dl>' if told else ''}{_table(shown.figures)}"
        f'{film}<img alt="where each pass looks, frame by frame" src="{_inside(shown.grid, "image/png")}">'
        f"{heads}</section>"
    )


def _table(figures: Mapping[str, Mapping[str, float]]) -> str:
    names = [*dict.fromkeys(name for row in figures.values() for name in row)]
    if not names:
        return ""
    head = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in names)
    rows = "".join(
        f"<tr><th>{escape(who)}</th>"
        + "".join(f"<td>{_said(name, row[name]) if name in row else ''}</td>" for name in names)
        + "</tr>"
        for who, row in figures.items()
    )
    return f"<table><tr><th></th>{head}</tr>{rows}</table>"


def _said(name: str, value: float) -> str:
    if "on_target" in name:
        return f"{value:.0%}"
    return f"{value:.1f}×" if name == "peak" else f"{value:.3f}"


def _inside(content: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


# --- curves -------------------------------------------------------------------------------------------


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; one that a training is just writing is left out."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            found.append(row)
    return found


def curves(metrics: Sequence[Mapping[str, Any]]) -> str:
    """Loss and ratio over the steps, as SVG: training as lines, evaluations as dots. "": there are none."""
    rows = [{**row, "ratio": row.get("ratio", _ratio(row))} for row in metrics]
    losses = chart(rows, ["loss_coarse", "loss_fine"], title="loss")
    ratio = chart(rows, ["ratio"], title="ratio: coarse / fine", level=1.0)
    drawn = "".join(f"<figure>{svg}</figure>" for svg in (losses, ratio) if svg)
    return f'<div class="charts">{drawn}</div>' if drawn else ""


def _ratio(row: Mapping[str, Any]) -> float | None:
    coarse, fine = row.get("loss_coarse"), row.get("loss_fine")
    usable = isinstance(coarse, int | float) and isinstance(fine, int | float) and fine > 0
    return coarse / fine if usable else None  # type: ignore[operator]


def chart(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str], *, title: str, level: float | None = None
) -> str:
    """Figures over the steps as one SVG; level: a value with a line of its own. "": there is nothing."""
    lines = {name: _points(rows, name, "train") for name in names}
    dots = {name: _points(rows, name, "eval") for name in names}
    every = [point for some in (*lines.values(), *dots.values()) for point in some]
    if not every:
        return ""
    steps = max(1, *(step for step, _ in every))
    low, high, ticks = _span([value for _, value in every] + ([] if level is None else [level]))

    def at(step: float, value: float) -> tuple[float, float]:
        x = _LEFT + (_WIDE - _LEFT - _RIGHT) * step / steps
        return x, _TOP + (_HIGH - _TOP - _FOOT) * (1 - (value - low) / (high - low))

    parts = [_axes(at, ticks, steps)]
    if level is not None:
        (x, y), (end, _) = at(0, level), at(steps, level)
        parts.append(f'<line class="level" x1="{x:.1f}" y1="{y:.1f}" x2="{end:.1f}" y2="{y:.1f}"/>')
    for k, name in enumerate(names):
        ink = _INKS.get(name, _OTHER[k % len(_OTHER)])
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in lines[name]))
        parts.append(f'<polyline points="{drawn}" stroke="{ink}"/>' if drawn else "")
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{ink}"/>'
            for x, y in (at(*point) for point in dots[name])
        ]
        parts.append(
            f'<text x="{_WIDE - _RIGHT}" y="{_TOP + 14 + 16 * k}" text-anchor="end" class="name" '
            f'style="fill: {ink}">{escape(name)}</text>'
        )
    return (
        f'<svg viewBox="0 0 {_WIDE} {_HIGH}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg><figcaption>{escape(title)}; dots: evaluation</figcaption>"
    )


def _points(rows: Sequence[Mapping[str, Any]], name: str, kind: str) -> list[tuple[int, float]]:
    """(step, value) of what was finite, thinned by the mean of neighbours."""
    found = [
        (row["step"], float(row[name]))
        for row in rows
        if row.get("kind", "train") == kind and isinstance(row.get(name), int | float)
    ]
    found = [point for point in found if math.isfinite(point[1])]
    if len(found) <= _POINTS:
        return found
    size = math.ceil(len(found) / _POINTS)
    groups = [found[i : i + size] for i in range(0, len(found), size)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]


def _span(values: Sequence[float]) -> tuple[float, float, list[float]]:
    """Limits that hold all values, and round numbers between them."""
    low, high = min(values), max(values)
    wide = max(high - low, 1e-6 * max(1.0, abs(high)))
    rough = wide / 4
    unit = 10 ** math.floor(math.log10(rough))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= rough)
    low, high = math.floor(low / step) * step, math.ceil(high / step) * step
    return low, max(high, low + step), [low + k * step for k in range(round((high - low) / step) + 1)]


def _axes(at: Any, ticks: Sequence[float], steps: int) -> str:
    parts = []
    digits = max(0, -math.floor(math.log10(ticks[1] - ticks[0]))) if len(ticks) > 1 else 2
    for tick in ticks:
        (x, y), (end, _) = at(0, tick), at(steps, tick)
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="{y:.1f}" x2="{end:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{x - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{tick:.{digits}f}</text>')
    for part in (0.0, 0.5, 1.0):
        x, y = at(steps * part, ticks[0])
        anchor = {0.0: "start", 1.0: "end"}.get(part, "middle")
        said = f"{round(steps * part):,}" + (" steps" if part == 1.0 else "")
        parts.append(f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="{anchor}">{said}</text>')
    return "".join(parts)


_STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1f; --faint: #6b6b75; --line: #d9d9df; --ground: #fff }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8ec; --faint: #a0a0aa; --line: #3a3a42; --ground: #121216 } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground);
  max-width: 1412px; margin: 0 auto; padding: 24px }
h1 { font-size: 26px; margin: 0 0 8px } h2 { font-size: 19px; margin: 36px 0 10px; overflow-wrap: anywhere }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; margin: 0 0 12px }
dt { color: var(--faint) } dd { margin: 0 }
table { border-collapse: collapse; margin: 0 0 14px; font-variant-numeric: tabular-nums }
th { font-weight: 500; color: var(--faint); text-align: right } td { text-align: right }
th, td { padding: 2px 14px 2px 0 } tr > th:first-child { text-align: left }
img, video { display: block; max-width: 100%; margin: 0 0 14px; border-radius: 4px }
summary { cursor: pointer; color: var(--faint); margin: 0 0 10px }
.charts { display: flex; flex-wrap: wrap; gap: 24px } figure { margin: 0; flex: 1 1 420px; max-width: 680px }
figcaption { color: var(--faint); font-size: 14px } svg { width: 100%; height: auto }
svg text { font: 12px system-ui, sans-serif; fill: var(--faint) } svg .name { font-weight: 600 }
svg polyline { fill: none; stroke-width: 1.6 } svg .grid { stroke: var(--line) }
svg .level { stroke: var(--faint); stroke-dasharray: 4 4 }
"""
