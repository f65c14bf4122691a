"""Scripts that a profiler easily breaks or misreads: they run as they would, and what is said is right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from truth import environment

from frostline.results import Profile


def profiled(folder: Path, source: str, *args: str, options: tuple[str, ...] = ()) -> tuple[Profile, str]:
    (folder / "train.py").write_text(source, encoding="utf-8")
    asked = ["--steps", "20", "--warmup", "4", "--out", str(folder / "out"), *options]
    done = subprocess.run(
        [sys.executable, "-m", "frostline", "profile", *asked, "--", sys.executable, "train.py", *args],
        capture_output=True, text=True, timeout=500, cwd=folder, env=environment(), check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return Profile.read(folder / "out" / "profile.json"), done.stdout + done.stderr


TRANSFORM = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Turned(Dataset):
    def __init__(self):
        self.turn = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    def __len__(self):
        return 100_000
    def __getitem__(self, i):
        with torch.no_grad():
            return self.turn(torch.ones(8) * i)

if __name__ == "__main__":
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    loader = DataLoader(Turned(), batch_size=8, num_workers=2, multiprocessing_context=sys.argv[1])
    for x in loader:
        model(x).mean().backward()
        optimizer.step()
"""


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_transform_that_is_a_module_makes_no_training_of_a_worker(tmp_path: Path, context: str) -> None:
    found, _ = profiled(tmp_path, TRANSFORM, context)
    assert found.boundary == "SGD.step"
    assert [module.name for module in found.modules if module.depth == 0] == ["Linear"]


SPAWNED = """
import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

def run(rank, folder):
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{folder}/meet")
    model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for step in range(2000):
        model(torch.ones(8, 64)).mean().backward()
        optimizer.step()

if __name__ == "__main__":
    mp.spawn(run, (os.getcwd(),), nprocs=2)
"""


def test_ranks_that_no_launcher_started_stop_at_the_same_step(tmp_path: Path) -> None:
    """WORLD_SIZE is not set: the process group says how many there are."""
    found, told = profiled(tmp_path, SPAWNED)
    assert found.machine.ranks == 2
    assert "rror" not in told


MANY = """
import torch
from torch import nn
models = [nn.Linear(16, 16) for _ in range(7)]
optimizers = [torch.optim.SGD(m.parameters(), 1e-3) for m in models]
for step in range(2000):
    x = torch.ones(4, 16)
    for model, optimizer in zip(models, optimizers):
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_step_may_have_many_optimisers(tmp_path: Path) -> None:
    found, _ = profiled(tmp_path, MANY)
    assert found.verdict.kind != "unclear"
    assert sum(module.calls for module in found.modules) == pytest.approx(7, abs=0.5)


SCRIPTED = """
import torch
from torch import nn
frozen = torch.jit.trace(nn.Linear(32, 32).eval().requires_grad_(False), torch.ones(4, 32))
head = nn.Linear(32, 4)
optimizer = torch.optim.SGD(head.parameters(), 1e-3)
for step in range(2000):
    head(frozen(torch.randn(4, 32))).mean().backward()
    optimizer.step()
"""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_module_that_takes_no_hooks_is_left_alone(tmp_path: Path) -> None:
    found, _ = profiled(tmp_path, SCRIPTED)
    assert found.verdict.kind != "unclear"


IN_PLACE = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
model = nn.Embedding(4, 8)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for epoch in range(100):
    for (ids,) in DataLoader(TensorDataset(torch.zeros(4096, dtype=torch.long)), batch_size=16):
        ids += 1  # a batch that is handed out again would run out of the table
        model(ids).mean().backward()
        optimizer.step()
"""


def test_a_batch_that_the_script_wrote_into_is_not_handed_out_again(tmp_path: Path) -> None:
    found, _ = profiled(tmp_path, IN_PLACE)
    assert found.trials == ()
    assert found.verdict.kind != "unclear"


FED = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
adapter, language, head = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 1)
language.requires_grad_(False)
optimizer = torch.optim.SGD([*adapter.parameters(), *head.parameters()], 1e-2)
for epoch in range(100):
    for (x,) in DataLoader(TensorDataset(torch.randn(64, 32)), batch_size=16):
        head(language(adapter(x))).mean().backward()
        optimizer.step()
"""


def test_what_something_trained_feeds_is_not_to_be_stored(tmp_path: Path) -> None:
    """A trained adapter before a frozen language model: nothing that it is given comes again."""
    found, _ = profiled(tmp_path, FED)
    assert not any("storing" in remedy.name for remedy in found.remedies)
    assert not any(finding.kind in ("frozen", "repeat") for finding in found.findings)


STREAM = """
import sys
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

Image.effect_noise((64, 64), 20).save("one.png")

class Stream(IterableDataset):
    def __iter__(self):
        while True:
            with Image.open("one.png") as image:
                yield torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).float()

if __name__ == "__main__":
    model = nn.Linear(4096, 4)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    for x in DataLoader(Stream(), batch_size=4, num_workers=int(sys.argv[1])):
        model(x).mean().backward()
        optimizer.step()
"""


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_stream_decodes_too(tmp_path: Path, workers: str) -> None:
    found, _ = profiled(tmp_path, STREAM, workers)
    (repeat,) = [r for r in found.repeats if r.what.startswith("decode PIL")]
    assert repeat.seen - repeat.repeats == max(1, int(workers))
    assert found.loaders[0].prepare_ms is not None
