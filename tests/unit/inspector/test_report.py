"""The report reads well and refuses with every reason."""

from __future__ import annotations

import pytest

from frostline.errors import NotFrozen
from frostline.inspector import AuditReport, StageAudit, TrainingAudit


def test_every_part_is_shown() -> None:
    report = AuditReport(
        (StageAudit("a/x", notes=("fine",)), StageAudit("b/x", reasons=("one", "two"))),
        TrainingAudit(findings=("no gradient",), notes=("small batch",)),
        ("stage 'crop' is random",),
    )
    assert str(report).splitlines() == [
        "1 of 2 stages is frozen",
        "  ✓ a/x",
        "      note: fine",
        "  ✗ b/x",
        "      - one",
        "      - two",
        "evaluation is refused",
        "      - stage 'crop' is random",
        "one training step: look at this",
        "      - no gradient",
        "      note: small batch",
    ]


def test_refusing_names_every_reason_of_the_stages_meant() -> None:
    report = AuditReport((StageAudit("a/x"), StageAudit("b/x", reasons=("one", "two"))))
    with pytest.raises(NotFrozen) as caught:
        report.raise_if_not_frozen()
    assert caught.value.problems == ("b/x: one", "b/x: two")
    with pytest.raises(NotFrozen):
        report.raise_if_not_frozen("x")
    report.raise_if_not_frozen(["a/x"])


@pytest.mark.parametrize(
    ("report", "ok"),
    [
        (AuditReport(), True),
        (AuditReport(training=TrainingAudit()), True),
        (AuditReport(training=TrainingAudit(findings=("x",))), False),
        (AuditReport(evaluation=("x",)), False),
    ],
)
def test_ok_counts_everything(report: AuditReport, ok: bool) -> None:
    assert report.ok is ok
    assert str(report)
