"""Train a perceptron from a loader that takes most of the step; --fast replaces it.

Plant: a batch takes 50 ms to prepare (a sleep) in the training process itself, the rest of the step about 20
ms (the depth is chosen for it on the machine at hand); a GPU works on that while the host sleeps. With --fast
the loader hands out tensors that lie ready: what is gained by that is what a profile of the slow run must
have foretold. With --asleep the rest is a sleep too, which other work of the machine does not stretch.
"""

import argparse
import time
from collections.abc import Iterator

import torch
from step_of import Asleep, depth_for, layers
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

PREPARE_S, COMPUTE_S, BATCH, BATCHES = 0.050, 0.020, 64, 400


class Rows(Dataset):
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return BATCHES * BATCH

    def __getitem__(self, i: int) -> Tensor:
        return self.x[i % len(self.x)]


def collate(rows: list[Tensor]) -> Tensor:
    time.sleep(PREPARE_S)
    return torch.stack(rows)


class Ready:
    """The same rows as batches that lie in memory."""

    def __init__(self, x: Tensor) -> None:
        self.batches = list(x.split(BATCH))

    def __iter__(self) -> Iterator[Tensor]:
        for step in range(BATCHES):
            yield self.batches[step % len(self.batches)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--fast", action="store_true", help="a loader that has its batches ready")
    parser.add_argument("--depth", type=int, default=0, help="0: chosen for this machine")
    parser.add_argument(
        "--asleep", action="store_true", help="the rest of the step sleeps too: any machine does"
    )
    parser.add_argument("--print-step-ms", type=int, default=0, help="mean over so many steps, from the 15th")
    args = parser.parse_args()
    torch.manual_seed(0)
    cuda = args.device == "cuda"
    width, views = (4096, 16) if cuda else (512, 1)  # views: noisy copies of each row
    depth = args.depth or (0 if args.asleep else depth_for(width, views * BATCH, COMPUTE_S, args.device))
    print(f"depth {depth}", flush=True)
    model = (Asleep(COMPUTE_S) if args.asleep else layers(width, depth)).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x = torch.randn(8 * BATCH, width)
    loader = Ready(x) if args.fast else DataLoader(Rows(x), BATCH, shuffle=True, collate_fn=collate)
    began = 0.0
    for step, x in enumerate(loader):
        if cuda and args.print_step_ms and step in (15, 15 + args.print_step_ms):
            torch.cuda.synchronize()
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
