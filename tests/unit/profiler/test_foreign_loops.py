"""Loops that nobody here wrote: scripts out of wheels, Lightning, Accelerate, the HF Trainer, torchrun.

Each has to give a profile that knows what ends a step, where the data come from, and what holds the step up.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from truth import environment, the_loader  # noqa: E402 (lies beside this file)

from frostline.results import Profile  # noqa: E402


def profiled(folder: Path, *command: str, steps: int = 40) -> Profile:
    options = ["--steps", str(steps), "--warmup", "5", "--out", str(folder / "out")]
    done = subprocess.run(
        [sys.executable, "-m", "frostline", "profile", *options, "--", *command],
        capture_output=True, text=True, timeout=500, cwd=folder, env=environment(), check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return Profile.read(folder / "out" / "profile.json")


def script(folder: Path, source: str) -> list[str]:
    (folder / "run.py").write_text(source, encoding="utf-8")
    return [sys.executable, "-W", "ignore", "run.py"]


def check(profile: Profile, *, boundary: str, batches: int | None = None, calls: float = 1.0) -> None:
    """What has to be known of any of them. `calls`: batches a step."""
    assert boundary in profile.boundary
    assert profile.verdict.kind != "unclear", profile.verdict
    assert profile.wall.count >= 8
    assert profile.attributed is not None
    loader = the_loader(profile)
    assert loader.calls == pytest.approx(calls, abs=0.15)
    if batches is not None:
        assert loader.batches == batches
    for kind in ("forward", "backward", "optimizer"):
        assert sum(row.ms for row in profile.rows if row.kind == kind) > 0, f"no time in {kind}"


def needs(*modules: str) -> pytest.MarkDecorator:
    missing = [name for name in modules if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not installed")


@needs("accelerate")
def test_accelerates_own_script_from_where_it_is_installed(tmp_path: Path) -> None:
    spec = find_spec("accelerate")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / "test_utils" / "scripts" / "test_script.py"
    profile = profiled(tmp_path, sys.executable, "-W", "ignore", str(path))
    check(profile, boundary="SGD.step")  # a dozen short trainings in a row, each with a loader of its own


@needs("lightning", "requests")
def test_lightnings_demo_transformer(tmp_path: Path) -> None:
    words = tmp_path / "data" / "wikitext-2.txt"  # where the demo keeps its data; nothing is downloaded
    words.parent.mkdir()
    words.write_text("\n".join(" ".join(f"w{i * j % 97}" for j in range(20)) for i in range(400)))
    run = """
import lightning.pytorch as pl
from lightning.pytorch.demos.transformer import LightningTransformer
trainer = pl.Trainer(max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False,
                     enable_progress_bar=False, enable_model_summary=False)
trainer.fit(LightningTransformer(vocab_size=200))
"""
    profile = profiled(tmp_path, *script(tmp_path, run))
    check(profile, boundary="SGD.step", batches=400 * 21 // 35 - 1)
    backward, optimizer = (
        sum(row.ms for row in profile.rows if row.kind == kind) for kind in ("backward", "optimizer")
    )
    assert backward > optimizer, "Lightning's backward runs within optimizer.step(closure)"


@needs("lightning")
def test_a_lightning_fit_with_validation(tmp_path: Path) -> None:
    run = """
import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
trainer = pl.Trainer(max_epochs=20, accelerator="cpu", logger=False, enable_checkpointing=False,
                     enable_progress_bar=False, enable_model_summary=False)
trainer.fit(BoringModel(), datamodule=BoringDataModule())
"""
    check(profiled(tmp_path, *script(tmp_path, run)), boundary="SGD.step", batches=64)


@needs("transformers", "accelerate")
def test_a_hugging_face_trainer(tmp_path: Path) -> None:
    run = """
import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

class Rows(Dataset):
    def __len__(self):
        return 640
    def __getitem__(self, i):
        ids = torch.randint(100, (16,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "attention_mask": torch.ones(16, dtype=torch.long), "labels": i % 2}

config = BertConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                    intermediate_size=64, max_position_embeddings=32)
args = TrainingArguments("hf", max_steps=200, per_device_train_batch_size=8, gradient_accumulation_steps=2,
                         report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=True)
Trainer(BertForSequenceClassification(config), args, train_dataset=Rows()).train()
"""
    profile = profiled(tmp_path, *script(tmp_path, run))
    check(profile, boundary="AdamW.step", batches=80, calls=2.0)
    assert profile.samples == 16


@needs("accelerate")
def test_an_accelerate_loop(tmp_path: Path) -> None:
    run = """
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
accelerator = Accelerator(cpu=True)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
loader = DataLoader(TensorDataset(torch.randn(480, 64), torch.randint(4, (480,))), 16, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(10):
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
"""
    profile = profiled(tmp_path, *script(tmp_path, run))
    check(profile, boundary="AdamW.step", batches=30)
    assert profile.samples == 16


def test_two_processes_of_torchrun(tmp_path: Path) -> None:
    run = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 4)))
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
data = TensorDataset(torch.randn(640, 64))
sampler = DistributedSampler(data)
for epoch in range(10):
    sampler.set_epoch(epoch)
    for (x,) in DataLoader(data, 8, sampler=sampler):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
dist.destroy_process_group()
"""
    script(tmp_path, run)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    profile = profiled(tmp_path, *torchrun, "run.py")
    check(profile, boundary="SGD.step", batches=40)
    assert profile.machine.ranks == 2
