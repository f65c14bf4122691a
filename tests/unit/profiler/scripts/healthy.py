"""Train a perceptron on data that lie in memory.

Plant: nothing. The step is computing; the loader hands out slices of a tensor, the loss is read every 50
steps.
"""

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--print-step-ms", type=int, default=0, help="mean over so many steps, from the 15th")
    args = parser.parse_args()
    torch.manual_seed(0)
    cuda = args.device == "cuda"
    width, rows, depth, batches = (4096, 2048, 8, 32) if cuda else (512, 64, 11, 60)
    data = TensorDataset(torch.randn(batches, rows, width), torch.randint(10, (batches, rows)))
    loader = DataLoader(data, batch_size=None, shuffle=True, pin_memory=cuda)
    layers = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(width, 10)).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step, began = 0, 0.0
    for _ in range(args.epochs):
        for x, labels in loader:
            if args.print_step_ms and step in (15, 15 + args.print_step_ms):
                if cuda:
                    torch.cuda.synchronize()
                if step > 15:
                    mean = 1000 * (time.perf_counter() - began) / args.print_step_ms
                    print(f"step_ms {mean:.4f}", flush=True)
                    return
                began = time.perf_counter()
            x, labels = x.to(args.device, non_blocking=True), labels.to(args.device, non_blocking=True)
            loss = nn.functional.cross_entropy(model(x), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 50 == 0:
                print(f"step {step} loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
