"""Train one layer on wide rows that lie in ordinary memory (GPU only).

Plant: each step copies one batch of 2048×16384 floats, 134,217,728 bytes, to the GPU from pageable memory.
The copy blocks and takes several times as long as the work on it.
"""

import argparse

import torch
from torch import nn

ROWS, WIDTH = 2048, 16384


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    batches = [torch.randn(ROWS, WIDTH) for _ in range(4)]
    model = nn.Sequential(nn.Linear(WIDTH, 512), nn.GELU(), nn.Linear(512, 10)).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(args.steps):
        x = batches[step % len(batches)].to(args.device)
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
