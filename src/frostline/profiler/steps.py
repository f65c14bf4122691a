"""Step times out of an agent's blocks: means with their spread, trials, what profiling costs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from frostline.profiler.intervals import of_rounds, of_steps
from frostline.results import Cost, Epoch, Steps, Trial

_FAR = 3.0
_SLOWED = ("look", "trace", "replay", "compute", "half")
"""Phases whose epochs do not begin as those of the script do."""

_TURNS = ("A", "B", "bare")

Raw = Mapping[str, Any]


@dataclass(frozen=True)
class Start:
    """What the main loader takes to begin an epoch, over waiting for any other batch."""

    seconds: float
    dataset: str
    anew: bool = False
    """Its workers end with each epoch, others are started."""


def usual(raw: Raw) -> float:
    """The median step of passes A and B, in seconds."""
    times = [t for b in raw["blocks"] if b["phase"] in _TURNS for t in b["times"]]
    return statistics.median(times) if times else 0.0


def far(raw: Raw) -> float:
    """Seconds beyond which a step in which a loader began anew stands between epochs."""
    return _FAR * usual(raw)


def kept(block: Raw, limit: float) -> list[int]:
    """The block's steps that are steps: not those in which an epoch ended and another began."""
    return [i for i, t in enumerate(block["times"]) if not (block["fresh"][i] and t > limit)]


def between(raw: Raw) -> list[float]:
    """Seconds over a usual step that stand between epochs, of each time that one followed another."""
    if begun := _begun(raw):
        return [pause for pause, _ in begun]
    if _knows_starts(raw):
        return []
    limit = far(raw)
    blocks = [b for b in raw["blocks"] if b["phase"] in _TURNS]
    found = [(b, i) for b in blocks for i in range(len(b["times"])) if i not in kept(b, limit)]
    return [b["times"][i] - usual(raw) for b, i in found]


def interludes(raw: Raw) -> float:
    """Seconds a step of what stands within an epoch and pass A leaves out: steps in which another loader
    began than the one that they read from, as of an evaluation every few steps. How often that is, all steps
    say; how long it takes, those that are measured."""
    blocks = [b for b in raw["blocks"] if b["phase"] in _TURNS and "end" in b]
    if not blocks or not _knows_starts(raw):
        return 0.0
    main = main_loader(raw) or {}
    began = {at for at, *_ in main["starts"]}
    others = {at for loader in raw["loaders"] for at, *_ in loader["starts"]} - began
    limit, took = far(raw), []
    for block in blocks:
        mine = {_step_at(block, at) for at in began if block["start"] <= at <= block["end"]}
        whole = kept(block, limit)
        for i, seconds in enumerate(block["times"]):
            if block["fresh"][i] and i not in mine:
                took.append(0.0 if i in whole else seconds - usual(raw))
    times = sum(at >= blocks[0]["start"] for at in others)
    return statistics.fmean(took) * times / max(1, raw["steps"] - raw["warmup"]) if took else 0.0


def _step_at(block: Raw, at: float) -> int:
    """The block's step that began at this time, or next to it."""
    begins = [*accumulate(block["times"][:-1], initial=block["start"])]
    return min(range(len(begins)), key=lambda i: abs(begins[i] - at))


def _knows_starts(raw: Raw) -> bool:
    """Whether each beginning of the loader that steps read from was seen: not where a thread reads ahead."""
    loader = main_loader(raw)
    return loader is not None and "starts" in loader and not loader.get("aside")


def _begun(raw: Raw) -> list[tuple[float, float]]:
    """(seconds between two epochs, seconds of these that the loader took), over a usual wait. None of either
    where the step is no longer for it: pass A has that."""
    loader = main_loader(raw) or {}
    slowed = [(b["start"], b["end"]) for b in raw["blocks"] if b["phase"] in _SLOWED and "end" in b]
    wait, least = a_step(raw, "waits", ("A", "B")) or 0.0, far(raw) - usual(raw)
    found = []
    for at, pause, start in loader.get("starts", ()):
        if not any(first <= at <= last for first, last in slowed):
            seen = pause - wait > least
            found.append((pause - wait, max(0.0, start - wait)) if seen else (0.0, 0.0))
    return found


def start(raw: Raw) -> Start | None:
    """None: it is not known, or takes no longer than a step."""
    loader, found = main_loader(raw), _begun(raw)
    if loader is None or not any(seconds for _, seconds in found):
        return None
    anew = bool(loader["workers"]) and not loader["persistent"]
    return Start(statistics.fmean(seconds for _, seconds in found), loader["dataset"], anew)


def timed(raw: Raw, phase: str) -> Steps | None:
    """The wall time of a phase's steps: whole blocks, end to end."""
    limit = far(raw)
    means, times = [], []
    for block in raw["blocks"]:
        if block["phase"] == phase and "end" in block and (whole := kept(block, limit)):
            left = sum(block["times"][i] for i in range(len(block["times"])) if i not in whole)
            seconds = block.get("device_s", block["end"] - block["start"]) - left
            means += [1000 * seconds / len(whole)] * len(whole)
            times += [1000 * block["times"][i] for i in whole]
    if not times:
        return None
    mean = statistics.fmean(means)
    low, high = of_steps(times)
    shift = mean - statistics.fmean(times)  # blocks are ended by a sync, single steps are not
    each = tuple(dict.fromkeys(means))
    return Steps(mean, low + shift, high + shift, len(times), tuple(times), each)


def trial(raw: Raw, phase: str, name: str, note: str) -> Trial | None:
    found = timed(raw, phase)
    return None if found is None else Trial(name, found.ms, found.low, found.high, note)


def cost(raw: Raw) -> Cost | None:
    """Pass A over steps that only their end is seen of, round by round: what a round shares cancels."""
    limit = far(raw)
    means: dict[str, list[float]] = {"A": [], "bare": []}
    for block in raw["blocks"]:
        if block["phase"] in means:
            times = [block["times"][i] for i in kept(block, limit)]
            means[block["phase"]].append(statistics.fmean(times) if times else 0.0)
    ratios = [a / bare for a, bare in zip(means["A"], means["bare"], strict=False) if a and bare]
    if len(ratios) < 2:
        return None
    low, high = of_rounds(ratios, statistics.median)
    looks = sum(h["s"] * h["calls"] for h in raw["inputs"] if h["looked"] == h["calls"])
    beside = looks / max(1, raw["steps"]) / max(usual(raw), 1e-9)  # these go on in bare steps too
    return Cost(*(ratio - 1 + beside for ratio in (statistics.median(ratios), low, high)))


def a_step(raw: Raw, name: str, phases: Sequence[str] = ("A",)) -> float | None:
    """What a phase's steps have of `name`: the mean of waits (seconds), the usual rows and batches. Loops
    that fetch a batch ahead have two in an epoch's first step and none in its last."""
    limit = far(raw)
    found = [b[name][i] for b in raw["blocks"] if b["phase"] in phases for i in kept(b, limit)]
    middle = statistics.fmean if name == "waits" else statistics.median
    return float(middle(found)) if found else None


def grown(raw: Raw, name: str) -> float:
    """What a counter grew by in pass A, a step."""
    blocks = [b for b in raw["blocks"] if b["phase"] == "A" and "after" in b]
    steps = sum(len(b["times"]) for b in blocks)
    return sum(b["after"][name] - b["before"][name] for b in blocks) / steps if steps else 0.0


def epoch(raw: Raw, wall: Steps) -> Epoch | None:
    """From the length of the loader that steps wait for most."""
    loader = main_loader(raw)
    if loader is None or not loader["batches"] or not loader["a_step"]:
        return None
    steps = loader["batches"] / loader["a_step"]
    pause = statistics.fmean(found) if (found := between(raw)) else 0.0
    pause += steps * interludes(raw)
    low, high = (steps * ms / 1000 + pause for ms in (wall.low, wall.high))
    return Epoch(steps * wall.ms / 1000 + pause, low, high, steps, pause)


def main_loader(raw: Raw) -> dict[str, Any] | None:
    """The loader that steps read from most. An evaluation every so many steps may read more batches: then
    `a_step` is a mean, seldom a whole number, and more than a usual step reads from all loaders together."""
    usual_step = a_step(raw, "batches", ("A", "B"))

    def order(found: Raw) -> tuple[bool, bool, float, int]:
        each = found["a_step"]
        whole = each >= 1 and each == round(each)
        return whole, usual_step is None or each <= usual_step, each, found["calls"]

    return max(raw["loaders"], key=order, default=None)
