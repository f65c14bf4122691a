"""Train a deep stack of tiny layers on a small batch (GPU only).

Plant: 200 layers of 64×64 on 8 rows. Each kernel takes the GPU a few microseconds, less than the host needs
to start it; a batch of 8 times as many rows, or of half as many, takes the same time.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ROWS, WIDTH, DEPTH = 8, 64, 200


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=500)
    args = parser.parse_args()
    layers = [part for _ in range(DEPTH) for part in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))]
    model = nn.Sequential(*layers).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rows = TensorDataset(torch.randn(args.steps, ROWS, WIDTH, device=args.device))
    for (x,) in DataLoader(rows, batch_size=None):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
