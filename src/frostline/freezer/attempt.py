"""One attempt at a freeze: plan, audit, forecast, and carry it out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from frostline.errors import FreezeStopped, NotFrozen
from frostline.execution import Execution, whole_chunks
from frostline.execution.columns import Column
from frostline.fingerprint import made_by
from frostline.fingerprint.code import parts_of
from frostline.freezer import choice, schema
from frostline.freezer.child import Child, close_all
from frostline.freezer.forecast import Forecast, Probe, forecast, none_worked, probe
from frostline.freezer.inputs import Inputs
from frostline.freezer.options import Options
from frostline.freezer.plan import UNREADABLE, Plan, Wanted, chosen_codecs, chosen_cut, make_plan
from frostline.freezer.progress import Reporter
from frostline.freezer.stopping import Stop
from frostline.freezer.stream import Sink, Stats, Stream, stored_bytes
from frostline.freezer.workers import Given, cores
from frostline.freezer.writing import Budget, Rows, Write, delete_rows, retire_fields
from frostline.inspector import audit
from frostline.inspector.samples import NoneWorked
from frostline.pipeline import Pipeline
from frostline.stage import Lazy, Stage
from frostline.store import Field, Store
from frostline.store.building import default_rows_per_shard
from frostline.store.manifest import commit_numbers
from frostline.wording import about, many, size

_MOST_ROWS = 4096
"""Rows a shard at most: what a kill can cost."""
_MOST_BYTES = 512 << 20
_AUDITED = 8
_WAITS = 0.5
"""A stage of single samples that waits for longer than this share of its time leaves its core to others."""


@dataclass(frozen=True)
class Outcome:
    """What a freeze did, or would do."""

    root: Path
    plan: Plan
    forecast: Forecast | None
    stats: Stats
    seconds: float
    streamed: float
    """Seconds in which samples were computed and written: without what comes before."""
    stopped: str | None
    """Why it ended before all was done; None when all is done."""
    device: str

    @property
    def store(self) -> Store:
        return Store.open(self.root)


class Attempt:
    """A freeze with chunks of given sizes."""

    def __init__(
        self,
        pipeline: Pipeline,
        root: Path,
        options: Options,
        reporter: Reporter,
        chunks: Mapping[str, int],
        stop: Stop,
    ) -> None:
        self.root, self.options, self.reporter, self.stop = root, options, reporter, stop
        self.device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        cut, codecs = chosen_cut(pipeline, options.cut), chosen_codecs(pipeline, options.codec)
        self.wanted = Wanted(pipeline, cut, codecs, options.limit, options.paranoid, options.retry_bad)
        self.chunks = {**_reduced(pipeline, root), **chunks}
        sizes = {s: self.chunks[s.name] for s in pipeline.stages if s.name in self.chunks}
        self.pipeline = pipeline.with_stages({s.name: s.with_options(batch_size=n) for s, n in sizes.items()})
        self.inputs = Inputs.of(pipeline, paranoid=options.paranoid)
        self.budget = Budget(options.max_bad, len(self.wanted.places), root)
        self.stats = Stats()
        self.hatched: list[Child] = []
        self.choosing = 0.0

    def run(self) -> Outcome:
        began = time.monotonic()
        self.plan = make_plan(self.wanted, self.root, self.chunks, self.reporter.looked)
        if self.options.keep:
            self.plan.refuse_losses()
        self.budget.failed = self.plan.quarantined  # those of earlier runs count, or a kill would change it
        self.reporter.end()
        for sentence in self.plan.said():
            self.reporter.note(sentence)
        try:
            guess = None if self.plan.idle else self._prepare()
            ready = time.monotonic()
            if guess is not None and not self.options.dry_run and self.stop.why is None:
                self._carry_out()
        finally:
            close_all(self.hatched)
        self.reporter.end()
        stopped = None if guess is None or self.options.dry_run else self.stop.why
        now = time.monotonic()
        return Outcome(
            self.root,
            self.plan,
            guess,
            self.stats,
            now - began,
            now - ready - self.choosing,
            stopped,
            str(self.device),
        )

    # before anything is written

    def _prepare(self) -> Forecast:
        plan = self.plan
        self.missing = [name for name in plan.extended if name != plan.text_field]
        self.given = self._fields_to_read()
        self.adding = Execution(self.pipeline, plan.fields, device=self.device)
        self.extending = Execution(self.pipeline, self.missing, device=self.device, given=self.given)
        self.places = {key: i for i, key in enumerate(self.pipeline.source.keys)}
        early, samples = self.adding.early, len(plan.new)
        asked, n = self.options.workers, self.options.n_workers
        self.hatched = choice.hatch(early, samples, asked=asked, n=n, wanted=not self.options.dry_run)
        called = early.called | self.extending.early.called
        self.parts = None if asked == "threads" else parts_of(called)  # the audit calls them
        self._audit()
        self.probed = self._probe()
        self.specs = self._specs()
        guess = self._forecast()
        work = f"{many(guess.samples, 'sample')} on {self.device} into {self.root}"
        takes = f"{about(guess.seconds)} and {size(guess.bytes)} ({size(guess.free)} free)"
        self.reporter.note(f"freezing {', '.join(plan.fields)}: {work}: {takes}")
        if not self.options.dry_run:
            guess.refuse_if_full(self.root)
        return guess

    def _fields_to_read(self) -> tuple[str, ...]:
        """Fields of the store from which missing ones can be computed: up to date, whole and exact."""
        if not self.missing or not self.plan.held:
            return ()
        failed = {entry.get("field") for entry in Store.open(self.root).quarantine}
        made = {*self.plan.extended} | failed
        exact = [n for n, spec in self.plan.held.items() if spec.codec == "raw" and n not in made]
        stages = self.pipeline.needed(self.missing, given=exact)
        return tuple(n for n in exact if any(n in stage.reads for stage in stages))

    def _audit(self) -> None:
        """Whether the stages of what is computed now are frozen.

        Also of fields that the store holds: a fingerprint does not tell that a network was put into train
        mode since.
        """
        computed = self.plan.fields if self.plan.new else self.missing
        stages = self.pipeline.needed(computed)
        if stages:
            self.reporter.note(f"auditing {', '.join(stage.name for stage in stages)}")
            below, tries = Pipeline(self.pipeline.source, *stages), self.budget.tries(_AUDITED)
            self._refuse_other_weights([s for s in stages if isinstance(s.fn, Lazy) and not s.fn.loaded])
            try:
                report = audit(below, samples=_AUDITED, tries=tries, device=str(self.device))
            except NoneWorked as e:
                raise FreezeStopped(none_worked(e.failed)) from e
            report.raise_if_not_frozen()

    def _refuse_other_weights(self, known: Sequence[Stage]) -> None:
        """Networks whose weights were known by their files, and that are loaded now: a loader may make up
        weights that no file has, and then makes up others each time.

        Before anything is called: a tokenizer keeps what it was last asked for."""
        for stage in known:
            stage.fn.get()
        held = {name: part for _, parts in self.plan.marks.values() for name, part in parts["stages"].items()}
        now = {s.name: made_by(s.fn, vouched=s.version is not None).weights for s in known}
        others = [name for name, weights in now.items() if weights != held[name]["weights"]]
        if others:
            raise NotFrozen(
                f"The files of these networks are the same, but not their weights. Rows in {self.root} would "
                "be those of several networks:",
                problems=[
                    f"{name}: its loader gives other weights each time, so some are in no file and drawn "
                    "at random, with a seed of its own. Load all of them, or draw them by torch's default"
                    for name in others
                ],
            )

    def _probe(self) -> Probe | None:
        """The first samples: what the fields look like, and how long they take."""
        plan = self.plan
        staying = self._staying() if self.missing else []
        tries = self.budget.tries(_AUDITED)
        if staying:
            found = probe(self.extending, staying, self._reader(), tries)
        else:
            found = probe(self.adding, [i for i in plan.new if i not in plan.broken], None, tries)
        unknown = [name for name in plan.fields if name not in plan.held]
        if not found.block.keys and unknown and (plan.new or staying):
            raise FreezeStopped(found.none_worked())
        return found if found.block.keys else None

    def _staying(self) -> list[int]:
        dropped = {*self.plan.gone, *self.plan.changed}
        return [self.places[k] for k in Store.open(self.root).keys if k in self.places and k not in dropped]

    def _reader(self) -> Given | None:
        """Reads the fields that are given, for some keys."""
        if not self.given:
            return None
        store = Store.open(self.root, check="files")  # nothing is computed from a damaged row

        where = {key: i for i, key in enumerate(store.keys)}  # the index would take 20 µs a key

        def read(keys: Sequence[str]) -> dict[str, Column]:
            rows = np.array([where[key] for key in keys])
            batch = store.rows(rows, self.given, pinned=self.device.type == "cuda")
            return {n: c if isinstance(c, torch.Tensor) else [*c] for n, c in batch.items()}

        return read

    def _specs(self) -> dict[str, Field]:
        """How every field is stored, with what it is computed from."""
        plan = self.plan
        found = {name: plan.held[name] for name in plan.fields if name in plan.held}
        new = [name for name in plan.fields if name not in found]
        if new and self.probed is not None:
            block = self.probed.block
            fresh = schema.fields_of(self.pipeline, new, block.keys, block.columns)
            codecs = {n: c for n, c in self.wanted.codecs.items() if n == "*" or n in fresh}
            for name, spec in schema.with_marks(fresh, codecs, plan.marks).items():
                found[name] = replace(spec, provenance={**spec.provenance, "kinds": self._kinds()})
        return {**{n: found[n] for n in plan.fields if n in found}, plan.text_field: self.inputs.field}

    def _kinds(self) -> dict[str, str]:
        """The shapes to keep to: those that a field which is up to date was begun with, so that a kill
        changes nothing; of what is computed otherwise now, those of the first samples."""
        kinds = dict(self.probed.kinds) if self.probed else {}
        for name, spec in self.plan.held.items():
            read = {n for stage in self.pipeline.needed([name]) for n in stage.reads}
            kinds |= {n: kind for n, kind in spec.provenance.get("kinds", {}).items() if n in read}
        return kinds

    def _forecast(self) -> Forecast:
        plan, samples = self.plan, len(self.plan.new) + self.plan.waiting
        per_row: dict[str, int] = {}
        if self.probed is not None:
            n = len(self.probed.block.keys)
            for name, column in self.probed.block.columns.items():
                spec = self.specs[name]
                per_row[name] = stored_bytes(column, spec) // n if spec.ragged else spec.row_bytes
        per_row[plan.text_field] = 80
        return forecast(
            self.probed, samples, self.options.n_workers or cores(), self.device, per_row, self.root
        )

    # carrying it out

    def _carry_out(self) -> None:
        plan = self.plan
        self.rows = Rows(plan, self.specs, self._text_of, self.budget)
        self.stop.start()
        if plan.exists:
            delete_rows(self.root, [*plan.gone, *plan.changed])
            retire_fields(self.root, [*plan.retired])
        if plan.extended and plan.exists:
            self._extend()
        if self.stop.why is None:
            retire_fields(self.root, plan.old_texts) if plan.exists else None
            self._add()

    def _text_of(self, key: str) -> str:
        place = self.places[key]
        text = self.plan.texts.get(place)
        if text is not None:
            return text
        return UNREADABLE if place in self.plan.broken else self.inputs.text(place)

    def _extend(self) -> None:
        specs = {name: self.specs[name] for name in self.plan.extended if name in self.specs}
        with Store.extend(self.root, specs) as extender:
            segments = ([self.places[key] for key in keys] for keys in extender.pending_shards())
            write = self.rows.into(extender)
            self._stream(
                f"adding {', '.join(self.plan.extended)}", self.extending, segments, write, self._reader()
            )

    def _add(self) -> None:
        plan = self.plan
        if not plan.new and plan.exists:
            return
        if plan.exists:
            writer = Store.append(self.root)
        else:
            writer = Store.create(self.root, self.specs, rows_per_shard=self._rows_per_shard(), resume=True)
        with writer:
            size = Store.open(self.root).rows_per_shard
            segments = (plan.new[s : s + size] for s in range(0, len(plan.new), size))
            self._stream("freezing", self.adding, segments, self.rows.into(writer), None)

    def _rows_per_shard(self) -> int:
        """About 64 MB of whole chunks; where not even one stays below 512 MB, the largest part of one that
        does and divides it. The same for the same fields, on any machine.

        Chunks of all frozen stages count, also of those whose fields may be added later: they will be
        computed shard by shard.
        """
        usual = min(_MOST_ROWS, default_rows_per_shard(self.specs))
        chunk = whole_chunks(self.pipeline.frozen) or 1
        if usual >= chunk:
            return usual // chunk * chunk
        row_bytes = sum(1024 if spec.ragged else spec.row_bytes for spec in self.specs.values())
        parts = [n for n in range(chunk, 0, -1) if chunk % n == 0]  # the chunk itself comes first
        return next((n for n in parts if n * row_bytes <= _MOST_BYTES), 1)

    def _stream(
        self,
        what: str,
        execution: Execution,
        segments: Iterable[Sequence[int]],
        write: Write,
        given: Given | None,
    ) -> None:
        plan = self.plan
        sample_s = self.probed.sample_s if self.probed else 0.0
        size = self.probed.sample_bytes if self.probed else 1
        early = bool(execution.early.stages)
        compete = self.device.type == "cpu" and self.probed is not None and self.probed.waiting < _WAITS
        turns = compete and early and bool(execution.late)
        wanted = choice.Wanted(
            self.options.workers, self.options.n_workers, sample_s, execution.block_size,
            sample=self.probed.sample if self.probed else None, pin=self.device.type == "cuda", turns=turns,
            parts=self.parts,
        )  # fmt: skip
        began = time.monotonic()
        with choice.quick_switches():
            hatched = [child for child in self.hatched if child.alive]
            workers = choice.start(
                execution.early, plan.new, wanted, given=given, reporter=self.reporter, hatched=hatched
            )
        self.choosing += time.monotonic() - began
        group = choice.group_size(sample_s, execution.block_size, early=early, kind=workers.kind)
        kinds = self._kinds()
        stream = Stream(
            execution, workers, group=group, sample_bytes=size, kinds=kinds, stats=self.stats, turns=turns
        )
        total = len(plan.new) if execution is self.adding else plan.waiting
        before = self.stats.samples + self.stats.failed
        with choice.quick_switches(), closing(workers):
            sink = Sink(write, self.stats, self.specs)
            try:
                for item in stream.items(segments, self.stop):
                    sink.put(item)
                    done = self.stats.samples + self.stats.failed - before
                    self.reporter.computed(what, done, total, self.stats)
                sink.close()
            except BaseException:
                sink.abandon()
                raise


def _reduced(pipeline: Pipeline, root: Path) -> dict[str, int]:
    """Stages whose chunk was made smaller when a store was begun, because memory did not do: they stay so."""
    found: dict[str, int] = {}
    fields = Store.open(root).fields.values() if commit_numbers(root) else ()
    asked = {stage.name: stage.chunk for stage in pipeline.stages}
    for spec in fields:
        for name, parts in ((spec.provenance or {}).get("stages") or {}).items():
            chunk = parts.get("chunk")
            if chunk and parts.get("chunk_asked") == asked.get(name) != chunk:
                found[name] = chunk
    return found
