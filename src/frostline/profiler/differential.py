"""Differential runs of a workload: the same step, with one thing about its data changed at a time.

compute    one batch that lies on the device
half       half of it: whether a step's time grows with the batch
replayed   a few batches as they are prepared ahead, again and again; copies and stages on the device run
real       the supply itself; what it reads lies in the page cache
cold       the supply, after the page cache has let go of the store's files

They take turns. real − replayed is what preparation holds the step up by, cold − real what fetching does.
"""

from __future__ import annotations

import copy
import ctypes
import mmap
import os
import statistics
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import torch

from frostline.batch import Batch
from frostline.profiler.inside.patches import Patches
from frostline.profiler.steps import interval
from frostline.results import Trial
from frostline.step import Step
from frostline.supply import Supply
from frostline.supply.ahead import Pool, n_threads
from frostline.supply.rows import Parts
from frostline.timing import interleave

_Source = Callable[[], Generator[Batch, None, None]]
_KEPT = 4
"""Batches that are replayed: one alone would lie in the processor's caches."""
_SETTLE = 2
"""Steps of a turn before its clock starts: queues fill, the last contestant's memory leaves the caches."""
_STEPS = 4
_ROUNDS, _FEWEST_ROUNDS = 6, 3
_MOST_S = 60.0
"""What all turns may take together, as long as there are the fewest rounds."""
_SAMPLED = 32
"""Pages that are looked at to learn whether the page cache let go."""


@dataclass(frozen=True)
class Differences:
    """What came of the runs: their times, and sentences with the stalls."""

    trials: tuple[Trial, ...]
    notes: tuple[str, ...]


def differences(step: Step, supply: Supply, files: Sequence[Path] | None, step_ms: float) -> Differences:
    """Run them all. files: of the stores, None without; step_ms: what a step takes, about."""
    notes: list[str] = []
    with closing(Prepared(supply, _KEPT)) as prepared:
        kept = max(prepared.batches, key=lambda batch: batch.n_rows)
        sources: dict[str, _Source] = {
            "compute": partial(_same, kept), "replayed": prepared.again, "real": partial(_endless, supply),
        }  # fmt: skip
        part = _half(kept, notes)
        if part is not None:
            sources["half"] = partial(_same, part)
        cold = Cold(files, notes) if files is not None else None
        if cold is not None and cold.possible:
            sources["cold"] = partial(_cold, supply, cold)
        for name in ("compute", "half", "replayed"):  # compiles, and finds its kernels, before it is measured
            if name in sources:
                _turn(step, sources[name], 1)
        turns = {name: partial(_turn, step, source, _STEPS) for name, source in sources.items()}
        found = interleave(turns, rounds=_rounds(len(turns), step_ms))
    stalls = {"real": _stall(found, "real", "replayed"), "cold": _stall(found, "cold", "real")}
    said = _said(kept, part, live=files is None)
    return Differences(
        tuple(_trial(name, times, said[name], stalls.get(name)) for name, times in found.items()),
        (*_sentences(stalls, found), *notes),
    )


def _rounds(contestants: int, step_ms: float) -> int:
    round_s = contestants * (_STEPS + _SETTLE) * step_ms / 1000
    return max(_FEWEST_ROUNDS, min(_ROUNDS, int(_MOST_S / max(round_s, 1e-3))))


def _turn(step: Step, source: _Source, n: int) -> float:
    """Milliseconds a step, of n."""
    with closing(source()) as batches:
        for batch in islice(batches, _SETTLE):
            step(batch)
        _settle(step.device)
        began = time.perf_counter()
        for batch in islice(batches, n):
            step(batch)
        _settle(step.device)
        return 1000 * (time.perf_counter() - began) / n


def _settle(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


# --- where batches come from --------------------------------------------------------------------------


class Prepared:
    """Batches as the supply's threads hand them over, to be finished as often as they are asked for."""

    def __init__(self, supply: Supply, n: int) -> None:
        self.batches: list[Batch] = []
        self._parts: list[Parts] = []
        self._rows = supply._rows
        layouts = [self._rows.route_of(name).layout for name in self._rows.counts]
        pooled = any(step.pooled for layout in layouts for step in layout.late)
        self._pool = Pool(n_threads()) if pooled else None
        patches, wait = Patches(), supply._next
        patches.set(supply, "_next", lambda iteration: self._seen(wait(iteration)))
        try:
            with closing(_endless(supply)) as source:
                self.batches += islice(source, n)
        finally:
            patches.undo()

    def _seen(self, parts: Parts | None) -> Parts | None:
        """Kept as they are before the last stages, which write into them."""
        if parts is not None:
            self._parts.append(_copied(parts))
        return parts

    def again(self) -> Generator[Batch, None, None]:
        for parts in cycle(self._parts):
            yield self._finished(_copied(parts))

    def _finished(self, parts: Parts) -> Batch:
        done = {part: self._rows.route_of(part).finish(work, self._pool) for part, work in parts.items()}
        return done[""] if [*done] == [""] else Batch(dict(done), next(iter(done.values()))._keys)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()


def _copied(parts: Parts) -> Parts:
    found = {name: copy.copy(work) for name, work in parts.items()}
    for work in found.values():
        work.fed, work.exact, work.picked, work.done = (
            dict(columns) for columns in (work.fed, work.exact, work.picked, work.done)
        )
    return found


def _same(batch: Batch) -> Generator[Batch, None, None]:
    while True:
        yield _anew(batch)


def _anew(batch: Batch) -> Batch:
    """In containers of its own: a loss may pop what it needs."""
    return Batch({n: _anew(v) if isinstance(v, Batch) else v for n, v in batch.items()}, batch._keys)


def _half(batch: Batch, notes: list[str]) -> Batch | None:
    rows = batch.n_rows
    if rows < 4 or any(isinstance(value, Batch) for value in batch.values()):
        why = f"it has {rows} rows" if rows < 4 else "it is made of several"
        notes.append(f"half a batch was not tried: {why}")
        return None
    return batch.part(0, rows // 2)


def _endless(supply: Supply) -> Generator[Batch, None, None]:
    """Epoch after epoch. One that would end within the turn is left out, where whole ones are longer."""
    state = supply.state_dict()
    needed = _SETTLE + _STEPS
    if state["cursor"] + needed > supply.n_batches(state["epoch"]):
        supply.load_state_dict({**state, "epoch": state["epoch"] + bool(state["cursor"]), "cursor": 0})
    try:
        while True:
            yield from supply
    finally:
        supply.close()  # nobody prepares batches while others are measured


def _cold(supply: Supply, cold: Cold) -> Generator[Batch, None, None]:
    cold.drop()
    yield from _endless(supply)


# --- the page cache -----------------------------------------------------------------------------------


class Cold:
    """Files that the page cache can be made to forget.

    A page stays as long as somebody has it mapped, so mappings of this process let go first: they are
    read-only, and what is touched again is read again.
    """

    def __init__(self, files: Iterable[Path], notes: list[str]) -> None:
        self._files = [path.resolve() for path in files]
        self.possible = False
        try:
            self.drop()
            warm = self._warm()
        except (OSError, AttributeError) as e:  # AttributeError: not on this system
            notes.append(f"cold data were not tried: the page cache cannot be dropped here ({e})")
            return
        self.possible = warm <= 0.1
        if not self.possible:
            notes.append(f"cold data were not tried: {warm:.0%} of the store stays in the page cache")

    def drop(self) -> None:
        names = {str(path) for path in self._files}
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
            place, rights, *_, name = line.split(maxsplit=5)
            if name in names and rights.startswith("r-"):
                first, last = (int(end, 16) for end in place.split("-"))
                libc.madvise(first, last - first, mmap.MADV_DONTNEED)
        for path in self._files:
            _forget(path)

    def _warm(self) -> float:
        """Of some pages, the share that is still there; asking brings others in."""
        large = sorted(self._files, key=lambda path: path.stat().st_size)[-_SAMPLED:]
        each = max(1, _SAMPLED // max(1, len(large)))
        found = [there for path in large for there in _there(path, each)]
        return statistics.fmean(found) if found else 1.0


def _forget(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        os.fsync(file.fileno())  # what is not written yet would stay
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _there(path: Path, n: int) -> list[bool]:
    """Whether pages, from the last to the first, can be read without the disk."""
    size, found, room = path.stat().st_size, [], bytearray(1)
    with path.open("rb", buffering=0) as file:
        for i in reversed(range(n if size else 0)):
            try:
                os.preadv(file.fileno(), [room], size * i // n, os.RWF_NOWAIT)
                found.append(True)
            except BlockingIOError:
                found.append(False)
    return found


# --- in words -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stall:
    ms: float
    low: float
    high: float

    @property
    def seen(self) -> bool:
        return self.low > 0


def _stall(found: Mapping[str, Sequence[float]], more: str, less: str) -> _Stall | None:
    """Of the rounds' own differences: what a round's two turns share cancels."""
    if more not in found or less not in found:
        return None
    each = [a - b for a, b in zip(found[more], found[less], strict=True)]
    return _Stall(statistics.fmean(each), *interval(each))


_STALLS = {"real": ("preparation", "replayed"), "cold": ("fetch", "real")}


def _trial(name: str, times: Sequence[float], note: str, stall: _Stall | None) -> Trial:
    if stall is not None:
        kind, other = _STALLS[name]
        note += f"; {stall.ms:+.2f} ms over {other}: the {kind} stall"
    return Trial(name, statistics.fmean(times), *interval(times), note)


def _said(kept: Batch, part: Batch | None, *, live: bool) -> dict[str, str]:
    return {
        "compute": "one batch that lies on the device",
        "half": f"{part.n_rows if part is not None else 0} of its {kept.n_rows} rows",
        "replayed": f"{_KEPT} prepared batches again and again; copies and stages on the device run",
        "real": "computed from the source" if live else "read from the store, out of the page cache",
        "cold": "read from the store, after the page cache let go of it",
    }


def _sentences(stalls: Mapping[str, _Stall | None], found: Mapping[str, Sequence[float]]) -> Iterator[str]:
    for name, stall in stalls.items():
        if stall is None:
            continue
        kind, other = _STALLS[name]
        a, b = (statistics.fmean(found[n]) for n in (name, other))
        between = f"{stall.ms:.2f} ms a step ({stall.low:.2f} to {stall.high:.2f})"
        if not stall.seen:
            between = f"none that these rounds can show ({stall.low:.2f} to {stall.high:.2f} ms a step)"
        words = {"real": "real data, warm,", "cold": "cold data", "replayed": "replayed"}
        yield f"{kind} stall: {between}; {words[name]} {a:.2f} ms, {words[other].rstrip(',')} {b:.2f} ms"
