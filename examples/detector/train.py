"""Train a small detector that is shown what to look for: 3 pictures each of 2 objects, then frames of video.

    python examples/detector/train.py --epochs 2

A stand-in for a published detector, with that one's habits: nothing in here is tuned. docs/profile-example.md
says what its authors believed of it, and what a profile finds. The data are made on the spot.

Shapes: B frames, K objects, S pictures of each ("shots"), N tokens, D width, H W the sides of a map.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

VIDEOS, FRAMES = 12, 1383  # one object each; frames of one video
WAYS, SHOTS, QUERIES = 2, 3, 4
SUPPORT_SIZE, FRAME_SIZE, PATCH = 96, 128, 16
WIDTH, STRIDE = 64, 8


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.cls = nn.Parameter(0.02 * torch.randn(1, 1, WIDTH))
        self.position = nn.Parameter(
            0.02 * torch.randn(1, WIDTH, SUPPORT_SIZE // PATCH, SUPPORT_SIZE // PATCH)
        )

    def forward(self, images: Tensor) -> Tensor:
        x_BDHW = self.patches(images)
        x_BDHW = x_BDHW + F.interpolate(self.position, x_BDHW.shape[2:], mode="bilinear")
        x_BND = x_BDHW.flatten(2).transpose(1, 2)
        return torch.cat([self.cls.expand(len(x_BND), -1, -1), x_BND], 1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x_BND: Tensor) -> Tensor:
        h_BND = self.norm1(x_BND)
        x_BND = x_BND + self.attention(h_BND, h_BND, h_BND, need_weights=False)[0]
        return x_BND + self.mlp(self.norm2(x_BND))


class SupportEncoder(nn.Module):
    """A vision transformer of 12 blocks; the embedding and the first six stay as they were pretrained."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Embedding()
        self.blocks = nn.ModuleList(Block() for _ in range(12))
        self.norm = nn.LayerNorm(WIDTH)
        for part in (self.embed, *self.blocks[:6]):
            part.requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        x_BND = self.embed(images)
        for block in self.blocks:
            x_BND = block(x_BND)
        return F.normalize(self.norm(x_BND)[:, 0], dim=-1)


def conv(inside: int, outside: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inside, outside, 3, stride, 1), nn.GroupNorm(4, outside), nn.SiLU())


class Backbone(nn.Module):
    """Maps of a frame at strides 8 and 16."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(3, 16, 2), conv(16, 32, 2))
        self.p3 = nn.Sequential(conv(32, 64, 2), conv(64, 64))
        self.p4 = nn.Sequential(conv(64, WIDTH, 2), conv(WIDTH, WIDTH))

    def forward(self, frames: Tensor) -> tuple[Tensor, Tensor]:
        fine = self.p3(self.stem(frames))
        return fine, self.p4(fine)


class Fusion(nn.Module):
    """Both maps in one, gated by the objects that are looked for."""

    def __init__(self) -> None:
        super().__init__()
        self.across, self.mix = nn.Conv2d(64, WIDTH, 1), conv(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, maps: tuple[Tensor, Tensor], prototypes_KD: Tensor) -> Tensor:
        fine, coarse = maps
        x_BDHW = self.mix(self.across(fine) + F.interpolate(coarse, scale_factor=2.0))
        return x_BDHW * torch.sigmoid(self.gate(prototypes_KD).mean(0))[:, None, None]


class Head(nn.Module):
    """For each cell its likeness to each object, and a box: left, top, right, bottom in strides."""

    def __init__(self) -> None:
        super().__init__()
        self.what, self.box = nn.Conv2d(WIDTH, WIDTH, 1), nn.Conv2d(WIDTH, 4, 1)
        self.temperature = nn.Parameter(torch.tensor(10.0))

    def forward(self, x_BDHW: Tensor, prototypes_KD: Tensor) -> tuple[Tensor, Tensor]:
        like_BKHW = torch.einsum("bdhw,kd->bkhw", F.normalize(self.what(x_BDHW), dim=1), prototypes_KD)
        return self.temperature * like_BKHW, F.softplus(self.box(x_BDHW))


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.support_encoder, self.project = SupportEncoder(), nn.Linear(WIDTH, WIDTH)
        self.backbone, self.fusion, self.head = Backbone(), Fusion(), Head()

    def encode_support(self, supports: Tensor) -> Tensor:
        """[K, S, 3, H, W] → a prototype for each object: the mean over its pictures."""
        prototypes = []
        for shots in supports:
            found = [self.support_encoder(image[None]) for image in shots]
            prototypes.append(self.project(torch.cat(found)).mean(0))
        return F.normalize(torch.stack(prototypes), dim=-1)

    def forward(self, frames: Tensor, prototypes_KD: Tensor) -> tuple[Tensor, Tensor]:
        return self.head(self.fusion(self.backbone(frames), prototypes_KD), prototypes_KD)


class Episodes(Dataset[dict[str, Tensor]]):
    """Two videos, three pictures of each one's object, four frames with a box each."""

    def __init__(self, episodes: int, support_size: int = SUPPORT_SIZE, queries: int = QUERIES) -> None:
        self.episodes, self.support_size, self.queries = episodes, support_size, queries
        rng = torch.Generator().manual_seed(0)
        looks = torch.rand(VIDEOS, 1, 3, 6, 6, generator=rng)
        shots = (looks + 0.2 * torch.rand(VIDEOS, SHOTS, 3, 6, 6, generator=rng)).clamp(max=1)
        large = F.interpolate(shots.flatten(0, 1), (192, 192), mode="bilinear")
        self.pictures = (255 * large).byte().unflatten(0, (VIDEOS, SHOTS))

    def __len__(self) -> int:
        return self.episodes

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        rng = torch.Generator().manual_seed(i)
        videos = torch.randperm(VIDEOS, generator=rng)[:WAYS].tolist()
        way = torch.arange(self.queries) % WAYS
        numbers = torch.randint(FRAMES, (self.queries,), generator=rng).tolist()
        frames, boxes = zip(
            *(self.frame(videos[w], n) for w, n in zip(way, numbers, strict=True)), strict=True
        )
        return {
            "frames": torch.stack(frames), "boxes": torch.stack(boxes), "way": way,
            "supports": torch.stack([self.supports(video) for video in videos]),
        }  # fmt: skip

    def supports(self, video: int) -> Tensor:
        """[S, 3, H, W]: the same few pictures, made small again whenever they are drawn."""
        size = (self.support_size, self.support_size)
        return F.interpolate(self.pictures[video].float() / 255, size, mode="bilinear", antialias=True)

    def frame(self, video: int, number: int) -> tuple[Tensor, Tensor]:
        """[3, H, W] and its xyxy: a frame as a decoder would give it, then resized."""
        rng = torch.Generator().manual_seed(1000 + video * FRAMES + number)
        large = F.interpolate(torch.rand(1, 3, 9, 16, generator=rng), (144, 256), mode="bilinear")
        top, left, side = (int(torch.randint(low, high, (), generator=rng)) for low, high in
                           ((0, 112), (0, 224), (12, 28)))  # fmt: skip
        patch = F.interpolate(self.pictures[video, :1].float() / 255, (side, side), mode="bilinear")
        large[:, :, top : top + side, left : left + side] = patch
        small = F.interpolate(large, (FRAME_SIZE, FRAME_SIZE), mode="bilinear", antialias=True)[0]
        box = torch.tensor([left, top, left + side, top + side]) * torch.tensor([1 / 256, 1 / 144] * 2)
        return small, FRAME_SIZE * box


def loss_of(found: tuple[Tensor, Tensor], boxes: Tensor, way: Tensor) -> Tensor:
    """Every cell: is it the object's middle. The middle: the four distances to the box's sides."""
    like_BKHW, ltrb_B4HW = found
    middle = (boxes[:, :2] + boxes[:, 2:]) / 2
    x, y = (middle / STRIDE).long().unbind(1)
    rows = torch.arange(len(boxes), device=boxes.device)
    target = torch.zeros_like(like_BKHW)
    target[rows, way, y, x] = 1
    expected = torch.cat([middle - boxes[:, :2], boxes[:, 2:] - middle], 1) / STRIDE
    where = F.binary_cross_entropy_with_logits(like_BKHW, target)
    return where + 0.1 * F.l1_loss(ltrb_B4HW[rows, :, y, x], expected)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--episodes", type=int, default=100, help="of an epoch")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    loader = DataLoader(Episodes(args.episodes), batch_size=None, shuffle=True, num_workers=args.num_workers)
    model = torch.compile(Detector().to(args.device), backend="aot_eager")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for epoch in range(args.epochs):
        began, total = time.perf_counter(), torch.zeros((), device=args.device)
        for episode in loader:
            episode = {name: value.to(args.device) for name, value in episode.items()}
            prototypes = model.encode_support(episode["supports"])
            loss = loss_of(model(episode["frames"], prototypes), episode["boxes"], episode["way"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        loss_mean = float(total) / args.episodes
        print(f"epoch {epoch}: loss {loss_mean:.4f}, {time.perf_counter() - began:.2f} s", flush=True)


if __name__ == "__main__":
    main()
