"""The weights of an `fl.lazy(loader, …)`, without loading them when that is safe.

On a real load the files that the loader opens are recorded. What was made of them is kept in the cache
under the loader's code and arguments, together with the identities of those files and of the weight files
beside them. As long as all of that holds, the next process knows the weights without reading them. A loader
that opens no file, or that runs on anything that changed, is run, and what it returns is hashed.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from frostline.errors import UsageError
from frostline.fingerprint import cache, files, origin, recorder
from frostline.fingerprint.values import Tree, digest, tree

if TYPE_CHECKING:
    from frostline.fingerprint.walk import Walk

_ENVIRONMENT = ("os.environ", "os.getenv", "os.getenvb", "os.environb")
_SETTINGS = ("HF_", "TRANSFORMERS_", "TORCH_HOME", "HUGGINGFACE_", "XDG_CACHE_HOME", "DIFFUSERS_")


@dataclass(frozen=True)
class Made:
    """What a loader makes: its weights (or other content), its structure and its code."""

    weights: str
    structure: str | None
    code: str
    functions: dict[str, str]
    values: dict[str, str]
    libraries: dict[str, str]
    sources: list[str]


def is_lazy(value: object) -> bool:
    """By what it offers, so that this package does not depend on where `fl.lazy` is written."""
    return type(value).__name__ == "Lazy" and all(
        hasattr(type(value), name) or name in getattr(value, "__dict__", {})
        for name in ("loader", "args", "kwargs", "get", "loaded")
    )


def made_by(lazy: Any, *, paranoid: bool = False, vouched: bool = False) -> Made:
    """What a lazy makes or has made.

    >>> import frostline as fl, torch
    >>> made_by(fl.lazy(torch.nn.Linear, 2, 2)).structure is not None
    True

    paranoid: load it in any case.  vouched: code counts by name alone, as a `version` stands for it.
    """
    if lazy.loaded:  # what it holds may have been given new weights: only that counts
        return _look(lazy.get(), vouched=vouched)
    recipe = _recipe(lazy, vouched=vouched)
    known = None if paranoid or recipe is None else _recall(recipe.key)
    if known is not None:
        return known
    with recorder.recording() as opened:
        product = lazy.get()
    found = _look(product, vouched=vouched)
    if recipe is not None:
        _keep(recipe, found, opened)
    return found


def as_value(lazy: Any, walk: Walk, where: str) -> Tree:
    """A lazy met on a walk."""
    given = [tree(lazy.args, walk, f"{where}, arguments"), tree(dict(lazy.kwargs), walk, where)]
    try:
        made = asdict(made_by(lazy, vouched=walk.vouched))
    except UsageError as error:
        return walk.problem(f"{where}: {error}")
    walk.libraries.update(made["libraries"])
    counted = {name: made[name] for name in ("weights", "structure", "code")}
    return {"lazy": tree(lazy.loader, walk, where), "given": given, "made": counted}


def _look(product: Any, *, vouched: bool) -> Made:
    from frostline.fingerprint.code import Code, summary
    from frostline.fingerprint.walk import Walk
    from frostline.fingerprint.weights import weights_of

    structure: str | None = None
    code: Code
    if _is_network(product):
        weights = weights_of(product, vouched=vouched)
        content, structure, code = weights.digest, weights.structure, weights.code
    else:
        walk = Walk(vouched=vouched)
        content = digest(walk.value(product, "what the loader returned"))
        walk.finish(f"what the loader returned ({type(product).__qualname__})")
        code = summary(walk, None)
    return Made(
        content, structure, code.digest, code.functions, code.values, code.libraries, list(code.sources)
    )


def _is_network(product: Any) -> bool:
    torch = sys.modules.get("torch")  # not loaded: then nothing is a network
    return torch is not None and isinstance(product, torch.nn.Module)


# --- kept between processes ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Recipe:
    """key: all that decides what the loader does, but for the files.  sources: its code, read by meaning."""

    key: str
    sources: tuple[str, ...]


def _recipe(lazy: Any, *, vouched: bool) -> _Recipe | None:
    """None when it cannot be told."""
    from frostline.fingerprint.code import examine

    try:
        code, given = examine(lazy, files="loader")
    except UsageError:
        if vouched:  # its code has no source: the loader is run and its weights are hashed
            return None
        raise
    asks = any(found.path.startswith(_ENVIRONMENT) for found in code.references)
    chosen = {name: value for name, value in os.environ.items() if asks or name.startswith(_SETTINGS)}
    parts = [code.digest, code.libraries, given, os.getcwd(), digest(chosen), vouched]
    return _Recipe(digest(parts), code.sources)


def _recall(key: str) -> Made | None:
    entry = cache.recall("lazy", key)
    if not isinstance(entry, dict):
        return None
    held = entry["files"]
    beside = recorder.with_siblings(entry["opened"])
    if beside is None or {*beside, *entry["sources"]} != set(held):
        return None
    if any(files.identity(name) != known for name, known in held.items()):
        return None
    made = Made(**entry["made"])
    return made if origin.still(made.libraries) else None


def _keep(recipe: _Recipe, made: Made, opened: recorder.Opened) -> None:
    """Only when this thread saw the loader open files, and all of them are still what it read."""
    names = recorder.with_siblings(sorted(opened.files))
    if not opened.here or opened.broken or names is None:
        return
    # Code that the loader finds by itself (a class named in a config) is in no recipe: its files count too.
    sources = sorted(set(made.sources) - set(recipe.sources))
    held = {name: files.identity(name) for name in (*names, *sources)}
    changed = [name for name, then in opened.files.items() if then is not None and held[name] != then]
    fresh = [name for name, known in held.items() if known and not files.settled(os.stat(name))]
    if changed or fresh or not any(held[name] for name in opened.files):
        return
    entry = {"made": asdict(made), "opened": sorted(opened.files), "files": held, "sources": sources}
    cache.keep("lazy", recipe.key, entry)
