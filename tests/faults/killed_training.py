"""The training to kill and run again: dropout, batch norm, two groups of parameters, random augmentation,
evaluations in between; in fp32, or in fp16 with a scaler and gradients added up over three parts of a batch.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import frostline as fl

N, BATCH, STEPS = 50, 8, 40
VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32", "schedule": "cosine", "warmup_steps": 3, "clip": 1.0},
    "fp16": {"precision": "fp16", "microbatch": 3, "schedule": "wsd"},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


def features(x: list[float]) -> Tensor:
    return torch.tensor(x).sin()


def flipped(features: Tensor, rng: np.random.Generator) -> Tensor:
    return features.flip(0) if rng.random() < 0.5 else features + 0.1 * float(rng.standard_normal())


def as_it_is(features: Tensor) -> Tensor:
    return features


def loss(model: nn.Module, batch: fl.Batch) -> dict[str, Tensor]:
    noise = 1 + 0.01 * random.random() + 0.01 * float(np.random.rand())  # every global generator counts
    logits = model(batch["seen"]) * noise
    wrong = nn.functional.cross_entropy(logits.float(), batch["label"].long())
    return {"loss": wrong, "accuracy": (logits.argmax(1) == batch["label"]).float().mean()}


def optimizer(model: Any) -> torch.optim.Optimizer:
    groups = [{"params": model.body.parameters(), "lr": 3e-3}, {"params": model.head.parameters()}]
    return torch.optim.AdamW(groups, 1e-2)


def evaluate(model: nn.Module, feed: Any) -> dict[str, float]:
    torch.rand(7)  # an evaluation that draws must not be noticed
    hits = [(model(b["seen"]).argmax(1) == b["label"]).float().mean() for b in feed]
    return {"accuracy": float(torch.stack(hits).mean())}


def workload(variant: str) -> fl.Workload:
    rng = np.random.default_rng(0)
    rows = [
        {"key": f"k{i:02d}", "x": rng.standard_normal(6).tolist(), "label": int(rng.integers(3))}
        for i in range(N)
    ]
    data = fl.Pipeline(
        fl.Source.table(rows),
        fl.Stage("features", features, reads="x"),
        fl.Stage("seen", flipped, reads="features", random=True, eval=as_it_is),
        outputs=("seen", "label"),
    )
    settings = {"log_every": 4, "eval_every": 10, "save_every": 7, "keep": 2, **VARIANTS[variant]}
    return fl.Workload(
        data, model=fl.lazy(Net), loss=loss, optimizer=optimizer, evaluate=evaluate, batch_size=BATCH,
        metric=fl.Metric("accuracy", better="higher"), splits={"train": 0.8, "val": 0.2}, training=settings,
    )  # fmt: skip


def job(request: dict[str, Any]) -> int:
    root = Path(request["root"])
    result = fl.train(
        workload(request["variant"]), steps=request.get("steps", STEPS), out=root / "run",
        store=root / "store", device="cpu", quiet=True,
    )  # fmt: skip
    return 0 if result.stopped is None else 3


def serve() -> None:
    import killing  # beside this file: whoever starts the server has put the folder on the path

    killing.serve(job)
