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
from itertools import chain, cycle, islice, repeat
from pathlib import Path

import torch

from frostline.batch import Batch
from frostline.profiler.inside.patches import Patches
from frostline.profiler.intervals import of_rounds
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
_TURN_MS, _MOST_TURN_MS = 100.0, 3000.0
_FEWEST_STEPS, _MOST_STEPS = 4, 25
_ROUNDS, _FEWEST_ROUNDS = 6, 3
_MOST_S = 60.0
"""What all turns may take together, as long as there are the fewest rounds."""
_OTHER_PACE = 0.2
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
    length = Length.of(supply, step_ms)
    with closing(Prepared(supply, _KEPT)) as prepared:
        kept = max(prepared.batches, key=lambda batch: batch.n_rows)
        real = partial(_endless, supply, length)
        sources: dict[str, _Source] = {
            "compute": partial(_same, kept), "replayed": prepared.again, "real": real,
        }  # fmt: skip
        part = _half(kept, notes)
        if part is not None:
            sources["half"] = partial(_same, part)
        cold = Cold(files, notes) if files is not None else None
        if cold is not None and cold.possible:
            sources["cold"] = partial(_cold, real, cold)
        found = _measured(step, sources, length, step_ms)
    said = _said(kept, part, live=files is None, within=length.within)
    stalls = {"real": _stall(found, "real", "replayed"), "cold": _stall(found, "cold", "real")}
    trials = [_trial(name, times, said[name], stalls.get(name)) for name, times in found.items()]
    notes = [*_sentences(stalls, found), *_pace(found["real"], step_ms, length), *notes]
    return Differences(tuple(trials), tuple(notes))


@dataclass(frozen=True)
class Length:
    """Steps of a turn: enough for a clock; with the supply, within an epoch or whole epochs.

    Short epochs are prepared ahead before they are timed, were their beginnings left out.

    >>> Length.fitting(10.0, n_batches=500), Length.fitting(10.0, n_batches=6)
    (Length(steps=10, real=10, within=True), Length(steps=10, real=12, within=False))
    """

    steps: int
    real: int
    within: bool

    @classmethod
    def of(cls, supply: Supply, step_ms: float) -> Length:
        return cls.fitting(step_ms, supply.n_batches())

    @classmethod
    def fitting(cls, step_ms: float, n_batches: int) -> Length:
        steps = max(_FEWEST_STEPS, min(_MOST_STEPS, int(_TURN_MS / max(step_ms, 1e-3))))
        if n_batches >= 2 * (_SETTLE + steps):
            return cls(steps, steps, within=True)
        whole = -(-steps // n_batches) * n_batches
        return cls(steps, whole if whole * step_ms <= _MOST_TURN_MS else steps, within=False)


def _measured(
    step: Step, sources: Mapping[str, _Source], length: Length, step_ms: float
) -> dict[str, list[float]]:
    for name in ("compute", "half", "replayed"):  # compiles, and finds its kernels, before it is measured
        if name in sources:
            _turn(step, sources[name], 1)
    n = {name: length.real if name in _STALLS else length.steps for name in sources}
    round_s = (sum(n.values()) + _SETTLE * len(n)) * step_ms / 1000
    rounds = max(_FEWEST_ROUNDS, min(_ROUNDS, int(_MOST_S / max(round_s, 1e-3))))
    turns = {name: partial(_turn, step, source, n[name]) for name, source in sources.items()}
    return interleave(turns, rounds=rounds)


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
            self.batches += islice(chain.from_iterable(repeat(supply)), n)
        finally:
            patches.undo()
            supply.close()

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


def _endless(supply: Supply, length: Length) -> Generator[Batch, None, None]:
    """Epoch after epoch; the rest of a long one that would end within a turn is left out."""
    state = supply.state_dict()
    if length.within and state["cursor"] + _SETTLE + length.real > supply.n_batches(state["epoch"]):
        supply.load_state_dict({**state, "epoch": state["epoch"] + 1, "cursor": 0})
    try:
        while True:
            yield from supply
    finally:
        supply.close()  # nobody prepares batches while others are measured


def _cold(source: _Source, cold: Cold) -> Generator[Batch, None, None]:
    cold.drop()
    yield from source()


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
    return _Stall(statistics.fmean(each), *of_rounds(each))


_STALLS = {"real": ("preparation", "replayed"), "cold": ("fetch", "real")}


def _trial(name: str, times: Sequence[float], note: str, stall: _Stall | None) -> Trial:
    if stall is not None:
        kind, other = _STALLS[name]
        told = f"{stall.ms:.2f} ms over {other}: the {kind} stall" if stall.seen else f"no {kind} stall seen"
        note += f"; {told}"
    return Trial(name, statistics.fmean(times), *of_rounds(times), note)


def _said(kept: Batch, part: Batch | None, *, live: bool, within: bool) -> dict[str, str]:
    whole = "" if within else "; short epochs, each with its beginning"
    return {
        "compute": "one batch that lies on the device",
        "half": f"{part.n_rows if part is not None else 0} of its {kept.n_rows} rows",
        "replayed": f"{_KEPT} prepared batches again and again; copies and stages on the device run",
        "real": ("computed from the source" if live else "read from the store, out of the page cache")
        + whole,
        "cold": f"read from the store, after the page cache let go of it{whole}",
    }


_WORDS = {"real": "real data, warm", "cold": "real data, cold", "replayed": "replayed data"}


def _sentences(stalls: Mapping[str, _Stall | None], found: Mapping[str, Sequence[float]]) -> Iterator[str]:
    for name, stall in stalls.items():
        if stall is None:
            continue
        kind, other = _STALLS[name]
        spread = f"{stall.low:.2f} to {stall.high:.2f}".replace("-", "−")
        told = f"{stall.ms:.2f} ms a step ({spread})"
        if not stall.seen:
            told = f"none that these rounds can show ({spread} ms a step)"
        each = ", ".join(f"{_WORDS[n]}: {statistics.fmean(found[n]):.2f} ms" for n in (name, other))
        yield f"{kind} stall: {told}. {each}"


def _pace(real: Sequence[float], step_ms: float, length: Length) -> Iterator[str]:
    """Real data once more: the same steps as the agent saw, unless the machine changed its pace."""
    now, (low, high) = statistics.fmean(real), of_rounds(real)
    if length.within and not low <= step_ms <= high and abs(now / max(step_ms, 1e-9) - 1) > _OTHER_PACE:
        yield (
            f"in the differential runs a step with real data took {now:.2f} ms, before them {step_ms:.2f}: "
            f"the machine's pace changed, compare these runs with each other"
        )
