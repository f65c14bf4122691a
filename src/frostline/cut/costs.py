"""What is known of a pipeline's stages and of its possible cuts: plain figures, nothing measured here."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from frostline.feed import memory

SPARE_DISK = 256 << 20
"""Bytes that a store leaves free on its disk, as a freeze does."""


@dataclass(frozen=True)
class Cost:
    """Seconds a sample: on the clock, and of all cores together.

    >>> Cost(0.5, 1.0) + Cost(0.25, 0.25)
    Cost(wall=0.75, cores=1.25)
    """

    wall: float = 0.0
    cores: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.wall + other.wall, self.cores + other.cores)

    def __sub__(self, other: Cost) -> Cost:
        """What is left, never below nothing."""
        return Cost(max(0.0, self.wall - other.wall), max(0.0, self.cores - other.cores))

    def at_most(self, other: Cost) -> Cost:
        return Cost(min(self.wall, other.wall), min(self.cores, other.cores))


def at_once(*costs: Cost, n_cores: int) -> float:
    """Seconds a sample when these go on at the same time: the slowest, unless they want more cores than
    there are. Then it is the core time of all of them, shared out.

    >>> at_once(Cost(0.3, 0.3), Cost(0.2, 0.2), n_cores=4)
    0.3
    >>> at_once(Cost(0.3, 0.6), Cost(0.2, 0.4), n_cores=2)
    0.5
    """
    return max(*(c.wall for c in costs), sum(c.cores for c in costs) / n_cores)


@dataclass(frozen=True)
class StepCost:
    """One training step: compute only, with a batch that is on the device already."""

    seconds: float
    samples: int
    cores: float | None = None
    """How many cores it keeps busy. None: on the CPU all of them, otherwise one."""

    def a_sample(self, device: torch.device, n_cores: int) -> Cost:
        busy = self.cores if self.cores is not None else n_cores if device.type == "cpu" else 1
        wall = self.seconds / self.samples
        return Cost(wall, wall * busy)


@dataclass(frozen=True)
class StageCost:
    """What a stage takes for one sample, and the bytes of the fields that it writes."""

    name: str
    on: str
    """"cpu", "device", or "source" for getting the raw fields."""
    frozen: bool
    seconds: float
    """Alone: one thread for a stage of single samples, whole chunks for others."""
    together: Cost
    """Where it runs: workers beside each other for a stage of single samples."""
    bytes: Mapping[str, float]
    """Field → bytes a sample, as stored without a lossy codec; fields that no store can hold are left out."""


@dataclass(frozen=True)
class Budgets:
    """What may be taken, in bytes."""

    disk: int
    ram: int
    device: int

    @staticmethod
    def here(root: Path, device: torch.device) -> Budgets:
        """What is free: where the store would lie, in this machine, on the device."""
        place = next(p for p in (root, *root.absolute().parents) if p.exists())
        on_device = memory.device_free_bytes(device) if device.type != "cpu" else 0
        return Budgets(shutil.disk_usage(place).free, memory.host_free_bytes(), on_device)

    def tier(self, size: float, device: torch.device) -> str:
        """Where a feed would hold so many bytes, by the rule of `feed.tiers`."""
        if device.type != "cpu" and size <= self.device // 5:
            return "device"
        if device.type == "cuda" and size <= self.ram // 3:
            return "pinned"
        return "mmap" if size <= 0.7 * self.ram else "disk"


@dataclass(frozen=True)
class Option:
    """One place to draw the line. Times in seconds for all samples, those of an epoch for one epoch."""

    fields: tuple[str, ...]
    """What the store would hold; empty: nothing is stored, everything is computed live."""
    bytes: int
    freeze_s: float
    read_s: float
    prepare_s: float
    """The stages of single samples that run each epoch, on all workers."""
    compute_s: float | None
    """The stages that take chunks and run each epoch, and the training step; None: the step is unknown and
    nothing else is computed."""
    epoch_s: float
    total_s: float
    """Freezing, and as many epochs as were asked about."""
    break_even: int | None
    """The first epoch after which it has taken less time than storing nothing; None: never."""
    fits_disk: bool
    fits_ram: bool
    fits_device: bool
    tier: str | None
    """Where the feed would hold it; None for nothing."""
    why_not: str | None = None
    """Why it cannot be chosen."""

    @property
    def name(self) -> str:
        return ", ".join(self.fields) or "nothing"


@dataclass(frozen=True)
class Offer:
    """A lossy codec for a field: what it would save, and what it does to the values. Never chosen unasked."""

    field: str
    codec: str
    bytes: float
    """A sample."""
    raw_bytes: float
    error: float
    """Relative: the length of the difference over the length of the values, on the samples measured."""

    @property
    def flag(self) -> str:
        return f"--codec {self.field}={self.codec}"


@dataclass(frozen=True)
class CutPlan:
    """What every cut would take, and which is best for a run of `epochs`. `fl.freeze(…, cut=plan.cut)`."""

    stages: tuple[StageCost, ...]
    options: tuple[Option, ...]
    """The shortest run first; what cannot be chosen last."""
    chosen: Option
    why: str
    offers: tuple[Offer, ...]
    epochs: float
    samples: int
    measured: int
    """Samples on which all this was measured."""
    notes: tuple[str, ...] = ()

    @property
    def cut(self) -> tuple[str, ...]:
        """The fields to give to `fl.freeze(cut=…)`; empty when nothing should be stored."""
        return self.chosen.fields

    def option(self, fields: Sequence[str]) -> Option | None:
        """The option that stores just these fields."""
        return next((o for o in self.options if {*o.fields} == {*fields}), None)

    def table(self) -> str:
        """All of it for a terminal."""
        from frostline.cut.words import lines

        return "\n".join(lines(self))
