"""`Workload`: data plus what is run on it, a model with its loss and optimiser, or an experiment."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import accumulate
from typing import Any, Literal, get_args

from frostline import keyed
from frostline.errors import UsageError
from frostline.pipeline import Pipeline
from frostline.stage import Lazy
from frostline.tables import nearest
from frostline.training import Training

Better = Literal["lower", "higher"]
MAIN = "data"
"""What the pipeline of a workload with only one is called."""


@dataclass(frozen=True)
class Metric:
    """What says whether a model is good: a figure that `evaluate` returns, and which way is better.

    >>> Metric("accuracy", better="higher", margin=0.01).is_better(0.91, than=0.90)
    True

    margin: by how much a model may be worse and still count as not worse, in the metric's own unit.
    """

    name: str
    better: Better = "lower"
    margin: float = 0.0

    def __post_init__(self) -> None:
        problems = []
        if not self.name:
            problems.append("name is empty; expected one that evaluate returns, as 'loss'")
        if self.better not in get_args(Better):
            problems.append(f"better is {self.better!r}; 'lower' or 'higher'")
        if not isinstance(self.margin, int | float) or not 0 <= self.margin < math.inf:
            problems.append(f"margin is {self.margin!r}; expected a number from 0")
        if problems:
            raise UsageError("Metric(...) cannot work:", problems=problems)

    def is_better(self, value: float, *, than: float) -> bool:
        return value < than if self.better == "lower" else value > than


@dataclass(frozen=True, eq=False)
class Workload:
    """Data and what is run on it. The first argument is a Pipeline, or several by name.

    >>> import frostline as fl, torch
    >>> data = fl.Pipeline(fl.Source.table([{"key": str(i), "x": float(i)} for i in range(100)]))
    >>> work = fl.Workload(data, model=fl.lazy(torch.nn.Linear, 1, 1), loss=lambda model, batch: 0,
    ...                    optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1),
    ...                    splits={"train": 0.8, "test": 0.2}, batch_size=8)
    >>> work.split_of("17"), work.split_of("18")
    ('train', 'train')

    model:     an nn.Module, or fl.lazy(Model, …).
    loss:      loss(model, batch) → a tensor, or {"loss": …, other figures}.
    optimizer: optimizer(model) → a torch optimiser.
    evaluate:  evaluate(model, feed) → {name: number}; with a parameter `step`, it is given the steps done.
    metric:    which of these numbers says that a model is good.
    splits:    {"train": 0.8, "val": 0.1, "test": 0.1}: shares of the samples, chosen by a hash of `group` and
               never by position, so that a sample stays where it is when others come. Or the name of a
               field that holds each sample's split.
    group:     the field whose equal values stay together (frames of one video); default: the key.
    order:     an Order for training; default: fl.Shuffle.
    training:  settings of the training, as {"precision": "bf16", "clip": 1.0}; see `frostline.training`.
    checks:    check(model, batch, figures) for each: called before the first step with what the loss gave;
               returns what is wrong, in a sentence, or None. It may raise as well. With a parameter `fresh`,
               it is told whether the weights are those that the model was made with.
    run:       instead of a model: an experiment, run(ctx); see `frostline.experiment.Context`. One that needs
               no data is Workload(None, run=…).
    """

    data: Pipeline | Mapping[str, Pipeline] | None
    _: KW_ONLY
    model: Any = None
    loss: Callable[..., Any] | None = None
    optimizer: Callable[..., Any] | None = None
    evaluate: Callable[..., Any] | None = None
    metric: Metric | None = None
    splits: Mapping[str, float] | str | None = None
    group: str | None = None
    order: Any = None
    batch_size: int | None = None
    training: Training | Mapping[str, Any] | None = None
    checks: Sequence[Callable[..., str | None]] = ()
    run: Callable[..., Any] | None = None
    name: str | None = None
    """What stores and runs are filed under; set where a TARGET is resolved."""

    def __post_init__(self) -> None:
        problems = [*self._data_problems(), *self._run_problems(), *self._split_problems()]
        if self.name is not None and not re.fullmatch(r"\w[\w.-]*", self.name):
            problems.append(
                f"name is {self.name!r}; it becomes a folder's: letters, digits, '_', '-' and '.'"
            )
        if problems:
            raise UsageError("Workload(...) cannot work:", problems=problems)

    # what is wrong

    def _data_problems(self) -> list[str]:
        if self.data is None and self.run is not None:
            return []
        named = self.data if isinstance(self.data, Mapping) else {MAIN: self.data}
        wrong = [
            f"data[{n!r}] is {type(p).__name__}" for n, p in named.items() if not isinstance(p, Pipeline)
        ]
        if wrong or not named:
            return [*(wrong or ["data is empty"]), "data is a Pipeline, or a dict of Pipelines by name"]
        return []

    def _run_problems(self) -> list[str]:
        parts = {"model": self.model, "loss": self.loss, "optimizer": self.optimizer}
        if self.run is not None:
            given = [name for name, part in parts.items() if part is not None]
            found = [f"run= is an experiment of its own: leave out {', '.join(given)}"] if given else []
            return [*found, *([] if callable(self.run) else ["run is not a function"])]
        found = [f"{name} is missing" for name, part in parts.items() if part is None]
        expected = {"model": "an nn.Module or fl.lazy(…)"}
        found += [
            f"{name} is {type(part).__name__}; expected {expected.get(name, 'a function')}"
            for name, part in (*parts.items(), ("evaluate", self.evaluate))
            if part is not None and not callable(part) and not isinstance(part, Lazy)
        ]
        if type(self.batch_size) is not int or self.batch_size < 1:
            found.append(f"batch_size is {self.batch_size!r}; a whole number of at least 1")
        found += self._training_problems()
        metric: Any = self.metric
        if metric is not None and not isinstance(metric, Metric):
            found.append(f"metric is {metric!r}; expected fl.Metric('loss', better='lower')")
        elif metric is not None and self.evaluate is None and metric.name != "loss":
            found.append(
                f"metric {metric.name!r} needs evaluate=, a function that returns it; only 'loss' does not"
            )
        return found

    def _training_problems(self) -> list[str]:
        found = [
            f"checks has {check!r}; functions are expected" for check in self.checks if not callable(check)
        ]
        try:
            Training.of(self.training)
        except UsageError as e:
            found += [f"training: {problem}" for problem in e.problems or [str(e)]]
        return found

    def _split_problems(self) -> list[str]:
        if self.data is None and self.splits is not None:
            return ["splits= divides data, and there is none"]
        if self._data_problems() or self.splits is None:
            return (
                []
                if self.group is None or self.splits is not None
                else ["group= is for splits=, which is missing"]
            )
        fields = {name for pipeline in self.pipelines.values() for name in pipeline.source.fields}
        named = {"group": self.group, "splits": self.splits if isinstance(self.splits, str) else None}
        found = [
            f"{what} is {name!r}, which is no field of the source{nearest(name, fields)}"
            for what, name in named.items()
            if name is not None and name not in fields
        ]
        splits: Any = self.splits
        if isinstance(splits, Mapping):
            shares = list(splits.values())
            usable = shares and all(isinstance(s, int | float) and s > 0 for s in shares)
            if not usable or abs(sum(shares) - 1) > 1e-6:
                found.append(f"splits are {dict(splits)}; expected shares above 0 that add up to 1")
        elif not isinstance(splits, str):
            found.append(f"splits is {splits!r}; expected shares by name, or the name of a field")
        return found

    # what others ask

    @property
    def pipelines(self) -> dict[str, Pipeline]:
        """All pipelines by name; a single one is called "data". An experiment without data is refused."""
        if self.data is None:
            raise UsageError(
                f"{self.name or 'This workload'} is an experiment without data: there is nothing to freeze, "
                f"audit or feed. `frostline run TARGET` runs it."
            )
        return {MAIN: self.data} if isinstance(self.data, Pipeline) else dict(self.data)

    def split_of(self, group: str) -> str | None:
        """The split of a sample, by its key or the value of its group field (as text)."""
        if self.splits is None:
            return None
        if isinstance(self.splits, str):
            return group
        place = keyed.derive(0, 0, group, "split") / 2**64
        bounds = accumulate(self.splits.values())
        return next(
            (n for n, end in zip(self.splits, bounds, strict=True) if place < end), [*self.splits][-1]
        )

    def named(self, name: str) -> Workload:
        return replace(self, name=name)
