"""Train a small network on photographs that are decoded anew each time they are shown.

Plant: 36 JPEG files of 1200×900, batches of 6, one loader worker. Decoding a file takes far longer than the
128×128 crop and the tensor made of it: nearly all of the preparation, and the preparation is nearly all of
the step. An epoch has 6 steps, so from the 7th step on every file has been decoded before.
"""

import argparse
import random
import tempfile
from pathlib import Path

import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

IMAGES, BATCH = 36, 6


def make_images(folder: Path) -> None:
    tile = Image.effect_noise((400, 300), 90)
    for i in range(IMAGES):
        picture = Image.merge("RGB", [tile.rotate(10 * i), tile.rotate(-7 * i), tile]).resize((1200, 900))
        picture.save(folder / f"{i:03}.jpg", quality=92)


class Photos(Dataset):
    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob("*.jpg"))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        image = Image.open(self.files[i]).convert("RGB")
        left, top = random.randrange(1200 - 128), random.randrange(900 - 128)
        crop = image.crop((left, top, left + 128, top + 128))
        pixels = torch.frombuffer(bytearray(crop.tobytes()), dtype=torch.uint8).view(128, 128, 3)
        return pixels.permute(2, 0, 1).float() / 255, i % 10


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--epochs", type=int, default=100)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_images(Path(folder))
        loader = DataLoader(
            Photos(Path(folder)), BATCH, shuffle=True, num_workers=1, persistent_workers=True
        )  # fmt: skip
        model = nn.Sequential(
            nn.Conv2d(3, 16, 7, 4, 3), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
        ).to(args.device)  # fmt: skip
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(args.epochs):
            for images, labels in loader:
                images, labels = images.to(args.device), labels.to(args.device)
                loss = nn.functional.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()


if __name__ == "__main__":
    main()
