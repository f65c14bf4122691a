"""`freeze`: compute the frozen part of a pipeline once, into a store.

Look at the inputs, plan, audit, forecast; then delete what is gone, add fields to rows that stay, add rows.
Killed anywhere and run again, it ends with the bytes of a run that nobody killed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from frostline.errors import ChunkTooLarge, CompileFailed, FreezePaused, UsageError
from frostline.freezer.attempt import Attempt, Outcome
from frostline.freezer.choice import Asked
from frostline.freezer.options import Options
from frostline.freezer.precision import without_autocast
from frostline.freezer.progress import Reporter
from frostline.freezer.stopping import Stop
from frostline.pipeline import Pipeline
from frostline.stage import Precision
from frostline.store import Store
from frostline.workload import Workload


def freeze(
    workload: Workload | Pipeline,
    out: str | os.PathLike[str] | None = None,
    *,
    cut: Sequence[str] | str | None = None,
    codec: Mapping[str, str] | None = None,
    limit: int | None = None,
    max_hours: float | None = None,
    max_bad: str | int = "1%",
    paranoid: bool = False,
    retry_bad: bool = False,
    device: str | None = None,
    workers: Asked = "auto",
    n_workers: int | None = None,
    precision: Precision | None = None,
    compile: bool = False,
    quiet: bool = False,
) -> Store:
    """Compute what never changes once; a store with the result. Run again, it does only what changed.

    >>> import frostline as fl, tempfile
    >>> data = fl.Pipeline(
    ...     fl.Source.table([{"key": "a", "text": "one two"}, {"key": "b", "text": "three"}]),
    ...     fl.Stage("words", len, reads="text"),
    ... )
    >>> store = fl.freeze(data, tempfile.mkdtemp() + "/store", quiet=True)
    >>> store["a"]["words"].item()
    7

    out:       the store's folder; default: stores/<name of the workload>.
    cut:       the fields to store; default: the last frozen ones that something above the line reads.
    codec:     field → codec; "*" stands for every floating-point field.
    limit:     only the first so many samples.
    max_hours: stop after so long, at the end of a shard; the same call goes on from there.
    max_bad:   samples that may fail, a number or a share; they are quarantined. More stop the run.
    paranoid:  compare files by all of their content, and load networks to compare their weights.
    retry_bad: try samples again that are in quarantine although nothing changed.
    device:    where device stages run; default: a GPU if there is one.
    workers:   "threads", "processes", or "auto": whichever measures faster.  n_workers: default, all cores.
    precision, compile: for all device stages that say nothing themselves; `torch.autocast` around the call
               is not heeded.
    """
    if not isinstance(workload, Workload | Pipeline):
        raise UsageError(
            f"fl.freeze(…) was given {type(workload).__name__} {workload!r:.60}; expected a Pipeline or a "
            f"Workload, as in fl.freeze(fl.Pipeline(source, stage), 'stores/mine')."
        )
    if isinstance(workload, Workload) and len(workload.pipelines) > 1:
        names = ", ".join(workload.pipelines)
        raise UsageError(
            f"This workload has several pipelines ({names}). Freeze them one by one: "
            f"fl.freeze(workload.pipelines['{next(iter(workload.pipelines))}'], out)."
        )
    pipeline = workload if isinstance(workload, Pipeline) else next(iter(workload.pipelines.values()))
    if out is None:
        name = getattr(workload, "name", None)
        if name is None:
            raise UsageError("fl.freeze(…) needs a folder for the store: fl.freeze(workload, 'stores/mine').")
        out = Path("stores") / name
    fields = (cut,) if isinstance(cut, str) else tuple(cut) if cut is not None else None
    options = Options(
        cut=fields, codec=codec, limit=limit, max_hours=max_hours, max_bad=max_bad, paranoid=paranoid,
        retry_bad=retry_bad, device=device, workers=workers, n_workers=n_workers, precision=precision,
        compile=compile,
    )  # fmt: skip
    outcome = run(pipeline, Path(out), options, Reporter(quiet=quiet))
    if outcome.stopped == "SIGINT":
        raise KeyboardInterrupt  # the shard is whole; the script was asked to end, not only this
    if outcome.stopped is not None:
        raise FreezePaused(
            f"Stopped ({outcome.stopped}) with {len(outcome.store):,} rows in {out}, all of them whole. Run "
            f"the same again to go on, or use what is there: fl.Store.open({str(out)!r})."
        )
    return outcome.store


def run(pipeline: Pipeline, root: Path, options: Options, reporter: Reporter) -> Outcome:
    """Freeze one pipeline; with a smaller chunk when the device runs out of memory."""
    options.check()
    pipeline = with_options(pipeline.listed_again(), options)
    chunks: dict[str, int] = {}
    with Stop(options.max_hours, reporter) as stop, without_autocast():
        while True:
            try:
                return Attempt(pipeline, root, options, reporter, chunks, stop).run()
            except ChunkTooLarge as e:
                if e.chunk == 1:
                    raise
                chunks[e.stage] = e.chunk // 2
                reporter.note(
                    f"{e} Going on with {e.chunk // 2}: other chunks give other bits, so what was computed "
                    f"with {e.chunk} is computed again."
                )
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
            except CompileFailed as e:
                reporter.note(f"{e}. Going on without torch.compile, which is another fingerprint.")
                eager = {s.name: s.with_options(compile=False) for s in pipeline.stages if s.name == e.stage}
                pipeline = pipeline.with_stages(eager)


def with_options(pipeline: Pipeline, options: Options) -> Pipeline:
    changed = {}
    for stage in pipeline.stages:
        if stage.on == "device" and (options.precision or options.compile):
            precision = stage.precision or options.precision
            changed[stage.name] = stage.with_options(
                precision=precision, compile=stage.compile or options.compile
            )
    return pipeline.with_stages(changed) if changed else pipeline
