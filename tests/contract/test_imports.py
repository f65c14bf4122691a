"""The house: a part of frostline imports only what its arrow names.

A part is a file or package directly under `src/frostline`. `MAY_IMPORT` is the whole rule; a new part needs a
line here. Imports under `TYPE_CHECKING` and inside functions count too: they are dependencies all the same.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

GROUND = {"errors", "flat", "keyed", "timing", "batch", "wording", "signals"}

DESCRIBED = GROUND | {"tables", "stage", "source", "pipeline", "training", "workload"}
"""What describes a workload, and runs nothing."""

FROZEN = {"execution", "fingerprint", "inspector", "freezer", "store"}
"""What computes the frozen part of it, once."""

MAY_IMPORT: dict[str, set[str]] = {
    **dict.fromkeys(GROUND, GROUND),
    "store": {"errors", "batch", "flat"},
    "tables": {"errors"},
    "stage": GROUND | {"store"},
    "source": {"errors", "tables"},
    "pipeline": {"errors", "tables", "stage", "source"},
    "training": {"errors", "tables"},
    "workload": DESCRIBED,
    "typed": {"errors"},
    "parameters": {"errors", "typed"},
    "target": {"errors", "parameters", "pipeline", "workload"},
    "layers": set(),
    "drawing": {"layers", "pipeline", "stage"},
    "execution": DESCRIBED,
    "fingerprint": DESCRIBED,
    "inspector": DESCRIBED | {"draws", "execution", "fingerprint"},
    "freezer": DESCRIBED | {"execution", "fingerprint", "inspector", "store"},
    "stages": {"errors"},
    "feed": GROUND | {"store", "stage"},
    "draws": GROUND,
    "supply": DESCRIBED | {"draws", "execution", "feed", "store"},
    "scaling": set(),
    "ranks": set(),
    "rewind": {"ranks"},
    "update": {"errors", "rewind", "scaling"},
    "step": GROUND | {"ranks", "rewind", "scaling", "training", "update", "workload"},
    "trainer": DESCRIBED | {"ranks", "rewind", "step", "supply", "update", "freezer", "fingerprint", "store"},
    "experiment": DESCRIBED | {"freezer", "step", "store", "supply", "trainer"},
    "cut": DESCRIBED | FROZEN | {"draws", "step", "feed", "supply"},
    "results": {"errors"},
    "report": {"results", "wording"},
    "profiler": DESCRIBED | {"freezer", "report", "results", "rewind", "step", "store", "supply", "trainer"},
    "cli": DESCRIBED
    | FROZEN
    | {
        "feed",
        "target",
        "drawing",
        "cut",
        "trainer",
        "experiment",
        "profiler",
        "report",
        "results",
        "frostline",
    },
}
"""Nothing may import `cli`, which may import "frostline", the public names themselves.

`__init__` and `__main__` tie the house together and are exempt."""


def imports(path: Path, source: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each frostline import in a file; `from frostline import x` is `frostline.x`."""
    package = ["frostline", *path.relative_to(source).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names] if base == "frostline" else [base]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == "frostline")


def violations(source: Path) -> list[str]:
    """Every import under `source` that the rule does not allow, as 'file:line: what'."""
    parts = {p.stem if p.suffix == ".py" else p.name for p in source.iterdir()}
    found = []
    for path in sorted(source.rglob("*.py")):
        part = path.relative_to(source).parts[0].removesuffix(".py")
        if part in ("__init__", "__main__"):
            continue
        where = path.relative_to(source)
        if part not in MAY_IMPORT:
            found.append(f"{where}: {part!r} has no line in MAY_IMPORT")
            continue
        for line, name in imports(path, source):
            second = name.split(".")[1] if "." in name else ""
            target = second if second in parts else "frostline"
            if target != part and target not in MAY_IMPORT[part]:
                found.append(f"{where}:{line}: {part} must not import {target}")
    return found


def test_every_import_follows_the_arrows(root: Path) -> None:
    source = root / "src" / "frostline"
    assert (source / "errors.py").exists(), "looking in the wrong place"
    assert violations(source) == []


def test_planted_violations_are_noticed(tmp_path: Path) -> None:
    planted = {
        "errors.py": "",
        "keyed.py": "from frostline import errors\n",
        "store/__init__.py": "from . import writer\n",
        "store/writer.py": "def f():\n    from frostline.feed import Feed\n",
        "store/reader.py": "from ..keyed import philox\nfrom frostline.errors import StoreError\n",
        "feed/__init__.py": "import frostline\nimport frostline.cli.main\nfrom frostline import Store\n",
        "cli/main.py": "import frostline.feed\nfrom frostline import __version__\n",
        "attic.py": "import os\n",
    }
    for name, text in planted.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert violations(tmp_path) == [
        "attic.py: 'attic' has no line in MAY_IMPORT",
        "feed/__init__.py:1: feed must not import frostline",
        "feed/__init__.py:2: feed must not import cli",
        "feed/__init__.py:3: feed must not import frostline",
        "store/reader.py:1: store must not import keyed",
        "store/writer.py:2: store must not import feed",
    ]
