"""Whose code is it: the user's own, a library's, Python's, or frostline's?

>>> kind_of("json"), kind_of("numpy.random"), kind_of("frostline.keyed"), kind_of("frostline.stages.images")
('standard', 'library', 'frostline', 'own')

Own code counts by its source. A library counts by name and version, Python's own modules by name. frostline
itself does not count, except the ready-made stages: those are what a user would otherwise have written.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from frostline.fingerprint.files import content_of

Kind = Literal["own", "library", "standard", "frostline"]

HARMLESS = frozenset({"loguru", "rich", "tqdm", "typing-extensions", "typing_extensions"})
"""Libraries that show or annotate and compute nothing: a new version of them changes no field."""

_INSTALLED = {"site-packages", "dist-packages"}


def kind_of(module: str) -> Kind:
    """Whose module it is, by its name and by where its file lies."""
    top = module.partition(".")[0]
    if top == "frostline_recipes" or module == "frostline.stages" or module.startswith("frostline.stages."):
        return "own"
    if top == "frostline":
        return "frostline"
    if top != "__main__" and (top in sys.stdlib_module_names or top == "builtins"):
        return "standard"
    return _kind_of_file(_file_of(module) or _file_of(top))


def _file_of(module: str) -> str | None:
    """The file a module came from, or would come from; for a namespace package one of its folders."""
    loaded = sys.modules.get(module)
    if loaded is not None:
        file = getattr(loaded, "__file__", None)
        paths = list(getattr(loaded, "__path__", ()))
        return str(file) if file else (str(paths[0]) if paths else None)
    if "." in module:  # finding it would import its parents
        return None
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # ValueError: a module put into sys.modules by hand, without a spec
        return None
    if spec is None:
        return None
    return spec.origin or next(iter(spec.submodule_search_locations or ()), None)


@lru_cache(maxsize=4096)
def _kind_of_file(file: str | None) -> Kind:
    if file is None:
        return "own"  # made by hand: nobody else vouches for it with a version
    path = Path(file)
    if _INSTALLED & set(path.parts) or _came_with_a_record(path):
        return "library"
    paths = sysconfig.get_paths()
    if any(path.is_relative_to(paths[name]) for name in ("purelib", "platlib")):
        return "library"
    return "standard" if path.is_relative_to(paths["stdlib"]) else "own"


def _came_with_a_record(path: Path) -> bool:
    """Whether it was unpacked or installed into a folder of the search path, beside the list of its files."""
    folder = next((folder for folder in path.parents if str(folder) in sys.path), None)
    if folder is None:
        return False
    start = f"{path.relative_to(folder).as_posix()},"
    return any(
        line.startswith(start)
        for record in folder.glob("*.dist-info/RECORD")
        for line in record.read_text(encoding="utf-8", errors="replace").splitlines()
    )


def home_of(value: object) -> str:
    """The module that a function, class, built-in or object comes from.

    A function says so by its globals: `functools.wraps` gives a library's wrapper the user's `__module__`.
    """
    if isinstance(value, ModuleType):
        return value.__name__
    found = getattr(value, "__globals__", None)
    if isinstance(found, dict) and "__name__" in found:
        return str(found["__name__"])
    for name in ("__module__", "__self__", "__objclass__"):
        holder = _quiet(value, name)
        if isinstance(holder, str):
            return holder
        if holder is not None and name != "__module__":
            return home_of(holder if isinstance(holder, ModuleType | type) else type(holder))
    return type(value).__module__


def _quiet(value: object, name: str) -> Any:
    """An attribute, or None: some objects (torch.ops) answer every question with an error of their own."""
    try:
        return getattr(value, name, None)
    except (RuntimeError, TypeError):
        return None


def named(value: object) -> str:
    """The name inside its module: 'Resize.__call__'."""
    return str(_quiet(value, "__qualname__") or _quiet(value, "__name__") or type(value).__qualname__)


def public_module(module: str) -> str:
    """A script's `__main__` by the name it is imported under, so that both say the same."""
    if module != "__main__":
        return module
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name:
        return str(spec.name).removesuffix(".__main__")
    file = getattr(main, "__file__", None)
    return Path(file).stem if file else module


def version_of(module: str) -> tuple[str, str] | None:
    """(distribution, version) of a library's module; None for what computes nothing.

    >>> version_of("numpy.random")[0]
    'numpy'

    A local suffix (`+cpu`, `+cu130`) is left out: it names a build, and the device counts elsewhere.
    """
    top = module.partition(".")[0]
    names = sorted({name.lower() for name in _distributions().get(top, ())})
    if not names:  # copied there, not installed: its file, as a `__version__` is known only once it is loaded
        file = _file_of(top)
        return (top, content_of(file)[:12]) if file and Path(file).is_file() else (top, "unknown")
    names = [name for name in names if name not in HARMLESS]
    versions = [_version(name) for name in names]
    return ("/".join(names), "/".join(versions)) if names else None


@lru_cache(maxsize=1024)
def _version(name: str) -> str:
    return metadata.version(name).partition("+")[0]


def still(libraries: dict[str, str]) -> bool:
    """Whether these are the versions that are installed."""
    for joined, versions in libraries.items():
        try:
            now = [metadata.version(name).partition("+")[0] for name in joined.split("/")]
        except metadata.PackageNotFoundError:
            return False
        if "/".join(now) != versions:
            return False
    return True


@lru_cache(maxsize=1)
def _distributions() -> dict[str, list[str]]:
    return {top: list(names) for top, names in metadata.packages_distributions().items()}
