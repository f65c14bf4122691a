"""What holds the step up, in words.

The verdict follows from shares of pass A's step. What is lost to waiting for data is what one batch, handed
out again and again, takes less, where waits bear that out; on a GPU the rest comes from what the device did
under torch's tracer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from frostline.profiler.steps import Start
from frostline.results import (
    Copies,
    Epoch,
    Idle,
    Loader,
    Machine,
    ModuleUse,
    Row,
    Steps,
    Sync,
    Trial,
    Verdict,
)

FEWEST = 6
"""Steps of pass A below which nothing is said."""
_BOUND = 0.25
"""A share of the step that makes it bound by something."""
_ALSO = 0.2
STARTS = 0.1
"""A share of an epoch's time, before its first batch, that is told."""
_FLAT = 0.9
"""Half the batch takes so much of the whole one's time: what a step takes does not come from the batch."""
_SMALL_MS = 0.03
"""On the CPU: operators shorter than this take as long to call as to compute."""
_BEYOND = 2.0
"""With workers: data cost so many times their waits at most. Workers take cores from the step as well, but
not from one that hardly waits for them. A guess."""
MUCH = 0.05
"""Of the step: what takes less is not told."""
_OWN = 0.15
"""Of the step: the script's own code, whose lines are told from there on."""


@dataclass(frozen=True)
class Seen:
    """Everything that a verdict may look at."""

    wall: Steps | None
    rows: Sequence[Row]
    machine: Machine
    wait_ms: float
    loaders: Sequence[Loader] = ()
    modules: Sequence[ModuleUse] = ()
    trials: Mapping[str, Trial] | None = None
    idle: Sequence[Idle] = ()
    syncs: Sequence[Sync] = ()
    copies: Sequence[Copies] = ()
    retries: float = 0.0
    swapped: float = 0.0
    """Pages read back from swap, a step."""
    exposed_copy_ms: float = 0.0
    kernels_ms: float = 0.0
    """On a GPU: what is not copying of its busy time, a step."""
    operators: float = 0.0
    """Of torch, a step."""
    repeated: Mapping[str, float] = field(default_factory=dict)
    """Module → the share of its inputs that it had seen before."""
    items_again: float = 0.0
    """The share of a data set's items that had been asked for before."""
    alone: bool = False
    """A script whose loaders have no workers: batches are prepared while everything else stands still."""
    aside: bool = False
    """A thread of the script's own reads from the loader: the step waits for that one, not for the loader."""
    epoch: Epoch | None = None
    start: Start | None = None
    """What the loader takes to begin an epoch; pass A's steps are without it."""
    training: bool = True
    """Epochs follow each other; a loop of calls may see each input once."""
    lines: Sequence[tuple[str, float]] = ()
    """Of the script, and what they take of the step outside of all parts that are known."""

    @property
    def step(self) -> float:
        return self.wall.ms if self.wall is not None else 0.0

    def row(self, kind: str) -> float:
        return sum(row.ms for row in self.rows if row.kind == kind)

    def trial(self, name: str) -> Trial | None:
        return (self.trials or {}).get(name)

    @property
    def told_ms(self) -> float:
        """Pass B's step: what times of modules are shares of."""
        return sum(row.ms for row in self.rows) or self.step

    @property
    def beside(self) -> Trial | Steps | None:
        """The step with real data that trials are compared with; in turns with them, where it was so. Not
        where turns are no steps of pass A: in a workload's epochs begin too, which may take long; and a
        thread that reads ahead hands out what was replayed in the next turn as well."""
        real = self.trial("real")
        other = self.aside or (self.start is not None and not self.alone)
        return self.wall if real is None or other else real

    @property
    def beside_ms(self) -> float:
        return self.beside.ms if self.beside is not None else 0.0

    @property
    def starting(self) -> float:
        """The share of an epoch's time that the loader takes to begin it."""
        known = self.start is not None and self.epoch is not None and self.epoch.seconds > 0
        return self.start.seconds / self.epoch.seconds if known else 0.0  # type: ignore[union-attr]

    @property
    def stepping(self) -> float:
        """The share of an epoch's time that its steps take."""
        if self.epoch is None or not self.epoch.seconds:
            return 1.0
        return max(0.0, 1 - self.epoch.between_s / self.epoch.seconds)

    def idle_ms(self, *causes: str) -> float:
        return sum(idle.ms for idle in self.idle if idle.cause in causes)

    @property
    def on_gpu(self) -> bool:
        return self.machine.device != "cpu"


def shares(seen: Seen) -> dict[str, float]:
    """Of the step: input, transfer, sync, launch, compute."""
    found = {"input": _input(seen)}
    if seen.on_gpu:
        found["transfer"] = (seen.exposed_copy_ms + seen.idle_ms("copy")) / seen.step
        found["sync"] = seen.idle_ms("sync") / seen.step
        found["launch"] = seen.idle_ms("launch", "optimizer") / seen.step
    lost_in_all = sum(found.values())
    if lost_in_all > 1:  # measured in different ways: together they are never more than the step
        found = {kind: share / lost_in_all for kind, share in found.items()}
    return found | {"compute": min(seen.machine.busy or 0.0, max(0.0, 1 - lost_in_all))}


def _input(seen: Seen) -> float:
    """What data cost of the step; 0: nothing that is felt."""
    replayed, beside = seen.trial("replayed"), seen.beside
    felt = _waits(seen) >= MUCH
    if hidden(seen):
        felt = True
    elif _turns(seen) and replayed is not None and beside is not None:
        felt = beside.low > replayed.high
    if not felt:
        return 0.0
    return max(0.0, _saved(seen)) if borne_out(seen) else _waits(seen)


def _waits(seen: Seen) -> float:
    """The share of the step that waits for data; on a GPU that the device notices."""
    waits = seen.wait_ms / seen.step
    return min(waits, seen.idle_ms("data") / seen.step) if seen.idle else waits


def _saved(seen: Seen) -> float:
    """The share of the step that one batch again and again saves; 0: it was not tried."""
    replayed = seen.trial("replayed")
    return 1 - replayed.ms / seen.beside_ms if replayed is not None else 0.0


def _turns(seen: Seen) -> bool:
    """A workload: its batches as they come, in turns with several that were prepared before."""
    return not seen.alone and seen.trial("real") is not None


def borne_out(seen: Seen) -> bool:
    """Whether data can cost what one batch, again and again, saves: where batches differ in length, it may be
    a short one, or a long one. Without workers the step loses what it waits, never more, and on the CPU
    never less, as nothing goes on meanwhile; with them up to `_BEYOND` times that."""
    if seen.trial("replayed") is None:
        return False
    if hidden(seen) or _turns(seen):
        return True
    if not seen.on_gpu and (seen.alone or _saved(seen) <= 0):
        return False
    return _saved(seen) <= _waits(seen) * (1.0 if seen.alone else _BEYOND)


def hidden(seen: Seen) -> bool:
    """Whether data hold the step up though it is not seen to wait for a loader: a thread of the script's own
    does, and the step waits for that one. Then the trial says it, and the step has nothing else to do."""
    replayed, beside = seen.trial("replayed"), seen.beside
    if replayed is None or beside is None or not seen.aside:
        return False
    lost = 1 - replayed.ms / beside.ms
    spare = 1 - (seen.machine.busy or 0.0)
    return lost >= _BOUND and replayed.high < beside.low and spare >= lost / 2


def flat(seen: Seen) -> bool:
    """Whether a step takes as long with half the batch."""
    whole, half = seen.trial("compute") or seen.trial("replayed"), seen.trial("half")
    if whole is None or half is None or half.ms / whole.ms < _FLAT:  # longer, by noise, does not grow either
        return False
    if seen.on_gpu:
        return (seen.machine.busy or 0.0) < 0.8 and seen.idle_ms("launch", "optimizer") >= 0.15 * seen.step
    return bool(seen.operators) and seen.step / seen.operators < _SMALL_MS  # not an optimiser of many weights


def verdict(seen: Seen) -> Verdict:
    if seen.wall is None or seen.wall.count < FEWEST:
        n = seen.wall.count if seen.wall is not None else 0
        return Verdict("unclear", f"Too few steps to say: {n} of pass A were seen, {FEWEST} are needed.")
    if seen.on_gpu and seen.machine.busy is None:
        return Verdict("unclear", "It is not known how busy the GPU was: no trace of it could be taken.")
    if not seen.rows:
        return Verdict("unclear", "The script ended before it was seen where a step's time goes.")
    found = shares(seen)
    evidence = [f"{_NAMED[kind]}: {share:.0%} of the step" for kind, share in found.items() if share >= 0.01]
    if found["input"] and hidden(seen):
        evidence.append(f"{replayed(seen)}; a thread of the script's own waits for the loader")
    if seen.starting >= STARTS:
        evidence.insert(0, begins(seen))
    if seen.retries >= 0.1 or seen.swapped >= 20:
        what = (
            f"the allocator emptied its cache {seen.retries:.1f} times a step"
            if seen.retries >= 0.1
            else f"{seen.swapped:.0f} pages a step were read back from swap"
        )
        return Verdict("memory-thrashing", f"Memory is short: {what}.", (what, *evidence))
    slow = _slow_epochs(seen, found)
    if slow:
        return Verdict("input-bound", slow, tuple(evidence))
    if flat(seen) and found["input"] < _ALSO:
        half, whole = seen.trial("half"), seen.trial("compute") or seen.trial("replayed")
        assert half is not None and whole is not None  # noqa: S101, PT018 -- flat() says so
        told = f"half the batch takes {half.ms / whole.ms:.0%} of the time of the whole one"
        if half.ms > whole.ms:
            told = "half the batch takes no less time than the whole one"
        return Verdict(
            "launch-bound", f"Starting the work takes the time, not the work: {told}.", (told, *evidence)
        )
    bad = sorted(((s, k) for k, s in found.items() if k != "compute"), reverse=True)
    strong = [kind for share, kind in bad if share >= _ALSO]
    if bad[0][0] >= _BOUND and (len(strong) < 2 or bad[0][0] >= 2 * bad[1][0]):
        kind = bad[0][1]
        return Verdict(f"{kind}-bound", _SAID[kind].format(share=bad[0][0]), tuple(evidence))
    if len(strong) > 1 or (strong and found["compute"] < 0.5):
        told = " and ".join(_NAMED[kind] for kind in strong)
        return Verdict("mixed", f"More than one thing holds the step up: {told}.", tuple(evidence))
    if found["compute"] >= 0.5:
        told = _SAID["compute"].format(share=found["compute"])
        if seen.starting >= STARTS:
            told += " Epochs begin slowly."
        elif bad[0][0] < MUCH:
            told += " Data, copies and waits do not hold it up."
        return Verdict("compute-bound", told, tuple(evidence))
    told = f"{_own(seen):.0%} of the step is the script's own code between parts that are known"
    lines = own_lines(seen)
    if _own(seen) < 0.5 or not lines:
        return Verdict("mixed", f"No single cause: {told}.", tuple(evidence))
    evidence += [f"{line}: about {share:.0%} of the step" for line, share in lines]
    return Verdict("mixed", f"{told}: {', '.join(line for line, _ in lines[:3])}.", tuple(evidence))


def _own(seen: Seen) -> float:
    """The share of the step that is in no part that is known."""
    return seen.row("other") / seen.told_ms


def own_lines(seen: Seen) -> list[tuple[str, float]]:
    """Lines of the script's own code and their shares of the step, the largest first. They were looked at in
    other steps than the rows: none has more than the row that it is part of."""
    if _own(seen) < _OWN:
        return []
    found = [(line, min(share, _own(seen))) for line, share in seen.lines if share >= MUCH]
    return sorted(found, key=lambda line: -line[1])


_NAMED = {
    "input": "waiting for data", "transfer": "copies to the device", "sync": "idle after the host's waits",
    "launch": "idle while work is started", "compute": "computing",
}  # fmt: skip
_SAID = {
    "input": "The step waits for its data: {share:.0%} of it would be gone with an infinitely fast loader.",
    "transfer": "Copies to the device that nothing else runs beside take {share:.0%} of the step.",
    "sync": "The device runs dry because the host waits for it: {share:.0%} of the step.",
    "launch": "The device waits to be given work: {share:.0%} of the step.",
    "compute": "The step computes: {share:.0%} of it.",
}


def _slow_epochs(seen: Seen, found: Mapping[str, float]) -> str:
    """Where an epoch waits for data, and much of that before its first batch; "": it does not."""
    whole = of_epoch(seen, found["input"])
    others = max((seen.stepping * found[kind] for kind in ("transfer", "sync", "launch") if kind in found),
                 default=0.0)  # fmt: skip
    if seen.starting < STARTS or whole < _BOUND or others >= whole:
        return ""
    return (
        f"Epochs wait for their data: {whole:.0%} of the time would be gone with an infinitely fast loader, "
        f"{seen.starting:.0%} before their first batch."
    )


def of_epoch(seen: Seen, share: float) -> float:
    """Of an epoch's time what waiting takes, from a step's share of it."""
    return min(1.0, seen.starting + seen.stepping * share)


def begins(seen: Seen) -> str:
    """What an epoch's beginning takes, in words; "": nothing."""
    if seen.start is None or seen.epoch is None:
        return ""
    took, whole = _time(seen.start.seconds), _time(seen.epoch.seconds)
    return f"{took} of the {whole} that an epoch takes go by before its first batch"


def _time(seconds: float) -> str:
    """
    >>> _time(0.0123), _time(1.94)
    ('12.3 ms', '1.9 s')
    """
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def replayed(seen: Seen) -> str:
    """What the trial took, in words."""
    trial = seen.trial("replayed")
    took = trial.ms if trial is not None else seen.beside_ms
    return f"with batches that are there already a step takes {took:.1f} ms, not {seen.beside_ms:.1f}"
