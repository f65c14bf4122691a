"""Train with gradients gathered over four batches.

Plant: a step of the optimiser takes 4 batches of 16 rows from the loader and 4 forwards: 64 samples a step.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

MICRO, BATCH = 4, 16


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()
    torch.manual_seed(0)
    width, depth = (512, 5) if args.device == "cpu" else (8192, 12)
    data = TensorDataset(torch.randn(25, BATCH, width).repeat(16, 1, 1))  # 400 batches
    layers = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.GELU())]
    model = nn.Sequential(*layers).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(args.epochs):
        for i, (x,) in enumerate(DataLoader(data, batch_size=None, shuffle=True)):
            loss = model(x.to(args.device)).square().mean() / MICRO
            loss.backward()
            if (i + 1) % MICRO == 0:
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
