"""What an audit found, as plain frozen dataclasses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from frostline.errors import NotFrozen, UsageError

REMEDY = "mark the stage random=True (it then runs every epoch), or make it a pure function of its inputs"


@dataclass(frozen=True)
class StageAudit:
    """One stage that is declared frozen: whether it is, and if not, every reason.

    >>> StageAudit("features", reasons=("dropout 'drop' (p=0.1) is in train mode: call .eval()",)).frozen
    False

    reasons: why its results may not be computed once, each with what to do about it.
    notes:   what is worth knowing and no reason to refuse it.
    """

    name: str
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def frozen(self) -> bool:
        return not self.reasons


@dataclass(frozen=True)
class TrainingAudit:
    """One step of training, looked at.

    >>> TrainingAudit(findings=("1 trainable parameter got no gradient: 'head.bias'",)).ok
    False
    """

    findings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.findings


@dataclass(frozen=True)
class AuditReport:
    """All that an audit found. `print(report)` shows it.

    >>> report = AuditReport((StageAudit("frames"), StageAudit("crop", reasons=("it draws random numbers",))))
    >>> report.ok
    False
    >>> print(report)
    1 of 2 stages is frozen
      ✓ frames
      ✗ crop
          - it draws random numbers

    evaluation: why evaluation is refused, when it was asked about.
    """

    stages: tuple[StageAudit, ...] = ()
    training: TrainingAudit | None = None
    evaluation: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        trained = self.training is None or self.training.ok
        return trained and not self.evaluation and all(stage.frozen for stage in self.stages)

    def raise_if_not_frozen(self, names: Iterable[str] | None = None) -> None:
        """Raise NotFrozen with every reason, for these stages or all.

        A stage of a workload with several pipelines is called 'pipeline/stage'; 'stage' finds it too.
        """
        wanted = None if names is None else {names} if isinstance(names, str) else {*names}
        known = {known for stage in self.stages for known in _called(stage.name)}
        if wanted is not None and wanted - known:
            missing = ", ".join(map(repr, sorted(wanted - known)))
            raise UsageError(f"raise_if_not_frozen({missing}): audited were {sorted(known)}.")
        refused = [
            stage
            for stage in self.stages
            if not stage.frozen and (wanted is None or wanted & _called(stage.name))
        ]
        if refused:
            several = "stages that are" if len(refused) > 1 else "stage that is"
            raise NotFrozen(
                f"{len(refused)} {several} to be computed once may not be:",
                problems=[f"{stage.name}: {reason}" for stage in refused for reason in stage.reasons],
            )

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        if self.stages:
            frozen = sum(stage.frozen for stage in self.stages)
            yield f"{frozen} of {len(self.stages)} stages {'is' if frozen == 1 else 'are'} frozen"
        elif self.training is None:
            yield "no stage is declared frozen"
        for stage in self.stages:
            yield f"  {'✓' if stage.frozen else '✗'} {stage.name}"
            yield from _indented(stage.reasons, stage.notes)
        if self.evaluation:
            yield "evaluation is refused"
            yield from _indented(self.evaluation, ())
        if self.training is not None:
            yield "one training step: " + ("all is well" if self.training.ok else "look at this")
            yield from _indented(self.training.findings, self.training.notes)


def _called(name: str) -> set[str]:
    return {name, name.rpartition("/")[2]}


def _indented(reasons: Iterable[str], notes: Iterable[str]) -> Iterator[str]:
    yield from (f"      - {reason}" for reason in reasons)
    yield from (f"      note: {note}" for note in notes)


def listed(names: Iterable[str], most: int = 3) -> str:
    """
    >>> listed(["a", "b", "c", "d", "e"])
    "'a', 'b', 'c' and 2 more"
    """
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more
