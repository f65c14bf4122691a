"""Which fields a folder of files has: what most files agree on. The others are named, one reason a file."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from frostline.errors import UsageError
from frostline.store.field import Field
from frostline.store.folder import Exported, Found
from frostline.store.formats import Kind

Look = tuple[tuple[str, Kind], ...]  # what a file holds: its names in order, each with its kind
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_NUMBERS = {"bool": "bool", "int": "int64", "float": "float64"}


def decide(
    found: Found,
    looks: Mapping[str, Look],
    *,
    wanted: Sequence[str] | None,
    ragged: str | Sequence[str],
    exported: Exported | None,
) -> dict[str, Field]:
    """The fields, by the names in the files: an export's own record, or what most files hold."""
    if exported:
        fields = {name: _reusable(name, spec, found.notes) for name, spec in exported.fields.items()}
        _refuse_unknown("fields", wanted or (), fields)
        return {name: spec for name, spec in fields.items() if wanted is None or name in wanted}
    counted = Counter(looks.values())
    names = _names(counted, wanted)
    if not isinstance(ragged, str):
        _refuse_unknown("ragged", ragged, names)
    fields = {name: _field(name, _kinds(name, counted), ragged, found.notes) for name in names}
    # the name tells a resumed import that it is the same one; a whole path would change with the machine
    provenance = {"imported_from": found.folder.resolve().name}
    return {name: replace(spec, provenance=provenance) for name, spec in fields.items()}


def _reusable(name: str, spec: Field, notes: list[str]) -> Field:
    """Casting again changes nothing; taking int8 scales again would, so what was decoded is kept as it is."""
    if not spec.codec.startswith("int8"):
        return spec
    notes.append(
        f"{name!r} was {spec.codec} where it was exported; it is stored as {spec.dtype} now (see --codec)."
    )
    return replace(spec, codec="raw")


def _names(counted: Counter[Look], wanted: Sequence[str] | None) -> list[str]:
    """The most common set of names, in a file's order (of equals: the first seen)."""
    everywhere = {name for look in counted for name, _ in look}
    _refuse_unknown("fields", wanted or (), everywhere)
    sets: Counter[frozenset[str]] = Counter()
    order: dict[frozenset[str], list[str]] = {}
    for look, n in counted.items():
        names = [name for name, _ in look if wanted is None or name in wanted]
        sets[frozenset(names)] += n
        order.setdefault(frozenset(names), names)
    if wanted is not None:
        return list(dict.fromkeys(wanted))
    best = sets.most_common(1)[0][0]
    if not best:
        raise UsageError("Nothing to import: most of the files hold no values at all.")
    return order[best]


def _kinds(name: str, counted: Counter[Look]) -> Counter[Kind]:
    kinds: Counter[Kind] = Counter()
    for look, n in counted.items():
        for key, kind in look:
            if key == name:
                kinds[kind] += n
    return kinds


def _field(name: str, kinds: Counter[Kind], ragged: str | Sequence[str], notes: list[str]) -> Field:
    tensors = Counter({kind: n for kind, n in kinds.items() if kind.type == "tensor"})
    if 2 * sum(tensors.values()) < kinds.total():
        return _plain_field(name, Counter({k.type: n for k, n in kinds.items() if k.type != "tensor"}), notes)
    may_differ = ragged == "auto" or (ragged != "never" and name in ragged)
    alike: Counter[tuple[str, int, tuple[int, ...]]] = Counter()
    for kind, n in tensors.items():
        alike[kind.dtype, len(kind.shape), kind.shape[1:] if may_differ else kind.shape] += n
    dtype, rank, shape = alike.most_common(1)[0][0]
    if not may_differ or not rank:
        return Field(shape, dtype)
    lengths = {k.shape[0] for k in tensors if (k.dtype, len(k.shape), k.shape[1:]) == (dtype, rank, shape)}
    if len(lengths) == 1 and ragged == "auto":
        return Field((lengths.pop(), *shape), dtype)
    return Field((None, *shape), dtype)


def _plain_field(name: str, types: Counter[str], notes: list[str]) -> Field:
    """Of what most files have; None beside anything else makes it JSON, an int beside floats is a float."""
    most = types.most_common(1)[0][0]
    if most in ("none", "json"):
        return Field((), "json")
    if "none" in types:
        notes.append(f"{name!r} is {most} in most files and None in {types['none']:,}; it is stored as JSON.")
        return Field((), "json")
    if most in ("int", "float") and {"int", "float"} <= types.keys():
        return Field((), "float64")
    return Field((), _NUMBERS.get(most, most))


def misfit(look: Look, fields: Mapping[str, Field], *, all_names: bool) -> str | None:
    """Why a file that holds this does not fit, or None. `all_names`: a name that is no field is a misfit."""
    held = dict(look)
    missing = [name for name in fields if name not in held]
    extra = [name for name in held if name not in fields] if all_names else []
    problems = [f"has no {', '.join(map(repr, missing))}"] if missing else []
    problems += [f"also has {', '.join(map(repr, extra))}"] if extra else []
    problems += [
        f"{name!r} is {held[name]}, in most files {_said(spec)}"
        for name, spec in fields.items()
        if name in held and not _fits(held[name], spec)
    ]
    return "; ".join(problems) or None


def _said(spec: Field) -> str:
    return f"{spec.dtype} {list(spec.shape)}".replace("None", "any") if spec.shape else spec.dtype


def _fits(kind: Kind, spec: Field) -> bool:
    if spec.dtype == "json":
        return kind.type != "tensor"
    if spec.dtype == "bytes":
        return kind.type == "tensor" and kind.dtype == "uint8" and len(kind.shape) == 1
    if kind.type != "tensor":
        same = _NUMBERS.get(kind.type, kind.type) == spec.dtype
        return spec.shape == () and (same or (kind.type, spec.dtype) == ("int", "float64"))
    if kind.dtype != spec.dtype or len(kind.shape) != len(spec.shape):
        return False
    return all(want in (None, got) for got, want in zip(kind.shape, spec.shape, strict=True))


def with_codecs(fields: dict[str, Field], codecs: Mapping[str, str]) -> dict[str, Field]:
    """The fields with the codecs asked for; "*" is every floating-point field that is not named itself."""
    named = {name: codec for name, codec in codecs.items() if name != "*"}
    _refuse_unknown("codec", named, fields)
    if "*" in codecs:
        named = {**{name: codecs["*"] for name, spec in fields.items() if _takes(spec)}, **named}
    return {name: replace(spec, codec=named.get(name, spec.codec)) for name, spec in fields.items()}


def _takes(spec: Field) -> bool:
    return spec.dtype in _FLOATS and bool(spec.shape)


def storable_names(names: Iterable[str], notes: list[str]) -> dict[str, str]:
    """Name in the files → name of the field, with what a field's name cannot have replaced by "_"."""
    out = {}
    for name in names:
        clean = re.sub(r"\.{2,}", ".", re.sub(r"[^A-Za-z0-9_.-]", "_", name))[:64]
        out[name] = clean if re.match(r"[A-Za-z_]", clean) else f"_{clean}"[:64]
    changed = [f"{name!r} is called {clean!r}" for name, clean in out.items() if name != clean]
    twice = [clean for clean, n in Counter(out.values()).items() if n > 1]
    if twice:
        same = [repr(name) for name, clean in out.items() if clean == twice[0]]
        raise UsageError(
            f"{' and '.join(same)} would both be the field {twice[0]!r}. "
            f"Rename one in the files, or take one only (--field)."
        )
    if changed:
        notes.append(
            f"In the store, {', '.join(changed)}: a field's name has letters, digits, '_', '.' and '-'."
        )
    return out


def _refuse_unknown(option: str, asked: Iterable[str], there: Iterable[str]) -> None:
    known = list(there)
    unknown = [name for name in asked if name not in known]
    if unknown:
        hint = nearest(unknown[0], known) or "."
        raise UsageError(
            f"{option}: the files have no {', '.join(map(repr, unknown))}{hint} They have {', '.join(known)}."
        )


def nearest(name: str, known: Sequence[str]) -> str:
    """“; did you mean 'x'?”, or nothing."""
    close = difflib.get_close_matches(name, known, 3)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
