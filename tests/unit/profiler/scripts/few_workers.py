"""Train a perceptron from a loader with one worker too few.

Plant: putting a batch together takes one worker 60 ms (a sleep, which needs no core); the rest of the step
takes about 36 ms (the depth is chosen for it on the machine at hand). One worker therefore holds the step at
60 ms; two would keep up. With --asleep the rest is a sleep too, which other work of the machine does not
stretch.
"""

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

PREPARE_S, COMPUTE_S, BATCH = 0.060, 0.036, 64
PROBED = 5
"""Layers of a model that is timed first; not as many as the one that is trained."""


class Rows(Dataset):
    def __init__(self, width: int) -> None:
        self.x = torch.randn(512, width)

    def __len__(self) -> int:
        return 300 * BATCH

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.x[i % 512]


def collate(rows: list[torch.Tensor]) -> torch.Tensor:
    time.sleep(PREPARE_S)
    return torch.stack(rows)


class Asleep(nn.Module):
    """Takes as long as the rest of the step should, and needs no core for it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(COMPUTE_S)
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--asleep", action="store_true", help="the rest of the step sleeps too: any machine does"
    )
    parser.add_argument("--print-step-ms", type=int, default=0, help="mean over so many steps, from the 15th")
    args = parser.parse_args()
    torch.manual_seed(0)
    width, views = (512, 1) if args.device == "cpu" else (4096, 16)  # views: noisy copies of each row
    depth = 0 if args.asleep else depth_for(width, views * BATCH, COMPUTE_S, args.device)
    model = (Asleep() if args.asleep else layers(width, depth)).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(Rows(width), BATCH, shuffle=True, num_workers=args.workers, collate_fn=collate)
    began = 0.0
    for step, x in enumerate(loader):
        if step == 15:
            began = time.perf_counter()
        if args.print_step_ms and step == 15 + args.print_step_ms:
            print(f"step_ms {1000 * (time.perf_counter() - began) / args.print_step_ms:.4f}", flush=True)
            return
        x = x.to(args.device).repeat(views, 1)
        loss = model(x + 0.01 * torch.randn_like(x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
