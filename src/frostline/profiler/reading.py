"""From what agents wrote to a `Profile`."""

from __future__ import annotations

import dataclasses
import os
import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from frostline.profiler import findings, peaks, remedies, repeats, steps, verdict
from frostline.profiler.launch import Ran
from frostline.profiler.monitor import Sample
from frostline.profiler.rows import Spans
from frostline.profiler.steps import Raw
from frostline.results import Copies, Idle, Loader, Machine, ModuleUse, Profile, Steps, Sync, Trial
from frostline.wording import many

_WORK = ("forward", "backward", "optimizer", "zero_grad", "clip")
_TRIALS = (
    ("real", "real", "in turns with replayed"), ("replay", "replayed", "one batch"),
    ("compute", "compute", "nothing is copied"), ("half", "half", "half of that batch"),
)  # fmt: skip
"""Phase, name and what the report's own words for it leave open."""
_TURNS = ("A", "bare", "B")
_BESIDE = {
    "lines": "the script's own lines", "trace": "what the device does",
    "look": "reads from the device and operations",
}  # fmt: skip
_OTHER_DATA = {
    "replay": "a batch again and again", "compute": "a batch on the device", "half": "half a batch",
}  # fmt: skip


def read(ran: Ran, out: Path) -> Profile:
    """The profile of a command's first rank."""
    raw = ran.processes[0]
    notes = _notes(ran)
    return profile_of(raw, _prepared(ran), ran.samples, shlex.join(ran.command), out, notes)


def _prepared(ran: Ran) -> list[dict[str, Any]]:
    """Batches that this process prepared, and its workers; not those of other ranks, or of another script."""
    raw = ran.processes[0]
    workers = [line for line in ran.workers if line["of"] == raw["pid"]]
    return [*workers, *({**line, "pid": raw["pid"]} for line in raw["prepared"])]


def profile_of(
    raw: Raw,
    prepared: Sequence[Mapping[str, Any]],
    samples: Sequence[Sample],
    command: str,
    out: Path,
    notes: Sequence[str] = (),
    trials: Sequence[Trial] = (),
) -> Profile:
    wall, spans = steps.timed(raw, "A"), Spans(raw)
    step = wall.ms if wall is not None else 0.0
    found = [*trials, *filter(None, (steps.trial(raw, *told) for told in _TRIALS))]
    kernels = raw.get("kernels", {})
    wait_ms = 1000 * (steps.a_step(raw, "waits") or 0.0)
    idle = _idle(kernels, step, wait_ms)
    machine = _machine(raw, wall, spans, kernels, samples)
    rows = spans.rows()
    loaders = _loaders(raw, prepared, step, found)
    seen = verdict.Seen(
        wall=wall, rows=rows, machine=machine, wait_ms=wait_ms,
        loaders=loaders, modules=_modules(raw, spans), trials={t.name: t for t in found}, idle=idle,
        syncs=_syncs(raw, spans), copies=_copies(raw), retries=steps.grown(raw, "retries"),
        swapped=steps.grown(raw, "swapped"), **_on_device(kernels, step),
        operators=raw.get("look", {}).get("operators", 0.0),
        lines=[(_here(line), share) for line, share in raw["lines"]],
        repeated={held["name"]: held["repeats"] / held["rows"] for held in raw["inputs"] if held["rows"]},
        items_again=max((x["repeats"] / x["items"] for x in raw["loaders"] if x["items"]), default=0.0),
        training=not raw["boundary"].startswith("call of"),
        alone=not trials and not any(loader.workers for loader in loaders),
        aside=bool((steps.main_loader(raw) or {}).get("aside")),
        epoch=steps.epoch(raw, wall) if wall else None, start=steps.start(raw),
    )  # fmt: skip
    again = repeats.repeats(raw, spans, prepared, out)
    return Profile(
        command=command, boundary=raw["boundary"], wall=wall or Steps(0.0, 0.0, 0.0, 0),
        attributed=_without(steps.timed(raw, "B"), spans), rows=rows, machine=machine,
        verdict=verdict.verdict(seen),
        samples=steps.a_step(raw, "rows") or None, epoch=seen.epoch,
        warmup=raw["warmup"], cost=steps.cost(raw), remedies=remedies.remedies(seen),
        findings=findings.findings(seen, again), modules=tuple(seen.modules), repeats=again,
        syncs=tuple(seen.syncs), copies=tuple(seen.copies), loaders=loaders, idle=idle, trials=tuple(found),
        timeline=spans.timeline([*prepared]),
        notes=(*notes, *raw["notes"], *_unreconciled(rows, wall), *_interludes(raw), *_uncounted(raw)),
        versions={"torch": raw["torch"], "python": raw["python"]},
    )  # fmt: skip


def _without(found: Steps | None, spans: Spans) -> Steps | None:
    """Pass B's step without what the profiler itself did in it."""
    if found is None or not spans.steps:
        return found
    less = found.ms - spans.ms
    return dataclasses.replace(found, ms=spans.ms, low=found.low - less, high=found.high - less)


def _notes(ran: Ran) -> list[str]:
    raw, found = ran.processes[0], []
    ended = raw["ended"]
    if ended not in ("stopped", "kept going"):
        found.append(f"the script ended before all steps were seen: {ended}, after {_seen(raw)}")
    if raw["trace"] and f"trace-{raw['pid']}.json" not in [path.name for path in ran.traces]:
        early = "trace" in raw["left"] or not raw["warmup"]
        found.append(
            f"--trace was asked for, but there is no trace{': the script ended before' if early else ''}"
        )
    if raw["swallowed"]:
        found.append("the script catches everything, also its own end; it had to be ended hard")
    others = [p for p in ran.processes[1:] if p["rank"] != raw["rank"]]
    if others:
        each = [(p["rank"], steps.timed(p, "A")) for p in others]
        told = ", ".join(f"rank {rank} {wall.ms:.1f} ms" for rank, wall in each if wall is not None)
        found.append(f"{len(others) + 1} ranks; this is rank {raw['rank']}. The others' step: {told}")
    beside = [p for p in ran.processes[1:] if p["rank"] == raw["rank"]]
    if beside:
        told = f"{len(beside)} more process{'es' if len(beside) > 1 else ''} took steps; this is"
        why = "a training before loops of calls, then who took the most"
        found.append(f"{told} `{shlex.join(raw['argv'])}`: {why}")
    return found


def _seen(raw: Raw) -> str:
    """How far a script came that ended by itself, and what is missing."""
    asked, left, taken = raw["asked"], raw["left"], many(raw["steps"], "step")
    if not raw["warmup"]:
        return f"{taken}, all of them warm-up: none of the {asked} asked for was measured"
    n = sum(len(block["times"]) for block in raw["blocks"] if block["phase"] in _TURNS)
    fewer = n < asked and any(phase in _TURNS for phase in left)
    told = f"{n} of the {asked} steps" if fewer else f"the {asked} steps"
    possible = _BESIDE | (_OTHER_DATA if any(loader["calls"] for loader in raw["loaders"]) else {})
    missing = [words for phase, words in possible.items() if phase in left]
    if not missing and not fewer:
        missing = ["turns that would have made their times surer"]
    out = f"; left out: {', '.join(missing)}" if missing else ""
    return f"{taken}, {raw['warmup']} of them warm-up: {told} asked for were measured{out}"


def _unreconciled(rows: Sequence[Any], wall: Steps | None) -> list[str]:
    if not rows or wall is None:
        return []
    off = sum(row.ms for row in rows) / wall.ms - 1
    if abs(off) <= 0.05:
        return []
    apart = f"{100 * abs(off):.1f} % {'more' if off > 0 else 'less'}"
    return [f"the rows add up to {apart} than pass A's step: take them for shares, not for times"]


def _interludes(raw: Raw) -> list[str]:
    """What is in the epoch's time, though neither in a step nor between epochs."""
    ms = 1000 * steps.interludes(raw)
    if not ms or ms < verdict.MUCH * 1000 * steps.usual(raw):
        return []
    return [
        f"between steps other loaders are read from, as an evaluation does: {ms:.1f} ms a step on average, "
        f"no part of pass A's step but of the epoch's time"
    ]


def _uncounted(raw: Raw) -> list[str]:
    """Where the operations are too few."""
    found = raw.get("look", {}).get("uncounted")
    return [f"not all operations were counted, so the utilisation is too low: {found}"] if found else []


def _modules(raw: Raw, spans: Spans) -> tuple[ModuleUse, ...]:
    found = []
    for module in raw["modules"]:
        seen = spans.modules.get(module["name"]) if spans.steps else None
        if seen is None and module["depth"] > 0:
            continue
        calls = seen[0] / spans.steps if seen else module["calls"] / max(1, module["steps"])
        ms = 1000 * seen[1] / spans.steps if seen else 0.0
        prefix = 1000 * spans.prefixes.get(module["prefix"], 0.0) / spans.steps if spans.steps else 0.0
        found.append(
            ModuleUse(
                module["name"], module["kind"], round(calls, 3), ms, tuple(module["rows"]), module["depth"],
                module["parameters"], module["trainable"], module["frozen"], module["compiled"],
                module["prefix"], prefix,
            )
        )  # fmt: skip
    return tuple(found)  # in the order of their calls


def _loaders(
    raw: Raw, prepared: Sequence[Mapping[str, Any]], step: float, trials: Sequence[Trial]
) -> tuple[Loader, ...]:
    waits = 1000 * (steps.a_step(raw, "waits") or 0.0)
    used = [loader for loader in raw["loaders"] if loader["calls"]]
    each_waits = _waits_of(raw, used)
    seconds = sum(each_waits)
    rest = next((t.ms for t in trials if t.name == "replayed"), step - waits)
    found = []
    for loader, its_s in zip(used, each_waits, strict=True):
        mine = [line for line in prepared if line["dataset"] == loader["dataset"]]
        prepare = 1000 * statistics.median(line["s"] for line in mine) if mine else None
        decode = (
            1000 * statistics.fmean(sum(d[3] for d in line["decodes"]) for line in mine) if mine else None
        )
        each = loader["a_step"]
        needed = None
        if prepare is not None and loader["workers"]:
            needed = max(1, -int(-(prepare * each) // max(rest, 0.1)))
        wait = waits * (its_s / seconds if seconds else 0.0)
        found.append(
            Loader(
                f"the loader of {loader['dataset']}", loader["workers"], loader["batch_size"],
                loader["batches"], each, wait, prepare, decode or None, loader["pinned"], needed,
            )
        )  # fmt: skip
    return tuple(sorted(found, key=lambda loader: -loader.wait_ms))


def _waits_of(raw: Raw, used: Sequence[Mapping[str, Any]]) -> list[float]:
    """Seconds that each loader was waited for, of those that a usual step reads from: where one gives it all
    of its batches, others are read from between steps, as for an evaluation."""
    main = steps.main_loader(raw)
    batches = steps.a_step(raw, "batches")
    only = main is not None and batches is not None and main["a_step"] >= batches
    return [loader["wait_s"] if not only or loader is main else 0.0 for loader in used]


def _syncs(raw: Raw, spans: Spans) -> tuple[Sync, ...]:
    """Places by the look; times by pass B, shared out by calls: under the look the device is idle anyway."""
    waits = raw.get("look", {}).get("waits", [])
    total = 1000 * spans.host["sync"] / spans.steps if spans.steps else 0.0
    each = total / max(1e-9, sum(w["calls"] for w in waits))
    found = [Sync(_here(w["where"]), w["what"], w["calls"], each * w["calls"]) for w in waits]
    return tuple(sorted(found, key=lambda sync: (-sync.ms, -sync.calls, sync.where)))


def _here(place: str) -> str:
    return place.removeprefix(f"{os.getcwd()}{os.sep}")


def _copies(raw: Raw) -> tuple[Copies, ...]:
    sums: dict[tuple[str, bool], list[float]] = {}
    for copy in raw.get("copies", []):
        held = sums.setdefault((copy["kind"], copy["blocking"]), [0.0, 0.0, 0.0])
        for i, name in enumerate(("calls", "bytes", "s")):
            held[i] += copy[name]
    n = max(1, sum(len(found["bounds"]) for found in raw.get("spans", [])))
    whole: dict[str, float] = {}
    for (kind, _), (_, size, _) in sums.items():
        whole[kind] = whole.get(kind, 0.0) + size
    on_device = raw.get("kernels", {}).get("up_s", {})
    found = []
    for (kind, blocking), (calls, size, seconds) in sums.items():
        took = seconds / n if blocking else on_device.get(kind, 0.0) * size / max(1.0, whole[kind])
        found.append(Copies(kind, calls / n, size / n, 1000 * took, blocking))
    return tuple(found)


def _on_device(kernels: Mapping[str, Any], step: float) -> dict[str, float]:
    """What copies that nothing ran beside, and kernels, take of pass A's step; of a traced step that took
    longer, the same shares."""
    if "busy_s" not in kernels:
        return {}
    traced = 1000 * (kernels["busy_s"] + sum(kernels["idle_s"].values()))
    scale = 1000 * min(1.0, step / traced) if traced else 0.0
    copies = kernels["exposed_copy_s"]
    return {"exposed_copy_ms": scale * copies, "kernels_ms": scale * (kernels["busy_s"] - copies)}


def _idle(kernels: Mapping[str, Any], step: float, wait_ms: float) -> tuple[Idle, ...]:
    """Idle time of pass A's step. What it waited for data is pass A's to say, as batches lie ready by the
    time the tracer has started; the other causes are shared out as the trace showed them."""
    if not kernels.get("idle_s") or not step:
        return ()
    total = sum(kernels["idle_s"].values())
    idle = max(0.0, step - 1000 * kernels["busy_s"])
    data = min(idle, wait_ms)
    rest = total - kernels["idle_s"]["data"]
    found = {"data": data}
    for cause, seconds in kernels["idle_s"].items():
        if cause != "data" and rest:
            found[cause] = (idle - data) * seconds / rest
    return tuple(Idle(cause, ms, ms / step) for cause, ms in found.items() if ms > 0)


def _machine(
    raw: Raw, wall: Steps | None, spans: Spans, kernels: Mapping[str, Any], samples: Sequence[Sample]
) -> Machine:
    device, look = raw["device"], raw.get("look", {})
    gpu = device["name"] != "cpu"
    flops = look.get("flops")
    dtypes = look.get("flops_by_dtype") or {}
    peak = peaks.of_mix(device["name"], dtypes)
    busy: float | None = None
    if wall is not None and gpu and "busy_s" in kernels:
        busy = min(1.0, 1000 * kernels["busy_s"] / wall.ms)
    elif spans.total and not gpu:
        busy = sum(spans.own[kind] - spans.beside[kind] for kind in _WORK) / spans.total
    rows = steps.a_step(raw, "rows")
    used = _used(raw, samples)
    watts = used.get("watts")
    joules = watts * wall.ms / 1000 / rows if watts and wall is not None and rows else None
    return Machine(
        device=device["name"], cores=len(os.sched_getaffinity(0)), torch=raw["torch"], python=raw["python"],
        ranks=raw["world"], busy=busy, flops=flops, peak_flops=peak,
        mfu=flops / (wall.ms / 1000) / peak if flops and peak and wall else None,
        nvml_utilization=used.get("utilization"), power_w=watts, joules_per_sample=joules,
        peak_allocated=device.get("peak_allocated"), peak_reserved=device.get("peak_reserved"),
        alloc_retries=int(device.get("alloc_retries", 0)), rss=used.get("rss"), cores_used=used.get("cores"),
        disk_read_per_s=used.get("read"), major_faults=steps.grown(raw, "faults"),
    )  # fmt: skip


def _used(raw: Raw, samples: Sequence[Sample]) -> dict[str, float]:
    """What was used between the first and the last block of pass A, as seen from outside."""
    blocks = [b for b in raw["blocks"] if b["phase"] in ("A", "B", "bare") and "end" in b]
    if not blocks:
        return {}
    inside = [s for s in samples if blocks[0]["start"] <= s.at <= blocks[-1]["end"]]
    if len(inside) < 2:
        return {}
    first, last = inside[0], inside[-1]
    seconds = last.at - first.at
    found = {
        "cores": (last.cpu_s - first.cpu_s) / seconds, "rss": max(s.rss for s in inside),
        "read": (last.read_bytes - first.read_bytes) / seconds,
    }  # fmt: skip
    mine = [
        gpu for s in inside for uuid, gpu in s.gpus.items() if uuid.endswith(raw["device"].get("uuid", "?"))
    ]
    if mine:
        found["watts"], found["utilization"] = (
            statistics.fmean(column) for column in zip(*mine, strict=True)
        )
    return found
