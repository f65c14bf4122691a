"""Modules written on the spot, imported afresh, and a cache of fingerprints for each test."""

from __future__ import annotations

import importlib
import linecache
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from frostline.fingerprint import files


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; and files count as settled at once, as tests do not wait."""
    monkeypatch.setenv("FROSTLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "SETTLED_NS", -(10**12))
    return tmp_path / "cache"


class Lab:
    """Writes modules into a folder and imports one as a new process would."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: set[str] = set()

    def write(self, **modules: str) -> None:
        for name, text in modules.items():
            path = self.folder / f"{name.replace('__in__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text).lstrip("\n"))
            self.names.add(name.split("__in__")[0])

    def forget(self) -> None:
        for name in list(sys.modules):
            if name.split(".")[0] in self.names:
                del sys.modules[name]
        importlib.invalidate_caches()
        linecache.clearcache()

    def load(self, target: str = "work:fn", **modules: str) -> Any:
        self.write(**modules)
        self.forget()
        module, _, name = target.partition(":")
        return getattr(importlib.import_module(module), name)

    def run(self, code: str, **environment: str) -> str:
        """What a new process prints."""
        source = Path(files.__file__).parents[2]  # where this frostline lies, installed or not
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(self.folder), str(source)]), **environment}
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    folder = tmp_path / "lab"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # edits within a second must be seen
    made = Lab(folder)
    yield made
    made.forget()


@pytest.fixture
def code(lab: Lab) -> Callable[..., str]:
    """The digest of `work:fn` after writing these modules."""
    from frostline.fingerprint import code_of

    return lambda **modules: code_of(lab.load(**modules)).digest
