"""Train a classifier and look at its numbers in every step.

Plant: three waits for the device a step, one each by .item(), float() and bool(), at the lines marked
"sync". On a GPU the bookkeeping between them could run while the GPU works; because of the waits it does
not.
"""

import argparse

import torch
from torch import nn


def bookkeeping(history: list[float], n: int) -> float:
    """A moving average of the moving average, in plain Python."""
    slow = fast = 0.0
    for i in range(n):
        fast += 0.1 * (history[i % len(history)] - fast)
        slow += 0.01 * (fast - slow)
    return slow


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    torch.manual_seed(0)
    width, rows, work = (512, 64, 100) if args.device == "cpu" else (2048, 2048, 100_000)
    layers = [part for _ in range(9) for part in (nn.Linear(width, width), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(width, 10)).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(rows, width, device=args.device)
    labels = torch.randint(10, (rows,), device=args.device)
    history, hits = [], []
    for _ in range(args.steps):
        logits = model(x)
        loss = nn.functional.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())  # sync 1
        bookkeeping(history, work)
        hits.append(float((logits.argmax(1) == labels).float().mean()))  # sync 2
        if torch.isnan(loss):  # sync 3
            raise SystemExit("the loss is not a number")


if __name__ == "__main__":
    main()
