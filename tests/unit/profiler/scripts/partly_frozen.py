"""Fine-tune the upper half of a vision transformer.

Plant: the encoder has 12 blocks of the same size. The patch embedding and blocks 0–5 are frozen, blocks 6–11
and the head are trained: nothing is trained up to and including "blocks.5".
"""

import argparse

import torch
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_BND: Tensor) -> Tensor:
        h_BND = self.norm1(x_BND)
        x_BND = x_BND + self.attention(h_BND, h_BND, h_BND, need_weights=False)[0]
        return x_BND + self.mlp(self.norm2(x_BND))


class VisionTransformer(nn.Module):
    def __init__(self, width: int, depth: int = 12) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, width, 16, 16)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, images: Tensor) -> Tensor:
        x_BND = self.patch_embed(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x_BND = block(x_BND)
        return self.norm(x_BND).mean(1)


class Detector(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.encoder = VisionTransformer(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.encoder(images))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    torch.manual_seed(0)
    width, rows, size = (64, 4, 64) if args.device == "cpu" else (768, 16, 256)
    model = Detector(width).to(args.device)
    for frozen in (model.encoder.patch_embed, *model.encoder.blocks[:6]):
        frozen.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    for _ in range(args.steps):
        images = torch.randn(rows, 3, size, size, device=args.device)
        labels = torch.randint(10, (rows,), device=args.device)
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
