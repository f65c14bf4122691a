"""Time the detector's stages the way people often do. Do not copy this: nearly everything about it is wrong.

    python examples/detector/time_stages.py

It reproduces how a published profile was made, so that its mistakes can be looked at; docs/profile-example.md
names them. `frostline profile -- python examples/detector/train.py` is the other way.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from train import FRAMES, SUPPORT_SIZE, VIDEOS, Detector, Episodes


def timed(stage: Callable[[], Any]) -> tuple[float, Any]:
    """Milliseconds from start to stop, and what came out."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    out = stage()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - began), out


@torch.no_grad()
def stages(model: Detector, supports: Tensor, frame: Tensor) -> dict[str, float]:
    """Each stage between clocks of its own, at its very first call."""
    support_ms, prototypes = timed(lambda: model.encode_support(supports))
    backbone_ms, maps = timed(lambda: model.backbone(frame))
    head_ms, _ = timed(lambda: model.head(model.fusion(maps, prototypes), prototypes))
    return {"Support encoding": support_ms, "Backbone": backbone_ms, "Fusion + detection": head_ms}


@torch.no_grad()
def iteration(model: Detector, supports: Tensor, frame: Tensor, times: int) -> float:
    """The mean of all of them in a row, now that everything has run before."""
    spent = [timed(lambda: model(frame, model.encode_support(supports)))[0] for _ in range(times)]
    return sum(spent) / times


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=10)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = Detector().to(device)
    episode = Episodes(1, support_size=SUPPORT_SIZE // 2)[0]
    supports, frame = episode["supports"].to(device), episode["frames"][:1].to(device)
    spent = stages(model, supports, frame)
    total = iteration(model, supports, frame, args.iterations)
    for name, ms in spent.items():
        print(f"{name + ':':<20} {ms:6.1f} ms ({100 * ms / total:.0f} %)")
    print("─" * 40)
    print(f"{'Total iteration:':<20} {total:6.1f} ms")
    print(f"{'Epoch time:':<20} {total * VIDEOS * FRAMES / 60_000:6.1f} minutes")


if __name__ == "__main__":
    main()
