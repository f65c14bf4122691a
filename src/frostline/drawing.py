"""A pipeline as an SVG: boxes and arrows, what is computed once below the frostline, the rest above it."""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from frostline.layers import Layout, Spot, arrange
from frostline.pipeline import Pipeline
from frostline.stage import Pick, Stage

Kind = Literal["source", "frozen", "live", "pick", "out"]

_BOX, _HEIGHT, _BEND, _GAP_X, _GAP_Y = 200, 72, 14, 26, 44
_LINE_GAP = 84  # between the rows beside the frostline, where the line and its words are
_GUTTER, _MARGIN = 164, 24
_NAME_CELLS, _DETAIL_CELLS, _GUTTER_CELLS = 17, 30, 24  # what fits, at the font sizes below
_TITLE_CELLS = 500
_MOST_CUT = 3

_STYLE = """
.fl-back{fill:#fff}.fl-ice{fill:#e8f1fa}.fl-box{fill:#fff;stroke-width:2}
.fl-frozen{stroke:#2b6cb0}.fl-source{stroke:#2b6cb0;stroke-dasharray:5 4}.fl-live,.fl-pick{stroke:#c05621}
.fl-pick{stroke-dasharray:5 4}.fl-out{stroke:#4a5568}.fl-name{fill:#1a202c;font-size:15px;font-weight:700}
.fl-detail{fill:#4a5568;font-size:12px}.fl-arrow{fill:none;stroke:#718096;stroke-width:1.6}
.fl-head{fill:#718096}.fl-line{stroke:#2b6cb0;stroke-width:3;stroke-dasharray:10 6}
.fl-cold{fill:#2b6cb0;font-size:13px}.fl-warm{fill:#c05621;font-size:13px}.fl-strong{font-weight:700}
.fl-flake{stroke:#2b6cb0;stroke-width:1.6;stroke-linecap:round}
@media (prefers-color-scheme:dark){
.fl-back{fill:#10161d}.fl-ice{fill:#132a40}.fl-box{fill:#1b232d}.fl-frozen,.fl-source{stroke:#7cc0ff}
.fl-live,.fl-pick{stroke:#f0a36b}.fl-out{stroke:#a0aec0}.fl-name{fill:#f0f4f8}.fl-detail{fill:#b8c4d0}
.fl-arrow{stroke:#8fa1b3}.fl-head{fill:#8fa1b3}.fl-line,.fl-flake{stroke:#7cc0ff}
.fl-cold{fill:#9bd0ff}.fl-warm{fill:#f0a36b}}
"""


@dataclass
class _Node:
    kind: Kind
    name: str
    details: tuple[str, ...]
    about: str
    comes_from: list[str] = field(default_factory=list)


def draw(pipeline: Pipeline, *, title: str = "") -> str:
    """The SVG of a pipeline; needs no other file, no font and no library.

    >>> import frostline as fl
    >>> data = fl.Pipeline(fl.Source.table([{"key": "a", "text": "x"}]), fl.Stage("n", len, reads="text"))
    >>> draw(data, title="lengths").splitlines()[0][:60]
    '<svg xmlns="http://www.w3.org/2000/svg" width="412" height="'

    title: said by screen readers and shown above the graph.
    """
    nodes = _nodes(pipeline)
    row_of = _rows(nodes)
    arrows = [(start, end) for end, node in nodes.items() for start in node.comes_from]
    rising = [(a, b) for a, b in arrows if row_of[a] < row_of[b]]
    layout = arrange(row_of, rising, box=_BOX, bend=_BEND, gap=_GAP_X)
    return _Canvas(pipeline, nodes, row_of, layout, title).svg()


# --- the graph ----------------------------------------------------------------------------------------


def _nodes(pipeline: Pipeline) -> dict[str, _Node]:
    """Source, stages, picks and what leaves the pipeline, each with the nodes its fields come from."""
    source = pipeline.source
    fields = ", ".join(source.fields)
    nodes = {"source": _Node("source", source.what, (fields, "source"), f"{source.what}: {fields}")}
    last = len(pipeline.steps)
    for place, step in enumerate(pipeline.steps):
        nodes[_id(step, place)] = _stage(pipeline, step) if isinstance(step, Stage) else _pick(step)
        reads = step.reads if isinstance(step, Stage) else step.fields
        nodes[_id(step, place)].comes_from = _origins(pipeline, reads, place)
    leaving = ", ".join(pipeline.outputs)
    out = _Node("out", "to the model", (leaving,), f"what leaves the pipeline: {leaving}")
    out.comes_from = _origins(pipeline, pipeline.outputs, last)
    return nodes | {"out": out}


def _id(step: Stage | Pick, place: int) -> str:
    return f"stage {step.name}" if isinstance(step, Stage) else f"pick {place}"


def _origins(pipeline: Pipeline, fields: Sequence[str], place: int) -> list[str]:
    """The nodes that fields come from at a place: the last pick before it, else the stage or the source."""
    found: dict[str, None] = {}
    for name in fields:
        writer = pipeline.writer_of(name)
        origin = _id(writer, 0) if writer else "source"
        for at, step in enumerate(pipeline.steps[:place]):
            if isinstance(step, Pick) and name in step.fields:
                origin = _id(step, at)
        found[origin] = None
    return list(found)


def _stage(pipeline: Pipeline, stage: Stage) -> _Node:
    why = pipeline.why_not_frozen.get(stage.name)
    where = [f"{stage.on} × {stage.chunk}" if stage.chunk else stage.on, stage.precision or ""]
    where += ["compiled" if stage.compile else "", "random" if stage.random else ""]
    flow = f"{', '.join(stage.reads)} → {', '.join(stage.writes)}"
    about = f"{stage.name}: {flow}; " + (f"runs every epoch: {why}" if why else "frozen: computed once")
    return _Node("live" if why else "frozen", stage.name, (flow, " · ".join(filter(None, where))), about)


def _pick(pick: Pick) -> _Node:
    fields = ", ".join(pick.fields)
    about = f"{pick.n} entries of {fields}: at random in training, {pick.eval} in evaluation"
    return _Node("pick", f"pick {pick.n:,}", (f"of {fields}", f"in evaluation: {pick.eval}"), about)


def _rows(nodes: dict[str, _Node]) -> dict[str, int]:
    """Each above what it comes from, and everything live above everything frozen."""
    cold = [name for name, node in nodes.items() if node.kind in ("source", "frozen")]
    rows: dict[str, int] = {}
    _lift(nodes, cold, rows, 0)
    warm = [name for name, node in nodes.items() if node.kind in ("live", "pick")]
    _lift(nodes, warm, rows, max(rows.values()) + 1)
    rows["out"] = max(rows.values()) + 1
    return rows


def _lift(nodes: dict[str, _Node], names: Sequence[str], rows: dict[str, int], floor: int) -> None:
    rows |= dict.fromkeys(names, floor)
    for _ in names:  # a path is no longer than there are nodes; so it ends also where picks form a ring
        for name in names:
            below = [rows[start] for start in nodes[name].comes_from]
            rows[name] = max([floor, *(row + 1 for row in below if row < len(nodes))])


# --- the picture --------------------------------------------------------------------------------------


@dataclass
class _Canvas:
    pipeline: Pipeline
    nodes: dict[str, _Node]
    row_of: dict[str, int]
    layout: Layout
    title: str

    def __post_init__(self) -> None:
        self.top_cold = max(r for n, r in self.row_of.items() if self.nodes[n].kind in ("source", "frozen"))
        self.rows = max(self.row_of.values()) + 1
        self.head = 34 if self.title else 0
        self.width = self.layout.width + _GUTTER + 2 * _MARGIN
        lifted = (self.rows - 1) * _GAP_Y + (_LINE_GAP - _GAP_Y)
        self.height = self.rows * _HEIGHT + lifted + 2 * _MARGIN + self.head
        self.line = self.top(self.top_cold) - _LINE_GAP / 2

    def top(self, row: int) -> float:
        above = self.rows - 1 - row
        wide = _LINE_GAP - _GAP_Y if row <= self.top_cold else 0
        return self.head + _MARGIN + above * (_HEIGHT + _GAP_Y) + wide

    def x(self, spot: Spot) -> float:
        return _MARGIN + _GUTTER + self.layout.x[spot]

    def svg(self) -> str:
        w, h = f"{self.width:.0f}", f"{self.height:.0f}"
        label = html.escape(shorten(self.title or repr(self.pipeline), _TITLE_CELLS))
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{w}" height="{h}" viewBox="0 0 {w} {h}" '
            f'font-family="ui-sans-serif, system-ui, sans-serif" role="img" aria-label="{label}">',
            f"<style>{_STYLE}</style>",
            '<defs><marker id="fl-tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path class="fl-head" d="M0 0L8 4L0 8z"/></marker></defs>',
            f'<rect class="fl-back" width="{w}" height="{h}"/>',
            f'<rect class="fl-ice" y="{self.line:.1f}" width="{w}" height="{self.height - self.line:.1f}"/>',
            f'<path class="fl-line" d="M0 {self.line:.1f}H{w}"/>',
            *self._words(), *self._arrows(), *(self._box(name) for name in self.nodes), "</svg>", "",
        ])  # fmt: skip

    def _words(self) -> list[str]:
        cut = self.pipeline.cut
        more = [f"and {len(cut) - _MOST_CUT} more"] if len(cut) > _MOST_CUT else []
        stored = [f"· {name}" for name in cut[:_MOST_CUT]] + more
        said = [_text(_MARGIN, self.head - 2, "fl-name", self.title, 60)] if self.title else []
        said.append(_text(_MARGIN, self.line - 30, "fl-warm", "runs every epoch"))
        said.append(_text(_MARGIN, self.line - 10, "fl-cold fl-strong", "the frostline"))
        below = ["computed once; stored:", *stored] if stored else ["computed once"]
        for n, text in enumerate(below):
            said.append(_text(_MARGIN, self.line + 22 + 17 * n, "fl-cold", text, _GUTTER_CELLS))
        return said

    def _arrows(self) -> list[str]:
        found = []
        for a, b in self.layout.steps:
            sources = self.layout.into(b)
            bends = self.row_of[b[0]] != b[1]
            spread = 0 if bends else min(26.0, 0.7 * _BOX / len(sources))
            end_x = self.x(b) + (sources.index(a) - (len(sources) - 1) / 2) * spread
            x, y, end_y = self.x(a), self.top(a[1]), self.top(b[1]) + _HEIGHT
            half = (y + end_y) / 2
            path = f"M{x:.1f} {y:.1f}C{x:.1f} {half:.1f} {end_x:.1f} {half:.1f} {end_x:.1f} {end_y:.1f}"
            path += f"V{self.top(b[1]):.1f}" if bends else ""
            tip = "" if bends else ' marker-end="url(#fl-tip)"'
            found.append(f'<path class="fl-arrow" d="{path}"{tip}/>')
        return found

    def _box(self, name: str) -> str:
        node, row = self.nodes[name], self.row_of[name]
        x, y = self.x((name, row)), self.top(row)
        first = y + (27 if len(node.details) > 1 else 33)
        parts = [f"<g><title>{html.escape(shorten(node.about, _TITLE_CELLS))}</title>"]
        parts.append(
            f'<rect class="fl-box fl-{node.kind}" x="{x - _BOX / 2:.1f}" y="{y:.1f}" width="{_BOX}" '
            f'height="{_HEIGHT}" rx="8"/>'
        )
        if node.kind == "frozen":
            parts.append(_flake(x + _BOX / 2 - 13, y + 13))
        parts.append(_text(x, first, "fl-name", node.name, _NAME_CELLS, middle=True))
        for n, text in enumerate(node.details):
            parts.append(_text(x, first + 18 * (n + 1), "fl-detail", text, _DETAIL_CELLS, middle=True))
        return "".join([*parts, "</g>"])


def _text(x: float, y: float, style: str, text: str, cells: int = 40, *, middle: bool = False) -> str:
    anchor = ' text-anchor="middle"' if middle else ""
    cut = html.escape(shorten(text, cells))
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}"{anchor}>{cut}</text>'


def _flake(x: float, y: float) -> str:
    return (
        f'<path class="fl-flake" d="M{x:.1f} {y - 6:.1f}v12M{x - 5.2:.1f} {y - 3:.1f}l10.4 6'
        f'M{x - 5.2:.1f} {y + 3:.1f}l10.4 -6"/>'
    )


def shorten(text: str, cells: int) -> str:
    """Text cut to so many columns, where wide letters take two; control characters become spaces.

    >>> shorten("efficientnet_features", 12), shorten("short", 12)
    ('efficientne…', 'short')
    """
    clean = "".join(c if c.isprintable() else " " for c in text)
    widths = [2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in clean]
    if sum(widths) <= cells:
        return clean
    kept = 0
    while sum(widths[: kept + 1]) <= cells - 1:
        kept += 1
    return clean[:kept] + "…"
