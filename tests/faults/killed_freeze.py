"""The job to kill and run again: it freezes a small pipeline of pictures and captions, twice.

The second time a file has changed, one is gone, one is new, a bad one is repaired, a caption is another, a
stage has another parameter, and two more fields are wanted. A request (see killing.py) also has `root`,
`inputs`, `options` of the freeze, `job`: "crash" freezes with a decoder that crashes on one file, and
`asked`: instead of `at`, the n-th time that it asks whether to stop, once before each shard.
"""

from __future__ import annotations

import ctypes
import json
import os
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import frostline as fl
from frostline.freezer import attempt
from frostline.freezer.options import Options
from frostline.freezer.progress import Reporter
from frostline.freezer.run import run as freeze
from frostline.stages import Image

N, CHUNK, ROWS_PER_SHARD = 45, 4, 8
BAD = {"p05": b"", "p17": b"no picture", "p40": None}
"""Files that are no pictures; None: a picture that is cut off."""
CHANGED, REPAIRED, SPOILT, GONE, ADDED, RENAMED = "p11", "p17", "p30", "p21", "p99", "p02"
UNSAYABLE = "p33"
"""The tokens of this one fail, from the second time on."""
CRASHING = "p42"
"""The file on which `fragile` crashes: not among the first samples, which the parent itself looks at."""
STOPPED = 3
"""Exit status of a job that was asked to stop and did."""


# --- the inputs ---------------------------------------------------------------------------------------


def make_inputs(folder: Path) -> None:
    """Two folders of pictures with their tables and one file of weights, all of a fixed age."""
    for phase in (1, 2):
        (folder / f"inputs-{phase}").mkdir(parents=True)
        names = [f"p{i:02d}" for i in range(N)]
        if phase == 2:
            names = [*(name for name in names if name != GONE), ADDED]
        rows = [_row(folder / f"inputs-{phase}", name, phase) for name in names]
        (folder / f"table-{phase}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    torch.manual_seed(0)
    torch.save(TinyViT().state_dict(), folder / "weights.pt")
    for path in folder.rglob("*"):
        os.utime(path, ns=(10**18, 10**18))


def _row(folder: Path, name: str, phase: int) -> dict[str, str]:
    seed = int(name[1:]) + (1000 if phase == 2 and name == CHANGED else 0)
    data = _png(seed)
    spoilt = phase == 2 and name == SPOILT
    if (name in BAD or spoilt) and not (phase == 2 and name == REPAIRED):
        content = BAD.get(name)
        data = data[: len(data) // 2] if content is None else content
    (folder / f"{name}.png").write_bytes(data)
    words = "unsayable" if name == UNSAYABLE else f"picture {'new ' * (phase == 2 and name == RENAMED)}"
    return {"key": name, "path": f"{name}.png", "caption": words + " of something" * (seed % 4)}


def _png(seed: int) -> bytes:
    from io import BytesIO

    from PIL import Image as Pillow

    pixels = torch.randint(0, 256, (20, 24, 3), generator=torch.Generator().manual_seed(seed))
    file = BytesIO()
    Pillow.fromarray(pixels.to(torch.uint8).numpy()).save(file, "png")
    return file.getvalue()


# --- the pipeline -------------------------------------------------------------------------------------


class TinyViT(nn.Module):
    """Patches, a block of attention, the mean."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.block = nn.TransformerEncoderLayer(width, 2, 32, 0.1, batch_first=True, norm_first=True)

    def forward(self, image: Tensor) -> Tensor:
        tokens = self.patches(image.float() / 255).flatten(2).transpose(1, 2)
        out: Tensor = self.block(tokens).mean(1)
        return out


def load(path: str) -> nn.Module:
    network = TinyViT()
    network.load_state_dict(torch.load(path, weights_only=True))
    return network.requires_grad_(False).eval()


@dataclass(frozen=True)
class Tokens:
    """As many numbers as a caption has words."""

    factor: int

    def __call__(self, caption: str) -> Tensor:
        if self.factor > 1 and "unsayable" in caption:
            raise ValueError("no tokens for this")
        return torch.tensor([self.factor * len(word) for word in caption.split()], dtype=torch.int32)


def brightness(image: Tensor) -> float:
    return float(image.float().mean())


def pooled(features: Tensor) -> Tensor:
    return features.mean(1, keepdim=True)


def pipeline(folder: Path, phase: int) -> fl.Pipeline:
    source = fl.Source.table(folder / f"table-{phase}.jsonl", paths="path", root=folder / f"inputs-{phase}")
    stages = [
        fl.Stage("image", Image(size=16), reads="path"),
        fl.Stage("features", fl.lazy(load, str(folder / "weights.pt")), reads="image", on="device",
                 batch_size=CHUNK),
        fl.Stage("tokens", Tokens(phase), reads="caption", writes={"tokens": fl.Field((None,), "int32")}),
        fl.Stage("brightness", brightness, reads="image"),
        fl.Stage("pooled", pooled, reads="features", on="device", batch_size=3),
    ]  # fmt: skip
    return fl.Pipeline(source, *stages)


def fragile(path: str) -> Tensor:
    """A decoder with a bug: one file makes it read where there is nothing."""
    if path.endswith(f"{CRASHING}.png"):
        ctypes.string_at(0)
    return Image(size=16)(path)


def crash(root: Path, folder: Path, more: dict[str, Any]) -> int:
    """A freeze whose decoder crashes on one file."""
    attempt._MOST_ROWS = ROWS_PER_SHARD
    data = fl.Pipeline(
        fl.Source.files(folder / "inputs-1" / "*.png"), fl.Stage("image", fragile, reads="path")
    )
    freeze(data, root, Options(max_bad=10, device="cpu", n_workers=2, **more), Reporter(quiet=True))
    return 0


CUT = {1: ("features", "tokens", "caption"), 2: ("features", "tokens", "caption", "brightness", "pooled")}


def options(phase: int, more: dict[str, Any]) -> Options:
    return Options(cut=CUT[phase], max_bad=10, device="cpu", n_workers=2, **more)


def job(root: Path, folder: Path, more: dict[str, Any], phases: int = 2) -> int:
    """Both phases; which are done stands in a file beside the store. 0, or STOPPED."""
    attempt._MOST_ROWS = ROWS_PER_SHARD  # many shards of few rows
    mark = root.with_suffix(".phase")
    done = int(mark.read_text()) if mark.exists() else 0
    for phase in range(done + 1, phases + 1):
        outcome = freeze(pipeline(folder, phase), root, options(phase, more), Reporter(quiet=True))
        if outcome.stopped:
            return STOPPED
        aside = mark.with_suffix(".aside")
        aside.write_text(str(phase))
        aside.rename(mark)
    return 0


# --- killing it ---------------------------------------------------------------------------------------


def serve() -> None:
    import killing  # beside this file: whoever starts the server has put the folder on the path

    killing.serve(_asked)


def _at_stop(asked: int, what: str) -> None:
    """What happens when the freeze asks for the n-th time whether to stop, before a shard: in the middle of
    its work, however far ahead of the disk it is."""
    import killing

    real, times = attempt.Stop.__call__, count(1)

    def stops(self: attempt.Stop) -> bool:
        if next(times) == asked:
            killing.happen(what)
        return real(self)

    attempt.Stop.__call__ = stops  # type: ignore[method-assign]


def _asked(request: dict[str, Any]) -> int:
    if request.get("asked"):
        _at_stop(request["asked"], request["do"])
    work = crash if request.get("job") == "crash" else job
    return work(Path(request["root"]), Path(request["inputs"]), request.get("options", {}))
