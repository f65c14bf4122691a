"""`plan`: measure on a few samples, work every cut out, choose, and say why."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from frostline.cut.costing import Costing, all_options, place_beside
from frostline.cut.costs import Budgets, CutPlan, Option, StageCost, StepCost
from frostline.cut.fields import Fields, look_at, offers
from frostline.cut.options import possible_cuts
from frostline.cut.trial import Trial
from frostline.cut.walk import Walk, chosen_places
from frostline.cut.words import why
from frostline.errors import UsageError
from frostline.freezer.workers import cores
from frostline.pipeline import Pipeline
from frostline.workload import Workload

WORTH = 0.05
"""A store is only chosen if it makes the run shorter by this share: less is not told from none."""
_DEFAULT_BATCH = 32


def plan(
    workload: Workload | Pipeline,
    *,
    epochs: float,
    device: str = "cpu",
    step: StepCost | None = None,
    n_workers: int | None = None,
    limit_share: float = 0.05,
    limit: int | None = None,
    budgets: Budgets | None = None,
    out: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> CutPlan:
    """What every cut would take for a run of so many epochs, and the best of them.

    >>> import frostline as fl
    >>> rows = [{"key": str(i), "x": float(i)} for i in range(200)]
    >>> data = fl.Pipeline(fl.Source.table(rows), fl.Stage("y", lambda x: x + 1, reads="x"))
    >>> found = plan(data, epochs=1)
    >>> found.measured, found.cut, [option.fields for option in found.options]
    (10, (), [(), ('y',)])

    step:        what a training step takes; None: not known, and not counted.
    n_workers:   threads for stages of single samples; default: all cores.
    limit_share: the share of the samples to measure on; eight at least, 256 at most.
    limit:       only the first so many samples count.
    budgets:     bytes that may be taken; default: what is free.
    out:         where the store would lie; default: the current folder's disk.
    progress:    called with a sentence now and then.
    """
    _check(workload, epochs, limit_share, step, {"n_workers": n_workers, "limit": limit})
    pipeline = workload if isinstance(workload, Pipeline) else next(iter(workload.pipelines.values()))
    place, total = torch.device(device), min(len(pipeline.source), limit or len(pipeline.source))
    walk = Walk(pipeline, chosen_places(pipeline, limit_share, limit), place, n_workers or cores())
    walk.run(progress)
    cuts = possible_cuts(pipeline, {name: taken.alone for name, taken in walk.took.items()})
    fields = look_at(pipeline, walk, [*dict.fromkeys(name for cut in cuts for name in cut)])
    beside, elsewhere = place_beside(Path(out or "."))
    batch_size = (workload.batch_size if isinstance(workload, Workload) else None) or _DEFAULT_BATCH
    costing = Costing(
        walk, fields, step, epochs, total, total * _trained(workload, walk), Trial(walk, batch_size, beside),
        budgets or Budgets.here(Path(out or "."), place),
    )  # fmt: skip
    if progress is not None:
        progress(f"trying {len(cuts)} cuts")
    options = all_options(costing, cuts)
    chosen = _chosen(options)
    ordered = sorted(options, key=lambda o: (o.why_not is not None, o is not chosen, o.total_s))
    notes = [*_notes(costing, limit_share), *([elsewhere] if elsewhere else [])]
    return CutPlan(
        stages=_stages(walk, fields), options=tuple(ordered), chosen=chosen,
        why=why(chosen, ordered, epochs, WORTH), offers=tuple(offers(walk, fields)), epochs=epochs,
        samples=total, measured=len(walk.places), notes=tuple(notes),
    )  # fmt: skip


def _check(workload: Any, epochs: Any, share: Any, step: StepCost | None, whole: dict[str, Any]) -> None:
    problems = []
    if not isinstance(workload, Workload | Pipeline):
        problems.append(f"it was given {type(workload).__name__}; expected a Pipeline or a Workload")
    elif isinstance(workload, Workload) and len(workload.pipelines) > 1:
        names = ", ".join(workload.pipelines)
        problems.append(f"the workload has several pipelines ({names}); plan one: workload.pipelines[name]")
    if not isinstance(epochs, int | float) or not 0 < epochs < math.inf:
        problems.append(f"epochs is {epochs!r}; expected a number above 0")
    if not isinstance(share, int | float) or not 0 < share <= 1:
        problems.append(f"limit_share is {share!r}; expected a share above 0, at most 1")
    problems += [
        f"{name} is {n!r}; a whole number of at least 1"
        for name, n in whole.items()
        if n is not None and (type(n) is not int or n < 1)
    ]
    if step is not None and not (step.seconds >= 0 and step.samples >= 1):
        problems.append(f"step is {step}; expected seconds from 0, and one sample at least")
    if problems:
        raise UsageError("No cut can be planned:", problems=problems)


def _trained(workload: Workload | Pipeline, walk: Walk) -> float:
    """The share of the samples that an epoch goes through."""
    splits = workload.splits if isinstance(workload, Workload) else None
    if splits is None:
        return 1.0
    if not isinstance(splits, str):
        return float(splits.get("train", 1.0))
    found = [walk.pipeline.source.raw(i)[splits] for i in walk.places]
    return found.count("train") / len(found) or 1.0


def _notes(costing: Costing, share: float) -> list[str]:
    """What a reader should know about the figures."""
    walk, out = costing.walk, []
    n = len(walk.places) + len(walk.failed)
    if n > share * costing.total + 1e-9:
        out.append(
            f"measured on {n} of {costing.total:,} samples, more than {share:.0%}: fewer tell too little"
        )
    if walk.failed:
        first = next(iter(walk.failed.values()))
        out.append(f"{len(walk.failed)} of the samples tried failed, the first with: {first}")
    if costing.step is None:
        out.append("the training step was not measured: epochs count reading and preparing only")
    if costing.fields.specs:
        out.append("reading was measured from the page cache; a disk that has to be read is slower")
    return out


def _chosen(options: Sequence[Option]) -> Option:
    """The shortest run of those that can be; nothing, unless a store is clearly shorter."""
    nothing = next(o for o in options if not o.fields)
    can = [o for o in options if o.fields and o.why_not is None]
    best = min(can, key=lambda o: (o.total_s, o.bytes), default=nothing)
    if best.total_s > (1 - WORTH) * nothing.total_s:
        return nothing
    close = [o for o in can if o.total_s <= best.total_s * (1 + WORTH / 2)]  # of equals, the smallest
    return min(close, key=lambda o: o.bytes)


def _stages(walk: Walk, fields: Fields) -> tuple[StageCost, ...]:
    source = walk.source
    raw = {name: fields.bytes[name] for name in walk.raw if name in fields.bytes}
    found = [StageCost("source", "source", True, source.alone, source.together, raw)]
    for stage in walk.stages:
        took = walk.took[stage.name]
        sizes = {name: fields.bytes[name] for name in stage.writes if name in fields.bytes}
        frozen = walk.pipeline.is_frozen(stage.writes[0])
        found.append(StageCost(stage.name, stage.on, frozen, took.alone, took.together, sizes))
    return tuple(found)
