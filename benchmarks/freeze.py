"""Freezing against its parts: decoding alone, the encoder alone, and the loop that people write.

    .venv/bin/python benchmarks/freeze.py                                   2 cores, no GPU
    PYTHONPATH=src python3 benchmarks/freeze.py --rounds 3                  on the GPU

Everything is measured in the same run, in turns. A freeze is timed from its first sample to its last commit;
looking at the inputs, auditing, compiling, the first samples and starting workers stand in a column of their
own.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import ROOT, device_name, goal, print_table, write_results

import frostline as fl
from frostline import stages
from frostline.execution import Execution
from frostline.freezer.options import Options
from frostline.freezer.progress import Reporter
from frostline.freezer.run import run
from frostline.freezer.workers import Threads, cores
from frostline.timing import interleave, spread

CUDA = torch.cuda.is_available()
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Case:
    """An encoder and the pictures it is run on."""

    name: str
    side: int
    chunk: int
    config: dict[str, Any]
    output: str
    precision: Any = None
    compile: bool = False

    @property
    def frames(self) -> fl.Stage:
        return fl.Stage("frames", stages.Image(size=self.side), reads="path")

    def encoder(self) -> torch.nn.Module:
        return stages.vision_tower(config=self.config, seed=0, output=self.output)

    def stages(self) -> list[fl.Stage]:
        pixels = fl.lazy(stages.Preprocess, self.side, mean=MEAN, std=STD)
        network = fl.lazy(stages.vision_tower, config=self.config, seed=0, output=self.output)
        options: dict[str, Any] = {"precision": self.precision, "compile": self.compile}
        return [
            self.frames,
            fl.Stage(
                "pixels", pixels, reads="frames", on="device", batch_size=self.chunk, compile=self.compile
            ),
            fl.Stage("features", network, reads="pixels", on="device", batch_size=self.chunk, **options),
        ]


def dinov3(side: int, width: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "dinov3_vit", "image_size": side, "patch_size": 16, "hidden_size": width,
        "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": 4 * width,
        "num_register_tokens": 4,
    }  # fmt: skip


def cases() -> list[Case]:
    if not CUDA:
        return [Case("small ViT/16, 128²", 128, 16, dinov3(128, 192, 4, 3), "tokens")]
    small = dinov3(256, 384, 12, 6)
    return [
        Case("DINOv3 ViT-S/16 256²", 256, 512, small, "cls", "bf16", True),
    ]


def make_pictures(folder: Path, n: int) -> None:
    """JPEG files of 500 x 375 with structure at several scales, about as large as photographs are.

    256 different ones, each copied as often as needed: every file is opened, read and decoded all the same.
    """
    from PIL import Image

    folder.mkdir()
    for i in range(n):
        place = folder / f"{i:06d}.jpg"
        if i >= 256:
            shutil.copyfile(folder / f"{i % 256:06d}.jpg", place)
            continue
        rng = np.random.default_rng(i)
        noise = [rng.integers(0, 256, (side, side, 3), np.uint8) for side in (4, 16, 64)]
        layers = [np.asarray(Image.fromarray(x).resize((500, 375)), np.float32) for x in noise]
        mixed = 0.6 * layers[0] + 0.3 * layers[1] + 0.1 * layers[2]
        Image.fromarray(mixed.astype(np.uint8)).save(place, quality=85)


# --- contestants: each returns samples a second -------------------------------------------------------


def decode_threads(case: Case, pattern: str, n: int) -> float:
    execution = Execution(fl.Pipeline(fl.Source.files(pattern), case.frames), ["frames"])
    places = list(range(n))
    workers = Threads(execution.early, cores())
    began = time.perf_counter()
    pending = workers.begin(places, group=8)
    pending.result()
    rate = n / (time.perf_counter() - began)
    workers.close()
    return rate


def decode_processes(case: Case, folder: Path, n: int) -> float:
    """As many processes as cores, each decoding its share for nothing; starting them is not timed."""
    command = [sys.executable, __file__, "--decode", str(folder), str(case.side)]
    shares = [range(k, n, cores()) for k in range(cores())]
    children = [
        subprocess.Popen(
            [*command, str(s.start), str(n), str(s.step)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for s in shares
    ]
    for child in children:
        child.stdout.readline()  # type: ignore[union-attr]
    began = time.perf_counter()
    for child in children:
        child.stdin.write(b"go\n")  # type: ignore[union-attr]
        child.stdin.flush()  # type: ignore[union-attr]
    for child in children:
        child.stdout.readline()  # type: ignore[union-attr]
    rate = n / (time.perf_counter() - began)
    for child in children:
        child.communicate()
    return rate


def decode_share(folder: str, side: str, start: str, stop: str, step: str) -> None:
    torch.set_num_threads(1)  # there are as many processes as cores
    names, stage = sorted(Path(folder).glob("*.jpg")), stages.Image(size=int(side))
    stage(names[0])
    print("ready", flush=True)
    sys.stdin.readline()
    for i in range(int(start), int(stop), int(step)):
        stage(names[i])
    print("done", flush=True)


class EncoderAlone:
    """The network on made-up input that is on the device already."""

    def __init__(self, case: Case) -> None:
        network = case.encoder().to("cuda" if CUDA else "cpu")
        dtype = torch.bfloat16 if case.precision == "bf16" else torch.float32
        self.network = torch.compile(network.to(dtype), dynamic=False) if case.compile else network.to(dtype)
        self.x = torch.randn(
            case.chunk, 3, case.side, case.side, dtype=dtype, device="cuda" if CUDA else "cpu"
        )
        self.chunk = case.chunk
        self.rate(1.0)

    def rate(self, seconds: float) -> float:
        done, began = 0, time.perf_counter()
        with torch.inference_mode():
            while time.perf_counter() - began < seconds:
                for _ in range(8 if CUDA else 1):
                    self.network(self.x)
                    done += self.chunk
                if CUDA:
                    torch.cuda.synchronize()
        return done / (time.perf_counter() - began)


def plain_loop(case: Case, names: list[Path], out: Path) -> float:
    """One process, one picture at a time, one file a sample."""
    device = "cuda" if CUDA else "cpu"
    network = case.encoder().to(device)
    decode, pixels = stages.Image(size=case.side), stages.Preprocess(case.side, mean=MEAN, std=STD).to(device)
    out.mkdir(exist_ok=True)
    began = time.perf_counter()
    with torch.inference_mode():
        for i, name in enumerate(names):
            x = pixels(decode(name)[None].to(device))
            torch.save(network(x)[0].cpu(), out / f"{i}.pt")
    return len(names) / (time.perf_counter() - began)


class Frozen:
    """Freezes, into a new store each time; notes what was not streaming."""

    def __init__(self, pipeline: fl.Pipeline, scratch: Path, limit: int) -> None:
        self.pipeline, self.scratch, self.limit = pipeline, scratch, limit
        self.before: list[float] = []
        self.busy: list[float] = []

    def rate(self) -> float:
        root = self.scratch / "frozen"
        shutil.rmtree(root, ignore_errors=True)
        outcome = run(self.pipeline, root, Options(limit=self.limit), Reporter())
        self.before.append(outcome.seconds - outcome.streamed)
        self.busy.append(outcome.stats.busy / outcome.streamed)
        shutil.rmtree(root)
        return outcome.stats.samples / outcome.streamed


class FromFrames(Frozen):
    """Features of frames that a store holds: the encoder's field is retired before each round."""

    def __init__(self, pipeline: fl.Pipeline, root: Path, limit: int) -> None:
        super().__init__(pipeline, root, limit)
        run(pipeline, root, Options(limit=limit, cut=("frames",)), Reporter())
        self.rate()  # loads and compiles

    def rate(self) -> float:
        if "features" in fl.Store.open(self.scratch).fields:
            fl.Store.retire(self.scratch, "features")
            from frostline.store.gc import collect

            collect(self.scratch)
        options = Options(limit=self.limit, cut=("frames", "features"))
        outcome = run(self.pipeline, self.scratch, options, Reporter())
        self.before.append(outcome.seconds - outcome.streamed)
        self.busy.append(outcome.stats.busy / outcome.streamed)
        return outcome.stats.samples / outcome.streamed


def read_alone(root: Path) -> float:
    """Frames of the store, in blocks, into memory, by one thread."""
    store = fl.Store.open(root)
    n = min(len(store), 8192)
    began = time.perf_counter()
    for start in range(0, n, 512):
        store.rows(np.arange(start, min(n, start + 512)), ["frames"])
    return n / (time.perf_counter() - began)


# --- the run ------------------------------------------------------------------------------------------


def measure(case: Case, scratch: Path, pictures: Path, n: int, rounds: int) -> tuple[list[Any], list[Any]]:
    pipeline = fl.Pipeline(fl.Source.files(str(pictures / "*.jpg")), *case.stages())
    names = sorted(pictures.glob("*.jpg"))
    alone, frozen = EncoderAlone(case), Frozen(pipeline, scratch, min(n, 16384))
    frozen.rate()  # files into the page cache, kernels compiled
    few = names[: max(8, min(128, n // 16))]
    contestants: dict[str, Callable[[], float]] = {
        "decode alone, threads": lambda: decode_threads(case, str(pictures / "*.jpg"), min(n, 2048)),
        "decode alone, processes": lambda: decode_processes(case, pictures, min(n, 4096)),
        "encoder alone": lambda: alone.rate(3.0 if CUDA else 8.0),
        "freeze, from JPEG": frozen.rate,
        "plain loop, batch 1, torch.save": lambda: plain_loop(case, few, scratch / "plain"),
    }
    held: FromFrames | None = None
    if CUDA:
        held = FromFrames(pipeline, scratch / "held", n)
        contestants["frames read alone"] = lambda: read_alone(scratch / "held")
        contestants["freeze, from stored frames"] = held.rate
    rates = interleave({name: told(name, one) for name, one in contestants.items()}, rounds=rounds)
    extra = {"freeze, from JPEG": frozen, "freeze, from stored frames": held}
    rows = []
    for name, values in rates.items():
        s, about = spread(values), extra.get(name)
        rows.append({
            "case": case.name, "what": name, "samples_per_s": s.median, "low": s.low, "high": s.high,
            "busy": statistics.median(about.busy[1:]) if about else "",
            "before_s": statistics.median(about.before[1:]) if about else "",
        })  # fmt: skip
    shutil.rmtree(scratch / "held", ignore_errors=True)
    return rows, goals_of(case, rates)


def told(name: str, contestant: Callable[[], float]) -> Callable[[], float]:
    """The contestant, which also says what it reached: a run takes minutes."""

    def run() -> float:
        rate = contestant()
        print(f"[{time.strftime('%H:%M:%S')}] {name}: {rate:,.0f} samples/s", flush=True)
        return rate

    return run


def goals_of(case: Case, rates: dict[str, list[float]]) -> list[dict[str, Any]]:
    kinds = [rates[f"decode alone, {kind}"] for kind in ("threads", "processes")]
    decode = max(kinds, key=statistics.median)  # the faster kind, not the luckier one of each round
    encode, frozen = rates["encoder alone"], rates["freeze, from JPEG"]
    loop = statistics.median(
        [f / p for f, p in zip(frozen, rates["plain loop, batch 1, torch.save"], strict=True)]
    )
    if not CUDA:
        limit = [1 / (1 / a + 1 / b) for a, b in zip(decode, encode, strict=True)]
        share = statistics.median([f / x for f, x in zip(frozen, limit, strict=True)])
        return [
            goal(f"{case.name}: share of what decoding and encoding allow together", 0.9, share),
            goal(f"{case.name}: over the plain loop", 1.0, loop),
        ]
    share = statistics.median([f / min(a, b) for f, a, b in zip(frozen, decode, encode, strict=True)])
    held = rates["freeze, from stored frames"]
    kept = statistics.median([f / b for f, b in zip(held, encode, strict=True)])
    return [
        goal(f"{case.name}, JPEG: share of the slower of decoding and encoding", 0.9, share),
        goal(f"{case.name}, stored frames: share of the encoder alone", 0.9, kept),
        goal(f"{case.name}, JPEG: over the plain loop", 1.0, loop),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=49152 if CUDA else 6144)
    parser.add_argument("--scratch", type=Path, help="where stores are written; default: a temporary folder")
    parser.add_argument("--only", help="only cases whose name contains this")
    parser.add_argument("--also", type=Path, help="another folder for the result")
    parser.add_argument("--decode", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.decode:
        decode_share(*given.decode)
        return
    scratch = Path(tempfile.mkdtemp(dir=given.scratch))
    command = " ".join(["benchmarks/freeze.py", *sys.argv[1:]])
    rows, goals = [], []
    try:
        make_pictures(scratch / "pictures", given.samples)
        for case in cases():
            if not given.only or given.only in case.name:
                some, reached = measure(case, scratch, scratch / "pictures", given.samples, given.rounds)
                print_table(case.name, some)
                rows += some
                goals += reached
                kept = write_results("freeze", device_name(), rows, goals, command, also=given.also)
    finally:
        shutil.rmtree(scratch)
    print(f"kept in {kept.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
