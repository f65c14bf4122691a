"""Train a head on what a frozen encoder says of images, most of which it has seen before.

Plant: each batch has 20 images, 16 of them out of a fixed pool of 8 (each twice), 4 that never come again.
Of the 20·n images of n steps in a row, 8 + 4·n are different: 16·n − 8 are repeats.
"""

import argparse
import time

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

BATCH, FROM_POOL, POOL = 20, 16, 8


def planted_repeats(steps: int) -> int:
    """Images of `steps` steps in a row that came before in those steps."""
    return FROM_POOL * steps - POOL


class Images(Dataset):
    """Item i belongs to step i // 20. Every item has an index of its own; only the pixels repeat."""

    def __len__(self) -> int:
        return 800 * BATCH

    def __getitem__(self, i: int) -> Tensor:
        row = i % BATCH
        seed = row % POOL if row < FROM_POOL else 1000 + i
        return torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(seed))


class Encoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 2, 2)
        layers = [part for _ in range(4) for part in (nn.Conv2d(width, width, 3, padding=1), nn.GELU())]
        self.body = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        return self.body(self.stem(images)).mean((2, 3))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--print-step-ms", type=int, default=0, help="mean over so many steps, from the 15th")
    args = parser.parse_args()
    torch.manual_seed(0)
    width = 48 if args.device == "cpu" else 2048
    encoder = Encoder(width).to(args.device).eval().requires_grad_(False)
    head = nn.Sequential(nn.Linear(width, 256), nn.GELU(), nn.Linear(256, 10)).to(args.device)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3)
    began = 0.0
    for step, images in enumerate(DataLoader(Images(), BATCH)):
        if args.print_step_ms and step in (15, 15 + args.print_step_ms):
            if args.device == "cuda":
                torch.cuda.synchronize()
            if step > 15:
                mean = 1000 * (time.perf_counter() - began) / args.print_step_ms
                print(f"step_ms {mean:.4f}", flush=True)
                return
            began = time.perf_counter()
        with torch.no_grad():
            features = encoder(images.to(args.device))
        loss = head(features).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
