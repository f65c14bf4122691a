"""Runs when Python starts, in every process that `frostline profile` reaches: it lies first on PYTHONPATH.

It waits for torch to be imported and then starts the profiler's agent (`profiler/inside`) in that process. A
`sitecustomize` of the user's own, which this one hides, is run after it as if it were not hidden.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
AGENT = "_frostline_inside"
"""The agent's name in the script's process: frostline itself need not be installed there."""


class Watch(importlib.abc.MetaPathFinder):
    """Calls `then(name)` after the first import of each module in `names`."""

    def __init__(self, names: list[str], then: Callable[[str], None]) -> None:
        self.names, self.then = set(names), then

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name not in self.names:
            return None
        self.names.discard(name)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            self.then(name)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def agent() -> Any:
    """The package beside this folder, under a name that no script has."""
    if AGENT not in sys.modules:
        place = os.path.join(os.path.dirname(HERE), "inside")
        spec = importlib.util.spec_from_file_location(
            AGENT, os.path.join(place, "__init__.py"), submodule_search_locations=[place]
        )
        if spec is None or spec.loader is None:
            raise ImportError(f"frostline's agent is not at {place}")
        sys.modules[AGENT] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[AGENT]


def imported(name: str) -> None:
    if name == "torch":
        agent().start()
    else:
        agent().imported(name)


def hidden() -> None:
    """Runs the sitecustomize that this one stands in front of."""
    rest = [p for p in sys.path if os.path.abspath(p or ".") != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if os.environ.get("FROSTLINE_PROFILE"):
    decoders = os.environ.get("FROSTLINE_PROFILE_WATCH", "").split(",")
    sys.meta_path.insert(0, Watch(["torch", *filter(None, decoders)], imported))
    mark = os.path.join(os.environ["FROSTLINE_PROFILE"], "reached")
    with open(mark, "a", encoding="utf-8") as reached:  # says that this interpreter was reached at all
        reached.write(f"{os.getpid()} {sys.argv[:1]}\n")
hidden()
