"""How to freeze; `fl.freeze` and `frostline freeze --help` explain each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from frostline.errors import UsageError
from frostline.freezer.choice import Asked
from frostline.stage import Precision


@dataclass(frozen=True)
class Options:
    """What may be said about a freeze."""

    cut: tuple[str, ...] | None = None
    codec: Mapping[str, str] | None = None
    limit: int | None = None
    max_hours: float | None = None
    max_bad: str | int = "1%"
    paranoid: bool = False
    retry_bad: bool = False
    device: str | None = None
    workers: Asked = "auto"
    n_workers: int | None = None
    precision: Precision | None = None
    compile: bool = False
    dry_run: bool = False
    keep: bool = False
    """Refuse where rows or fields of the store would go: who trains or looks did not ask for that."""

    def check(self) -> None:
        problems = []
        if self.limit is not None and (type(self.limit) is not int or self.limit < 1):
            problems.append(f"limit is {self.limit!r}; a whole number of at least 1")
        if self.max_hours is not None and not self.max_hours > 0:
            problems.append(f"max_hours is {self.max_hours!r}; expected hours, above 0")
        if self.workers not in ("auto", "threads", "processes"):
            problems.append(f"workers is {self.workers!r}; 'auto', 'threads' or 'processes'")
        if self.n_workers is not None and (type(self.n_workers) is not int or self.n_workers < 1):
            problems.append(f"n_workers is {self.n_workers!r}; a whole number of at least 1")
        try:
            torch.empty(1, device=self.device or "cpu")
        except (RuntimeError, AssertionError, NotImplementedError, TypeError) as e:  # AssertionError: no CUDA
            problems.append(f"device is {self.device!r}, which cannot be used: {str(e).splitlines()[0]}")
        if problems:
            raise UsageError("freeze(...) cannot start:", problems=problems)
