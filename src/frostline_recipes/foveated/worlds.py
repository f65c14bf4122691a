"""A world of glyphs: what moves where, what changes when, and which one matters.

A `Script` is drawn from (seed, index) alone, and is all that `frame`, `where` and `caption` need. Being the
target is independent of everything else in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from frostline_recipes.foveated.painting import BRACKET, COLOURS, KINDS, Pixels, background, stamp

Floats = npt.NDArray[np.float64]

APART = 40 / 256
"""How far apart centres keep, in widths of the picture."""
CUE = 1 / 6
"""The part of the clip, from its start, in which the target wears the bracket."""
COLOUR, KIND = (0.3, 0.5), (0.6, 0.8)
"""Between which parts of the clip a glyph changes its colour, and then its kind. One at a time: who follows
it can tell it by what stayed, and by where it was."""
_INSIDE, _LENGTH, _TURN = 0.1, (0.4, 0.9), 1.2
"""Margin of the centres; how long a path is, in widths; and by how much it bends at most, in radians."""
_PARTS = np.linspace(0, 1, 33)
"""Of the clip: where the distances are looked at."""
_TRIES = 7


@dataclass(frozen=True)
class Room:
    """How far centres keep from the border and from each other, in widths of the picture."""

    inside: float
    apart: float


@dataclass(frozen=True)
class Look:
    colour: str
    kind: str


@dataclass(frozen=True)
class Glyph:
    """One glyph: what it looks like, when it changes, and the arc that it runs along at constant speed."""

    before: Look
    after: Look
    colour_s: float
    """When it takes its new colour."""
    kind_s: float
    """When it takes its new kind."""
    start: tuple[float, float]
    heading: float
    """Direction at the start, in radians."""
    turn: float
    """By how much the direction changes over the whole clip, in radians."""
    length: float
    """Of the whole path, in widths of the picture."""

    def look(self, t_s: float) -> Look:
        colour = self.before.colour if t_s < self.colour_s else self.after.colour
        return Look(colour, self.before.kind if t_s < self.kind_s else self.after.kind)


@dataclass(frozen=True)
class Script:
    """A world, complete: everything that `frame`, `where` and `caption` need.

    >>> world = script(3, seed=0, size=64)
    >>> frame(world, 0.0).shape, len(world.glyphs)
    ((3, 64, 64), 6)
    >>> caption(world)
    'a cyan square turns red and then becomes a triangle'
    """

    index: int
    seed: int
    size: int
    seconds: float
    glyphs: tuple[Glyph, ...]
    target: int
    background: int
    scale: float = 1.0
    """How large glyphs are, in their usual size."""


def script(
    index: int,
    *,
    seed: int = 0,
    size: int = 256,
    seconds: float = 24.0,
    objects: int = 6,
    scale: float = 1.0,
    changes: int = 2,
) -> Script:
    """World `index` of a set. `size` only sets how it is painted: the same world comes in every size.

    changes: 2; or 1, and every glyph keeps its kind.
    """
    draw = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, index])))
    room = Room(max(_INSIDE, BRACKET * scale / 2), APART * scale)
    arcs = _arcs(draw, objects, room)
    glyphs = []
    for x, y, heading, turn, length in arcs:
        before = Look(str(draw.choice(list(COLOURS))), str(draw.choice(KINDS)))
        colours, kinds = [c for c in COLOURS if c != before.colour], [k for k in KINDS if k != before.kind]
        after = Look(str(draw.choice(colours)), str(draw.choice(kinds)))
        colour_s, kind_s = (float(draw.uniform(*span)) * seconds for span in (COLOUR, KIND))
        if changes < 2:
            after, kind_s = Look(after.colour, before.kind), seconds
        glyphs.append(Glyph(before, after, colour_s, kind_s, (x, y), heading, turn, length))
    # The target is chosen last and by itself: being the target says nothing about place, path or looks.
    target, background = int(draw.integers(objects)), int(draw.integers(2**31))
    return Script(index, seed, size, seconds, tuple(glyphs), target, background, scale)


def places(world: Script, t_s: float) -> Floats:
    """[objects, 2] the centres (x, y) of all glyphs at a time, in 0…1."""
    arcs = np.array([(*g.start, g.heading, g.turn, g.length) for g in world.glyphs])
    return _along(arcs, np.array([t_s / world.seconds]))[:, 0]


def where(world: Script, t_s: float) -> tuple[float, float]:
    """The target's centre (x, y) at a time, in 0…1 from the upper left corner."""
    x, y = places(world, t_s)[world.target]
    return float(x), float(y)


def cued(world: Script, t_s: float) -> bool:
    """Whether the target wears the bracket at that time."""
    return t_s < CUE * world.seconds


def caption(world: Script) -> str:
    """What the target was and what it became."""
    a, b = world.glyphs[world.target].before, world.glyphs[world.target].after
    became = "" if a.kind == b.kind else f" and then becomes a {b.kind}"
    return f"a {a.colour} {a.kind} turns {b.colour}{became}"


def frame(world: Script, t_s: float) -> Pixels:
    """uint8 [3, size, size], the picture at a time."""
    canvas = background(world.background, world.size).copy()
    centres = places(world, t_s) * world.size
    for glyph, (x, y) in zip(world.glyphs, centres, strict=True):
        look = glyph.look(t_s)
        stamp(canvas, look.kind, COLOURS[look.colour], x, y, world.scale)
    if cued(world, t_s):
        x, y = centres[world.target]
        stamp(canvas, "bracket", (255, 255, 255), x, y, world.scale)
    return canvas


# --- paths --------------------------------------------------------------------------------------------


def _arcs(
    draw: np.random.Generator, objects: int, room: Room
) -> list[tuple[float, float, float, float, float]]:
    """(x, y, heading, turn, length) of every glyph: inside, and always apart if a few tries find that."""
    least, best = _one_by_one(draw, objects, room)
    for _ in range(_TRIES):
        if least >= room.apart:
            break
        least, best = max((least, best), _one_by_one(draw, objects, room), key=lambda tried: tried[0])
    return [tuple(row) for row in best.tolist()]


def _one_by_one(draw: np.random.Generator, objects: int, room: Room) -> tuple[float, Floats]:
    """Each glyph takes the first of many arcs that keeps away from those taken, or else the farthest."""
    taken: list[Floats] = []
    paths: list[Floats] = []
    least = math.inf
    for _ in range(objects):
        arcs, xy = _candidates(draw, 192, room.inside)
        apart = np.full(len(arcs), np.inf)
        for path in paths:
            apart = np.minimum(apart, np.hypot(*(xy - path).transpose(2, 0, 1)).min(1))
        at = int(np.argmax(np.minimum(apart, room.apart)))
        least = min(least, float(apart[at]))
        taken.append(arcs[at])
        paths.append(xy[at])
    return least, np.stack(taken)


def _candidates(draw: np.random.Generator, count: int, margin: float) -> tuple[Floats, Floats]:
    """[some, 5] arcs that stay inside, out of `count` drawn at a time, and [some, parts, 2] their paths."""
    while True:
        low = [margin, margin, 0, -_TURN, _LENGTH[0]]
        high = [1 - margin, 1 - margin, 2 * math.pi, _TURN, _LENGTH[1]]
        arcs = draw.uniform(low, high, (count, 5))
        for parts in (_PARTS[-1:], _PARTS):  # most leave the picture for good: their ends are looked at first
            xy = _along(arcs, parts)
            inside = ((xy >= margin) & (xy <= 1 - margin)).all((1, 2))
            arcs = arcs[inside]
        if len(arcs):
            return arcs, xy[inside]


def _along(arcs: Floats, parts: Floats) -> Floats:
    """[arcs, parts, 2]: where each arc is after these parts of the clip."""
    x, y, heading, turn, length = (arcs[:, k, None] for k in range(5))
    # The chord of an arc: sinc keeps the straight path (turn 0) exact.
    half = turn * parts / 2
    chord = length * parts * np.sinc(half / math.pi)
    return np.stack([x + chord * np.cos(heading + half), y + chord * np.sin(heading + half)], -1)
