"""What `frostline show` says about a workload, as plain values: for JSON, and for the terminal.

Networks stay unloaded: of an `fl.lazy` only the name of its loader is looked at.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from frostline.pipeline import Pipeline
    from frostline.source import Source
    from frostline.stage import Stage
    from frostline.target import Described, Resolved
    from frostline.workload import Workload

STORES = Path("stores")


def signature(found: Described) -> dict[str, Any]:
    """What a workload can be made with."""
    return {"name": found.name, "function": _place(found.function), "parameters": _parameters(found)}


def outline(found: Resolved) -> dict[str, Any]:
    """Everything, in the order in which it is shown."""
    work = found.workload
    return {
        "name": work.name,
        "function": _place(found.function),
        "parameters": _parameters(found),
        "pipelines": {name: _pipeline(p, work) for name, p in work.pipelines.items()} if work.data else {},
        **_parts(work),
        "stores": _stores(STORES / str(work.name)),
    }


def _place(function: Any) -> str:
    inner = getattr(function, "func", function)  # functools.partial
    return f"{inner.__module__}:{called(inner)}"


def _parameters(found: Described) -> list[dict[str, Any]]:
    return [
        {
            "name": p.name, "type": p.type, "required": p.required, "help": p.help,
            "default": None if p.required else repr(p.default),
            "given": repr(found.given[p.name]) if p.name in found.given else None,
        }
        for p in found.parameters
    ]  # fmt: skip


def _pipeline(pipeline: Pipeline, work: Workload) -> dict[str, Any]:
    source = _source(pipeline.source)
    return {
        "source": source,
        "stages": [_stage(stage, pipeline.why_not_frozen.get(stage.name)) for stage in pipeline.stages],
        "picks": [{"fields": [*p.fields], "n": p.n, "eval": p.eval} for p in pipeline.picks],
        "cut": [*pipeline.cut],
        "outputs": [*pipeline.outputs],
        "splits": None if source["problem"] else _splits(pipeline.source, work),
    }


def _source(source: Source) -> dict[str, Any]:
    """A source that cannot be listed (no file matches) is no reason not to show the rest."""
    from frostline.errors import FrostlineError

    kind = type(source.finder).__name__.strip("_").lower()
    about = {"kind": kind, "what": source.what, "fields": [*source.fields], "keys": None, "problem": None}
    try:
        return about | {"keys": len(source)}
    except FrostlineError as e:
        return about | {"problem": str(e)}


def _stage(stage: Stage, why: str | None) -> dict[str, Any]:
    from frostline.stage import Lazy

    return {
        "name": stage.name, "reads": [*stage.reads], "writes": [*stage.writes], "fn": called(stage.fn),
        "lazy": isinstance(stage.fn, Lazy), "on": stage.on, "chunk": stage.chunk, "random": stage.random,
        "precision": stage.precision, "compile": stage.compile, "frozen": why is None, "why": why,
    }  # fmt: skip


def _splits(source: Source, work: Workload) -> dict[str, int] | str | None:
    """How many keys fall into each split, or why they are not counted."""
    by = work.splits if isinstance(work.splits, str) else work.group
    if work.splits is None:
        return None
    if by is None:
        groups = list(source.keys)
    elif by not in source.fields:
        return f"not counted: this source has no field {by!r}"
    elif not source.cheap:
        return f"not counted: {by!r} is known only after every sample is read"
    else:
        groups = [str(source.raw(i)[by]) for i in range(len(source))]
    counted = Counter(str(work.split_of(group)) for group in groups)
    names = sorted(counted) if isinstance(work.splits, str) else [*work.splits]
    return {name: counted[name] for name in names}


def _parts(work: Workload) -> dict[str, Any]:
    metric = work.metric
    parts = {name: getattr(work, name) for name in ("model", "loss", "optimizer", "evaluate", "run")}
    return {
        **{name: None if part is None else _part(part) for name, part in parts.items()},
        "metric": metric and {"name": metric.name, "better": metric.better, "margin": metric.margin},
        "splits": work.splits if isinstance(work.splits, str | None) else dict(work.splits),
        "group": work.group,
        "batch_size": work.batch_size,
        "order": None if work.order is None else repr(work.order),
    }


def _part(what: Any) -> dict[str, Any]:
    from frostline.stage import Lazy

    return {"name": called(what), "lazy": isinstance(what, Lazy)}


def called(what: Any) -> str:
    """The name of a function or network; of a lazy one, of what loads it."""
    from frostline.stage import Lazy

    if isinstance(what, Lazy):
        return called(what.loader)
    inner = getattr(what, "func", what)  # functools.partial
    return str(getattr(inner, "__qualname__", None) or type(inner).__name__)


def _stores(place: Path) -> list[dict[str, Any]]:
    """Stores where freezing puts them: the folder itself, or one in it for each pipeline."""
    if not place.is_dir():
        return []
    places = [place, *sorted(p for p in place.iterdir() if p.is_dir())]
    return [_store(p) for p in places if (p / "manifest.json").exists() or (p / "commits").exists()]


def _store(path: Path) -> dict[str, Any]:
    from frostline.errors import StoreError
    from frostline.store import Store

    about: dict[str, Any] = {"path": str(path), "rows": None, "fields": [], "problem": None}
    try:
        opened = Store.open(path)
    except StoreError as e:
        return about | {"problem": str(e)}
    return about | {"rows": len(opened), "fields": [*opened.fields]}
