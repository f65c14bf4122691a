"""TARGET, as every verb takes it: a recipe's name, a file, or `module:function`; and `key=value` for it."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from frostline.errors import UsageError
from frostline.parameters import Parameter as Parameter
from frostline.parameters import name_of, parameters_of, values_of
from frostline.pipeline import Pipeline
from frostline.workload import Workload

GROUP = "frostline.recipes"
"""The entry points under which a package offers functions that return a Workload."""
DEFAULT = "workload"
"""The function of a file or module that is taken when none is named."""
_BINDS = ("exec", "globals", "locals", "vars", "modules", "__getattr__", "*")
"""Words of a file whose names cannot all be told by reading it."""


@dataclass(frozen=True)
class Described:
    """A function that makes a workload, what it can be given, and what it is given."""

    name: str
    function: Callable[..., Any]
    parameters: tuple[Parameter, ...]
    given: dict[str, Any]


@dataclass(frozen=True)
class Resolved(Described):
    """What a TARGET stands for: the workload as well, made with those values."""

    workload: Workload

    @property
    def values(self) -> dict[str, Any]:
        """All parameters, given or not, as JSON can hold them; other defaults are left out."""
        usual = {p.name: p.default for p in self.parameters if not p.required and _is_plain(p.default)}
        return usual | {name: _plain(value) for name, value in self.given.items()}


@dataclass(frozen=True)
class _Offer:
    """A function of a file or module that may be meant."""

    name: str
    says: bool
    """That it returns a Workload."""
    free: bool
    """To be called as it is."""


def resolve(
    target: str, overrides: Sequence[str] = (), before: Mapping[str, Any] | None = None, *, meant: str = ""
) -> Resolved:
    """The workload that a TARGET and its `key=value` stand for. before: values of an earlier call.
    meant: how a file without such a function is given instead; the error ends with it and the file.

    >>> import sys, types, frostline as fl
    >>> def workload(*, n: int = 3) -> fl.Workload:
    ...     rows = [{"key": str(i)} for i in range(n)]
    ...     return fl.Workload(fl.Pipeline(fl.Source.table(rows)), run=print)
    >>> sys.modules["my_work"] = types.ModuleType("my_work")
    >>> sys.modules["my_work"].workload = workload
    >>> found = resolve("my_work:workload", ["n=5"])
    >>> found.name, len(found.workload.data.source), found.given
    ('my_work', 5, {'n': 5})
    >>> del sys.modules["my_work"]

    What the function itself raises passes through.
    """
    name, function = find(target, meant)
    parameters = parameters_of(function)
    given = values_of(function, overrides, before)
    made = function(**given)
    if not isinstance(made, Workload):
        raise UsageError(_not_a_workload(target, function, made))
    return Resolved(name, function, parameters, given, made if made.name else made.named(name))


def described(target: str, overrides: Sequence[str] = ()) -> Described:
    """What a TARGET can be given; its workload is not made, and without overrides nothing is missing."""
    name, function = find(target)
    given = values_of(function, overrides) if overrides else {}
    return Described(name, function, parameters_of(function), given)


def recipes() -> dict[str, EntryPoint]:
    """The recipes that installed packages offer, by name."""
    return {point.name: point for point in sorted(entry_points(group=GROUP), key=lambda p: p.name)}


def written(target: str) -> str:
    """A TARGET as it is written down: two files of one name are told apart, by their path from here."""
    place, word = _parted(target)
    return os.path.relpath(place) + (f":{word}" if word else "") if _is_file(place) else target


def _parted(target: str) -> tuple[str, str]:
    place, colon, word = target.rpartition(":")
    return (place, word) if colon and word.isidentifier() else (target, "")  # C:\work.py has no function


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float | bool | None)


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if _is_plain(value) else str(value)


def find(target: str, meant: str = "") -> tuple[str, Callable[..., Any]]:
    """A TARGET's name, as stores and runs are filed under, and its function."""
    place, word = _parted(target)
    if _is_file(place):
        module = _load_file(Path(place), word, meant)
        return _named(Path(place).stem, word), _function(module, word, place, meant)
    if word:
        return _named(place, word), _function(_load_module(place, word), word, place, "")
    offered = recipes()
    if target not in offered:
        raise UsageError(_unknown(target, offered))
    function = offered[target].load()
    if not callable(function):
        raise UsageError(
            f"Recipe {target} ({offered[target].value}) is {type(function).__name__}, no function."
        )
    return target, function


def _named(base: str, word: str) -> str:
    """Two functions of one file must not share a store; a file's name may have what no folder should."""
    name = re.sub(r"^(?=\W)|[^\w.-]", "_", base)
    return name if word in ("", DEFAULT) else f"{name}.{word}"


def _is_file(place: str) -> bool:
    return place.endswith(".py") or os.sep in place or "/" in place


# --- loading ------------------------------------------------------------------------------------------


def _load_file(path: Path, word: str, meant: str) -> ModuleType:
    """The file as the module of its name, its folder first in sys.path: worker processes find it there.

    A file without the function is not run: it may be a script that trains for hours."""
    file = path.resolve()
    if not file.is_file() or file.suffix != ".py":
        raise UsageError(_no_file(path))
    if "." in file.stem:
        raise UsageError(
            f"{path}: Python can import no module called {file.stem!r}. Rename it, without dots."
        )
    loaded = sys.modules.get(file.stem)
    if loaded is not None:
        if _file_of(loaded) == file:
            return loaded
        raise UsageError(
            f"{path} would be imported as {file.stem!r}, and another module of that name already is: "
            f"{_file_of(loaded) or 'one built into Python'}. Rename the file."
        )
    tree = _parsed(file)
    if tree is not None and not _may_have(tree, word or DEFAULT):
        raise UsageError(_no_function(_written_in(tree), word, str(path), meant))
    return _import(file.stem, str(file.parent), str(path))


def _parsed(file: Path) -> ast.Module | None:
    try:
        return ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # importing it says so, with the line
        return None


def _may_have(tree: ast.Module, name: str) -> bool:
    """Whether a file that is run may have a name: not, where the word is nowhere, and none is made up.

    >>> [_may_have(ast.parse(text), "work") for text in ("import a as work", "def other(): pass", "exec(f)")]
    [True, False, True]
    """
    words = {
        str(getattr(node, kind, "")) for node in ast.walk(tree) for kind in ("id", "name", "asname", "attr")
    }
    return not {word.partition(".")[0] for word in words}.isdisjoint({name, *_BINDS})


def _written_in(tree: ast.Module) -> list[_Offer]:
    return [
        _Offer(node.name, "Workload" in ast.unparse(node.returns or ast.Constant(None)), _is_free(node.args))
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    ]


def _is_free(args: ast.arguments) -> bool:
    given = len(args.defaults) == len(args.posonlyargs) + len(args.args) and None not in args.kw_defaults
    return given and args.vararg is None and args.kwarg is None


def _file_of(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if file else None


def _import(name: str, folder: str, shown: str) -> ModuleType:
    before = list(sys.path)
    sys.path[:] = [folder, *(entry for entry in before if entry != folder)]
    importlib.invalidate_caches()  # the file may be younger than Python's list of its folder
    try:
        return importlib.import_module(name)
    except BaseException as e:
        sys.path[:] = before
        if isinstance(e, ImportError) and "relative import" in str(e):
            raise UsageError(
                f"{shown} imports from its own package ({e}), so it has to be loaded as part of it: from the "
                f"folder that holds the package, give `package.{name}:{DEFAULT}` instead of the file."
            ) from e
        raise


def _load_module(name: str, word: str) -> ModuleType:
    """A module by its name; the current folder can be imported from, as with python -m."""
    if name in sys.modules:
        return sys.modules[name]
    try:
        return _import(name, os.getcwd(), name)
    except ModuleNotFoundError as e:
        if e.name is None or not (name == e.name or name.startswith(f"{e.name}.")):
            raise  # the module is there, and something that it imports is not
        near = difflib.get_close_matches(name, _modules_here(), n=1)
        meant = f" Did you mean {near[0]}:{word}?" if near else ""
        raise UsageError(
            f"There is no module {e.name!r} in {os.getcwd()} or among what is installed.{meant}"
        ) from e
    except ValueError as e:
        raise UsageError(f"{name}:{word} names no module: expected package.module:function.") from e


def _modules_here() -> list[str]:
    return sorted(p.stem for p in Path.cwd().glob("*.py"))


def _function(module: ModuleType, word: str, shown: str, meant: str) -> Callable[..., Any]:
    found = getattr(module, word or DEFAULT, None)
    if inspect.isfunction(found) or (callable(found) and not isinstance(found, type)):
        function: Callable[..., Any] = found
        return function
    if found is not None:
        raise UsageError(
            f"{word or DEFAULT} of {shown} is {_a(found)}; expected a function that returns a Workload: "
            f"def workload(*, batch_size: int = 64) -> fl.Workload."
        )
    raise UsageError(_no_function(_found_in(module), word, shown, meant))


def _found_in(module: ModuleType) -> list[_Offer]:
    own = [
        (name, inspect.signature(f))
        for name, f in vars(module).items()
        if inspect.isfunction(f) and f.__module__ == module.__name__ and not name.startswith("_")
    ]
    return [
        _Offer(
            name,
            "Workload" in str(signature.return_annotation),
            all(p.default is not p.empty for p in signature.parameters.values()),
        )
        for name, signature in own
    ]


# --- what went wrong ----------------------------------------------------------------------------------


def _a(value: Any) -> str:
    return f"a {value.__name__ if isinstance(value, type) else type(value).__name__}"


def _no_file(path: Path) -> str:
    folder = path.parent
    if path.is_file() or path.is_dir():
        what = "a folder" if path.is_dir() else "no Python file"
        return f"{path} is {what}; expected a file such as my_work.py."
    if not folder.is_dir():
        return f"No file {path}: there is no folder {folder}."
    near = difflib.get_close_matches(path.name, [p.name for p in folder.glob("*.py")], n=1)
    meant = f" Did you mean {folder / near[0]}?" if near else ""
    return f"No file {path} (looked in {folder.resolve()}).{meant}"


def _unknown(target: str, offered: dict[str, EntryPoint]) -> str:
    files = {p.stem: p.name for p in Path.cwd().glob("*.py")}
    near = difflib.get_close_matches(target, [*offered, *files, *files.values()], n=1)
    meant = (
        f" Did you mean {files.get(near[0], near[0]) if near[0] not in offered else near[0]}?" if near else ""
    )
    return (
        f"No recipe is called {target!r}.{meant} `frostline ls` lists the recipes; a file is given as "
        f"my_work.py or my_work.py:function, a module as package.module:function."
    )


def _no_function(offers: Sequence[_Offer], word: str, shown: str, meant: str) -> str:
    told = f"{shown} has no function {word or DEFAULT!r}. {_hint(offers, word, shown)}"
    return f"{told} {meant} {shown}" if meant else told


def _hint(offers: Sequence[_Offer], word: str, shown: str) -> str:
    """Which function may be meant: those that say they return a Workload, else those callable as they are."""
    said = [offer.name for offer in offers if offer.says]
    near = difflib.get_close_matches(word, [offer.name for offer in offers], n=1) if word else []
    likely = near or said or [offer.name for offer in offers if offer.free]
    if len(likely) == 1:
        why = "is the nearest" if near else "returns a Workload" if said else "can be called as it is"
        return f"{likely[0]} {why}: give {shown}:{likely[0]}."
    if likely:
        return f"Name one of its functions, as {shown}:{likely[0]}; it has {', '.join(likely)}."
    return "Add one: def workload(*, batch_size: int = 64) -> fl.Workload."


def _not_a_workload(target: str, function: Any, made: Any) -> str:
    what = "nothing" if made is None else _a(made)
    fix = "End it with `return fl.Workload(…)`."
    if isinstance(made, Pipeline):
        fix = (
            "A pipeline is the data of a workload: return fl.Workload(pipeline, model=…, loss=…, "
            "optimizer=…, batch_size=…), or fl.Workload(pipeline, run=…) for an experiment of its own."
        )
    return f"{target}: {name_of(function)}() returned {what}; expected a Workload. {fix}"
