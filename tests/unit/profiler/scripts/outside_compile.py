"""Train a detector that is compiled, though half of it is not.

Plant: torch.compile replaces `forward`. The support images go through `model.encode_support`, a method of
the module within, so `support_encoder` runs uncompiled in every step.
"""

import argparse

import torch
from torch import Tensor, nn


def tower(width: int) -> nn.Sequential:
    layers = [part for _ in range(3) for part in (nn.Conv2d(width, width, 3, padding=1), nn.ReLU())]
    return nn.Sequential(nn.Conv2d(3, width, 4, 4), *layers)


class Detector(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.support_encoder, self.backbone = tower(width), tower(width)

    def encode_support(self, supports: Tensor) -> Tensor:
        return self.support_encoder(supports).mean((0, 2, 3))

    def forward(self, images: Tensor, prototype: Tensor) -> Tensor:
        return nn.functional.cosine_similarity(self.backbone(images).mean((2, 3)), prototype, dim=-1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--backend", default="aot_eager")
    args = parser.parse_args()
    torch.manual_seed(0)
    width, rows, size = (32, 8, 64) if args.device == "cpu" else (256, 64, 256)
    model = torch.compile(Detector(width).to(args.device), backend=args.backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(args.steps):
        supports = torch.randn(rows, 3, size, size, device=args.device)
        images = torch.randn(rows, 3, size, size, device=args.device)
        prototype = model.encode_support(supports)
        loss = -model(images, prototype).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
