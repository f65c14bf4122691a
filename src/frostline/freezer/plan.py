"""What a freeze has to do: what the store should hold, compared with what it holds. Computes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from frostline.errors import FrostlineError, NotFrozen, StoreError, UsageError
from frostline.fingerprint import Fingerprint, differences, digest, fingerprint, value_of
from frostline.freezer.inputs import PREFIX, Inputs, changed, same, unrecorded
from frostline.pipeline import Pipeline
from frostline.stage import Stage
from frostline.store import Field, Store
from frostline.store.manifest import commit_numbers
from frostline.tables import nearest
from frostline.wording import many

Marks = dict[str, tuple[str, Any]]
"""Field → its fingerprint, and what that is made of."""
Look = Callable[[int, int], None]
"""Called with samples looked at, and how many there are."""


def chosen_cut(pipeline: Pipeline, asked: Sequence[str] | None) -> tuple[str, ...]:
    """The fields to store: those asked for, or the last frozen ones."""
    if asked is None:
        cut = pipeline.cut
        if not cut:
            why = [f"{name}: {reason}" for name, reason in pipeline.why_not_frozen.items()]
            raise NotFrozen("Nothing in this pipeline is the same in every epoch:", problems=why)
        return cut
    fields = pipeline.fields
    problems = [
        f"no field {n!r}{nearest(n, fields)}; there are {', '.join(fields)}" for n in asked if n not in fields
    ]
    if problems or not asked:
        raise UsageError("Cannot cut there:", problems=problems or ["name at least one field"])
    moving = [name for name in asked if not pipeline.is_frozen(name)]
    if moving:
        why = [f"{n!r}: {pipeline.why_not_frozen[w.name]}" for n in moving if (w := pipeline.writer_of(n))]
        raise NotFrozen("These fields differ from epoch to epoch, and cannot be stored:", problems=why)
    return tuple(dict.fromkeys(asked))


def chosen_codecs(pipeline: Pipeline, asked: Mapping[str, str] | None) -> dict[str, str]:
    """The codecs asked for, by field; a name that is no field would change nothing, unsaid."""
    codecs, fields = dict(asked or {}), pipeline.fields
    unknown = [
        f"no field {n!r}{nearest(n, fields)}; there are {', '.join(fields)}, and '*' for all floating-point"
        for n in codecs
        if n not in ("*", *fields)
    ]
    if unknown:
        raise UsageError("Cannot use these codecs:", problems=unknown)
    return codecs


@dataclass(frozen=True)
class _Below:
    """The part of a pipeline that some fields are computed by: what lies above the line does not count."""

    pipeline: Pipeline
    fields: tuple[str, ...]

    @property
    def stages(self) -> tuple[Stage, ...]:
        return self.pipeline.needed(self.fields)

    def writer_of(self, field: str) -> Stage | None:
        return self.pipeline.writer_of(field)


def marks_of(
    pipeline: Pipeline, fields: Sequence[str], chunks: Mapping[str, int], *, paranoid: bool
) -> Marks:
    prints = dict(fingerprint(_Below(pipeline, tuple(fields)), chunk=chunks, paranoid=paranoid))
    for name in fields:
        if name not in prints:
            prints[name] = Fingerprint(digest(value_of(["source", name])), {"field": name, "stages": {}})
    return {name: _declared(pipeline, name, prints[name]) for name in fields}


def _declared(pipeline: Pipeline, name: str, found: Fingerprint) -> tuple[str, Any]:
    """With how a stage says that its field is stored, where it does."""
    stage = pipeline.writer_of(name)
    spec = stage.fields.get(name) if stage is not None else None
    if spec is None:
        return found.digest, found.parts
    said = f"{spec.dtype} {list(spec.shape)}, {spec.codec}"
    return digest(value_of([found.digest, said])), {**found.parts, "declared": said}


def _differences(old: Any, new: Any) -> list[str]:
    """How a field was computed, or declared, otherwise."""
    was, now = (parts.get("declared", "nothing") for parts in (old or {}, new))
    declared = [f"it is declared as {now}, and was as {was}"] if was != now else []
    return [*declared, *differences(old, new)]


@dataclass
class Plan:
    """What is to be done, in the order in which it is done."""

    root: Path
    fields: tuple[str, ...]
    """What the store will hold, beside the texts of the inputs."""
    text_field: str
    marks: Marks
    exists: bool = False
    held: dict[str, Field] = field(default_factory=dict)
    """Fields of the store that are up to date."""
    gone: list[str] = field(default_factory=list)
    """Keys of the store that the source no longer lists."""
    changed: dict[str, list[str]] = field(default_factory=dict)
    """Keys whose row is deleted and computed again, and which raw fields differ."""
    unrecorded: list[str] = field(default_factory=list)
    """Those of them whose files look the same, but whose full hashes are asked for and were not recorded."""
    retried: list[str] = field(default_factory=list)
    """Those of them whose input is the same: a field failed, and is to be tried again."""
    old_texts: list[str] = field(default_factory=list)
    """Texts of inputs that were made otherwise."""
    retired: dict[str, list[str]] = field(default_factory=dict)
    """Fields of the store that were computed otherwise, and how."""
    extended: list[str] = field(default_factory=list)
    """Fields to be added to the rows that stay."""
    new: list[int] = field(default_factory=list)
    """Places of the samples to be added."""
    waiting: int = 0
    """Rows that lack an extended field."""
    broken: dict[int, str] = field(default_factory=dict)
    """Places of new samples whose input could not be looked at, and why."""
    texts: dict[int, str] = field(default_factory=dict)
    quarantined: int = 0
    """Samples that failed before and are not tried again."""

    @property
    def idle(self) -> bool:
        todo = (self.gone, self.changed, self.retired, self.extended, self.new, self.old_texts)
        return self.exists and not any(todo)

    def refuse_losses(self) -> None:
        """Nothing that the store holds goes. Fields that no stage writes here are left alone, where the store
        needs no new row, which would have to have them."""
        if not self.new:
            self.retired = {n: why for n, why in self.retired.items() if n in self.marks}
        if self.gone or self.changed or self.retired:
            raise UsageError(
                f"The store at {self.root} was made from other samples, or otherwise, and is left as it is. "
                "Give this call a store of its own (--store DIR), or none (--live). Or freeze again, which "
                "makes it fit:",
                problems=self.said(),
            )

    def said(self) -> list[str]:
        """The plan in sentences, for a person."""
        out = []
        for name, why in self.retired.items():
            what = "to be computed again" if name in self.fields else "taken out"
            out.append(f"{name}: {what}; {'; '.join(why) or 'it is another field now'}")
        fresh = [name for name in self.extended if name not in self.retired and name != self.text_field]
        if fresh:
            out.append(f"{', '.join(fresh)}: to be added to {many(self.waiting, 'row')}")
        out += self._said_of_rows()
        if self.gone:
            out.append(f"{many(len(self.gone), 'row')} no longer in the source ({self.gone[0]!r}): deleted")
        if self.exists and self.new:
            out.append(f"{many(len(self.new), 'sample')} to be added")
        if self.quarantined:
            failed = many(self.quarantined, "sample")
            out.append(f"{failed} failed before and did not change: left in quarantine")
        return out

    def _said_of_rows(self) -> list[str]:
        """Why rows that are there are computed again."""
        others, out = {*self.unrecorded, *self.retried}, []
        moved = [key for key in self.changed if key not in others]
        if moved:
            what = f"{moved[0]!r}: {', '.join(self.changed[moved[0]])}"
            out.append(f"{many(len(moved), 'input')} changed ({what})")
        if self.unrecorded:
            rows = f"{many(len(self.unrecorded), 'row')} ({self.unrecorded[0]!r})"
            out.append(f"full hashes of the files were not recorded for {rows}: computed again")
        if self.retried:
            rows = f"{many(len(self.retried), 'row')} ({self.retried[0]!r})"
            out.append(f"a field of {rows} failed before: computed again")
        return out


@dataclass(frozen=True)
class Wanted:
    """What was asked for."""

    pipeline: Pipeline
    cut: tuple[str, ...]
    codecs: Mapping[str, str]
    limit: int | None
    paranoid: bool
    retry_bad: bool

    @property
    def places(self) -> range:
        n = len(self.pipeline.source)
        return range(n if self.limit is None else min(n, self.limit))


def make_plan(wanted: Wanted, root: Path, chunks: Mapping[str, int], look: Look | None = None) -> Plan:
    pipeline = wanted.pipeline
    store = _opened(root)
    inputs = Inputs.of(pipeline, paranoid=wanted.paranoid)
    kept = [n for n in (store.fields if store else ()) if n in pipeline.fields and pipeline.is_frozen(n)]
    marks = marks_of(pipeline, [*dict.fromkeys((*wanted.cut, *kept))], chunks, paranoid=wanted.paranoid)
    plan = Plan(root, wanted.cut, inputs.name, marks, exists=store is not None)
    if store is None:
        _look(plan, [*wanted.places], inputs, look)
        plan.new = [*wanted.places]
        return plan
    _compare_fields(plan, wanted, store)
    places = [*wanted.places]
    if plan.extended and wanted.limit is not None:
        # fields are added to all rows: also those beyond the limit must be what they were computed from
        keys = pipeline.source.keys
        places += [i for i in range(len(places), len(keys)) if keys[i] in store]
    _look(plan, places, inputs, look)
    _compare_rows(plan, wanted, store, places)
    return plan


def _opened(root: Path) -> Store | None:
    if not commit_numbers(root):
        return None
    store = Store.open(root, check="read")  # a text that is damaged must not be taken for another input's
    if not any(name.startswith(PREFIX) for name in store.fields):
        raise StoreError(
            f"The store at {root} holds {', '.join(store.fields)} but not what its rows were computed from: "
            "`frostline freeze` did not make it. Give another folder (freeze: --out, the others: --store)."
        )
    return store


def _look(plan: Plan, places: Sequence[int], inputs: Inputs, look: Look | None) -> None:
    total = len(places)
    for done, (place, text) in enumerate(inputs.texts(places), 1):
        if isinstance(text, FrostlineError):
            plan.broken[place] = str(text)
        else:
            plan.texts[place] = text
        if look is not None and (done % 1000 == 0 or done == total):
            look(done, total)


def _compare_fields(plan: Plan, wanted: Wanted, store: Store) -> None:
    """Fields that are up to date, were computed otherwise, or are missing."""
    for name, spec in store.fields.items():
        if name.startswith(PREFIX):
            if name != plan.text_field:
                plan.old_texts.append(name)
        elif name not in plan.marks:
            plan.retired[name] = ["no stage writes it any more, or it differs from epoch to epoch"]
        elif spec.fingerprint != plan.marks[name][0]:
            plan.retired[name] = _differences(spec.provenance, plan.marks[name][1])
        elif _recoded(name, spec, wanted.codecs):
            plan.retired[name] = [f"codec {spec.codec} → {wanted.codecs[name]}"]
        else:
            plan.held[name] = spec
    # what the store holds beyond the cut is kept up to date too: nothing is lost unasked
    plan.fields = tuple(dict.fromkeys((*wanted.cut, *(n for n in store.fields if n in plan.marks))))
    whole = [n for n in (*plan.held, plan.text_field) if n in store.fields and not _lacking(store, n)]
    plan.extended = [n for n in (*plan.fields, plan.text_field) if n not in whole]


def _lacking(store: Store, name: str) -> int:
    """Rows without this field that did not fail."""
    failed = sum(1 for entry in store.quarantine if entry.get("field") == name)
    return len(store) - len(store.with_fields([name])) - failed


def _recoded(name: str, spec: Field, codecs: Mapping[str, str]) -> bool:
    """Whether another codec is asked for by name; "*" is for fields that are made anew."""
    return name in codecs and Field(spec.shape, spec.dtype, codecs[name]).codec != spec.codec


def _compare_rows(plan: Plan, wanted: Wanted, store: Store, places: Sequence[int]) -> None:
    keys = wanted.pipeline.source.keys
    there = _texts(store, plan.text_field)
    plan.gone = sorted({*there} - {*keys})
    failed = {entry["key"]: entry["input"] for entry in store.quarantine if "column" not in entry}
    lacking = _to_retry(plan, store) if wanted.retry_bad else {}
    mark = combined(plan)
    for place in places:
        key = keys[place]
        text = plan.texts.get(place)
        if key in there:
            differ = changed(there[key], text) if text is not None else ["it cannot be read any more"]
            if text is not None and differ and unrecorded(there[key], text):
                plan.unrecorded.append(key)
            elif not differ and key in lacking:
                plan.retried.append(key)
                differ = lacking[key]
            if differ:
                plan.changed[key] = differ
                plan.new.append(place)
        elif key in failed and not wanted.retry_bad and _failed_alike(failed[key], text, mark):
            plan.quarantined += 1
        else:
            plan.new.append(place)
    stay = len(there) - len(plan.gone) - len(plan.changed)
    begun = {n: _lacking(store, n) for n in plan.extended if n in store.fields and n not in plan.retired}
    plan.waiting = min(stay, max((begun.get(n, stay) for n in plan.extended), default=0))


UNREADABLE = "{}"
"""The text of an input that could not be looked at."""


def _failed_alike(recorded: Any, text: str | None, mark: str) -> bool:
    """Whether a sample that failed is the same now, and would be computed in the same way."""
    if not isinstance(recorded, list) or len(recorded) != 2 or not isinstance(recorded[0], str):
        return False
    alike = same(recorded[0], text) if text is not None else recorded[0] == UNREADABLE
    return recorded[1] == mark and alike


def _to_retry(plan: Plan, store: Store) -> dict[str, list[str]]:
    """Keys of rows that stay, and which of their fields failed; a field that is made anew is tried anyway."""
    found: dict[str, list[str]] = {}
    for entry in store.quarantine:
        if entry.get("field") in plan.held:
            found.setdefault(entry["key"], []).append(entry["field"])
    return found


def _texts(store: Store, newest: str) -> dict[str, str]:
    """Key → text, of every row; from texts that are whole, and where there are, from those being added.

    Those may tell of more fields: a row that has them already may have been computed from these, too.
    """
    names = [n for n in store.fields if n.startswith(PREFIX) and len(store.with_fields([n])) == len(store)]
    if not names:
        raise StoreError(
            f"No field of {store.path} says what all of its rows came from. Give --out another folder."
        )
    found: dict[str, str] = {}
    for name in dict.fromkeys((names[0], newest)):
        rows = store.with_fields([name]) if name in store.fields else None
        if rows is not None and len(rows):
            found |= zip(rows.keys, rows.column(name), strict=True)
    return found


def combined(plan: Plan) -> str:
    """All fingerprints in one: a sample that failed is tried again when any of them changes."""
    return digest(value_of({name: plan.marks[name][0] for name in plan.fields}))[:16]
