"""Which steps are watched how. Passes take turns, so that a machine that slows down slows all of them.

warm     until the steps run steadily; modules are found in its first steps
bare     nothing but the step's own hook: what steps take without the profiler
A        the loader's waits too: the time that counts
B        everything: where the time goes
lines    with a thread that looks at the script's own lines between the parts that are known
replay   one batch again and again: what an infinitely fast loader would give
real     as they come, in turns with replay, where no workers fill a queue meanwhile
compute  the same on a GPU, with the batch lying there: nothing is copied
half     half of that batch: whether a step's time grows with it; on a GPU in turns with compute
trace    under torch's tracer: what the device does
look     under a dispatch mode: where the host waits, how much is computed
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PHASES = {
    "bare": "steps that nothing but their end is seen of",
    "A": "pass A: the time that counts",
    "B": "pass B: where it goes",
    "replay": "one batch again and again",
    "real": "batches as they come",
    "compute": "one batch that lies on the device",
    "half": "half a batch",
    "lines": "the script's own lines",
    "trace": "tracing the device",
    "look": "looking for waits, counting operations",
}
TIMED = ("A", "bare", "B", "replay", "real", "compute", "half")
"""Phases that a GPU is not waited for in before they begin: an empty queue is no part of a usual step."""
AGAIN = {
    "replay": "a batch that it had seen before",
    "compute": "a batch that lies on the device already",
    "half": "half a batch",
}
"""Phases in which batches are handed out that the script would not have had, and what it was given."""
_ON_CPU, _ON_GPU, _MOST = 2, 4, 16
"""Steps of a block of bare, A or B. A GPU is waited for at a block's ends, so there they are longer; the
speed of shared cores changes from one second to the next, so there they are short."""
_FEWEST = 6
"""Steps of pass A, whatever was asked for: no verdict is made of less."""
_REPLAYED_S = 5.0
"""Turns of one batch again and again with batches as they come take about so long, two to six of them; those
of a whole batch and half of it, up to four, too."""
_LINES_S = 0.3
_BLOCK_S = 0.06
"""Blocks of quick steps are longer than asked for, to take about so long."""
_SURE, _MOST_MORE, _MORE_S = 0.02, 3, 16.0
"""Passes are told apart to so much of a step, or done again as often as that, or for so many seconds."""
_STABLE = 0.1
_WINDOW = 5
FOUND_IN = 9
"""Steps in which modules are looked for, at most: some are called every eighth step only."""


@dataclass(frozen=True)
class Block:
    phase: str
    steps: int
    settle: int = 1
    """Steps before it that are not counted: queues fill and drain when something changes."""


def plan(
    steps: int, step_s: float, *, cuda: bool, replay: bool, trace: bool, workers: bool = False
) -> list[Block]:
    """
    >>> [f"{b.phase}{b.steps}" for b in plan(18, 0.05, cuda=False, replay=True, trace=False, workers=True)]
    ['A2', 'bare2', 'B2', 'bare2', 'B2', 'A2', 'B2', 'A2', 'bare2', 'lines6', 'look2', 'replay12', 'half12']
    """
    size = _ON_GPU if cuda else _ON_CPU
    rounds = max(2, -(-_FEWEST // size), round(steps / 3 / size))
    size = max(size, min(_MOST, round(_BLOCK_S / max(step_s, 1e-6))))
    kinds = ["A", "bare", "B"]
    settle = 2 if workers else 1  # batches that were prepared between two blocks are gone then
    blocks = [Block(kinds[(i + r) % 3], size, settle) for r in range(rounds) for i in range(3)]
    blocks.append(Block("lines", max(2, min(_MOST, round(_LINES_S / max(step_s, 1e-6))))))
    if trace:
        blocks.append(Block("trace", 3))
    blocks.append(Block("look", 2, settle=0))
    if replay:  # half a batch last: what is compiled for it may run for the whole one from then on
        n = max(12, 2 * size)
        again = [Block("replay", n, settle=3)]
        if not workers:
            again = [Block("replay", n // 2, settle=2), Block("real", max(4, size), settle=2)]
            again *= max(2, min(6, round(_REPLAYED_S / (total(again) * max(step_s, 1e-6)))))
        blocks += again
        blocks += _halves(n, step_s) if cuda else [Block("half", n, settle=3)]
    return blocks


def _halves(n: int, step_s: float) -> list[Block]:
    """The whole batch and half of it, in turns: a host that slows down would pass for a step that grows."""
    turn = [Block("compute", n // 2, settle=2), Block("half", n // 2, settle=2)]
    turns = min(4, round(_REPLAYED_S / (total(turn) * max(step_s, 1e-6))))
    return turns * turn if turns > 1 else [Block("compute", n, settle=3), Block("half", n, settle=3)]


def more(plan: Sequence[Block], done: Sequence[Mapping[str, Any]], step_s: float, before: int) -> list[Block]:
    """Turns once more, where A and B differ so much from round to round that their means say little; on a
    machine with other work to do. before: how often that has been."""
    means: dict[str, list[float]] = {"A": [], "B": []}
    for block in done:
        if block["phase"] in means and block["times"]:
            means[block["phase"]].append(statistics.fmean(block["times"]))
    ratios = [b / a for a, b in zip(means["A"], means["B"], strict=False) if a]
    turns = [block for block in plan if block.phase in ("A", "bare", "B")]
    if len(ratios) < 2 or before >= _MOST_MORE or (before + 1) * total(turns) * step_s > _MORE_S:
        return []
    unsure = 2 * statistics.stdev(ratios) / len(ratios) ** 0.5
    return turns if unsure > _SURE else []


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
