"""`frostline profile` as a person runs it: what is said, written, and the status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from frostline.cli.main import main
from frostline.results import Machine, Profile, Row, Steps, Verdict

WORK = """
import torch
import frostline as fl

def loss(model, batch):
    return model(torch.tensor(batch["x"])).square().mean()

def workload(*, n: int = 64, batch_size: int = 8) -> fl.Workload:
    rows = [{"key": str(i), "x": [float(i), 1.0]} for i in range(n)]
    return fl.Workload(
        fl.Pipeline(fl.Source.table(rows)), model=fl.lazy(torch.nn.Linear, 2, 1), loss=loss,
        batch_size=batch_size,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), 1e-5),
    )
"""
SCRIPT = """
import torch
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(2000):
    model(torch.ones(8, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("reached its own end")
"""


def shell(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "frostline", "profile", *arguments],
        capture_output=True, text=True, cwd=folder, timeout=500, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
    )  # fmt: skip


def made(path: Path, ms: float) -> Path:
    times = tuple(ms + 0.01 * (i % 7) for i in range(40))
    Profile(
        command="python train.py", boundary="AdamW.step", wall=Steps(ms, ms - 0.1, ms + 0.1, 40, times),
        attributed=None, rows=(Row("forward", "forward", ms, 1.0),),
        verdict=Verdict("compute-bound", "It computes."), samples=8.0,
        machine=Machine("cpu", 2, "2.13", "3.11"),
    ).write(path)  # fmt: skip
    return path


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, object]:
    with pytest.raises(SystemExit) as ended:
        main(["profile", *arguments])
    captured = capsys.readouterr()
    return captured.out + captured.err, ended.value.code


def test_a_script_is_profiled_and_stopped(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = shell(tmp_path, "--steps", "12", "--warmup", "3", "--trace", "--", sys.executable, "train.py")
    assert done.returncode == 0, done.stderr
    assert "reached its own end" not in done.stdout
    assert "Where the step goes" in done.stdout
    (out,) = (tmp_path / "runs" / "profile").iterdir()
    assert f"kept in {out.relative_to(tmp_path)}" in done.stdout
    assert Profile.read(out / "profile.json").boundary == "SGD.step"
    assert (out / "report.html").read_text().startswith("<!doctype html>")
    assert json.loads((out / "trace.json").read_text())["traceEvents"]


def test_a_script_may_run_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = shell(
        tmp_path, "--steps", "12", "--warmup", "3", "--keep-going", "--out", "out", "--", sys.executable,
        "train.py",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "reached its own end" in done.stdout
    assert (tmp_path / "out" / "profile.json").exists()


def test_a_workload_is_profiled_with_its_parameters(tmp_path: Path) -> None:
    (tmp_path / "my_work.py").write_text(WORK)
    done = shell(
        tmp_path, "my_work.py", "batch_size=4", "--live", "--steps", "12", "--warmup", "3", "--out", "out"
    )
    assert done.returncode == 0, done.stderr
    found = Profile.read(tmp_path / "out" / "profile.json")
    assert found.samples == 4
    assert {trial.name for trial in found.trials} >= {"compute", "replayed", "real", "half"}


def test_two_profiles_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = made(tmp_path / "a.json", 20.0), made(tmp_path / "b.json", 10.0)
    text, status = told(capsys, "--compare", str(a), str(b))
    assert not status
    assert "2.0" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "needs a command after --, or a TARGET"),
        (("my_work.py", "--", "python", "train.py"), "needs a command after --, or a TARGET"),
        (("--",), "nothing to profile"),
        (("--steps", "1", "--", "python", "train.py"), "steps is 1"),
        (("--compare", "missing.json", "missing.json"), "missing.json"),
        (("no_such_work.py",), "no_such_work"),
    ],
)
def test_what_cannot_be_profiled_is_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...], words: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    text, status = told(capsys, *arguments)
    assert status == 1
    assert words in text
    assert "Traceback" not in text


def test_a_script_without_the_dashes_is_not_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.py").write_text(SCRIPT)
    text, status = told(capsys, "tiny.py")
    assert status == 1
    assert "reached its own end" not in text
    assert "has no function 'workload'" in text
    assert "To profile a script: frostline profile -- python tiny.py" in " ".join(text.split())
