"""Match objects in query images with support images that are encoded one at a time.

Plant: a step encodes its 6 support images by 6 calls of SupportEncoder with a batch of 1 each.
"""

import argparse

import torch
from torch import Tensor, nn

SUPPORTS = 6


class SupportEncoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, 4)
        self.body = nn.Sequential(
            *(part for _ in range(4) for part in (nn.Conv2d(width, width, 3, padding=1), nn.ReLU()))
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.body(self.stem(images)).mean((2, 3))


class Query(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, width, 4, 4), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))

    def forward(self, images: Tensor) -> Tensor:
        return self.body(images).mean((2, 3))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    torch.manual_seed(0)
    width, rows, size = (32, 8, 64) if args.device == "cpu" else (256, 64, 384)
    support_encoder, query = SupportEncoder(width).to(args.device), Query(width).to(args.device)
    parameters = [*support_encoder.parameters(), *query.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    for _ in range(args.steps):
        supports = torch.randn(SUPPORTS, 3, size, size, device=args.device)
        images = torch.randn(rows, 3, size, size, device=args.device)
        found = [support_encoder(supports[i : i + 1]) for i in range(SUPPORTS)]
        prototype = torch.cat(found).mean(0)
        loss = -nn.functional.cosine_similarity(query(images), prototype, dim=-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
