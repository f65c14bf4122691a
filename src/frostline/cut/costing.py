"""What a cut takes: from the costs of the stages, and from trying it out."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from frostline.cut.costs import SPARE_DISK, Budgets, Cost, Option, StepCost, at_once
from frostline.cut.fields import Fields
from frostline.cut.rehearsal import Freezing
from frostline.cut.trial import Trial, Tried
from frostline.cut.walk import FEWEST, Walk
from frostline.execution import Execution
from frostline.freezer.workers import cores
from frostline.stage import Stage
from frostline.supply.layout import Layout

_AUDIT_CALLS = 7
"""Calls of a stage before a freeze begins: an audit, and the first samples."""
_MARGIN = 1.02
"""Headers and index on top of the rows' bytes, as in a freeze's own forecast."""
_BOUND = 1.05
"""Batches that take so much longer than reading and late stages are held up by being prepared."""


@dataclass(frozen=True)
class Lanes:
    """What goes on in every epoch, a sample: reading, preparing ahead, and what the training thread does."""

    read: Cost
    prepare: Cost
    late: Cost
    """Stages of the training thread, before the step."""
    step: Cost

    def epoch(self, *, one_processor: bool) -> float:
        """Seconds a sample. On a GPU all three go on at once, and the slowest counts.

        Without one they take turns: a step on the CPU wants all cores, and Python's lock keeps threads of
        cheap stages from running beside it. Of adding and taking the slowest, adding was nearer
        where the two were compared.
        """
        compute = self.late + self.step
        if one_processor:
            return self.read.wall + self.prepare.wall + compute.wall
        return at_once(self.read, self.prepare, compute, n_cores=cores())


@dataclass(frozen=True)
class Costing:
    """Works cuts out, from what was measured."""

    walk: Walk
    fields: Fields
    step: StepCost | None
    epochs: float
    total: int
    """Samples of the source: so many are frozen."""
    trained: float
    """Samples of an epoch."""
    trial: Trial
    budgets: Budgets

    @property
    def _one_processor(self) -> bool:
        return self.walk.device.type == "cpu"

    def option(self, cut: tuple[str, ...]) -> Option:
        """All figures of a cut."""
        cannot = [f"{name}: {self.fields.unstorable[name]}" for name in cut if name in self.fields.unstorable]
        size = self._bytes(cut)
        tier = self.budgets.tier(size, self.walk.device) if cut else None
        fits = not cut or size + SPARE_DISK <= self.budgets.disk
        if not fits:
            cannot.append("it does not fit the disk")
        frozen, lanes = self._tried(cut, size, tier, possible=not cannot)
        cannot += [self.trial.refused[cut]] if cut in self.trial.refused else []
        epoch = lanes.epoch(one_processor=self._one_processor) * self.trained
        computes = self.step is not None or lanes.late.wall > 0
        return Option(
            fields=cut, bytes=size, freeze_s=frozen, read_s=lanes.read.wall * self.trained,
            prepare_s=lanes.prepare.wall * self.trained,
            compute_s=(lanes.late + lanes.step).wall * self.trained if computes else None,
            epoch_s=epoch, total_s=frozen + self.epochs * epoch, break_even=None,
            fits_disk=fits, fits_ram=tier != "disk", fits_device=tier in (None, "device"), tier=tier,
            why_not="; ".join(cannot) or None,
        )  # fmt: skip

    def _bytes(self, cut: Sequence[str]) -> int:
        """On disk, for all samples."""
        a_sample = sum(self.fields.bytes.get(name, 0.0) for name in cut) + self.fields.source_bytes
        return int(a_sample * self.total * _MARGIN) if cut else 0

    def _tried(
        self, cut: tuple[str, ...], size: int, tier: str | None, *, possible: bool
    ) -> tuple[float, Lanes]:
        """(seconds to freeze, what goes on in an epoch)."""
        layout = Layout(self.walk.pipeline, cut if cut else None)
        late = self._sum(stage for step in layout.late for stage in step.stages)
        prepare = self._sum(stage for step in layout.ahead for stage in step.stages)
        prepare += self.walk.source.together if layout.raw else Cost()
        step = self.step.a_sample(self.walk.device, cores()) if self.step is not None else Cost()
        lanes = Lanes(Cost(), prepare, late, step)
        if not possible:
            return 0.0, lanes
        expected = prepare.wall + late.wall
        if tier is None:
            return 0.0, self._corrected(lanes, self.trial.nothing(expected))
        run = Execution(self.walk.runs, cut, device=self.walk.device)
        tried = self.trial.stored(cut, self.fields, tier, expected, self._freezing(run))
        lanes = self._corrected(replace(lanes, read=tried.read), tried.supplied)
        return self._freeze_s(run, size, tried), lanes

    def _corrected(self, lanes: Lanes, supplied: Cost | None) -> Lanes:
        """With what handing samples from thread to thread and into batches takes beside the stages."""
        if supplied is None:
            return lanes
        # what was tried as a whole counts: alone, a stage may have met a busier moment
        late = lanes.late.at_most(supplied - lanes.read)
        rest = supplied - (lanes.read + late)
        if self._one_processor:
            return replace(lanes, prepare=rest, late=late)
        bound = supplied.wall > _BOUND * max(lanes.read.wall, lanes.late.wall)
        return replace(lanes, prepare=Cost(supplied.wall if bound else lanes.prepare.wall, rest.cores))

    def _sum(self, stages: Iterable[Stage]) -> Cost:
        return sum((self.walk.took[stage.name].together for stage in stages), Cost())

    def _in_turn(self, stages: Iterable[Stage]) -> Cost:
        """Stages that one thread runs itself, as a freeze does behind its first chunks."""
        took = ((stage, self.walk.took[stage.name]) for stage in stages)
        return sum((t.together if s.chunk else Cost(t.alone, t.alone) for s, t in took), Cost())

    def _freezing(self, run: Execution) -> Freezing:
        stages, took = [*run.early.stages, *run.late], self.walk.took
        sample = self.walk.source.alone + sum(took[s.name].alone for s in stages)
        audit = sum(_AUDIT_CALLS * (s.chunk or FEWEST) * took[s.name].alone for s in stages)
        return Freezing(sample, audit, self.total)

    def _freeze_s(self, run: Execution, size: int, tried: Tried) -> float:
        """As it was rehearsed; or, from its stages, as the freezer does it: workers, the device and writing
        at once; on a CPU they take turns."""
        if tried.frozen is not None:
            return tried.frozen.seconds(self.total)
        prepare, late = self.walk.source.together + self._sum(run.early.stages), self._in_turn(run.late)
        before = tried.start + self._freezing(run).audit_s
        if self._one_processor:
            return before + (prepare.wall + late.wall) * self.total + tried.write.cores * size / cores()
        return before + max(max(prepare.wall, late.wall) * self.total, tried.write.wall * size)


def all_options(costing: Costing, cuts: Sequence[tuple[str, ...]]) -> list[Option]:
    """Every cut with its figures, and what it gains over storing nothing."""
    nothing = costing.option(())
    rest = (costing.option(cut) for cut in cuts if cut)
    return [nothing, *(replace(o, break_even=break_even(o, nothing)) for o in rest)]


def break_even(option: Option, nothing: Option) -> int | None:
    """The smallest whole number of epochs after which freezing has paid."""
    saved = nothing.epoch_s - option.epoch_s
    return None if saved <= 0 or option.why_not is not None else math.floor(option.freeze_s / saved) + 1


def place_beside(root: Path) -> tuple[Path, str | None]:
    """A folder on the disk of the store that can be written to; and what to say if it is another."""
    there = next(p for p in (root, *root.absolute().parents) if p.exists())
    if there.is_dir() and os.access(there, os.W_OK):
        return there, None
    other = Path(tempfile.gettempdir())
    return other, f"{there} cannot be written to: reading was measured in {other}"
