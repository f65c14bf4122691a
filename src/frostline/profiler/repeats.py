"""Work that is done again: inputs that the same function had seen before, and what storing would need."""

from __future__ import annotations

import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from frostline.profiler.rows import Spans
from frostline.profiler.steps import Raw, a_step, main_loader
from frostline.results import Repeat

_TRIED_BYTES = 32 << 20


def repeats(raw: Raw, spans: Spans, prepared: Sequence[Mapping[str, Any]], out: Path) -> tuple[Repeat, ...]:
    """Everything that was seen to be done again, the dearest first."""
    found = [*_modules(raw, spans, out), *_decodes(raw, prepared), *_items(raw)]
    return tuple(sorted(found, key=lambda repeat: -(repeat.ms or 0.0)))


def _modules(raw: Raw, spans: Spans, out: Path) -> list[Repeat]:
    about = {module["name"]: module for module in raw["modules"]}
    found = []
    rates = None
    for held in raw["inputs"]:
        module = about.get(held["name"])
        if module is None or held["moved"] or not held["rows"]:
            continue
        name = module["prefix"] if module["prefix"] and not module["frozen"] else held["name"]
        seconds = spans.modules[name][1] if name in spans.modules else 0.0
        if name != held["name"]:
            seconds = spans.prefixes.get(name, 0.0)
        ms = 1000 * seconds / spans.steps if spans.steps else 0.0
        share = held["repeats"] / held["rows"]
        exact = held["looked"] == held["calls"]
        rates = rates or _disk(out)
        epochs = _pays(raw, module, name, ms, held, rates)
        note = "" if exact else f"looked at {held['looked']} of {held['calls']} calls"
        found.append(Repeat(f"module {name}", held["rows"], held["repeats"], ms * share, exact, epochs, note))
    return found


def _pays(
    raw: Raw,
    module: Mapping[str, Any],
    name: str,
    ms: float,
    held: Mapping[str, Any],
    rates: tuple[float, float],
) -> float | None:
    """Epochs after which computing once, writing and reading has taken less time than computing each time."""
    loader = main_loader(raw)
    size = next((m["out_bytes"] for m in raw["modules"] if m["name"] == name), 0)
    a_row = held["rows"] / max(1, held["looked"]) * module["calls"] / max(1, module["steps"])
    if loader is None or not loader["samples"] or not size or not ms or not a_row:
        return None
    compute, write, read = ms / a_row / 1000, size / rates[0], size / rates[1]
    return (compute + write) / (compute - read) if compute > read else None


def _disk(out: Path) -> tuple[float, float]:
    """Bytes a second that a file here is written and read with; reading is from memory."""
    data = os.urandom(1 << 20) * (_TRIED_BYTES >> 20)
    with tempfile.NamedTemporaryFile(dir=out) as file:
        began = time.perf_counter()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        wrote = time.perf_counter() - began
        file.seek(0)
        began = time.perf_counter()
        while file.read(1 << 22):
            pass
        return _TRIED_BYTES / wrote, _TRIED_BYTES / (time.perf_counter() - began)


def _decodes(raw: Raw, prepared: Sequence[Mapping[str, Any]]) -> list[Repeat]:
    """Files, by what they are; the time is that of whoever decodes, which may be a worker."""
    calls: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for line in prepared:
        for what, key, _, seconds in line["decodes"]:
            calls[what].append((key, seconds))
    batches = a_step(raw, "batches", ("A", "B")) or 0.0
    found = []
    for what, each in calls.items():
        known: set[str] = set()
        seen = again = 0
        spent = 0.0
        for key, seconds in each:
            if key:
                seen += 1
                again += key in known
                spent += seconds if key in known else 0.0
                known.add(key)
        ms = 1000 * spent / max(1, len(prepared)) * batches
        unknown = len(each) - seen
        note = f"{unknown} more whose input could not be told" if unknown else ""
        found.append(Repeat(f"decode {what}", seen, again, ms, not unknown, None, note))
    return found


def _items(raw: Raw) -> list[Repeat]:
    found = []
    for loader in raw["loaders"]:
        if loader["items"]:
            size = loader["samples"]
            note = f"a data set of {size:,}: from the second epoch on, every item" if size else ""
            found.append(
                Repeat(
                    f"items of {loader['dataset']}",
                    loader["items"],
                    loader["repeats"],
                    None,
                    True,
                    None,
                    note,
                )
            )
    return found
