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
from frostline.workload import Workload


def places_of(workload: Workload, store: str | os.PathLike[str] | None, *, asked: str) -> dict[str, Path]:
    """A folder for each pipeline: `store` itself where there is one pipeline, otherwise folders in it.

    store: default, stores/<name>. asked: what a message says needs it, as "fl.train(…)".
    """
    if store is None and workload.name is None:
        raise UsageError(f"{asked} needs a folder for the store: store='stores/mine', or live=True.")
    root = Path(store) if store is not None else Path("stores") / str(workload.name)
    several = len(workload.pipelines) > 1
    return {name: root / name if several else root for name in workload.pipelines}


def complete(workload: Workload, places: Mapping[str, Path], options: Options, *, quiet: bool) -> None:
    """Freeze what is not in them yet. What does not fit is refused: only a freeze by itself deletes."""
    options = replace(options, keep=True)
    for name, pipeline in workload.pipelines.items():
        try:
            outcome = run(pipeline, places[name], options, Reporter(quiet=quiet))
        except NotFrozen as e:
            raise NotFrozen(
                f"{e}\nWithout a store, the pipeline can be run each time: live=True (--live).", problems=()
            ) from e
        if outcome.stopped is not None:
            raise FreezePaused(f"Stopped while freezing ({outcome.stopped}); the same call goes on.")
