"""Recipes stand on public frostline alone, each by itself, and all are laid out alike."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / "src" / "frostline_recipes"
RECIPES = sorted(p.name for p in HOME.iterdir() if (p / "workload.py").is_file())
PUBLIC = {"frostline", "frostline.stages", "frostline.errors", "frostline.trainer"}
"""What a recipe, as anybody's package, may import."""


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_imports_public_frostline_and_itself(recipe: str) -> None:
    own = f"frostline_recipes.{recipe}"
    wrong = {
        (path.name, name)
        for path in (HOME / recipe).rglob("*.py")
        for name in imported(path)
        if name.startswith("frostline") and name not in PUBLIC and not name.startswith(own)
    }
    assert wrong == set()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_has_the_files_that_its_siblings_have(recipe: str) -> None:
    there = {p.name for p in (HOME / recipe).iterdir()}
    assert {"README.md", "data.py", "model.py", "workload.py"} <= there


def test_every_recipe_is_offered_by_its_name() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    offered = project["entry-points"]["frostline.recipes"]
    assert RECIPES
    assert set(RECIPES) <= set(offered)
    for place in offered.values():
        module, _, function = place.partition(":")
        assert callable(getattr(import_module(module), function))
