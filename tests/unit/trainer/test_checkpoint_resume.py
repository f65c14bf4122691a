"""Going on from a checkpoint: with a teacher that no gradient reaches, and with options that were changed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import frostline as fl
from frostline.errors import UsageError


class Taught(nn.Module):
    """A student, and a teacher that follows it in every training pass, as BYOL and DINO have it."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(2, 4)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.training:
                for mine, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    mine.lerp_(other, 0.1)
            target = self.teacher(x)
        out: Tensor = (self.student(x) - target - 1).square().mean()
        return out


def loss(model: nn.Module, batch: fl.Batch) -> Any:
    return model(batch["x"])


def work(*, decay: float = 0.01, **training: Any) -> fl.Workload:
    rows = [{"key": f"r{i}", "v": i / 30} for i in range(30)]
    stage = fl.Stage("x", lambda v: torch.tensor([v, 1.0]), reads="v")
    return fl.Workload(
        fl.Pipeline(fl.Source.table(rows), stage),
        model=fl.lazy(Taught),
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.student.parameters(), 1e-2, weight_decay=decay),
        batch_size=6,
        training={"unused": ["teacher.*"], "log_every": 1, **training},
    )


def train(workload: fl.Workload, out: Path, steps: int) -> dict[str, Tensor]:
    result = fl.train(workload, out=out, steps=steps, live=True, device="cpu", quiet=True)
    return {name: value.clone() for name, value in result.model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


def test_a_model_with_a_teacher_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole = train(work(), tmp_path / "whole", 6)
    train(work(), tmp_path / "parts", 3)
    assert same(train(work(), tmp_path / "parts", 6), whole)
    assert not torch.equal(whole["teacher.weight"], whole["student.weight"])


def test_a_teacher_that_nobody_told_of_is_refused_with_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'unused'(.|\n)*teacher\.weight, teacher\.bias is frozen .* moved"):
        train(work(unused=[]), tmp_path, 6)


def test_a_changed_weight_decay_is_taken_and_an_unchanged_one_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole = train(work(), tmp_path / "whole", 8)
    for name in ("same", "other"):
        train(work(), tmp_path / name, 4)
    assert same(train(work(), tmp_path / "same", 8), whole)
    changed = train(work(decay=5.0), tmp_path / "other", 8)
    assert float(changed["student.weight"].norm()) < 0.95 * float(whole["student.weight"].norm())
