"""Scripts that crash, never step, fork, leave by the back door, swallow the stop; commands that are none.

Exit status: 0 when there is a profile of a script that ran, 1 when there is none or the script failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from truth import environment  # noqa: E402 (lies beside this file)

from frostline.results import Profile  # noqa: E402

MODEL = """
import os, sys, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
def train(x=None):
    optimizer.zero_grad()
    model(torch.randn(32, 256) if x is None else x).square().mean().backward()
    optimizer.step()
"""


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str
    profile: Profile | None

    def says(self, *words: str) -> bool:
        """All of the words; of "a|b", either."""
        said = f"{self.out}\n{self.err}".lower()
        return all(any(word.lower() in said for word in choice.split("|")) for choice in words)


def frostline(folder: Path, *command: str, options: tuple[str, ...] = (), path: Path | None = None) -> Ran:
    env = environment()
    if path is not None:
        env["PYTHONPATH"] = os.pathsep.join([str(path), env["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, "-m", "frostline", "profile", "--steps", "30", "--warmup", "3",
         "--out", str(folder / "out"), *options, "--", *command],
        capture_output=True, text=True, timeout=500, cwd=folder, env=env, check=False,
    )  # fmt: skip
    kept = folder / "out" / "profile.json"
    return Ran(done.returncode, done.stdout, done.stderr, Profile.read(kept) if kept.exists() else None)


def profiled(folder: Path, source: str, *options: str, python: tuple[str, ...] = (), **more: Path) -> Ran:
    (folder / "train.py").write_text(source, encoding="utf-8")
    return frostline(folder, sys.executable, *python, "train.py", options=options, **more)


@pytest.mark.parametrize("steps", [15, 30, 40, 50])
def test_a_crash_comes_through_and_what_was_measured_is_kept(tmp_path: Path, steps: int) -> None:
    """Whatever the profiler is trying out just then."""
    crash = f"for i in range({steps}): train()\nraise ValueError('the disk is full')"
    ran = profiled(tmp_path, MODEL + crash)
    assert ran.code == 1
    assert "Traceback" in ran.err
    assert "ValueError: the disk is full" in ran.err
    assert "sitecustomize" not in ran.err, "the profiler shows in the user's traceback"
    assert ran.profile is not None
    assert ran.profile.wall.count > 0
    assert any("ValueError" in note for note in ran.profile.notes)


@pytest.mark.parametrize("steps", [58, 64])
def test_a_crash_is_not_taken_for_one_of_a_batch_that_was_tried_out(tmp_path: Path, steps: int) -> None:
    """With a loader, batches are handed out again and halved at about these steps."""
    loop = f"""
from torch.utils.data import DataLoader
for i, x in enumerate(DataLoader(torch.randn(6400, 256), 32)):
    if i == {steps}:
        raise ValueError("the disk is full")
    train(x)
"""
    ran = profiled(tmp_path, MODEL + loop)
    assert "Traceback" in ran.err
    assert "ValueError: the disk is full" in ran.err


def test_a_crash_before_the_first_step(tmp_path: Path) -> None:
    ran = profiled(tmp_path, MODEL + "raise ValueError('no data')\n")
    assert (ran.code, ran.profile) == (1, None)
    assert "ValueError: no data" in ran.err
    assert ran.says("step")


def test_a_script_that_never_steps(tmp_path: Path) -> None:
    ran = profiled(tmp_path, "import torch\nprint(torch.ones(3).sum())\n")
    assert (ran.code, ran.profile) == (1, None)
    assert "tensor(3.)" in ran.out
    assert ran.says("step", "optimizer|module")


def test_a_script_without_torch(tmp_path: Path) -> None:
    ran = profiled(tmp_path, "print('nothing to see')\n")
    assert (ran.code, ran.profile) == (1, None)
    assert "nothing to see" in ran.out
    assert ran.says("torch")


def test_a_child_that_was_forked_leaves_its_parents_profile_alone(tmp_path: Path) -> None:
    fork = """
for i in range(400):
    if i == 5 and not os.fork():
        train()
        sys.exit(7)
    train()
"""
    ran = profiled(tmp_path, MODEL + fork)
    assert ran.code == 0
    assert ran.profile is not None
    assert ran.profile.wall.count >= 8
    assert "SGD.step" in ran.profile.boundary


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_training_in_a_child_process_is_found(tmp_path: Path, method: str) -> None:
    (tmp_path / "loop.py").write_text(MODEL + "def main():\n    for i in range(400): train()\n")
    start = f"""
import multiprocessing
from loop import main
if __name__ == "__main__":
    child = multiprocessing.get_context("{method}").Process(target=main)
    child.start()
    child.join()
"""
    ran = profiled(tmp_path, start)
    assert ran.code == 0
    assert ran.profile is not None
    assert ran.profile.wall.count >= 8


def test_a_script_that_leaves_by_os_exit(tmp_path: Path) -> None:
    ran = profiled(tmp_path, MODEL + "for i in range(40): train()\nos._exit(3)\n")
    assert ran.code == 1
    assert ran.says("os._exit(3)|exit status 3")
    assert ran.profile is not None
    assert ran.profile.wall.count > 0


def test_fewer_steps_than_asked_for(tmp_path: Path) -> None:
    ran = profiled(tmp_path, MODEL + "for i in range(20): train()\n", "--steps", "200")
    assert ran.code == 0
    assert ran.profile is not None
    assert 0 < ran.profile.wall.count <= 20
    (note,) = (note for note in ran.profile.notes if "the script ended" in note)
    assert "its own end, after 20 steps, " in note
    assert " of the 200 steps asked for were measured; left out: the script's own lines" in note
    assert "again and again" not in note, "there is no loader"


def test_fewer_steps_than_the_warm_up(tmp_path: Path) -> None:
    ran = profiled(tmp_path, MODEL + "for i in range(8): train()\n", "--warmup", "10", "--trace")
    assert ran.profile is not None
    ended, trace = ran.profile.notes
    assert ended.endswith("8 steps, all of them warm-up: none of the 30 asked for was measured")
    assert trace == "--trace was asked for, but there is no trace: the script ended before"


def test_too_few_steps_for_a_verdict(tmp_path: Path) -> None:
    ran = profiled(tmp_path, MODEL + "for i in range(4): train()\n", "--warmup", "2")
    assert ran.says("step")
    if ran.profile is None:
        assert ran.code == 1
    else:
        assert (ran.code, ran.profile.verdict.kind) == (0, "unclear")


@pytest.mark.parametrize("command", [["ls"], ["no-such-command-at-all"]])
def test_a_command_that_is_not_python(tmp_path: Path, command: list[str]) -> None:
    ran = frostline(tmp_path, *command)
    assert (ran.code, ran.profile) == (1, None)
    assert ran.says("python|not found|no such|no command")


def test_a_script_that_is_not_there(tmp_path: Path) -> None:
    ran = frostline(tmp_path, sys.executable, "missing.py")
    assert (ran.code, ran.profile) == (1, None)
    assert ran.says("missing.py")


@pytest.mark.parametrize("flag", ["-I", "-S", "-E"])
def test_a_python_that_cannot_be_reached(tmp_path: Path, flag: str) -> None:
    ran = profiled(tmp_path, MODEL + "for i in range(60): train()\n", python=(flag,))
    assert (ran.code, ran.profile) == (1, None)
    assert ran.says(flag)


def test_a_sitecustomize_of_the_users_still_runs(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "sitecustomize.py").write_text("import sys\nsys.theirs = 'ran'\n")
    ran = profiled(
        tmp_path, MODEL + "print(sys.theirs, flush=True)\nfor i in range(400): train()", path=theirs
    )
    assert (ran.code, ran.profile is None) == (0, False)
    assert "ran" in ran.out


def test_the_stop_gets_through_a_bare_except(tmp_path: Path) -> None:
    swallow = "for i in range(10**9):\n    try:\n        train()\n    except:\n        continue\n"
    ran = profiled(tmp_path, MODEL + swallow)
    assert ran.code == 0
    assert ran.profile is not None
    assert ran.profile.wall.count >= 8


def test_the_stop_is_polite(tmp_path: Path) -> None:
    tidy = """
import atexit
atexit.register(print, "at the end", flush=True)
try:
    for i in range(10**9): train()
finally:
    print("finally", flush=True)
"""
    ran = profiled(tmp_path, MODEL + tidy)
    assert ran.code == 0
    assert "finally" in ran.out
    assert "at the end" in ran.out
    assert "Traceback" not in ran.err


def test_a_module_and_arguments_that_look_like_ours(tmp_path: Path) -> None:
    package = tmp_path / "trainer"
    package.mkdir()
    loop = "print(sys.argv[1:], flush=True)\nfor i in range(400): train()\n"
    (package / "__main__.py").write_text(MODEL + loop)
    ran = frostline(tmp_path, sys.executable, "-m", "trainer", "--steps", "7", "--out", "theirs")
    assert ran.code == 0
    assert "['--steps', '7', '--out', 'theirs']" in ran.out
    assert ran.profile is not None
    assert "--out theirs" in ran.profile.command


UNCHANGED = """
import hashlib, random, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Noisy(Dataset):
    def __len__(self):
        return 160
    def __getitem__(self, i):
        return torch.rand(6, 16) + random.random() + i

torch.manual_seed(3)
random.seed(3)
frozen = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval().requires_grad_(False)
model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.3), nn.BatchNorm1d(32), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
lines = []
for epoch in range(6):
    for x in DataLoader(Noisy(), 8, shuffle=True, num_workers=epoch % 2):
        with torch.no_grad():
            h = frozen(x).mean(1)
        loss = model(h).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        lines.append(float(loss).hex())
lines += [repr(value.tolist()) for value in model.state_dict().values()]
lines += [hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(), repr(random.getstate())]
open(sys.argv[1], "w").write("\\n".join(lines))
"""


def test_results_are_the_same_bit_by_bit(tmp_path: Path) -> None:
    script = tmp_path / "seeded.py"
    script.write_text(UNCHANGED)
    plain = [sys.executable, str(script), "plain"]
    subprocess.run(plain, cwd=tmp_path, env=environment(), check=True, timeout=500)
    ran = frostline(tmp_path, sys.executable, str(script), "profiled", options=("--keep-going",))
    assert ran.code == 0
    assert ran.profile is not None
    assert ran.profile.attributed is not None, "only the first pass was made"
    assert (tmp_path / "profiled").read_text() == (tmp_path / "plain").read_text()
