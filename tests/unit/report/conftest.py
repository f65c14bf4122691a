"""Made-up profiles that look like real ones: an encoder run again and again, behind a slow loader."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest

from frostline.results import (
    Copies,
    Cost,
    Epoch,
    Finding,
    Idle,
    Loader,
    Machine,
    ModuleUse,
    Profile,
    Remedy,
    Repeat,
    Row,
    Span,
    Steps,
    Sync,
    Trial,
    Verdict,
)

Make = Callable[..., Profile]

ROWS = (
    Row("data", "waiting for the loader", 20.4, 0.333, "4 workers; a batch takes one of them 96 ms"),
    Row("copy", "copies to the device", 3.1, 0.051, "pageable"),
    Row("forward", "forward", 18.9, 0.309),
    Row("backward", "backward", 17.0, 0.278),
    Row("optimizer", "optimizer step", 3.4, 0.056),
    Row("sync", "waiting for the device", 2.6, 0.042, "item, train.py:118"),
    Row("overlap", "overlap: done at the same time", -6.1, -0.1),
    Row("other", "other", 1.9, 0.031),
)


def steps(mean: float, count: int = 50, *, spread: float = 0.04, seed: int = 0) -> Steps:
    """Steps whose times scatter about a mean."""
    draw = random.Random(seed)
    times = [mean * (1 + draw.gauss(0, spread)) for _ in range(count)]
    ms = sum(times) / count
    half = 1.96 * spread * mean / count**0.5
    blocks = tuple(sum(times[i : i + 10]) / 10 for i in range(0, count - 9, 10))
    return Steps(ms, ms - half, ms + half, count, tuple(times), blocks)


def timeline(steps: int = 3, tiny: int = 120) -> tuple[Span, ...]:
    """Steps with loader, forward (nested), backward and many kernels that are too short to see."""
    found = []
    for step in range(steps):
        at = 61.2 * step
        host = [("data", "next(loader)", 0, 20.4, 0), ("copy", "batch.to", 20.4, 3.1, 0)]
        host += [("forward", "model", 23.5, 18.9, 0), ("forward", "encoder", 24, 15, 1)]
        host += [("forward", f"blocks.{k}", 24.2 + 2.4 * k, 2.3, 2) for k in range(6)]
        host += [("backward", "loss.backward", 42.4, 13, 0), ("optimizer", "AdamW.step", 55.4, 3.4, 0)]
        host += [("sync", "item", 58.8, 2.4, 0)]
        found += [
            Span("host", kind, name, at + start, ms, step, depth) for kind, name, start, ms, depth in host
        ]
        wide = 36 / max(tiny, 1)
        found += [
            Span("device", "forward" if k < tiny / 2 else "backward", f"kernel_{k % 7}", at + 24 + wide * k,
                 0.8 * wide if k % 9 else 0.01, step)
            for k in range(tiny)
        ]  # fmt: skip
        for worker in (1, 2):
            start = at + 7 * worker
            found.append(Span(f"worker {worker}", "data", "prepare", start, 50, step))
            found.append(Span(f"worker {worker}", "decode", "PIL.Image.open", start + 4, 38, step, 1))
    return tuple(found)


MACHINE = Machine(
    "NVIDIA H200", 16, "2.11.0", "3.12.4", busy=0.58, flops=3.2e12, peak_flops=9.89e14, mfu=0.053,
    nvml_utilization=0.94, power_w=312, joules_per_sample=0.59, peak_allocated=21.4e9, peak_reserved=30.1e9,
    alloc_retries=2, rss=9.1e9, cores_used=4.6, disk_read_per_s=310e6, major_faults=0.4,
)  # fmt: skip

MODULES = (
    ModuleUse("model", "Detector", 1, 18.9, (32,), 0, 23_100_000, 12_100_000),
    ModuleUse("encoder", "VisionTransformer", 6, 15.2, (1, 3), 1, 21_800_000, 10_800_000,
              prefix="blocks.5", prefix_ms=7.4),
    *(ModuleUse(f"encoder.blocks.{k}", "Block", 6, 1.2 - k / 100, (1,), 2, 1_774_464,
                0 if k < 6 else 1_774_464, "parameters" if k < 6 else "") for k in range(12)),
    ModuleUse("text", "CLIPTextModel", 1, 2.1, (32,), 1, 63_000_000, 0, "no_grad", True),
    ModuleUse("head", "Head", 1, 0.8, (32,), 1, 1_300_000, 1_300_000, compiled=True),
)  # fmt: skip


@pytest.fixture
def make() -> Make:
    """make(field=…): a profile with something in every section, some fields changed."""

    def made(**changed: Any) -> Profile:
        return dataclasses.replace(_full(), **changed)

    return made


def _full() -> Profile:
    return Profile(
        "python train.py --data /data/episodes --batch-size 32", "AdamW.step", steps(60.8),
        steps(61.2, seed=1), ROWS,
        Verdict(
            "input-bound", "The step waits for its data a third of the time; a faster loader comes first.",
            ("the loader is waited for 20.4 of 60.8 ms", "with one prepared batch the step takes 41.3 ms",
             "half the batch takes 0.52 of the time, so kernels, not launches, fill the rest"),
        ),
        MACHINE, samples=32, epoch=Epoch(842, 829, 860, 13_850, 3.2), warmup=12,
        cost=Cost(0.006, -0.004, 0.015),
        remedies=(
            Remedy("store what never changes", 1.62, "Freeze images and blocks 0–5 once: `frostline freeze`.",
                   "27.8 ms a step go into inputs that were seen before."),
            Remedy("a faster loader", 1.47, "Seven workers, or prepared data.",
                   "It is waited for 20.4 ms a step."),
            Remedy("pinned copies", 1.05, "pin_memory=True and non_blocking=True."),
        ),
        findings=(
            Finding("calls", "6 batch-1 calls of encoder in a step", "One call of six rows does the same.",
                    15.2),
            Finding("repeat", "images are decoded again in every epoch", "319,500 of 320,000 had been seen.",
                    20.4),
            Finding("compile", "the encoder runs outside the compiled region",
                    "model.forward is compiled, but model.encode, which is called first, is not."),
        ),
        modules=MODULES,
        repeats=(
            Repeat("decode PIL.Image.open", 320_000, 319_500, 20.4, epochs=1.2),
            Repeat("module encoder.blocks.5", 12_800, 11_904, 7.4, False, 2.0, "rows by content"),
            Repeat("dataset items", 1600, 0, None),
        ),
        syncs=(Sync("/home/me/project/train.py:118", "item", 1, 2.6), Sync("train.py:121", "float", 2, 0.1)),
        copies=(Copies("pageable", 2, 25_165_824, 3.1, True), Copies("pinned", 1, 4096, 0.01, False)),
        loaders=(Loader("train_loader", 4, 32, 13_850, 1, 20.4, 96.2, 71.5, needed=7),
                 Loader("stream", 0, None, None, 0.1, 0.4)),
        idle=(Idle("data", 19.8, 0.326), Idle("sync", 2.5, 0.041), Idle("launch", 1.9, 0.031)),
        trials=(Trial("replayed", 41.3, 40.9, 41.8), Trial("compute", 38.2, 37.9, 38.6),
                Trial("half", 31.5, 31.0, 32.2, "16 rows")),
        timeline=timeline(),
        notes=("Cold data were not measured: dropping the page cache needs root.",
               "The script was stopped after 62 steps, as asked for."),
        versions={"frostline": "0.1.0"},
    )  # fmt: skip


@pytest.fixture
def empty() -> Profile:
    """Of a script that never stepped."""
    nothing = Steps(0, 0, 0, 0)
    verdict = Verdict("unclear", "No step was seen, so nothing can be said.")
    return Profile("python empty.py", "", nothing, None, (), verdict, Machine("cpu", 2, "2.11.0", "3.12.4"))
