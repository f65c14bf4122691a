"""What a script writes, and how it ends, is what it would be without the profiler; and there is a profile."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from truth import environment

from frostline.results import Profile


def profiled(folder: Path, source: str, *options: str, status: int = 0) -> tuple[Profile, str, str]:
    """The profile, and what was written to stdout and stderr."""
    (folder / "train.py").write_text(source, encoding="utf-8")
    asked = ["--steps", "6", "--warmup", "4", "--out", str(folder / "out"), *options]
    done = subprocess.run(
        [sys.executable, "-m", "frostline", "profile", *asked, "--", sys.executable, "train.py"],
        capture_output=True, text=True, timeout=500, cwd=folder, env=environment(), check=False,
    )  # fmt: skip
    assert done.returncode == status, f"{done.stdout}\n{done.stderr}"
    return Profile.read(folder / "out" / "profile.json"), done.stdout, done.stderr


def alone(folder: Path) -> str:
    found = subprocess.run(
        [sys.executable, "train.py"],
        capture_output=True, text=True, timeout=500, cwd=folder, env=environment(), check=True,
    )  # fmt: skip
    return found.stdout


def line(text: str) -> str:
    """What the script says of itself at its end."""
    return next(found for found in text.splitlines() if found.startswith("FINAL"))


START = """
import copy, torch
from torch import nn
torch.manual_seed(0)

def final(*values):
    print("FINAL", *values, torch.rand(1).item(), flush=True)
"""

SAVES = (
    START
    + """
import warnings
warnings.simplefilter("ignore")
encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU()).requires_grad_(False)
model = nn.Sequential(encoder, nn.Linear(64, 4))
optimizer = torch.optim.SGD(model[1].parameters(), 0.1)
sizes = []
for step in range(700):
    loss = model(torch.randn(8, 64)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    if step % 3 == 0:
        best = copy.deepcopy(model)
        torch.save(model, "model.pt")
        data = open("model.pt", "rb").read()
        assert b"frostline" not in data
        sizes.append(len(data))
    if step % 50 == 0:
        torch.jit.script(model)
final(loss.item(), best(torch.ones(1, 64)).sum().item(), set(sizes))
"""
)


def test_whole_models_are_saved_copied_and_scripted_as_ever(tmp_path: Path) -> None:
    found, out, _ = profiled(tmp_path, SAVES, "--keep-going")
    assert line(out) == line(alone(tmp_path))
    assert found.wall.count >= 6


COMPILED = (
    START
    + """
model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 4))
compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(700):
    loss = compiled(torch.randn(8, 64)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
final(loss.item())
"""
)


def test_compiled_code_runs_compiled_in_every_step(tmp_path: Path) -> None:
    found, out, _ = profiled(tmp_path, COMPILED, "--keep-going")
    assert line(out) == line(alone(tmp_path))
    assert any("torch.compile is used" in note for note in found.notes)


IN_BACKWARD = (
    START
    + """
model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
optimizers = {p: torch.optim.SGD([p], 1e-3) for p in model.parameters()}

def step(p):
    optimizers[p].step()
    optimizers[p].zero_grad()

for p in model.parameters():
    p.register_post_accumulate_grad_hook(step)
for _ in range(100_000):
    model(torch.randn(8, 32)).square().mean().backward()
"""
)


def test_optimisers_that_step_within_the_backward_pass(tmp_path: Path) -> None:
    found, _, err = profiled(tmp_path, IN_BACKWARD)
    assert (found.boundary, "failed" in err) == ("SGD.step", False)
    assert found.wall.count >= 6
    assert any("within the backward pass" in note for note in found.notes)


FEATURES_FIRST = (
    START
    + """
encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
with torch.no_grad():
    features = torch.cat([encoder(torch.randn(8, 64)) for _ in range(60)])
head = nn.Linear(64, 4)
optimizer = torch.optim.Adam(head.parameters())
for _ in range(100_000):
    head(features[:8]).square().mean().backward()
    optimizer.step()
"""
)


def test_a_training_counts_although_features_were_computed_before_it(tmp_path: Path) -> None:
    found, _, _ = profiled(tmp_path, FEATURES_FIRST)
    assert found.boundary == "Adam.step"
    assert any("that was dropped" in note for note in found.notes)


ONE_SIZE = (
    START
    + """
from torch.utils.data import DataLoader, TensorDataset
loader = DataLoader(TensorDataset(torch.randn(160, 64)), 16)
model = nn.Linear(64, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
while True:
    for (x,) in loader:
        loss = (model(x) - torch.zeros(16, 4)).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
)


def test_a_script_that_cannot_take_half_a_batch_was_profiled(tmp_path: Path) -> None:
    found, _, err = profiled(tmp_path, ONE_SIZE)
    assert "What was measured before stands" in err
    assert any("half a batch" in note and "train.py:15" in note for note in found.notes)
    assert "replayed" in {trial.name for trial in found.trials}


LATE = (
    START
    + """
model = nn.Linear(64, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range({steps}):
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
{then}
"""
)


def test_an_error_after_the_profile_is_the_scripts(tmp_path: Path) -> None:
    source = LATE.format(steps=1500, then="raise SystemExit(3)")
    found, _, _ = profiled(tmp_path, source, "--keep-going", status=1)
    assert any("with status 3" in note for note in found.notes)


def test_what_a_script_showed_before_it_was_killed_is_there(tmp_path: Path) -> None:
    source = LATE.format(steps=120, then="import os; os.kill(os.getpid(), 9)")
    found, _, _ = profiled(tmp_path, source, status=1)
    assert found.boundary == "SGD.step"
    assert found.wall.count >= 6


UNSTEPPED = (
    START
    + """
model = nn.Linear(64, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with torch.no_grad():
    for _ in range(1500):
        model(torch.randn(8, 64))
{then}
"""
)


@pytest.mark.parametrize("trains", [False, True])
def test_a_test_of_a_model_is_profiled_and_gives_way_to_a_training(tmp_path: Path, trains: bool) -> None:
    """An optimiser is there: the script is not stopped before it is known whether it steps."""
    train = "while True:\n    model(torch.randn(8, 64)).sum().backward()\n    optimizer.step()"
    found, _, _ = profiled(tmp_path, UNSTEPPED.format(then=train if trains else ""))
    assert found.boundary == ("SGD.step" if trains else "call of Linear")
    assert any("dropped" in note if trains else "never stepped" in note for note in found.notes)


SUMS = (
    START
    + """
from torch.utils.data import DataLoader, TensorDataset
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1) if {optimizer} else None
total = 0
with torch.no_grad():
    for (x,) in DataLoader(TensorDataset(torch.arange(24_000.0).reshape(-1, 4)), 4):
        model(x)
        total += x.sum().item()
final(total)
"""
)


def test_a_script_that_is_not_stopped_was_given_its_own_batches(tmp_path: Path) -> None:
    """It goes on where a training may be yet to come, so its results matter."""
    found, out, _ = profiled(tmp_path, SUMS.format(optimizer=True))
    assert found.boundary == "call of Linear"
    assert line(out) == line(alone(tmp_path))


def test_a_process_that_makes_what_the_next_one_trains_on_is_not_stopped(tmp_path: Path) -> None:
    """And the training is what is profiled."""
    (tmp_path / "features.py").write_text(SUMS.format(optimizer=False), encoding="utf-8")
    source = """
import subprocess, sys
made = subprocess.run([sys.executable, "features.py"], check=True, capture_output=True, text=True).stdout
import torch
print(made)
model = torch.nn.Linear(64, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(100_000):
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
"""
    found, out, _ = profiled(tmp_path, source)
    assert found.boundary == "SGD.step"
    assert any("1 more process took steps" in note and "`train.py`" in note for note in found.notes)
    assert f"FINAL {sum(range(24_000)):.1f}" in out


FEATURES = (
    START
    + """
from torch.utils.data import DataLoader, TensorDataset
encoder = nn.Linear(4, 4)
with torch.no_grad():
    features = [encoder(x) for (x,) in DataLoader(TensorDataset(torch.arange(240.0).reshape(-1, 4)), 1)]
final(len(features), torch.cat(features).sum().item())
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range({steps}):
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
"""
)


def test_features_that_a_training_needs_are_whole_and_the_training_is_profiled(tmp_path: Path) -> None:
    """In one process, where no optimiser is there yet: the loop has fewer batches than are measured."""
    found, out, _ = profiled(tmp_path, FEATURES.format(steps=100_000))
    assert found.boundary == "SGD.step"
    (tmp_path / "train.py").write_text(FEATURES.format(steps=1), encoding="utf-8")
    assert line(out) == line(alone(tmp_path))


COMPILED_STEP = (
    START
    + """
model = nn.Linear(64, 4)
optimizer = torch.optim.Adam(model.parameters(), torch.tensor(1e-3))

@torch.compile(backend="eager")
def step():
    optimizer.step()

for _ in range(100_000):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    step()
"""
)


def test_an_optimiser_whose_step_is_compiled(tmp_path: Path) -> None:
    found, _, _ = profiled(tmp_path, COMPILED_STEP)
    assert found.boundary == "call of Linear"
    assert any("own steps are not seen" in note for note in found.notes)


SOMETIMES = (
    START
    + """
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
seldom = nn.Linear(64, 256).requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(100_000):
    out = model(torch.randn(8, 64))
    loss = out.square().mean() + (seldom(out).square().mean() if step % 8 == 7 else 0)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
)


def test_a_module_that_runs_every_eighth_step_is_told_of(tmp_path: Path) -> None:
    found, _, _ = profiled(tmp_path, SOMETIMES, "--warmup", "10")
    assert "Linear" in {module.name for module in found.modules}
