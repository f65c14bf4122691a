"""The profiler tells the truth about scripts in which the cause is planted (scripts/, truth.py).

Structure, counts, places and verdicts are judged here; the figures that depend on an undisturbed machine (5 %
between rows and wall clock, 10 % between what is foretold and gained) are benchmarks/profile.py's to judge.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from truth import PLANTS, Plant, load, run  # noqa: E402 (lies beside this file)


def planted(device: str) -> list[Plant]:
    return [plant for plant in PLANTS if device in plant.devices]


def test_every_script_is_a_plant() -> None:
    scripts = {path.name for path in HERE.glob("scripts/*.py")} - {"step_of.py"}  # a part of two of them
    assert sorted(p.script.name for p in PLANTS) == sorted(scripts)


@pytest.mark.parametrize("plant", planted("cpu"), ids=lambda plant: plant.name)
def test_what_was_planted_is_found(plant: Plant, tmp_path: Path) -> None:
    for _ in range(3):
        profile, printed = run(plant, tmp_path, steps=30, steady=True)
        wrong = plant.wrong(profile, "cpu", tight=False)
        if not wrong:  # else once more: others use these cores too, and what is there shows again
            break
    assert not wrong
    assert profile.verdict.kind in printed.lower()
    assert (tmp_path / "report.html").stat().st_size > 1000


@pytest.mark.gpu
@pytest.mark.parametrize("plant", planted("cuda"), ids=lambda plant: plant.name)
def test_what_was_planted_is_found_on_a_gpu(plant: Plant, tmp_path: Path) -> None:
    profile, _ = run(plant, tmp_path, device="cuda", steps=30)
    assert not plant.wrong(profile, "cuda", tight=False)


def test_the_planted_share_of_repeats_is_the_one_that_its_data_have() -> None:
    script = load("repeated_images")
    data, steps = script.Images(), 7
    rows = [data[i].numpy().tobytes() for i in range(steps * script.BATCH)]
    assert len(rows) - len(set(rows)) == script.planted_repeats(steps)
