"""`frostline ls` as a person runs it."""

from __future__ import annotations

import json
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from frostline import target
from frostline.cli.main import main


@pytest.fixture
def run(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)

    def call(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(["ls", *words])
        return int(end.value.code or 0), *capsys.readouterr()

    return call


@pytest.fixture
def offer(tmp_path: Path, monkeypatch):
    """Recipes by name: the text of the module that each lies in."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(**modules: str) -> None:
        for name, text in modules.items():
            (tmp_path / f"h4_ls_{name}.py").write_text(text)
        points = [EntryPoint(n, f"h4_ls_{n}:workload", target.GROUP) for n in modules]
        monkeypatch.setattr(target, "entry_points", lambda group: points)

    yield install
    for name in [n for n in sys.modules if n.startswith("h4_ls_")]:
        del sys.modules[name]


def test_without_recipes_it_says_how_to_offer_one(run, offer) -> None:
    offer()
    code, out, err = run()
    assert (code, err) == (0, "")
    assert "No recipes are installed" in out
    assert '[project.entry-points."frostline.recipes"]' in out
    assert run("--json")[1] == "[]\n"


def test_recipes_and_broken_ones(run, offer) -> None:
    offer(
        good='def workload():\n    """Frames of clips.\n\n    More."""\n',
        silent="def workload(): ...\n",
        bad="import h4_not_there\n",
        exits="raise SystemExit('no GPU here')\n",
        empty="",
    )
    code, out, err = run()
    assert (code, err) == (0, "")
    rows = {line.split()[0]: line for line in out.splitlines() if "h4_ls_" in line}
    assert list(rows) == ["bad", "empty", "exits", "good", "silent"]
    assert rows["good"].endswith("Frames of clips.")
    assert "cannot be imported: ModuleNotFoundError" in rows["bad"]
    assert "AttributeError" in rows["empty"]
    assert "no GPU here" in rows["exits"]
    listed = {row["name"]: row for row in json.loads(run("--json")[1])}
    assert listed["good"] == {
        "name": "good", "module": "h4_ls_good:workload", "about": "Frames of clips.", "problem": None,
    }  # fmt: skip
    assert listed["bad"]["problem"]
