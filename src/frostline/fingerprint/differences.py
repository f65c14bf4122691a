"""What differs between two fingerprints, in sentences.

>>> old = {"weights": "9f3a77", "chunk": 64, "libraries": {"torch": "2.11.0"}}
>>> new = {"weights": "77c1aa", "chunk": 32, "libraries": {"torch": "2.13.0"}}
>>> for text in differences({"stages": {"net": old}}, {"stages": {"net": new}}):
...     print(text)
weights of stage net: 9f3a77 → 77c1aa
chunk size of stage net: 64 → 32
torch 2.11.0 → 2.13.0 (stage net)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_WORDS = {
    "weights": "weights of stage {}",
    "precision": "precision of stage {}",
    "compile": "compile of stage {}",
    "chunk": "chunk size of stage {}",
    "version": "version of stage {}",
    "random": "random of stage {}",
}
_MOST = 8
"""Functions or parameters named for each stage; more are counted."""

Parts = Mapping[str, Any]


def differences(old: Parts, new: Parts) -> list[str]:
    """Sentences that say which part differs, from the sources downwards; none when nothing does.

    >>> differences({"stages": {}}, {"stages": {"frames": {}}})
    ['stage frames is new']
    """
    before, after = old.get("stages", {}), new.get("stages", {})
    out = []
    for name in dict.fromkeys((*after, *before)):
        if name not in before:
            out.append(f"stage {name} is new")
        elif name not in after:
            out.append(f"stage {name} is gone")
        else:
            out += _stage(name, before[name], after[name])
    if old.get("field") != new.get("field"):
        out.append(f"field {old.get('field')} → {new.get('field')}")
    return out


def _stage(name: str, old: Parts, new: Parts) -> Iterator[str]:
    explained = list(_code(name, old, new))
    yield from explained
    yield from _parameters(name, old.get("parameters"), new.get("parameters"))
    for part, words in _WORDS.items():
        if old.get(part) != new.get(part):
            yield f"{words.format(name)}: {_short(old.get(part))} → {_short(new.get(part))}"
    if old.get("structure") != new.get("structure") and not explained:
        yield f"structure of the network of stage {name} changed (a class, an attribute or a hook)"
    yield from _libraries(name, old.get("libraries", {}), new.get("libraries", {}))
    for part, verb in (("reads", "reads"), ("writes", "writes")):
        if old.get(part) != new.get(part):
            was = ", ".join(old.get(part) or ()) or "nothing"
            yield f"stage {name} now {verb} {', '.join(new.get(part) or ()) or 'nothing'} instead of {was}"


def _code(name: str, old: Parts, new: Parts) -> Iterator[str]:
    if old.get("code") == new.get("code"):
        return
    if old.get("code") is None or new.get("code") is None:
        return  # a version took the place of the code, or gave it up: said there
    told = []
    for kind, words in (("functions", "code"), ("values", "value")):
        if f"{kind}_left_out" in old or f"{kind}_left_out" in new:
            continue
        before, after = old.get(kind, {}), new.get(kind, {})
        for full in sorted({*before, *after}):
            if before.get(full) != after.get(full):
                change = "is new" if full not in before else "is gone" if full not in after else "changed"
                told.append(f"{words} of {full} (stage {name}) {change}")
    yield from told[:_MOST]
    if len(told) > _MOST:
        yield f"and {len(told) - _MOST} more functions or values of stage {name}"
    if not told:
        yield f"code of stage {name} changed"


def _parameters(name: str, old: Any, new: Any) -> Iterator[str]:
    found = list(_leaves(old, new, ""))
    for path, before, after in found[:_MOST]:
        yield f"parameter{path} of stage {name}: {_short(before)} → {_short(after)}"
    if len(found) > _MOST:
        yield f"and {len(found) - _MOST} more parameters of stage {name}"


_WRAPPERS = {"dict", "state", "tuple", "kwargs", "object", "items"}
"""Keys of a value's tree that say what it is, and that a reader need not see in a path."""


def _leaves(old: Any, new: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    if type(old) is type(new) and old == new:
        return
    if isinstance(old, dict) and isinstance(new, dict) and "digest" not in old:
        for key in dict.fromkeys((*old, *new)):
            inner = path if key in _WRAPPERS else f"{path} {key}" if not path else f"{path}.{key}"
            yield from _leaves(old.get(key), new.get(key), inner)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from _leaves(before, after, f"{path}[{i}]")
    else:
        yield path, old, new


def _libraries(name: str, old: Parts, new: Parts) -> Iterator[str]:
    for library in sorted({*old, *new}):
        was, now = old.get(library), new.get(library)
        if was is None:
            yield f"{library} {now} is now used (stage {name})"
        elif now is None:
            yield f"{library} {was} is no longer used (stage {name})"
        elif was != now:
            yield f"{library} {was} → {now} (stage {name})"


def _short(value: Any) -> str:
    """Short enough for a sentence: the beginning of a digest, or of anything long."""
    if isinstance(value, dict) and "digest" in value:
        value = value["digest"]
    text = "none" if value is None else str(value)
    hexadecimal = len(text) == 32 and set(text) <= set("0123456789abcdef")
    if hexadecimal:
        return text[:8] + "…"
    return text if len(text) <= 60 else text[:57] + "…"
