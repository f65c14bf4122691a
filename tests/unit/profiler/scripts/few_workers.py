"""Train a perceptron from a loader with one worker too few.

Plant: putting a batch together takes one worker 60 ms (a sleep, which needs no core); the rest of the step
takes about 36 ms (the depth is chosen for it on the machine at hand). One worker therefore holds the step at
60 ms; two would keep up. With --asleep the rest is a sleep too, which other work of the machine does not
stretch.
"""

import argparse
import time

import torch
from step_of import Asleep, depth_for, layers
from torch.utils.data import DataLoader, Dataset

PREPARE_S, COMPUTE_S, BATCH = 0.060, 0.036, 64


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
    model = (Asleep(COMPUTE_S) if args.asleep else layers(width, depth)).to(args.device)
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
