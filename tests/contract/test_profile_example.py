"""docs/profile-example.md: its scripts run, its files exist, its figures are those of the result file."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "detector"
PAGE = ROOT / "docs" / "profile-example.md"
RESULT = ROOT / "benchmarks" / "results" / "profile_example-cpu.json"
WAYS = ("by hand", "frostline", "true")
STAGES = ("Support encoding", "Backbone", "Fusion + detection")


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    return {row["what"]: row for row in json.loads(RESULT.read_text(encoding="utf-8"))["rows"]}


def printed(script: str, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLE / script, *args],
        capture_output=True, text=True, timeout=500, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def measured(page: str, name: str) -> str:
    """What lies between the marks that benchmarks/profile_example.py fills in."""
    found = re.search(rf"<!-- measured: {name} -->\n(.+?)<!-- end -->", page, re.DOTALL)
    assert found, f"the page has nothing between the marks of {name!r}"
    return found[1]


def stage_table(text: str) -> tuple[dict[str, tuple[float, float]], float]:
    """Stages: milliseconds and percent; and the total."""
    stages = re.findall(r"^(.+?):\s+([\d.]+) ms \((\d+) %\)$", text, re.MULTILINE)
    total = re.search(r"^Total iteration:\s+([\d.]+) ms$", text, re.MULTILINE)
    assert total
    return {name: (float(ms), float(percent)) for name, ms, percent in stages}, float(total[1])


def rounded(text: str, value: float, scale: float = 1.0) -> bool:
    """Whether a text such as "46 %" or "1,200 s" is the value, as far as its digits go."""
    found = re.match(r"[\d,.]+", text)
    assert found, text
    digits = len(found[0].partition(".")[2])
    return abs(float(found[0].replace(",", "")) - scale * value) <= 0.5000001 * 10**-digits


def test_the_training_runs() -> None:
    assert re.search(
        r"^epoch 0: loss \d+\.\d+, [\d.]+ s$", printed("train.py", "--episodes", "2", "--epochs", "1"), re.M
    )


def test_stages_are_timed_the_wrong_way() -> None:
    stages, total = stage_table(text := printed("time_stages.py", "--iterations", "2"))
    assert tuple(stages) == STAGES
    assert total > 0
    for ms, percent in stages.values():
        assert percent == pytest.approx(100 * ms / total, abs=1 + 10 / total)
    assert re.search(r"^Epoch time:\s+[\d.]+ minutes$", text, re.MULTILINE)


def test_the_page_names_files_that_exist(page: str) -> None:
    linked = re.findall(r"\]\(([^)#]+)\)", page)
    named = re.findall(r"\b(?:examples|benchmarks|docs)/[\w/.-]*\w", page)
    assert linked
    assert [name for name in linked if not (PAGE.parent / name).exists()] == []
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_table_is_the_result_file(page: str, rows: dict[str, dict[str, Any]]) -> None:
    lines = [line.strip("| ").split("|") for line in measured(page, "table").splitlines()[2:]]
    assert [line[0].strip() for line in lines] == list(rows)
    for what, *cells in lines:
        row = rows[what.strip()]
        cells += [""] * (len(WAYS) - len(cells))  # an empty last one went with the bars
        for way, cell in zip(WAYS, cells, strict=True):
            scale = 100 if row["unit"] == "share" else 1
            kept = row[way]
            assert not cell.strip() if kept is None else rounded(cell.strip(), kept, scale), (what, way)


def test_what_was_printed_is_of_the_same_run(page: str, rows: dict[str, dict[str, Any]]) -> None:
    stages, total = stage_table(measured(page, "stages"))
    assert rounded(f"{total}", rows["a step"]["by hand"])
    parts = sum(ms for ms, _ in stages.values())
    assert parts / total == pytest.approx(rows["all parts"]["by hand"], rel=1e-3)
    step = re.search(r"^step ([\d.]+) ms", measured(page, "profile"), re.MULTILINE)
    assert step
    assert rounded(step[1], rows["a step"]["frostline"])


def test_the_page_has_no_folder_of_a_machine(page: str) -> None:
    assert re.findall(r"(?<![\w.])/(?:work|home|root|tmp|usr)/\S*", page) == []
