"""One stage, looked at: is it the same function of its inputs at every call, for every row by itself?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from frostline.inspector.comparing import Difference, differences
from frostline.inspector.networks import mode_reasons, training_reasons
from frostline.inspector.reach import reach
from frostline.inspector.references import clock_uses, date_uses, process_uses, random_uses
from frostline.inspector.report import REMEDY, StageAudit, listed
from frostline.inspector.rows import Beside, beside_others, places_findings, row_findings
from frostline.inspector.snapshot import Snapshot
from frostline.inspector.subject import Subject
from frostline.inspector.watching import (
    Draws,
    clocks_shifted,
    entropy_watched,
    generator_states,
    generators_kept,
    modules_called,
    moved,
    seed_all,
)

_SHIFTS_S = (3 * 3600 + 1063, 29 * 3600 + 2)
"""Other hours, another day; one odd and one even, because a result may depend on `int(time.time()) % 2`."""


def look_at(subject: Subject) -> StageAudit:
    """Run it several times and say what is not as it must be; nothing is left changed."""
    before = Snapshot(reach(subject.fn))
    with generators_kept():
        try:
            return _Look(subject, before).audit()
        finally:
            before.restore()


class _Look:
    def __init__(self, subject: Subject, before: Snapshot) -> None:
        self.subject, self.before = subject, before
        seed_all(1)
        with modules_called() as self.called:
            subject.call(subject.inputs)  # a first call may load and fill caches, which is no fault
        self.found = reach(subject.fn, self.called)
        late = {*self.found.tensors()} - {*before.tensors}  # a network that the first call loaded
        self.warm = Snapshot(self.found, weights=bool(late))
        self.reasons: list[str] = []
        self.notes: list[str] = []

    def audit(self) -> StageAudit:
        self.reasons += training_reasons(self.found, self.subject.where)
        self.reasons += mode_reasons(self.found, self.subject.where)
        self._restore()
        gone, evidence = self._watched_run()
        self._writes()
        beside = self._beside_others()
        other = beside.result if beside.result is not None else self._run(seed=2)
        self._overwriting(other)
        apart = [] if beside.well else differences(self.result, other)
        drawn = any(name.startswith("torch") for name in gone)
        operators = self._operators() if drawn or (apart and not evidence) else []
        evidence = [*operators, *evidence] if drawn else evidence
        quiet = [] if evidence else operators
        clock = self._clocks()
        self._randomness(evidence, quiet, apart if not clock else [])
        self._state()
        if self.subject.chunk and not apart:
            self._rows(beside)
        self._restore()
        return StageAudit(self.subject.name, tuple(dict.fromkeys(self.reasons)), tuple(self.notes))

    def _restore(self) -> None:
        """Weights as they were given, everything else as after the first call."""
        self.warm.restore()
        self.before.restore_weights()

    def _run(self, *, seed: int = 1, inputs: Sequence[Any] | None = None) -> dict[str, Any]:
        self._restore()
        seed_all(seed)
        return self.subject.call(self.subject.inputs if inputs is None else inputs)

    def _watched_run(self) -> tuple[list[str], list[str]]:
        """(generators that moved, what shows that it draws random numbers)."""
        seed_all(1)
        witness, states = self.subject.witness, generator_states()
        witness.looking = True
        try:
            with entropy_watched(self.found.uses) as entropy:
                self.result = self.subject.call(self.subject.inputs)
        finally:
            witness.looking = False
        gone = moved(states, generator_states())
        self.later = Snapshot(reach(self.subject.fn, self.called), weights=False)
        evidence = [f"{name} moved" for name in gone]
        asked = list(dict.fromkeys(entropy))
        return gone, evidence + [f"it asks the operating system for random bytes{where}" for where in asked]

    def _operators(self) -> list[str]:
        """Torch's operators that draw. Only where something drew: watching them loads torch._dynamo, 3 s."""
        self._restore()
        seed_all(1)
        with Draws() as draws:
            self.subject.call(self.subject.inputs)
        return [f"{op}{where}" for op, where in draws.found.items()]

    def _writes(self) -> None:
        tensors = dict.fromkeys(self.before.moved(self.warm) + self.before.moved(self.later))
        tensors |= dict.fromkeys(
            name for name in self.warm.moved(self.later) if name not in self.before.tensors
        )
        if tensors:
            self.reasons.append(
                f"a call changes its own parameters or buffers: {listed(tensors, 6)}. Call .eval() "
                f"{self.subject.where}, or compute without writing to them"
            )
        if self.subject.witness.written:
            self.reasons.append(
                f"it writes into what it is given: {listed(sorted(self.subject.witness.written))}. Other "
                "stages read the same values: work on a copy (x = x.clone())"
            )

    def _overwriting(self, other: dict[str, Any]) -> None:
        pairs = [(self.result[name], other.get(name)) for name in self.result]
        chunks = [(a, b) for a, b in pairs if isinstance(a, Tensor) and isinstance(b, Tensor) and a.numel()]
        again = any(a.data_ptr() == b.data_ptr() != 0 for a, b in chunks)  # 0: it has no memory (meta)
        if again or self.subject.witness.overwritten:
            self.reasons.append(
                "it returns memory that its next call writes to, so what it gave for one sample becomes that "
                "of another. Return a new tensor (out.clone())"
            )

    def _randomness(self, evidence: list[str], quiet: list[str], apart: list[Difference]) -> None:
        uses = self.found.uses
        evidence = evidence + [f"it uses {use}" for use in random_uses(uses)]
        told = "; ".join(difference.told(self.subject.keys) for difference in apart)
        if evidence:
            seen = f". Two runs under different seeds do not agree: {told}" if apart else ""
            self.reasons.append(f"it draws random numbers: {'; '.join(evidence)}{seen}. Remedy: {REMEDY}")
        elif apart:
            because = f" (it runs {', '.join(quiet)})" if quiet else ""
            self.reasons.append(f"two runs with the same inputs do not agree{because}: {told}. {_remedy()}")
        for what, found in (("the date", date_uses(uses)), ("where it runs", process_uses(uses))):
            if found:
                self.reasons.append(f"it asks for {what}: {'; '.join(found)}. {_remedy()}")

    def _clocks(self) -> bool:
        """Whether the result depends on the clock, for code that reads one."""
        used = clock_uses(self.found.uses)
        if not used:
            return False
        for seconds in _SHIFTS_S:
            with clocks_shifted(self.found.uses, seconds):
                apart = differences(self.result, self._run())
            if apart:
                told = "; ".join(difference.told(self.subject.keys) for difference in apart)
                self.reasons.append(
                    f"its result depends on the clock ({'; '.join(used)}): {seconds // 3600} hours later "
                    f"{told}. {_remedy()}"
                )
                return True
        self.notes.append(f"it reads the clock ({'; '.join(used)}); its result does not depend on it")
        return False

    def _state(self) -> None:
        changed = self.warm.changed(self.later)
        if changed:
            self.reasons.append(
                f"it keeps something that changes from call to call: {', '.join(changed[:4])}. {_remedy()}"
            )

    def _beside_others(self) -> Beside:
        """In the good case the same two calls tell of seeds and of rows beside: a network's are costly."""
        if (self.subject.chunk or 1) < 2:
            return Beside()
        return beside_others(
            lambda given, seed: self._run(seed=seed, inputs=given), self.subject.inputs, self.result
        )

    def _rows(self, beside: Beside) -> None:
        size, keys = self.subject.chunk or 1, self.subject.keys
        inputs = [column[:size] for column in self.subject.inputs]
        whole = self.result
        if len(self.subject.inputs[0]) > size:  # several chunks: the first of them
            whole = {name: column[:size] for name, column in self.result.items()}
        look = places_findings if beside.well else row_findings
        reasons, notes = look(lambda given: self._run(inputs=given), inputs, keys[:size], whole)
        self.reasons += reasons
        self.notes += notes
        if beside.apart and not self.reasons:
            self.reasons.append(beside.told(keys))


def _remedy() -> str:
    return REMEDY[0].upper() + REMEDY[1:]
