"""What the freezer's tests share: a cache of their own, counted calls, a store's bytes, modules."""

from __future__ import annotations

import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from frostline.execution.call import Ready


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROSTLINE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Stage → samples that went through it. Not counted in the stage: an audit would refuse that."""
    found: Counter[str] = Counter()
    one, many = Ready.one, Ready.many

    def counted_one(self: Ready, key: str, values: Any) -> Any:
        found[self.stage.name] += 1
        return one(self, key, values)

    def counted_many(self: Ready, keys: Any, columns: Any) -> Any:
        found[self.stage.name] += len(keys)
        return many(self, keys, columns)

    monkeypatch.setattr(Ready, "one", counted_one)
    monkeypatch.setattr(Ready, "many", counted_many)
    return found


def files_of(root: Path) -> dict[str, bytes]:
    """Every file of a store but the log and the lock, which hold times and hosts."""
    return {
        p.relative_to(root).as_posix(): p.read_bytes()
        for p in sorted(root.rglob("*"))
        if p.is_file() and p.name not in ("log.txt", ".lock")
    }


@pytest.fixture(name="files_of")
def _files_of() -> Callable[[Path], dict[str, bytes]]:
    return files_of


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Writes a module that worker processes can import, and imports it."""
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    names: list[str] = []

    def write(text: str) -> ModuleType:
        names.append(f"written_{len(names)}_{tmp_path.name}")
        (folder / f"{names[-1]}.py").write_text(textwrap.dedent(text))
        return __import__(names[-1])

    yield write
    for name in names:
        sys.modules.pop(name, None)
