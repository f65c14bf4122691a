"""Work that is done again: inputs that the same function had seen before, and what storing would need."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from frostline.profiler.rows import Spans
from frostline.profiler.steps import Raw, a_step, main_loader
from frostline.results import Repeat

_TRIED_BYTES = 32 << 20

Disk = Callable[[], tuple[float, float]]
"""Bytes a second, written and read; measured when it is first asked for."""


def repeats(raw: Raw, spans: Spans, prepared: Sequence[Mapping[str, Any]], out: Path) -> tuple[Repeat, ...]:
    """Everything that was seen to be done again, the dearest first."""
    disk = cache(partial(_disk, out))
    found = [*_modules(raw, spans, disk), *_decodes(raw, prepared, disk), *_items(raw, prepared)]
    return tuple(sorted(found, key=lambda repeat: -(repeat.ms or 0.0)))


def _modules(raw: Raw, spans: Spans, disk: Disk) -> list[Repeat]:
    about = {module["name"]: module for module in raw["modules"]}
    found = []
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
        size = about[name]["out_bytes"] if name in about else 0
        rows = held["rows"] / max(1, held["looked"]) * module["calls"] / max(1, module["steps"])
        samples = _samples(raw)
        epochs = _pays(ms / rows / 1000, size, disk) if rows and samples else None
        results = _distinct(raw, held["rows"] - held["repeats"], held["rows"], _rows_a_sample(raw, rows))
        stored = size * results or None
        note = "" if exact else f"looked at {held['looked']} of {held['calls']} calls"
        what = f"module {name}"
        found.append(Repeat(what, held["rows"], held["repeats"], ms * share, exact, epochs, note, stored))
    return found


def _rows_a_sample(raw: Raw, rows: float) -> int:
    """Of a module that is given `rows` a step: an encoder of single frames has many. Whole ones, as half
    batches that were tried count too."""
    samples = a_step(raw, "rows", ("A", "B"))
    return max(1, round(rows / samples)) if samples else 1


def _distinct(raw: Raw, distinct: float, seen: float, a_sample: float) -> float:
    """Different results of the whole data set; 0: unknown. Those that were seen, for the share of its samples
    that was: as many more come with the others at most, and none where all of them were.

    a_sample: results that each sample needs, of which some may be the same.
    """
    loader = main_loader(raw)
    if loader is None or not loader["samples"]:
        return 0.0
    most: float = a_sample * loader["samples"]
    known = loader["items"] - loader["repeats"]
    left = loader["samples"] / known if known else most / max(1.0, seen)
    return min(most, distinct * max(1.0, left))


def _samples(raw: Raw) -> int | None:
    """Of the data set that steps read from most."""
    loader = main_loader(raw)
    return loader["samples"] if loader is not None else None


def _pays(compute: float, size: float, disk: Disk) -> float | None:
    """Epochs after which computing once, writing and reading has taken less time than computing each time.

    compute: seconds that one result takes; size: its bytes.
    """
    if not compute or not size:
        return None
    write, read = (size / rate for rate in disk())
    return (compute + write) / (compute - read) if compute > read else None


def _disk(out: Path) -> tuple[float, float]:
    """Bytes a second that a file here is written and read with. The kernel is asked to let go of the file
    before it is read: where it does (Linux, most disks), reading is from the disk, elsewhere from memory."""
    data = os.urandom(1 << 20) * (_TRIED_BYTES >> 20)
    with tempfile.NamedTemporaryFile(dir=out) as file:
        began = time.perf_counter()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        wrote = time.perf_counter() - began
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):  # a file system that takes no advice
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        began = time.perf_counter()
        while file.read(1 << 22):
            pass
        return _TRIED_BYTES / wrote, _TRIED_BYTES / (time.perf_counter() - began)


def _decodes(raw: Raw, prepared: Sequence[Mapping[str, Any]], disk: Disk) -> list[Repeat]:
    """Files, by what they are; the time is that of whoever decodes, which may be a worker."""
    calls: dict[str, list[tuple[str, float, int]]] = defaultdict(list)
    spent: dict[str, float] = defaultdict(float)
    known: dict[str, set[str]] = defaultdict(set)
    a_line = _a_line(raw, prepared)
    for line in prepared:
        for what, key, _, seconds, size in line["decodes"]:
            calls[what].append((key, seconds, size))
            if key in known[what]:
                spent[what] += seconds * a_line[_by_script(line)]
            if key:
                known[what].add(key)
    found = []
    for what, each in calls.items():
        seen = sum(bool(key) for key, *_ in each)
        again, unknown = seen - len(known[what]), len(each) - seen
        note = f"{unknown} more whose input could not be told" if unknown else ""
        compute, size = _typical(each)
        epochs = _pays(compute, size, disk)
        stored = size * _decoded(raw, prepared, what) or None
        ms = 1000 * spent[what]
        found.append(Repeat(f"decode {what}", seen, again, ms, not unknown, epochs, note, stored))
    return found


def _by_script(line: Mapping[str, Any]) -> bool:
    """Decoded by the script's own code, outside of every loader: such a line holds what a step decoded."""
    return not line["n"]


def _a_line(raw: Raw, prepared: Sequence[Mapping[str, Any]]) -> dict[bool, float]:
    """What share of a line a step has of it, on average: of loaders' lines, and of the script's own."""
    own = sum(map(_by_script, prepared))
    batches = a_step(raw, "batches", ("A", "B")) or 0.0
    return {True: 1 / max(1, own), False: batches / max(1, len(prepared) - own)}


def _typical(each: Sequence[tuple[str, float, int]]) -> tuple[float, float]:
    """(seconds, bytes) of a decode: the means of those whose input and size are known; (0, 0): of none."""
    known = [(seconds, size) for key, seconds, size in each if key and size]
    if not known:
        return 0.0, 0.0
    return statistics.fmean(s for s, _ in known), statistics.fmean(b for _, b in known)


def _decoded(raw: Raw, prepared: Sequence[Mapping[str, Any]], what: str) -> float:
    """Different results of `what` for all samples of the main loader; 0: unknown. Other loaders' are left
    out, the script's own are not: it decodes what the main loader gave it."""
    main = main_loader(raw)
    others = {loader["dataset"] for loader in raw["loaders"]} - {main["dataset"] if main else None}
    lines = [line for line in prepared if line["dataset"] not in others]
    samples = sum(line["n"] for line in lines)
    keys = [decode[1] for line in lines for decode in line["decodes"] if decode[0] == what]
    distinct = len({key for key in keys if key}) + keys.count("")
    return _distinct(raw, distinct, len(keys), len(keys) / samples) if samples else 0.0


def _items(raw: Raw, prepared: Sequence[Mapping[str, Any]]) -> list[Repeat]:
    """Items that had been asked for before; the time is what preparing them took, without decoding."""
    found = []
    for loader in raw["loaders"]:
        if loader["items"]:
            size = loader["samples"]
            note = f"a data set of {size:,}: from the second epoch on, every item" if size else ""
            if loader.get("anew"):
                note = f"{loader['anew'] + 1} data sets, one after the other: each counted by itself"
            batch = _preparation(raw, prepared, loader["dataset"])
            share = loader["repeats"] / loader["items"]
            ms = None if batch is None else 1000 * batch * loader["a_step"] * share
            what = f"items of {loader['dataset']}"
            found.append(Repeat(what, loader["items"], loader["repeats"], ms, True, None, note))
    return found


def _preparation(raw: Raw, prepared: Sequence[Mapping[str, Any]], dataset: str) -> float | None:
    """Seconds that a batch takes but for decoding; None: unknown, or of more than one loader."""
    mine = [line for line in prepared if line["dataset"] == dataset]
    if not mine or sum(loader["dataset"] == dataset for loader in raw["loaders"]) > 1:
        return None
    return statistics.fmean(max(0.0, line["s"] - sum(d[3] for d in line["decodes"])) for line in mine)
