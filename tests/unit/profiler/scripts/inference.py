"""Embed a set of images: no optimiser, no gradients.

Plant: a loop without an optimiser. A step is a call of ImageEncoder, on 16 images that come once.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

BATCH = 16


class Images(Dataset):
    def __init__(self, size: int) -> None:
        self.noise = torch.rand(3, size + 100, size + 100)
        self.size = size

    def __len__(self) -> int:
        return 500 * BATCH

    def __getitem__(self, i: int) -> Tensor:
        top, left = divmod(i, 100)
        return self.noise[:, top : top + self.size, left : left + self.size]


class ImageEncoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, 4)
        layers = [part for _ in range(6) for part in (nn.Conv2d(width, width, 3, padding=1), nn.ReLU())]
        self.body = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        return self.body(self.stem(images)).mean((2, 3))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    width, size = (40, 64) if args.device == "cpu" else (1024, 224)
    model = ImageEncoder(width).to(args.device).eval()
    total = torch.zeros(width, device=args.device)
    with torch.no_grad():
        for images in DataLoader(Images(size), BATCH):
            total += model(images.to(args.device)).sum(0)
    print(total.mean())


if __name__ == "__main__":
    main()
