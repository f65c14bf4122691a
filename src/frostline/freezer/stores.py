"""The stores of a workload: where they lie, and made or completed before somebody reads them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from frostline.errors import FreezePaused, NotFrozen, UsageError
from frostline.freezer.options import Options
from frostline.freezer.progress import Reporter
from frostline.freezer.run import run
from frostline.store import Store
from frostline.wording import plain
from frostline.workload import Workload

_SHOWN = 10


def places_of(workload: Workload, store: str | os.PathLike[str] | None, *, asked: str) -> dict[str, Path]:
    """A folder for each pipeline: `store` itself where there is one pipeline, otherwise folders in it.

    store: default, stores/<name>. asked: what a message says needs it, as "fl.train(…)".
    """
    if store is None and workload.name is None:
        raise UsageError(f"{asked} needs a folder for the store: store='stores/mine', or live=True.")
    root = Path(store) if store is not None else Path("stores") / str(workload.name)
    several = len(workload.pipelines) > 1
    return {name: root / name if several else root for name in workload.pipelines}


def _left_out(store: Store) -> str:
    """What is in quarantine, for who did not ask for a store and would miss it."""
    bad = store.quarantine
    named = [f"  - {entry['key']!r}: {plain(entry['reason'])}" for entry in bad[:_SHOWN]]
    more = [f"  - … and {len(bad) - _SHOWN:,} more"] if len(bad) > _SHOWN else []
    what = "1 sample failed and is" if len(bad) == 1 else f"{len(bad):,} samples failed and are"
    return "\n".join([f"{what} left out:", *named, *more])


def complete(workload: Workload, places: Mapping[str, Path], options: Options, *, quiet: bool) -> None:
    """Freeze what is not in them yet. What does not fit is refused: only a freeze by itself deletes."""
    options = replace(options, keep=True)
    for name, pipeline in workload.pipelines.items():
        try:
            reporter = Reporter(quiet=quiet)
            outcome = run(pipeline, places[name], options, reporter)
        except NotFrozen as e:
            raise NotFrozen(
                f"{e}\nWithout a store, the pipeline can be run each time: live=True (--live).", problems=()
            ) from e
        if outcome.stats.failed:
            reporter.note(_left_out(outcome.store))
        if outcome.stopped is not None:
            raise FreezePaused(f"Stopped while freezing ({outcome.stopped}); the same call goes on.")
