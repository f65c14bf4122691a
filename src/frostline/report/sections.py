"""What a report says beside the times, as tables of text: the terminal and the page show the same ones."""

from __future__ import annotations

from collections.abc import Callable

from frostline.report.figures import between, ms, number, percent, times
from frostline.report.modules import modules
from frostline.report.section import Section, calls, column, scaled
from frostline.report.summary import pauses
from frostline.results import Copies, Loader, Profile, Remedy, Repeat, Trial
from frostline.wording import many, size

_MOST_SYNCS = 12
_TRIALS = {
    "real": "the data as they come",
    "replayed": "what was prepared before, again and again",
    "compute": "one batch that lies on the device",
    "cold": "real data, nothing of it in memory",
    "half": "half the batch",
}


def sections(profile: Profile) -> list[Section]:
    """All that have something to say, in the order in which people ask.

    >>> from frostline.results import Machine, Steps, Sync, Verdict
    >>> made = Profile(
    ...     "train.py", "SGD.step", Steps(68, 67, 69, 50), None, (), Verdict("unclear", ""),
    ...     Machine("cpu", 2, "2.11", "3.12"), syncs=(Sync("train.py:9", "item", 1, 0.5),),
    ... )
    >>> [section.title for section in sections(made)]
    ['The host waits for the device', 'The machine']
    """
    found = [make(profile) for make in _MAKERS]
    return [section for section in found if section.rows]


# --- one section each ---------------------------------------------------------------------------------


def _remedies(profile: Profile) -> Section:
    best = sorted(profile.remedies, key=lambda remedy: -remedy.bound)
    rows = [(f"at most {times(r.bound)}", r.name, _with_reason(r)) for r in best]
    return Section("What would help, and by how much at most", tuple(rows))


def _findings(profile: Profile) -> Section:
    rows = [("" if f.ms is None else ms(f.ms), f.title, f.text) for f in profile.findings]
    return Section("Findings", tuple(rows))


def _repeats(profile: Profile) -> Section:
    spent = column([r.ms for r in profile.repeats])
    rows = [
        (r.what, _seen(r), took, _pays(r), r.note) for r, took in zip(profile.repeats, spent, strict=True)
    ]
    columns = ("what", "seen before", "ms", "storing pays after", "")
    return Section("Work on inputs that had been seen before", tuple(rows), columns, ("ms",))


def _seen(repeat: Repeat) -> str:
    """
    >>> _seen(Repeat("module encoder", 320_000, 319_500, 12.0))
    '319,500 of 320,000 (99.8 %)'
    """
    sampled = "" if repeat.exact else ", a sample"
    return f"{repeat.repeats:,} of {repeat.seen:,} ({percent(repeat.share)}{sampled})"


def _pays(repeat: Repeat) -> str:
    if repeat.epochs is None:
        return "unknown"
    room = "" if repeat.stored is None else f", {size(repeat.stored)}"
    return f"{number(repeat.epochs, 1)} epochs{room}"


def _syncs(profile: Profile) -> Section:
    worst = sorted(profile.syncs, key=lambda sync: (-sync.ms, -sync.calls))
    spent = column([sync.ms for sync in worst[:_MOST_SYNCS]])
    rows = [(s.where, s.what, calls(s.calls), took) for s, took in zip(worst, spent, strict=False)]
    left = len(worst) - len(rows)
    return Section(
        "The host waits for the device", tuple(rows), ("where", "by", "calls a step", "ms"),
        ("calls a step", "ms"), f"and {many(left, 'place')} more" if left else "",
    )  # fmt: skip


def _copies(profile: Profile) -> Section:
    columns = ("from memory", "calls a step", "size", "ms", "rate", "the host waits")
    spent = column([c.ms for c in profile.copies])
    rows = tuple(
        (c.kind, calls(c.calls), size(c.bytes), took, _rate(c), "yes" if c.blocking else "no")
        for c, took in zip(profile.copies, spent, strict=True)
    )
    return Section("Copies to the device, a step", rows, columns, columns[1:5])


def _rate(copies: Copies) -> str:
    return f"{size(1000 * copies.bytes / copies.ms)}/s" if copies.ms else "–"


def _loaders(profile: Profile) -> Section:
    columns = ("loader", "workers", "batch", "batches", "waited for", "a batch takes", "pinned")
    spent = [f"{took} ms" for took in column([x.wait_ms for x in profile.loaders])]
    rows = tuple(
        (
            x.name, _workers(x), "?" if x.batch_size is None else f"{x.batch_size:,}",
            "?" if x.batches is None else f"{x.batches:,}",
            took, _prepare(x), "yes" if x.pinned else "no",
        )
        for x, took in zip(profile.loaders, spent, strict=True)
    )  # fmt: skip
    return Section(
        "Loaders: batches an epoch, and what the script waits for, a step", rows, columns, columns[2:5]
    )


def _workers(loader: Loader) -> str:
    return f"{loader.workers}" + ("" if loader.needed is None else f" (would need {loader.needed})")


def _prepare(loader: Loader) -> str:
    if loader.prepare_ms is None:
        return "?"
    return ms(loader.prepare_ms) + ("" if loader.decode_ms is None else f", {ms(loader.decode_ms)} decoding")


def _idle(profile: Profile) -> Section:
    worst = sorted(profile.idle, key=lambda idle: -idle.ms)
    spent = column([idle.ms for idle in worst])
    rows = tuple((i.cause, took, percent(i.share)) for i, took in zip(worst, spent, strict=True))
    return Section(
        "The device has nothing to do", rows, ("because of", "ms", "of the step"), ("ms", "of the step")
    )


def _trials(profile: Profile) -> Section:
    columns = ("trial", "what", "step", "samples/s", "")
    rows = tuple(
        (t.name, _TRIALS.get(t.name, ""), ms(t.ms) + _spread(t), _faster(t, profile), t.note)
        for t in profile.trials
    )
    more = "samples/s: against pass A's step, without what stands between epochs" if _pauses(profile) else ""
    return Section("The same steps with one thing changed", rows, columns, ("step", "samples/s"), more)


def _pauses(profile: Profile) -> bool:
    return profile.epoch is not None and pauses(profile.epoch)


def _spread(trial: Trial) -> str:
    found = between(trial.low, trial.high)
    return f" ({found})" if found else ""


def _with_reason(remedy: Remedy) -> str:
    """
    >>> _with_reason(Remedy("a faster loader", 1.3, "num_workers=2", "5 of 20 ms are waits"))
    'num_workers=2 (5 of 20 ms are waits)'
    """
    return f"{remedy.what} ({remedy.why})" if remedy.what and remedy.why else remedy.what or remedy.why


def _faster(trial: Trial, profile: Profile) -> str:
    """In samples/s: half the batch in half the time is no faster."""
    rows = 0.5 if trial.name == "half" else 1.0
    return times(rows * profile.wall.ms / trial.ms) if trial.ms and profile.wall.ms else "–"


def _machine(profile: Profile) -> Section:
    m = profile.machine
    known: list[tuple[str, float | None, Callable[[float], str]]] = [
        (
            "busy: in forward, backward and optimizer"
            if m.device == "cpu"
            else "busy: a kernel or a copy ran",
            m.busy,
            percent,
        ),
        ("nvidia-smi's utilisation: any kernel at all ran", m.nvml_utilization, percent),
        ("model FLOP utilisation", m.mfu, percent),
        ("the model's operations a step", m.flops, lambda n: f"{scaled(n)}FLOP"),
        ("the device's peak", m.peak_flops, lambda n: f"{scaled(n)}FLOP/s"),
        ("device memory, peak allocated", m.peak_allocated, size),
        ("device memory, peak reserved", m.peak_reserved, size),
        ("allocator retries", m.alloc_retries or None, lambda n: f"{n:,.0f}"),
        ("power", m.power_w, lambda n: f"{n:,.0f} W"),
        ("energy a sample", m.joules_per_sample, lambda n: f"{number(n)} J"),
        ("host cores used, workers included", m.cores_used, lambda n: f"{number(n, 1)} of {m.cores}"),
        ("host memory", m.rss, size),
        ("read from disk", m.disk_read_per_s, lambda n: f"{size(n)}/s"),
        ("pages read back from disk or swap, a step", m.major_faults or None, lambda n: number(n, 1)),
    ]
    rows = [("device", m.device)] + [(what, said(value)) for what, value, said in known if value is not None]
    return Section("The machine", tuple(rows), ("", "figure"), ("figure",))


_MAKERS: tuple[Callable[[Profile], Section], ...] = (
    _remedies, _findings, modules, _repeats, _syncs, _copies, _loaders, _idle, _trials, _machine,
)  # fmt: skip
