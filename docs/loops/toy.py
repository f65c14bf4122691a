"""What the examples of this folder share: a small store, a small head, and a note of what each step saw."""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path

import torch
from torch import nn

import frostline as fl


def make_store(path: Path) -> fl.Store:
    """Stands for a store that `frostline freeze` made: 94 feature vectors with their labels."""
    x = torch.randn(94, 16, generator=torch.Generator().manual_seed(0))
    whole_number = fl.Field((), "int64")
    fields = {"x": fl.Field((16,), "float32"), "labels": whole_number, "row": whole_number}
    values = {"x": x, "labels": (x[:, 0] > 0).long(), "row": torch.arange(len(x))}
    if not path.exists():
        with fl.Store.create(path, fields=fields) as writer:
            writer.append_batch([f"clip-{i:02}" for i in range(len(x))], values)
    return fl.Store.open(path)


def make_head() -> nn.Module:
    """With dropout: a run that goes on with other random numbers does not end with the same weights."""
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))


def note(file: Path, step: int, epoch: int, keys: list[str], kill_at: int) -> None:
    """Which samples a step sees, one JSON line per batch; in step `kill_at` the process ends itself."""
    with open(file, "a", encoding="utf-8") as f:
        f.write(json.dumps({"step": step, "epoch": epoch, "keys": keys}) + "\n")
    if step == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)


def arguments(about: str, **choices: list[str]) -> argparse.Namespace:
    """OUT and --kill-at, and an option for each of `choices`, whose first is the default."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the store, the checkpoints and the weights")
    parser.add_argument("--kill-at", type=int, default=-1, metavar="STEP", help="end by SIGKILL in this step")
    for name, values in choices.items():
        parser.add_argument(f"--{name}", choices=values, default=values[0])
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    return given
