"""Train with `optimizer.step(closure)`, as Lightning does.

Plant: forward and backward run inside of the optimiser's step. The optimiser's own work (plain SGD) is a
small part of it.
"""

import argparse

import torch
from torch import Tensor, nn


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    torch.manual_seed(0)
    width, rows = (384, 128) if args.device == "cpu" else (4096, 1024)
    layers = [part for _ in range(9) for part in (nn.Linear(width, width), nn.GELU())]
    model = nn.Sequential(*layers).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(args.steps):
        x = torch.randn(rows, width, device=args.device)

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


if __name__ == "__main__":
    main()
