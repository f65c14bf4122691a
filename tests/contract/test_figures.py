"""The figures that pages quote are those of the result files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*-*.json"))


def test_pages_quote_the_result_files() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "figures.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", RESULTS, ids=lambda p: p.stem)
def test_results_have_the_agreed_shape(path: Path) -> None:
    record = json.loads(path.read_text())
    assert {"name", "device", "versions", "commit", "command", "rows", "goals"} <= record.keys()
    assert path.stem == f"{record['name']}-{record['device']}"
    assert record["rows"]
    for goal in record["goals"]:
        assert {"goal", "target", "value", "met"} <= goal.keys()
