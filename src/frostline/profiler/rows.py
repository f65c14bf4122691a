"""Pass B's spans as rows of a table: each moment of the step once, by what was going on.

On the CPU a span's time is the host's. On a GPU it is the device's, between two events on its stream: a wait
for data that the device did not notice takes no time there. What the host waited beyond that is overlap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from frostline.profiler.steps import Raw, far, kept
from frostline.results import Row, Span

NAMES = {
    "data": "waiting for data", "copy": "copies to the device", "forward": "forward",
    "backward": "backward", "optimizer": "optimizer", "zero_grad": "zero_grad", "clip": "clipping gradients",
    "sync": "waiting for the device", "save": "torch.save",
}  # fmt: skip
_SHOWN_STEPS = 3


class Spans:
    """All blocks of pass B."""

    def __init__(self, raw: Raw) -> None:
        self._raw = raw
        self.steps = 0
        self.total = 0.0
        """Seconds of all their steps."""
        self.ours = 0.0
        """Seconds of these in which the profiler itself worked; no row has them."""
        self.own: dict[str, float] = defaultdict(float)
        """Kind → seconds that nothing inside of it takes."""
        self.host: dict[str, float] = defaultdict(float)
        self.beside: dict[str, float] = defaultdict(float)
        """Of these, what other threads and streams do while the step goes on."""
        self.overlap = 0.0
        self.modules: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        """Name → calls, seconds with everything inside."""
        self.prefixes: dict[str, float] = defaultdict(float)
        """Name → seconds from the beginning of the outermost module around it to its end."""
        limit = far(raw)
        blocks = [b for b in raw["blocks"] if b["phase"] == "B" and "end" in b]
        for block, found in zip(blocks, raw.get("spans", []), strict=False):
            self._add(found, {*kept(block, limit)})
        self.total -= self.ours

    def _add(self, found: Mapping[str, Any], whole: set[int]) -> None:
        spans, bounds, cuda = found["spans"], found["bounds"], found["cuda"]
        clock = 6 if cuda else 4
        ends = [bound[1 if cuda else 0] for bound in bounds]
        self.steps += len(whole)
        self.total += sum(end - (ends[i - 1] if i else 0.0) for i, end in enumerate(ends) if i in whole)
        ours = [span for span in spans if span[0] == "frostline" and span[3] in whole]
        self.ours += sum(span[clock + 1] - span[clock] for span in ours)
        if not cuda:  # a device goes on while the host enters and leaves spans
            self.ours += sum(span[9] for span in spans if span[3] in whole and not span[8])
        inner, host_inner = [0.0] * len(spans), [0.0] * len(spans)
        for span in spans:
            if span[2] >= 0 and span[8] == spans[span[2]][8]:
                inner[span[2]] += span[clock + 1] - span[clock] + (0.0 if cuda else span[9])
                host_inner[span[2]] += span[5] - span[4]
        for i, (kind, name, _, step, *times, beside, _ours) in enumerate(spans):
            if step not in whole or kind == "frostline":
                continue
            took, held = times[clock - 3] - times[clock - 4], times[1] - times[0]
            if kind == "forward":
                self.modules[name][0] += 1
                self.modules[name][1] += took
                self._prefix(spans, i, clock)
            if beside:
                self.own[kind] += max(0.0, took - inner[i])
                self.overlap += max(0.0, took - inner[i])
                self.beside[kind] += max(0.0, took - inner[i])
            elif kind == "data" and cuda:
                took = max(0.0, took - inner[i])
                held = max(0.0, held - host_inner[i])
                self.own[kind] += max(held, took)
                self.overlap += max(0.0, held - took)
            else:
                self.own[kind] += max(0.0, took - inner[i])
            self.host[kind] += held

    def _prefix(self, spans: list[list[Any]], place: int, clock: int) -> None:
        outer = place
        while spans[outer][2] >= 0 and spans[spans[outer][2]][0] == "forward":
            outer = spans[outer][2]
        if outer != place:
            self.prefixes[spans[place][1]] += spans[place][clock + 1] - spans[outer][clock]

    # told

    @property
    def ms(self) -> float:
        return 1000 * self.total / self.steps if self.steps else 0.0

    def rows(self) -> tuple[Row, ...]:
        if not self.steps or not self.total:
            return ()
        each = {kind: self.own[kind] for kind in NAMES if self.own.get(kind)}
        other = self.total - sum(each.values()) + self.overlap
        found = [self._row(kind, NAMES[kind], seconds) for kind, seconds in each.items()]
        if self.overlap:
            note = "of the rows above, hidden behind other work"
            found.append(self._row("overlap", "overlap", -self.overlap, note))
        return (*found, self._row("other", "other", other, "between these: the script's own code"))

    def _row(self, kind: str, name: str, seconds: float, note: str = "") -> Row:
        return Row(kind, name, 1000 * seconds / self.steps, seconds / self.total, note)

    def timeline(self, workers: list[Mapping[str, Any]]) -> tuple[Span, ...]:
        """The first steps, span by span: of a block that no evaluation stands in, if there is one."""
        blocks = [b for b in self._raw["blocks"] if b["phase"] == "B" and "end" in b]
        pairs = [*zip(blocks, self._raw.get("spans", []), strict=False)]
        if not pairs:
            return ()
        limit = far(self._raw)
        whole = (pair for pair in pairs if len(kept(pair[0], limit)) == len(pair[0]["times"]))
        block, found = next(whole, pairs[0])
        last = min(_SHOWN_STEPS, len(found["bounds"]))
        until = found["bounds"][last - 1][0] if last else 0.0
        bars = []
        for kind, name, parent, step, start, end, first, done, *_ in found["spans"]:
            if not 0 <= step < last:
                continue
            deep = _depth(found["spans"], parent)
            bars.append(Span("host", kind, name, 1000 * start, 1000 * (end - start), step, deep))
            if found["cuda"] and kind != "data":
                at = first + found.get("lag", 0.0)
                bars.append(Span("device", kind, name, 1000 * at, 1000 * (done - first), step, deep))
        numbers: dict[int, int] = {}
        for line in workers:
            start = line["start"] - block["start"]
            if -line["s"] < start < until:
                here = line["pid"] == self._raw.get("pid")  # within a wait for data
                track = "host" if here else f"worker {numbers.setdefault(line['pid'], len(numbers) + 1)}"
                took = (1000 * start, 1000 * line["s"])
                bars.append(Span(track, "prepare", line["dataset"], *took, depth=int(here)))
        return tuple(bars)


def _depth(spans: list[list[Any]], parent: int) -> int:
    deep = 0
    while parent >= 0:
        deep, parent = deep + 1, spans[parent][2]
    return deep
