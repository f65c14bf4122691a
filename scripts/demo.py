"""The main job on small data sets made on the spot: freeze and train; store, check, feed and measure."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.utils.data import DataLoader, Dataset

import frostline as fl
from frostline.freezer.options import Options
from frostline.freezer.progress import Reporter
from frostline.freezer.run import run
from frostline.timing import interleave, rate, ratio, spread

SHAPE = (8, 325, 384)  # the features of 8 frames by a DINOv2-S, as bf16: 2 MB
BATCH = 16
ROUNDS = 5
BLOCK_S = 1.0
console = Console()


class PtFiles(Dataset[dict[str, Any]]):
    """What most people have: one `.pt` file a sample."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.glob("*.pt"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> dict[str, Any]:
        sample: dict[str, Any] = torch.load(self.paths[i], weights_only=True)
        return sample


def make_files(folder: Path, n: int) -> None:
    """Samples of noise, each its own, with a caption."""
    folder.mkdir()
    for i in track(range(n), "Making samples as .pt files", console=console):
        features = torch.randn(SHAPE, generator=torch.Generator().manual_seed(i)).bfloat16()
        torch.save({"features": features, "caption": f"clip number {i}"}, folder / f"clip-{i:04d}.pt")


def make_store(files: Path, path: Path, n: int) -> None:
    fields = {"features": fl.Field(SHAPE, "bfloat16"), "caption": fl.Field((), "str")}
    with fl.Store.create(path, fields) as writer:
        for file in track(sorted(files.glob("*.pt")), "Writing them into a store", total=n, console=console):
            writer.append(file.stem, torch.load(file, weights_only=True))


def endless(loader: Any) -> Iterator[float]:
    """The number of samples in each batch, epoch after epoch."""
    while True:
        for batch in loader:
            yield float(len(batch["features"]))


def same_samples(store: fl.Store, files: Path) -> None:
    """Every sample that the feed delivers is, bit for bit, the one in its file."""
    seen = 0
    for batch in fl.Feed(store, BATCH):
        for key, features, caption in zip(
            batch.keys_of_rows, batch["features"], batch["caption"], strict=True
        ):
            original = torch.load(files / f"{key}.pt", weights_only=True)
            if not torch.equal(features, original["features"]) or caption != original["caption"]:
                raise SystemExit(f"{key}: the feed's sample is not the file's")
            seen += 1
    console.print(f"The feed delivered all {seen} samples, each bit for bit as in its file.")


def freeze(folder: Path) -> None:
    """The workload of examples/pictures.py, frozen; again; and again after one picture changed."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
    import pictures

    for after in ("", " again, with nothing changed", " again, after one of the pictures changed"):
        if "pictures" in after:
            (folder / "00007.jpg").write_bytes((folder / "00008.jpg").read_bytes())
        console.print(f"\n[bold]Freezing 48 pictures through a small vision network{after}[/bold]")
        data = pictures.workload(folder=str(folder)).pipelines["data"]
        outcome = run(data, folder.parent / "frozen", Options(), Reporter(out=sys.stdout))
        done = f"{outcome.stats.samples} of 48 were computed, {outcome.stats.failed} failed"
        console.print(f"{done}; {outcome.seconds:.1f} s.")
    console.print("\n[bold]Training a head on what is stored: 60 steps, stopped, 60 more[/bold]")
    for steps in (60, 120):
        work = pictures.workload(folder=str(folder))
        place = {"out": folder.parent / "run", "store": folder.parent / "frozen"}
        result = fl.train(work, steps=steps, **place)
        console.print(f"step {result.step}: loss {result.figures['loss']:.4f}, held out {result.evaluation}")
    console.print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=192)
    parser.add_argument("--keep", type=Path, help="leave the store in this folder, to look at it")
    args = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        freeze(Path(temporary) / "pictures")
        files, path = Path(temporary) / "files", args.keep or Path(temporary) / "store"
        make_files(files, args.samples)
        make_store(files, path, args.samples)
        store = fl.Store.open(path)
        check = store.check(deep=True)
        if not check.ok:
            raise SystemExit("\n".join(check.problems))
        console.print(
            f"Checked {check.files} files, {check.rows} samples, {check.bytes / 1e6:,.0f} MB: all as written."
        )
        same_samples(store, files)
        compare(store, files)
    console.print(f"Done in {time.monotonic() - began:.0f} s.")
    if args.keep:
        console.print(f"Look at the store: frostline store inspect {args.keep}")


def compare(store: fl.Store, files: Path) -> None:
    """Samples per second, in turns, from memory that is warm for all of them."""
    loaders = {
        "frostline feed": fl.Feed(store, BATCH),
        "DataLoader over .pt files": DataLoader(PtFiles(files), BATCH, shuffle=True),
        "the same, 2 workers": DataLoader(
            PtFiles(files), BATCH, shuffle=True, num_workers=2, persistent_workers=True
        ),
    }
    runs: dict[str, Callable[[], float]] = {}
    for name, loader in loaders.items():
        batches = endless(loader)
        next(batches)
        runs[name] = lambda batches=batches: rate(batches, seconds=BLOCK_S)  # type: ignore[misc]
    with console.status(f"Measuring {ROUNDS} rounds of {BLOCK_S:.0f} s each, in turns"):
        results = interleave(runs, rounds=ROUNDS)
    table = Table(
        title="Shuffled batches of 16 samples of 2 MB, warm page cache, this machine", title_justify="left"
    )
    for column in ("loader", "samples/s (range)", "the feed is … times as fast (range)"):
        table.add_column(column, justify="left" if column == "loader" else "right")
    for name, values in results.items():
        gain = ratio(results["frostline feed"], values)
        table.add_row(name, _figures(spread(values)), "" if name == "frostline feed" else _figures(gain))
    console.print(table)


def _figures(found: Any) -> str:
    return (
        f"{found.median:,.3g} ({found.low:,.3g}–{found.high:,.3g})"
        if found.median < 1000
        else f"{found.median:,.0f} ({found.low:,.0f}–{found.high:,.0f})"
    )


if __name__ == "__main__":
    main()
