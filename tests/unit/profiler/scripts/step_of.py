"""The rest of a step that takes a given time, for scripts whose plant is in their loader."""

import time

import torch
from torch import nn

PROBED = 5
"""Layers of a model that is timed first; not as many as the one that is trained."""


class Asleep(nn.Module):
    """Takes that long, and needs no core for it."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return self.scale * x


def layers(width: int, depth: int) -> nn.Sequential:
    return nn.Sequential(*(part for _ in range(depth) for part in (nn.Linear(width, width), nn.GELU())))


def depth_for(width: int, rows: int, seconds: float, device: str) -> int:
    """As many layers as make a training step of so many seconds here."""
    probe, x = layers(width, PROBED).to(device), torch.randn(rows, width, device=device)
    optimizer, took = torch.optim.SGD(probe.parameters(), 1e-3), []
    for _ in range(24):
        began = time.perf_counter()
        probe(x).square().mean().backward()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        took.append((time.perf_counter() - began) / PROBED)
    return max(round(seconds / sorted(took[8:])[8]), 1)
