"""`import frostline as fl` shows the decided names, loads quickly, and no package ever hides a name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import frostline as fl

MOST_NAMES = 25
HEAVY = ("torch", "numpy", "pyarrow", "safetensors", "rich")

# Run in a fresh interpreter, since the names are loaded once: what does importing every module do to them?
HIDDEN_NAMES = """
import importlib, pkgutil, sys
from types import ModuleType
package = importlib.import_module(sys.argv[1])
load_first = sys.argv[2] == "names-first"
before = {n: getattr(package, n) for n in package.__all__} if load_first else {}
for m in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    if not m.name.endswith(".__main__"):
        importlib.import_module(m.name)
after = {n: getattr(package, n) for n in package.__all__}
hidden = {n for n in after if isinstance(after[n], ModuleType) or before.get(n, after[n]) is not after[n]}
print(*sorted(hidden))
"""


def python(*args: str, cwd: Path | None = None) -> str:
    done = subprocess.run([sys.executable, *args], capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def hidden_names(package: str, cwd: Path | None = None) -> list[str]:
    orders = ("names-first", "modules-first")
    return sorted({n for o in orders for n in python("-c", HIDDEN_NAMES, package, o, cwd=cwd).split()})


def test_names_are_the_decided_ones(root: Path) -> None:
    decision = (root / "docs" / "decisions" / "0001-public-names.md").read_text(encoding="utf-8")
    decided = re.findall(r"^\| `fl\.(\w+)` \|", decision, flags=re.MULTILINE)
    assert sorted(decided) == sorted(fl.__all__)
    assert sorted(n for n in dir(fl) if not n.startswith("_")) == sorted(fl.__all__)
    assert len(fl.__all__) <= MOST_NAMES


def test_every_name_exists_and_an_unknown_one_says_so() -> None:
    assert [n for n in fl.__all__ if not hasattr(fl, n)] == []
    assert not hasattr(fl, "Stroe")


def test_type_checkers_see_the_same_names(root: Path) -> None:
    source = (root / "src" / "frostline" / "__init__.py").read_text(encoding="utf-8")
    typed = re.findall(r"^    from (frostline[.\w]*) import (\w+) as \2$", source, flags=re.MULTILINE)
    assert {name: home for home, name in typed} == fl._HOMES
    assert fl.__all__ == sorted(fl._HOMES)


def test_no_package_hides_a_name() -> None:
    assert hidden_names("frostline") == []


def test_a_package_that_hides_a_name_is_noticed(tmp_path: Path) -> None:
    package = tmp_path / "planted"
    package.mkdir()
    (package / "__init__.py").write_text(
        "__all__ = ['train', 'tune']\n"
        "def __getattr__(name):\n"
        "    if name not in __all__: raise AttributeError(name)\n"
        "    return len\n"
    )
    (package / "train.py").write_text("")
    assert hidden_names("planted", cwd=tmp_path) == ["train"]


def test_import_loads_nothing_heavy() -> None:
    loaded = python("-c", f"import sys, frostline; print(*({set(HEAVY)} & set(sys.modules)))")
    assert loaded.split() == []


def test_no_help_loads_anything_heavy(cli_reference) -> None:
    """Every command's `--help`, one after the other in one interpreter."""
    calls = [[*words[1:], "--help"] for words, _ in cli_reference.commands()]
    script = f"""
import contextlib, io, sys
from frostline.cli.main import main
for call in {calls}:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main(call)
    if "Usage:" not in out.getvalue():
        sys.exit(f"no help: {{call}}")
print(*({set(HEAVY)} & set(sys.modules)))
"""
    assert python("-c", script).split() == []
