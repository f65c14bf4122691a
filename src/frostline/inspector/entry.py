"""`fl.audit`: is what is declared frozen really so, and does training train what it should?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from frostline.batch import Batch
from frostline.errors import UsageError
from frostline.execution import Block, Ready
from frostline.inspector.reach import reach
from frostline.inspector.report import AuditReport, StageAudit, TrainingAudit
from frostline.inspector.samples import MOST_TRIED, frozen_values, left_out, training_batch
from frostline.inspector.snapshot import Snapshot
from frostline.inspector.stages import look_at
from frostline.inspector.subject import of_callable, of_stage
from frostline.inspector.training import look_at_training
from frostline.inspector.watching import generators_kept
from frostline.pipeline import Pipeline
from frostline.stage import Lazy, Stage
from frostline.workload import Workload


@dataclass(frozen=True)
class _How:
    """What was asked for."""

    samples: int
    tries: int
    device: torch.device
    progress: Callable[[str], None]


def audit(
    what: Any,
    *example: Any,
    samples: int = 8,
    tries: int = MOST_TRIED,
    device: torch.device | str | None = None,
    evaluation: bool = False,
    training: bool = True,
    loss: Any = None,
    optimizer: Any = None,
    injected: Any = (),
    progress: Callable[[str], None] | None = None,
) -> AuditReport:
    """Look whether what is to be computed once may be: by running it, never by believing it.

    >>> import frostline as fl, torch
    >>> network = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.1)).requires_grad_(False)
    >>> fl.audit(network.eval(), torch.randn(3, 4)).ok
    True
    >>> print(fl.audit(network.train(), torch.randn(3, 4)).stages[0].reasons[0])
    dropout '1' (p=0.1) is in train mode: call .eval() before handing it over

    what:       a Pipeline or Workload: every stage below the line is looked at, and a workload's training
                step. Or a network or function, with `*example`: the tensors `[rows, …]` it is called with.
    samples:    how many of the first samples are used; those that fail are left out.
    tries:      how many are tried at most when all of the first ones fail.
    device:     where stages with on="device" run, by default on the CPU; a network by itself stays where
                it is.
    evaluation: also say whether evaluation is possible: a random stage needs eval= for that.
    training:   look at one training step of a workload.
    loss, optimizer: with a model and a batch, `audit(model, batch, loss=…, optimizer=…)`, one training
                step is looked at instead: loss(model, batch) and optimizer(model), as in a Workload.
    injected:   for the training step: modules (or their names, or their class) that were put into the
                model, and must be called and matter.
    progress:   called with what is looked at next, in words; networks can take a minute.

    Everything is left as it was: weights, buffers, gradients, modes, generators.
    """
    place = torch.device("cpu" if device is None else device)
    how = _How(samples, tries, place, progress or (lambda text: None))
    _check(what, example, samples, tries, loss, optimizer)
    with generators_kept():
        if isinstance(what, Pipeline):
            return AuditReport(_stages(what, how)[0])
        if isinstance(what, Workload):
            return _workload(what, how, evaluation, training, injected)
        fn = what.get() if isinstance(what, Lazy) else what
        if loss is not None:
            how.progress("looking at a training step")
            seen = look_at_training(fn, example[0], loss=loss, optimizer=optimizer, injected=injected)
            return AuditReport(training=seen)
        return AuditReport((_alone(fn, example, None if device is None else place),))


def _check(what: Any, example: Sequence[Any], samples: int, tries: int, loss: Any, optimizer: Any) -> None:
    described = isinstance(what, Pipeline | Workload)
    problems = []
    if not described and not callable(what) and not isinstance(what, Lazy):
        problems.append(f"it is {type(what).__name__}; a Pipeline, Workload, network or function")
    for name, n in (("samples", samples), ("tries", tries)):
        if type(n) is not int or n < 1:
            problems.append(f"{name} is {n!r}; a whole number of at least 1")
    if described and (example or loss is not None or optimizer is not None):
        problems.append("example, loss= and optimizer= are for a network; a Workload brings its own")
    if (loss is None) != (optimizer is None):
        problems.append("loss= and optimizer= go together")
    if not described and loss is not None and len(example) != 1:
        problems.append(f"a training step needs one batch: audit(model, batch, loss=…); got {len(example)}")
    if not described and loss is None and not _rows(example):
        problems.append(
            "give what it is called with, as audit(encoder, images): tensors of equally many rows"
        )
    if problems:
        raise UsageError("fl.audit(…) cannot look at this:", problems=problems)


def _rows(example: Sequence[Any]) -> bool:
    sized = [e for e in example if isinstance(e, list) or (isinstance(e, Tensor) and e.ndim)]
    return len(sized) == len(example) > 0 and len({len(e) for e in sized}) == 1 and len(sized[0]) > 0


def _alone(fn: Any, example: Sequence[Any], device: torch.device | None) -> StageAudit:
    before = Snapshot(reach(fn))
    try:
        if isinstance(fn, nn.Module) and device is not None:
            fn.to(device)
        seen = look_at(of_callable(fn, example, device))
    finally:
        before.restore()
    alone = () if len(example[0]) > 1 else ("with one row, nothing shows whether rows depend on each other",)
    return StageAudit(seen.name, seen.reasons, (*seen.notes, *alone))


def _stages(pipeline: Pipeline, how: _How, prefix: str = "") -> tuple[tuple[StageAudit, ...], Block | None]:
    frozen = pipeline.frozen
    if not frozen and not pipeline.outputs:
        return (), None
    # Not compiled: what is looked for is the same, and operators inside compiled code cannot be seen.
    plain = pipeline.with_stages({s.name: s.with_options(compile=False) for s in frozen if s.compile})
    how.progress(f"computing {how.samples} samples")
    fns = [s.fn.get() if isinstance(s.fn, Lazy) else s.fn for s in plain.frozen]
    before = [Snapshot(reach(fn)) for fn in fns]
    try:
        block = frozen_values(plain, how.samples, how.device, how.tries)
        for snapshot in before:  # getting the values ran the stages
            snapshot.restore()
        audits = [_stage(stage, prefix, block, how) for stage in plain.frozen]
    finally:
        for snapshot in before:
            snapshot.restore()
    return tuple(audits), block


def _stage(stage: Stage, prefix: str, block: Block, how: _How) -> StageAudit:
    how.progress(f"looking at stage {prefix + stage.name!r}")
    columns = [block.columns[name] for name in stage.reads]
    seen = look_at(of_stage(prefix + stage.name, Ready(stage, how.device), block.keys, columns))
    return StageAudit(seen.name, seen.reasons, (*seen.notes, *left_out(block.failed, stage.name)))


def _workload(work: Workload, how: _How, evaluation: bool, training: bool, injected: Any) -> AuditReport:
    audits: list[StageAudit] = []
    batches: dict[str, Batch] = {}
    wanted = training and work.model is not None
    for name, pipeline in work.pipelines.items():
        prefix = f"{name}/" if len(work.pipelines) > 1 else ""
        some, block = _stages(pipeline, how, prefix)
        audits += some
        if wanted and block is not None:
            batches[name] = training_batch(pipeline, block, how.device)
    refused = tuple(_refused(work)) if evaluation else ()
    return AuditReport(tuple(audits), _training(work, batches, how, injected) if wanted else None, refused)


def _training(work: Workload, batches: dict[str, Batch], how: _How, injected: Any) -> TrainingAudit:
    model = work.model.get() if isinstance(work.model, Lazy) else work.model
    before = Snapshot(reach(model))
    one = next(iter(batches.values()))
    batch = one if isinstance(work.data, Pipeline) else Batch(dict(batches), one.keys_of_rows)
    try:
        if work.loss is None:
            raise UsageError("fl.audit: this workload has a model and no loss.")
        how.progress("looking at a training step")
        model.to(how.device)
        return look_at_training(model, batch, loss=work.loss, optimizer=work.optimizer, injected=injected)
    finally:
        before.restore()


def _refused(work: Workload) -> list[str]:
    return [
        f"stage {stage.name!r} is random and has no eval=: it would be random in evaluation. Give "
        f"eval=, a function that is not (for a random crop, the centre)"
        for pipeline in work.pipelines.values()
        for stage in pipeline.stages
        if stage.random and stage.eval is None
    ]
