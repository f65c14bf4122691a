"""The fingerprint of each field: what its stage, and every stage above it, is made of.

A change reaches exactly the fields downstream of it. Fields of the source count by their names here: their
content is compared sample by sample, when a store is brought up to date.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from frostline.errors import UsageError
from frostline.fingerprint import lazies, origin
from frostline.fingerprint.code import Code, examine
from frostline.fingerprint.differences import differences as differences
from frostline.fingerprint.values import Tree, digest
from frostline.fingerprint.weights import weights_of

_LIMIT = 48 << 10
"""Bytes of JSON that the parts of one field may take: they lie in each commit of a store."""
_SHOWN = 2 << 10
"""Bytes of parameters that are shown; more are given by their digest."""
_COUNTED = (
    *("code", "parameters", "weights", "structure", "precision", "compile", "chunk", "version", "random"),
    *("libraries", "reads", "writes"),
)
"""What the digest is made from; the rest of a stage's parts explains it."""


@dataclass(frozen=True)
class Fingerprint:
    """digest: one string that changes with anything a field is computed from.  parts: the same in detail."""

    digest: str
    parts: dict[str, Any]


def fingerprint(
    pipeline: Any, *, chunk: Mapping[str, int] | None = None, paranoid: bool = False
) -> dict[str, Fingerprint]:
    """The fingerprint of every field that a stage writes.

    >>> import frostline as fl, torch
    >>> net = torch.nn.Linear(2, 2)
    >>> rows = fl.Source.table([{"key": "a", "x": 1.0}])
    >>> data = fl.Pipeline(rows, fl.Stage("y", net, reads="x", on="device"))
    >>> before = fingerprint(data)["y"]
    >>> net.requires_grad_(False).bias[0] += 1.0
    >>> [text.split(":")[0] for text in differences(before.parts, fingerprint(data)["y"].parts)]
    ['weights of stage y']

    chunk:    stage name → samples a call that it really runs with (after it ran out of memory, say).
    paranoid: load what is lazy even where its files are known.
    """
    parts, problems = {}, []
    for stage in pipeline.stages:
        try:
            parts[stage.name] = _stage_parts(stage, (chunk or {}).get(stage.name), paranoid=paranoid)
        except UsageError as error:
            problems += [f"stage {stage.name}: {text}" for text in error.problems or [str(error)]]
    if problems:
        raise UsageError("Cannot tell what these fields are computed from:", problems=problems)
    found: dict[str, Fingerprint] = {}
    for stage in pipeline.stages:
        for field in stage.writes:
            found[field] = _field(pipeline, stage, field, parts, found)
    return found


def _field(
    pipeline: Any, stage: Any, field: str, parts: dict[str, Any], found: dict[str, Fingerprint]
) -> Fingerprint:
    above: list[Tree] = []
    stages: dict[str, Any] = {}
    for name in stage.reads:
        if pipeline.writer_of(name) is None:
            above.append({"raw": name})
        else:
            above.append({"field": found[name].digest})
            stages.update(found[name].parts["stages"])
    own = parts[stage.name]
    stages[stage.name] = own
    # The name of a random stage is part of its key to the random numbers; of another it is only a name.
    counted = {name: own[name] for name in _COUNTED} | ({"name": stage.name} if own["random"] else {})
    total = digest({"stage": counted, "above": above, "field": field})
    return Fingerprint(total, shortened({"field": field, "stages": stages}))


# --- one stage ----------------------------------------------------------------------------------------


def _stage_parts(stage: Any, chunk: int | None, *, paranoid: bool) -> dict[str, Any]:
    asked = _asked(stage)
    vouched = stage.version is not None
    code, given, weights, structure = _content(stage.fn, vouched=vouched, paranoid=paranoid)
    libraries = dict(code.libraries)
    if stage.on == "device":
        libraries.update(filter(None, [origin.version_of("torch")]))
    return {
        "code": None if vouched else code.digest,
        "functions": code.functions,
        "values": code.values,
        "parameters": _limited(given),
        "weights": weights,
        "structure": structure,
        "precision": getattr(stage, "precision", None),
        "compile": bool(getattr(stage, "compile", False)),
        "chunk": chunk or asked,
        "chunk_asked": asked,
        "version": stage.version,
        "random": bool(stage.random),
        "libraries": libraries,
        "reads": list(stage.reads),
        "writes": list(stage.writes),
    }


def _asked(stage: Any) -> int | None:
    found = getattr(stage, "device_chunk", None) or getattr(stage, "chunk", None) or stage.batch_size
    return None if found is None else int(found)


def _content(fn: Any, *, vouched: bool, paranoid: bool) -> tuple[Code, Tree, str | None, str | None]:
    """Code, parameters, weights and structure of a stage's function."""
    if _is_network(fn):
        found = weights_of(fn, vouched=vouched)
        return found.code, None, found.digest, found.structure
    lazy = lazies.is_lazy(fn)
    code, given = examine(fn, vouched=vouched, files="loader" if lazy else "stage")
    if not lazy:
        return code, given, None, None
    made = lazies.made_by(fn, paranoid=paranoid, vouched=vouched)
    both = Code(
        digest=digest([code.digest, made.code]),
        functions={**code.functions, **made.functions},
        values={**code.values, **made.values},
        libraries={**code.libraries, **made.libraries},
        references=code.references,
        sources=code.sources,
    )
    return both, given, made.weights, made.structure


def _is_network(fn: Any) -> bool:
    torch = sys.modules.get("torch")  # not loaded: then nothing is a network
    return torch is not None and isinstance(fn, torch.nn.Module)


def _limited(given: Tree) -> Tree:
    size = len(json.dumps(given))
    return given if size <= _SHOWN else {"kind": "parameters", "digest": digest(given)}


# --- as it is stored ----------------------------------------------------------------------------------


def shortened(parts: dict[str, Any]) -> dict[str, Any]:
    """Below 48 KiB of JSON: the longest maps of functions and values give way to their number.

    What the digest is made from stays; only which function changed can then no longer be told.
    """
    stages = {name: dict(part) for name, part in parts["stages"].items()}
    maps = [(len(json.dumps(part[kind])), name, kind) for name, part in stages.items() for kind in _MAPS]
    size = len(json.dumps(parts))
    for length, name, kind in sorted(maps, reverse=True):
        if size <= _LIMIT:
            break
        count = len(stages[name][kind])
        stages[name][kind] = {}
        stages[name][f"{kind}_left_out"] = count
        size -= length - 40
    return {**parts, "stages": stages}


_MAPS = ("functions", "values")
