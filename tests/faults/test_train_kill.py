"""A training that is killed and called again ends with the bits of one that nobody touched.

Killed at random moments, at calls that change the disk (so also inside a save), asked to stop; in fp32 and in
fp16 with a scaler. Compared: parameters, optimiser state, buffers, scaler, generators, and the metrics.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from frostline.trainer.checkpoint import load
from frostline.trainer.recorder import read_metrics

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import killed_training  # noqa: E402
import killing  # noqa: E402

TIMES = ("elapsed_s",)


class Trainings:
    """Runs of both variants, and what an unbroken one of each came to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = killing.Server("killed_training", {"FROSTLINE_CACHE": str(folder / "cache")})
        self.whole: dict[str, Any] = {}
        self.calls: dict[str, int] = {}
        self.seconds: dict[str, float] = {}

    def begin(self) -> None:
        for variant in killed_training.VARIANTS:
            answer = self.run(f"whole-{variant}", variant)
            assert answer["exit"] == 0
            self.calls[variant], self.seconds[variant] = answer["calls"], answer["seconds"]
            self.whole[variant] = outcome(self.folder / f"whole-{variant}")

    def run(self, name: str, variant: str, **request: Any) -> dict[str, Any]:
        return self.server.ask(root=str(self.folder / name), variant=variant, **request)


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainings]:
    found = Trainings(tmp_path_factory.mktemp("trainings"))
    try:
        found.begin()
        yield found
    finally:
        found.server.close()


def outcome(root: Path) -> dict[str, Any]:
    """Every bit of the last checkpoint and every line of the metrics, but for times."""
    loaded = load(root / "run")
    state = {n: v for n, v in loaded.state.items() if n not in TIMES}
    tensors = {
        f"{group}/{name}": (str(t.dtype), t.reshape(-1).contiguous().numpy().tobytes())
        for group, some in loaded.groups.items()
        for name, t in some.items()
    }
    lines = [
        {n: v for n, v in line.items() if not n.startswith("time/")} for line in read_metrics(root / "run")
    ]
    return {
        "step": loaded.step,
        "tensors": tensors,
        "state": json.dumps(state, sort_keys=True),
        "lines": lines,
    }


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    found = [n for n in ("step", "state", "lines") if one[n] != other[n]]
    names = {*one["tensors"], *other["tensors"]}
    return found + sorted(n for n in names if one["tensors"].get(n) != other["tensors"].get(n))


def _kill(trainings: Trainings, kills: int, seed: int) -> dict[str, Any]:
    """Kill until it was done `kills` times, at random moments and at calls that change the disk in turn."""
    draw = random.Random(seed)
    done, runs, different = 0, 0, list[str]()
    while done < kills:
        variant = [*killed_training.VARIANTS][runs % 2]
        name = f"killed-{seed}-{runs}"
        runs += 1
        for _ in range(4):  # so many times at most in one run
            if draw.random() < 0.5:
                call = draw.randint(1, trainings.calls[variant])
                request = {"at": call, "do": "kill", "when": draw.choice(["before", "half", "after"])}
            else:
                request = {"after_s": draw.uniform(0, 0.9 * trainings.seconds[variant])}
            answer = trainings.run(name, variant, **request)
            if answer["exit"] == 0 or done == kills:
                break
            assert answer["exit"] == -9
            done += 1
        assert trainings.run(name, variant)["exit"] == 0
        found = differences(outcome(trainings.folder / name), trainings.whole[variant])
        different += [f"{name}: {what}" for what in found]
    return {"kills": done, "runs": runs, "identical": not different, "different": different}


def test_an_unbroken_run_is_the_same_each_time_and_evaluations_were_made(trainings: Trainings) -> None:
    for variant, whole in trainings.whole.items():
        assert trainings.run(f"again-{variant}", variant)["exit"] == 0
        assert differences(outcome(trainings.folder / f"again-{variant}"), whole) == []
        kinds = [line["kind"] for line in whole["lines"]]
        assert (kinds.count("train"), kinds.count("eval")) == (10, 4)
        assert whole["step"] == killed_training.STEPS


def test_killed_anywhere_it_ends_with_the_same_bits(trainings: Trainings) -> None:
    found = _kill(trainings, kills=5, seed=1)
    assert found["different"] == []


@pytest.mark.parametrize("signal", ["SIGTERM", "SIGINT"])
def test_asked_to_stop_it_finishes_the_step_saves_and_goes_on_exactly(
    trainings: Trainings, signal: str
) -> None:
    name = f"asked-{signal}"
    call = trainings.calls["fp32"] // 2
    assert trainings.run(name, "fp32", at=call, do=signal)["exit"] == 3
    before = load(trainings.folder / name / "run")
    assert 0 < before.step < killed_training.STEPS
    assert trainings.run(name, "fp32")["exit"] == 0
    assert differences(outcome(trainings.folder / name), trainings.whole["fp32"]) == []


def test_asked_twice_it_stops_at_once_and_goes_on_exactly(trainings: Trainings) -> None:
    call = trainings.calls["fp16"] // 2
    assert trainings.run("twice", "fp16", at=call, do="SIGINT twice")["exit"] == 130
    assert trainings.run("twice", "fp16")["exit"] == 0
    assert differences(outcome(trainings.folder / "twice"), trainings.whole["fp16"]) == []


@pytest.mark.full
def test_killed_thirty_times(trainings: Trainings) -> None:
    found = _kill(trainings, kills=30, seed=2)
    killing.record("train_kill", found)
    assert found["different"] == []
