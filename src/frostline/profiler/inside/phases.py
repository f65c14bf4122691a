"""Which steps are watched how. Passes take turns, so that a machine that slows down slows all of them.

warm     until the steps run steadily; modules are found in its first steps
bare     nothing but the step's own hook: what steps take without the profiler
A        the loader's waits too: the time that counts
B        everything: where the time goes
replay   one batch again and again: what an infinitely fast loader would give
half     half of that batch: whether a step's time grows with it
trace    under torch's tracer: what the device does
look     under a dispatch mode: where the host waits, how much is computed
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

PHASES = {
    "bare": "steps that nothing but their end is seen of",
    "A": "pass A: the time that counts",
    "B": "pass B: where it goes",
    "replay": "one batch again and again",
    "half": "half a batch",
    "trace": "tracing the device",
    "look": "looking for waits, counting operations",
}
_ON_CPU, _ON_GPU = 2, 4
"""Steps of a block of bare, A or B. A GPU is waited for at a block's ends, so there they are longer; the
speed of shared cores changes from one second to the next, so there they are short."""
_STABLE = 0.1
_WINDOW = 5
FOUND_IN = 3
"""Steps in which modules are looked for."""


@dataclass(frozen=True)
class Block:
    phase: str
    steps: int
    settle: int = 0
    """Steps before it that are not counted: queues fill and drain when something changes."""


def plan(steps: int, *, cuda: bool, replay: bool, trace: bool) -> list[Block]:
    """
    >>> [f"{b.phase}{b.steps}" for b in plan(12, cuda=False, replay=True, trace=False)]
    ['A2', 'bare2', 'B2', 'bare2', 'B2', 'A2', 'replay6', 'half6', 'look2']
    """
    size = _ON_GPU if cuda else _ON_CPU
    rounds = max(2, round(steps / 3 / size))
    kinds = ["A", "bare", "B"]
    settle = 1 if cuda else 0
    blocks = [Block(kinds[(i + r) % 3], size, settle) for r in range(rounds) for i in range(3)]
    if replay:
        blocks += [Block("replay", 6, settle=3), Block("half", 6, settle=3)]
    if trace:
        blocks.append(Block("trace", 3, settle=1))
    return [*blocks, Block("look", 2)]


def total(blocks: Sequence[Block]) -> int:
    return sum(b.steps + b.settle for b in blocks)


def steady(times: Sequence[float]) -> bool:
    """Whether the last few steps took as long as those before.

    >>> steady([9, 5, 1, 1, 1, 1, 1, 1, 1, 1]), steady([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    (True, False)
    """
    if len(times) < 2 * _WINDOW:
        return False
    before, last = times[-2 * _WINDOW : -_WINDOW], times[-_WINDOW:]
    a, b = statistics.median(before), statistics.median(last)
    return abs(a - b) <= _STABLE * max(a, b)
