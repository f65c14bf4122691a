"""The tables of documents 001 and 002, measured end to end in one run with the recipe `foveated`.

    PYTHONPATH=src python3 benchmarks/foveated.py                           all sections, on the GPU
    PYTHONPATH=src python3 benchmarks/foveated.py --scratch /tmp/f --only sources batches
    .venv/bin/python benchmarks/foveated.py                                 no GPU: tiny, nothing is kept

H.264 clips of glyphs (24 s, 256²), 24 stored frames of which 16 are seen; an encoder of DINOv2-S/14's shape
(325 tokens of 384), a language model of SmolLM2-135M's, both with random weights of a seed: no speed depends
on them. With --scratch, clips, networks and stores stay there, and the next call goes on with them. Sections
that are not run keep their last results in the file.

freeze   A row is one way to make frames or features, in stored frames a second (median of rounds in turns,
         low, high). `busy`: share of the time in which the encoder ran; `before_s`: looking at the inputs,
         auditing, loading, compiling and starting workers, which is not part of the rate.
sources  A row is the training step at one batch size from one source of batches. The step is the recipe's
         own: eager, bf16, a coarse and two fine passes, caption loss, clipping, AdamW.
batches  The same for each batch size until memory or rows end, from each kind of source.

samples_per_s    videos trained on, from asking for the first batch to the end of the last step on the device
wait_pct         share of that time which the loop spent asking for a batch
device_busy_pct  seconds a step in which at least one kernel runs, over the step's time; the first from a
                 profiler at the end of the run, for each batch size, with the encoder where it is live
nvml_pct, watts  NVML's utilisation (any kernel ran lately), mean of samples; energy over time
peak_gb          most memory in tensors on the device during the steps, with what a tier keeps there
bytes_per_video  what one video takes where it is read from; a step reads 16 of its 24 frames, `.pt` all
rows_a_pass      rows that fitted into memory at once, where the batch did not
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from itertools import repeat
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from common import device_name, disk_bytes, fed_against_kept, goal, print_table, write_results

import frostline as fl
from frostline import keyed, stages
from frostline.batch import Batch
from frostline.execution import Execution
from frostline.feed.order.base import RowSequence
from frostline.freezer.attempt import Outcome
from frostline.freezer.choice import quick_switches
from frostline.freezer.options import Options
from frostline.freezer.progress import Reporter
from frostline.freezer.run import run
from frostline.freezer.workers import Threads, cores
from frostline.step import Step
from frostline.store.gc import collect
from frostline.supply import supply
from frostline.timing import interleave, ratio, spread
from frostline.training import Training
from frostline_recipes.foveated import glyphs, networks
from frostline_recipes.foveated.workload import workload

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
STORED, SEEN = 24, 16
HELD = ("frames", "times", "features", "tokens")
BEGAN = time.perf_counter()

THEIRS = [
    {"document": "001", "from": ".pt features", "batch": batch, "samples_per_s": rate, "peak_gb": gb}
    for batch, rate, gb in (
        (8, 31, 3.9), (16, 70, 4.1), (32, 128, 7.5), (48, 171, 10.8), (64, 205, 14.1), (80, 215, 17.4),
    )
] + [
    {"document": "002", "from": what, "batch": batch, "samples_per_s": steps * batch, "peak_gb": gb,
     "nvml_pct": percent, "watts": watts}
    for what, batch, steps, gb, percent, watts in (
        ("video, decord", 6, 1.1, 8.4, 2, 100), (".pt frames", 10, 3.8, 10.7, 54, 180),
    )
]  # fmt: skip
"""What the documents claim, on an RTX 4090 with other code; 001's are without a loader."""


Measured = tuple[list[Any], list[Any]]
"""Rows and goals."""


@dataclass(frozen=True)
class Size:
    """How much is measured, and of what."""

    clips: int
    """Different ones; the others are the same files under more names: each is opened and decoded anew."""
    videos: int
    """What is frozen from clips: so many that freezing compares threads with processes, as for a real set."""
    held: int
    """Videos in the store of frames and features."""
    decoded: int
    """By decoding alone, in a round."""
    few: int
    """Rows of the int8 store, of tables in memory, and `.pt` files."""
    side: int
    fps: int
    encoder: Mapping[str, Any]
    llm: Mapping[str, Any]
    batch: int
    batches: tuple[int, ...]
    seconds: float
    """Of steps that are timed, at least, and of the encoder alone."""
    steps: int


FULL = Size(
    clips=256, videos=2048, held=1024, decoded=512, few=384, side=256, fps=4,
    encoder={
        "model_type": "dinov2", "image_size": 518, "patch_size": 14, "hidden_size": 384,
        "num_hidden_layers": 12, "num_attention_heads": 6, "mlp_ratio": 4,
    },
    llm={
        "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "intermediate_size": 1536, "vocab_size": 49152, "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    batch=64, batches=(8, 16, 32, 64, 128, 256, 512, 1024), seconds=2.5, steps=8,
)  # fmt: skip
SMALL = Size(
    clips=6, videos=24, held=16, decoded=16, few=16, side=64, fps=1,
    encoder={
        "model_type": "dinov2", "image_size": 70, "patch_size": 14, "hidden_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 1, "mlp_ratio": 2,
    },
    llm={
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "intermediate_size": 64, "vocab_size": 1024, "tie_word_embeddings": True,
    },
    batch=8, batches=(4, 8), seconds=0.1, steps=2,
)  # fmt: skip


def say(text: str) -> None:
    print(f"[{time.perf_counter() - BEGAN:5.0f} s] {text}", flush=True)


def done() -> None:
    if CUDA:
        torch.cuda.synchronize()


# --- what is measured with ----------------------------------------------------------------------------


class Made:
    """Clips, networks, stores and files in a folder, each made when it is first asked for."""

    def __init__(self, folder: Path, size: Size) -> None:
        self.folder, self.size = folder, size
        folder.mkdir(parents=True, exist_ok=True)

    def once(self, name: str, make: Callable[[Path], None]) -> Path:
        """A folder that is there or made now; written aside, so that what is there is whole."""
        place, aside = self.folder / name, self.folder / f"{name}.part"
        if not place.exists():
            say(f"making {name}")
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir()
            make(aside)
            aside.rename(place)
        return place

    @cached_property
    def videos(self) -> Path:
        size = self.size
        few = glyphs.make(self.folder / "glyphs", n=size.clips, size=size.side, fps=size.fps)
        with (few / "captions.csv").open(newline="", encoding="utf-8") as text:
            told = list(csv.DictReader(text))

        def link(into: Path) -> None:
            rows = [(f"{i:05d}.mp4", told[i % len(told)]) for i in range(size.videos)]
            for name, row in rows:
                os.link(few / row["path"], into / name)
            lines = [(name, row["caption"]) for name, row in rows]
            with (into / "captions.csv").open("w", newline="", encoding="utf-8") as text:
                csv.writer(text).writerows([("path", "caption"), *lines])

        return self.once("videos", link)

    @cached_property
    def encoder(self) -> Path:
        def save(into: Path) -> None:
            stages.vision_tower(config=self.size.encoder, seed=0).network.save_pretrained(into)

        return self.once("encoder", save)

    @cached_property
    def llm(self) -> Path:
        def save(into: Path) -> None:
            from transformers import LlamaConfig, LlamaForCausalLM

            torch.manual_seed(0)
            LlamaForCausalLM(LlamaConfig(**self.size.llm)).save_pretrained(into)
            for file in Path(networks.tokenizer_of("small")).iterdir():
                shutil.copy(file, into)

        return self.once("llm", save)

    @cached_property
    def work(self) -> fl.Workload:
        return workload(
            videos=str(self.videos), num_frames=SEEN, stored_frames=STORED, frame_size=self.size.side,
            encoder=str(self.encoder), llm=str(self.llm), batch_size=self.size.batch, learning_rate=1e-4,
            precision="bf16" if CUDA else "fp32", encoder_precision="bf16" if CUDA else "fp32",
            compile_encoder=CUDA, max_tokens=24,
        )  # fmt: skip

    def frozen(self, *, without: str = "") -> Outcome:
        """The store of frames and features, brought up to date; `without` a field, which is left out."""
        cut = tuple(name for name in HELD if name != without)
        options = Options(cut=cut, limit=self.size.held)
        return run(self.work.data, self.folder / "held", options, Reporter())

    @cached_property
    def held(self) -> Path:
        place = self.folder / "held"
        whole = place.exists() and not {*HELD} - {*(store := fl.Store.open(place)).fields}
        if not whole or len(store) < self.size.held:
            say("freezing frames and features")
            self.frozen()
        return place

    @cached_property
    def framed(self) -> Path:
        """The same rows without features: who reads them has to encode."""
        place = self.folder / "framed"
        if not place.exists() or len(fl.Store.open(place)) < self.size.held:
            say("freezing frames alone")
            cut = tuple(name for name in HELD if name != "features")
            run(self.work.data, place, Options(cut=cut, limit=self.size.held), Reporter())
        return place

    @cached_property
    def int8(self) -> Path:
        """Some rows of that store with their features in int8."""

        def write(into: Path) -> None:
            store = fl.Store.open(self.held)
            specs = {name: store.fields[name] for name in HELD if name != "frames"}
            codecs = {"features": "int8/token"}
            fields = {n: fl.Field(s.shape, s.dtype, codec=codecs.get(n, "raw")) for n, s in specs.items()}
            with fl.Store.create(into / "store", fields) as writer:
                for start in range(0, self.size.few, 16):
                    rows = store.rows(np.arange(start, min(self.size.few, start + 16)), [*fields])
                    columns = {n: c if isinstance(c, torch.Tensor) else [*c] for n, c in rows.items()}
                    writer.append_batch(rows.keys_of_rows, columns)

        return self.once("int8", write) / "store"

    @cached_property
    def pt(self) -> Path:
        """Document 001's layout: a file a video."""

        def write(into: Path) -> None:
            store, told = fl.Store.open(self.held), self.captions
            latents = torch.randn(STORED, 4, self.size.side // 8, self.size.side // 8).bfloat16()
            for i in range(self.size.few):
                features = store.rows([i], ["features"])["features"][0]
                sample = {"dino_features": features, "latents": latents, "caption": told[store.keys[i]]}
                torch.save(sample, into / f"{i:05d}.pt")

        return self.once("pt", write)

    @cached_property
    def captions(self) -> dict[str, str]:
        with (self.videos / "captions.csv").open(newline="", encoding="utf-8") as text:
            return {row["path"]: row["caption"] for row in csv.DictReader(text)}

    @cached_property
    def step(self) -> Step:
        model = self.work.model.get().to(DEVICE).train()
        optimizer = self.work.optimizer(model)  # type: ignore[misc]
        training = Training.of(self.work.training)
        return Step(model, self.work.loss, optimizer, training=training, device=DEVICE, note=say)  # type: ignore[arg-type]


# --- freeze -------------------------------------------------------------------------------------------


class Decoders:
    """As many processes as cores, each decoding its share for nothing; started once, before anything."""

    def __init__(self, videos: Path, side: int, n: int) -> None:
        self.n = n
        command = [sys.executable, __file__, "--decode", str(videos), str(side), str(n), str(cores())]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.children = [subprocess.Popen([*command, str(k)], **pipes) for k in range(cores())]
        for child in self.children:
            self._heard(child)

    def rate(self) -> float:
        began = time.perf_counter()
        for child in self.children:
            child.stdin.write("go\n")
            child.stdin.flush()
        for child in self.children:
            self._heard(child)
        return STORED * self.n / (time.perf_counter() - began)

    def close(self) -> None:
        for child in self.children:
            child.communicate()

    @staticmethod
    def _heard(child: Any) -> None:
        if not child.stdout.readline():
            raise RuntimeError(f"a decoding process ended with status {child.wait()}")


def decode_share(videos: str, side: str, n: str, step: str, first: str) -> None:
    """What one of them does, once for each line that it is sent."""
    torch.set_num_threads(1)  # there are as many processes as cores
    names = sorted(Path(videos).glob("*.mp4"))[int(first) : int(n) : int(step)]
    stage = clip_stage(int(side)).fn
    stage(next(Path(videos).glob("*.mp4")))
    print("ready", flush=True)
    for _ in sys.stdin:
        for name in names:
            stage(name)
        print("done", flush=True)


def clip_stage(side: int) -> fl.Stage:
    """The recipe's own first stage."""
    video = stages.Video(frames=STORED, size=side, fit="cover")
    return fl.Stage("clip", video, reads="path", writes=("frames", "times"))


def decode_threads(made: Made, n: int) -> float:
    source = fl.Source.files(str(made.videos / "*.mp4"))
    execution = Execution(fl.Pipeline(source, clip_stage(made.size.side)), ["frames"])
    workers = Threads(execution.early, cores())
    began = time.perf_counter()
    with quick_switches(), closing(workers):  # as freezing does it
        workers.begin(list(range(n)), group=1).result()  # type: ignore[union-attr]
    return STORED * n / (time.perf_counter() - began)


class EncoderAlone:
    """The network on made-up pixels that are on the device already."""

    def __init__(self, made: Made, frames: int) -> None:
        dtype = torch.bfloat16 if CUDA else torch.float32
        network = networks.encoder(str(made.encoder)).to(DEVICE, dtype)
        self.network = torch.compile(network, dynamic=False) if CUDA else network
        self.x = torch.randn(frames, 3, made.size.side, made.size.side, dtype=dtype, device=DEVICE)
        self.seconds = made.size.seconds
        self.rate()

    def rate(self) -> float:
        n, began = 0, time.perf_counter()
        with torch.inference_mode():
            while time.perf_counter() - began < self.seconds:
                for _ in range(8):
                    self.network(self.x)
                n += 8 * len(self.x)
                done()
        return n / (time.perf_counter() - began)


class Freeze:
    """A freeze of features, from clips or from stored frames; notes what was not streaming."""

    def __init__(self, made: Made, *, frames: bool) -> None:
        self.made, self.frames = made, frames
        self.before: list[float] = []
        self.busy: list[float] = []
        self.starved: list[float] = []

    def rate(self) -> float:
        outcome = self._from_frames() if self.frames else self._from_clips()
        self.before.append(outcome.seconds - outcome.streamed)
        self.busy.append(outcome.stats.busy / outcome.streamed)
        self.starved.append(outcome.stats.starved / outcome.streamed)
        return STORED * outcome.stats.samples / outcome.streamed

    def _from_clips(self) -> Outcome:
        root = self.made.folder / "fresh"
        shutil.rmtree(root, ignore_errors=True)
        outcome = run(self.made.work.data, root, Options(), Reporter())
        shutil.rmtree(root)
        return outcome

    def _from_frames(self) -> Outcome:
        root = self.made.folder / "held"
        if root.exists() and "features" in fl.Store.open(root).fields:
            fl.Store.retire(root, "features")
            collect(root)
        elif not root.exists():
            self.made.frozen(without="features")
        return self.made.frozen()


def write_alone(made: Made, n: int) -> float:
    """Rows of features into a store, by one thread, as a freeze ends."""
    width, grid = made.size.encoder["hidden_size"], made.size.side // made.size.encoder["patch_size"]
    shape = (STORED, grid**2 + 1, width)
    rows = torch.randn(8, *shape).to(torch.bfloat16 if CUDA else torch.float32)
    root = made.folder / "written"
    began = time.perf_counter()
    with fl.Store.create(root, {"x": fl.Field(shape, "bfloat16" if CUDA else "float32")}) as writer:
        for start in range(0, n, 8):
            writer.append_batch([str(start + i) for i in range(8)], {"x": rows}, take=True)
    took = time.perf_counter() - began
    shutil.rmtree(root)
    return STORED * n / took


def freezing(made: Made, given: argparse.Namespace) -> Iterator[Measured]:
    n = made.size.decoded
    decoders = Decoders(made.videos, made.size.side, n)
    chunk = STORED * next(stage.batch_size for stage in made.work.data.stages if stage.name == "features")
    calls = (chunk, 512 if CUDA else 2 * chunk)
    encoders = {f"encoder alone, {frames} frames a call": EncoderAlone(made, frames) for frames in calls}
    frozen = {f"freeze, from {w}": Freeze(made, frames=w != "clips") for w in ("clips", "stored frames")}
    contestants: dict[str, Callable[[], float]] = {
        "decode alone, threads": lambda: decode_threads(made, max(8, n // 4)),
        "decode alone, processes": decoders.rate,
        **{name: one.rate for name, one in encoders.items()},
        "features written alone": lambda: write_alone(made, max(8, n // 4)),
        **{name: one.rate for name, one in frozen.items()},
    }
    with closing(decoders):
        warm = frozen["freeze, from stored frames"]
        say(f"from stored frames, with all that comes before: {warm.rate():,.0f} frames/s")  # and compiles
        for seen in (warm.before, warm.busy, warm.starved):
            seen.clear()
        rates = interleave({k: told(k, one) for k, one in contestants.items()}, rounds=given.rounds)
    rows = []
    for name, values in rates.items():
        s, about = spread(values), frozen.get(name)
        rows.append({
            "section": "freeze", "what": name, "frames_per_s": s.median, "low": s.low, "high": s.high,
            "busy": statistics.median(about.busy) if about else "",
            "starved": statistics.median(about.starved) if about else "",
            "before_s": statistics.median(about.before) if about else "",
        })  # fmt: skip
    yield rows, freeze_goals(rates, [*encoders])


def freeze_goals(rates: dict[str, list[float]], encoders: list[str]) -> list[dict[str, Any]]:
    def best(names: list[str]) -> list[float]:
        """The faster kind, not the luckier one of each round."""
        return max((rates[name] for name in names), key=statistics.median)

    encode, decode = best(encoders), best(["decode alone, threads", "decode alone, processes"])
    limit = [min(pair) for pair in zip(encode, decode, strict=True)]
    write = rates["features written alone"]  # 6 MB a clip: faster than most disks
    stored = [min(pair) for pair in zip(encode, write, strict=True)]
    clips, frames = (rates[f"freeze, from {what}"] for what in ("clips", "stored frames"))
    slower, share = ratio(clips, limit).median, ratio(frames, stored).median
    return [
        goal("freeze: from clips, share of the slower of decoding and encoding", 0.9, slower),
        goal("freeze: from stored frames, share of the slower of encoding and writing", 0.9, share),
    ]


def told(name: str, contestant: Callable[[], float]) -> Callable[[], float]:
    """The contestant, which also says what it reached: a run takes minutes."""

    def one() -> float:
        rate = contestant()
        say(f"{name}: {rate:,.0f} frames/s")
        return rate

    return one


# --- batches from everywhere --------------------------------------------------------------------------


@dataclass(frozen=True)
class Endless:
    """Shuffled rows, over and over, in one epoch that does not end.

    A real one has thousands of batches; of the few rows here it would have a handful, and what starting an
    epoch takes would weigh far more than it does.
    """

    seed: int = 0

    def over(self, tables: Mapping[str, Any], batch_size: int) -> RowSequence:
        return _Repeated(len(next(iter(tables.values()))), batch_size)


class _Repeated(RowSequence):
    def __init__(self, n: int, batch_size: int) -> None:
        super().__init__(1_000_000 * batch_size, batch_size, drop_last=True)
        self._n = n

    def _rows(self, epoch: int, start: int, stop: int) -> np.ndarray[Any, Any]:
        turns, places = np.divmod(np.arange(start, stop, dtype=np.int64), self._n)
        rows = np.empty(stop - start, np.int64)
        for turn in np.unique(turns).tolist():
            mine = turns == turn
            rows[mine] = keyed.permute(places[mine], self._n, keyed.derive(0, turn, "", "benchmark"))
        return rows


@contextmanager
def supplied(made: Made, table: Any, tier: str, batch: int) -> Iterator[Iterator[Batch]]:
    """Batches of a store, or live from the clips where there is none."""
    work = replace(made.work, order=Endless())
    stores = None if table is None else {"data": table}
    batches = supply(work, stores, split=None, batch_size=batch, device=DEVICE, tier=tier)
    try:
        yield iter(batches)
    finally:
        batches.close()


class PtFiles(torch.utils.data.Dataset[Any]):
    """Document 001's loader: a file a sample, read whole, some of its frames taken."""

    def __init__(self, folder: Path, llm: Path) -> None:
        self.files = sorted(folder.glob("*.pt"))
        self.tokens = stages.Tokenizer(str(llm), max_length=24)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        sample = torch.load(self.files[i], weights_only=True)
        picked = torch.randperm(STORED)[:SEEN].sort().values
        return sample["dino_features"][picked], torch.as_tensor(self.tokens(sample["caption"]))


def collated(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    words = [row[1] for row in rows]
    ends = np.cumsum([0, *map(len, words)])
    return torch.stack([row[0] for row in rows]), torch.cat(words), torch.from_numpy(ends)


@contextmanager
def pt_loaded(made: Made, workers: int, batch: int) -> Iterator[Iterator[Batch]]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not live on in the workers
    files = PtFiles(made.pt, made.llm)
    order = np.concatenate([np.random.default_rng(k).permutation(len(files)) for k in range(1000)])
    loader = torch.utils.data.DataLoader(
        files, batch, sampler=order.tolist(), num_workers=workers, collate_fn=collated, pin_memory=CUDA,
        timeout=120,
    )  # fmt: skip
    batches = iter(loader)

    def moved() -> Iterator[Batch]:
        for features, words, ends in batches:
            x, w, e = (t.to(DEVICE, non_blocking=True) for t in (features, words, ends))
            yield Batch({"features": x, "tokens": fl.Ragged(w, e)})

    try:
        yield moved()
    finally:
        batches._shutdown_workers()  # type: ignore[attr-defined]  # waits for them; del would not say when


def evict(folder: Path) -> None:
    """Out of the page cache: written back, and given up; needs no rights, and no process to map the files."""
    gc.collect()
    for path in (p for p in folder.rglob("*") if p.is_file()):
        with path.open("rb", buffering=0) as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# --- the step, timed ----------------------------------------------------------------------------------


class Card:
    """Watts and NVML's utilisation over a block of time; nothing where nvidia-ml-py is not there."""

    def __init__(self) -> None:
        self.told: dict[str, Any] = {"nvml_pct": "", "watts": ""}
        self._nvml: Any = None
        if CUDA and find_spec("pynvml"):
            import pynvml

            try:
                pynvml.nvmlInit()
                self._card = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
                self._nvml = pynvml
            except pynvml.NVMLError as e:
                say(f"no watts: {e}")

    def __enter__(self) -> Card:
        self._over, self._used, self._drawn = threading.Event(), [], []
        self._thread = threading.Thread(target=self._sample, daemon=True)
        if self._nvml:
            self._began, self._energy = time.perf_counter(), self._joules()
            self._thread.start()
        return self

    def _joules(self) -> float | None:
        try:
            return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._card)) / 1000
        except self._nvml.NVMLError:  # this card does not count: samples of its power stand in
            return None

    def _sample(self) -> None:
        while not self._over.wait(0.1):
            self._used.append(self._nvml.nvmlDeviceGetUtilizationRates(self._card).gpu)
            self._drawn.append(self._nvml.nvmlDeviceGetPowerUsage(self._card) / 1000)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if not self._nvml:
            return
        self._thread.join()
        now, took = self._joules(), time.perf_counter() - self._began
        if self._used:
            self.told["nvml_pct"] = statistics.mean(self._used)
            self.told["watts"] = statistics.mean(self._drawn)
        if now is not None and self._energy is not None:
            self.told["watts"] = (now - self._energy) / took


def timed(
    step: Step,
    batches: Iterator[Batch],
    size: Size,
    *,
    warm: int = 3,
    least: int | None = None,
    exactly: int | None = None,
) -> dict[str, Any]:
    """A row's figures. least: steps, where they take long; exactly: so many, where there are no more."""
    for _ in range(warm):
        step(next(batches))
    done()
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    rows = n = 0
    wait = 0.0
    with Card() as card:
        began = time.perf_counter()
        while n < (exactly or least or size.steps) or (
            not exactly and time.perf_counter() - began < size.seconds
        ):
            asked = time.perf_counter()
            batch = next(batches)
            wait += time.perf_counter() - asked
            step(batch)
            rows, n = rows + batch.n_rows, n + 1
            del batch
        done()
        took = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated() / 1e9 if CUDA else ""
    return {
        "samples_per_s": rows / took, "wait_pct": 100 * wait / took, "device_busy_pct": "", **card.told,
        "peak_gb": peak, "steps": n,
    }  # fmt: skip


def add_busy(made: Made, rows: list[dict[str, Any]]) -> None:
    """Fill in how busy the device was. At the end: a profiler may stay attached, and launches take longer."""
    rows = [row for row in rows if "device_busy_pct" in row]
    seconds: dict[tuple[bool, int], float] = {}
    made.step.microbatch = None
    for live, batch in sorted({(is_live(row), row["batch"]) for row in rows}):
        if live:
            with supplied(made, frames_of(made, max(batch, made.size.few)), "pinned", batch) as batches:
                seconds[live, batch] = kernel_seconds(made.step, batches)
        else:
            seconds[live, batch] = kernel_seconds(made.step, repeat(first_batch(made, batch)))
    for row in rows:
        a_step = seconds[is_live(row), row["batch"]]
        row["device_busy_pct"] = 100 * a_step * row["samples_per_s"] / row["batch"]


def is_live(row: dict[str, Any]) -> bool:
    return row["source"].endswith("live encode")


def kernel_seconds(step: Step, batches: Iterator[Batch], n: int = 2) -> float:
    """Seconds a step in which at least one kernel ran: the union of what the profiler saw, without copies."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    step(next(batches))
    done()
    with profile(activities=[ProfilerActivity.CUDA if CUDA else ProfilerActivity.CPU]) as profiled:
        for _ in range(n):
            step(next(batches))
        done()
    here, other = DeviceType.CUDA if CUDA else DeviceType.CPU, ("Memcpy", "Memset", "Optimizer.")
    events = profiled.profiler.kineto_results.events()
    kernels = [e for e in events if e.device_type() == here and not e.name().startswith(other)]
    total = end = 0
    for start, length in sorted((e.start_ns(), e.duration_ns()) for e in kernels):
        total += max(0, start + length - max(start, end))
        end = max(end, start + length)
    return total / n / 1e9


# --- sources ------------------------------------------------------------------------------------------


def sources(made: Made, given: argparse.Namespace) -> Iterator[Measured]:
    size, step, rows = made.size, made.step, list[dict[str, Any]]()

    def add(what: str, state: str, per_video: int | str, figures: dict[str, Any]) -> None:
        head = {"section": "sources", "batch": size.batch, "source": what, "state": state}
        rows.append(head | figures | {"bytes_per_video": per_video})
        if figures:
            say(f"{what}: {figures['samples_per_s']:,.1f} samples/s, waited {figures['wait_pct']:.0f} %")

    stores = {"bf16" if CUDA else "fp32": made.held, "int8": made.int8}
    per_video = {name: fl.Store.open(root).fields["features"].row_bytes for name, root in stores.items()}
    add("one batch kept on the device", "", "", timed(step, repeat(first_batch(made, size.batch)), size))
    for name, root in stores.items():
        add(f"features {name}, disk", *cold(made, root, per_video[name]))
    for name, root in stores.items():
        for tier, what in (("pinned", "RAM"), ("device", "device memory")):
            with supplied(made, features_of(root, size.few), tier, size.batch) as batches:
                add(f"features {name}, {what}", "", per_video[name], timed(step, batches, size))
    more, goals = against_kept(made, given.rounds)
    frames = frames_of(made, size.few)
    with supplied(made, frames, "pinned", size.batch) as batches:
        held = frames.fields["frames"].row_bytes
        add("stored frames in RAM, live encode", "", held, timed(step, batches, size))
    with supplied(made, None, "auto", size.batch) as batches:
        held = mean_size(made.videos, "*.mp4")
        figures = timed(step, batches, size, warm=2, least=4)
        add("clips, live decode, live encode", "warm files", held, figures)
    for workers in (2, 4, 8) if CUDA else (2,):
        what, held = f".pt files, DataLoader, {workers} workers", mean_size(made.pt, "*.pt")
        try:
            with pt_loaded(made, workers, size.batch) as batches:
                figures = timed(step, batches, size, warm=2 * workers + 2)  # uses up what was read ahead
            add(what, "warm files", held, figures)
        except RuntimeError as e:  # workers die where /dev/shm is too small for their batches
            say(f"{what}: {e}")
            add(what, f"failed: {str(e).splitlines()[0]:.80}", held, {})
    yield rows + more, goals


def features_of(root: Path, n: int) -> Any:
    store = fl.Store.open(root)
    return store.at(np.arange(min(n, len(store))))


def frames_of(made: Made, n: int) -> Any:
    store = fl.Store.open(made.framed)
    assert "features" not in store.fields
    return store.at(np.arange(min(n, len(store))))


def first_batch(made: Made, batch: int) -> Batch:
    with supplied(made, features_of(made.held, batch), "pinned", batch) as batches:
        return next(batches)


def cold(made: Made, root: Path, per_video: int) -> tuple[str, int, dict[str, Any]]:
    """Every row once, from files that are not in the page cache; says how much the disk really gave."""
    evict(root)
    n = len(fl.Store.open(root)) // made.size.batch
    before = disk_bytes()
    with supplied(made, features_of(root, 1 << 30), "disk", made.size.batch) as batches:
        figures = timed(made.step, batches, made.size, warm=0, exactly=n)
    asked = n * made.size.batch * per_video * SEEN / STORED
    share = min(1.0, (disk_bytes() - before) / asked)
    return f"{'cold' if share > 0.9 else 'partly warm'}: {share:.0%} from the disk", per_video, figures


def mean_size(folder: Path, pattern: str) -> int:
    return int(statistics.mean(path.stat().st_size for path in folder.glob(pattern)))


def against_kept(made: Made, rounds: int) -> Measured:
    """Features in RAM against the same step on one batch, block by block in turns."""
    size, kept = made.size, first_batch(made, made.size.batch)
    with supplied(made, features_of(made.held, 2 * size.few), "pinned", size.batch) as batches:
        found, (share, low, high) = fed_against_kept(made.step, batches, kept, rounds=13 * rounds)
    head = {"section": "sources", "batch": size.batch}
    rows: list[dict[str, Any]] = []
    for name, values in (("features in RAM", found["fed"]), ("one batch kept", found["kept"])):
        s = spread(values)
        rows.append(head | {"source": f"in turns: {name}", "samples_per_s": s.median, "low": s.low,
                            "high": s.high})  # fmt: skip
    both = head | {"source": "in turns: RAM over one batch kept (95 % interval)"}
    rows.append(both | {"share": share, "low": low, "high": high})
    text = f"sources: features in RAM at batch {size.batch}, eager, share of one batch kept on the device"
    return rows, [goal(text, 0.97, share, within=(low, high))]


# --- batches ------------------------------------------------------------------------------------------


def batch_sizes(made: Made, given: argparse.Namespace) -> Iterator[Measured]:
    """A row at a time: a sweep takes minutes, and one that is cut off keeps what it has."""
    size, step = made.size, made.step
    for source, opened in swept(made).items():
        if given.of and source not in given.of:
            continue
        step.microbatch = None
        for batch in size.batches:
            read = disk_bytes()
            try:
                with opened(batch) as batches:
                    figures = timed(step, batches, size, **steps_of(source, batch))
            except RuntimeError as e:
                if "workers" not in source:
                    raise
                say(f"{source}, batch {batch}: {e}")  # workers die where /dev/shm is too small for batches
                break
            say(f"{source}, batch {batch}: {figures['samples_per_s']:,.1f} samples/s")
            head = {"section": "batches", "batch": batch, "source": source}
            if "disk" in source:
                figures["read_gb"] = (disk_bytes() - read) / 1e9  # rows that come again come from memory
            yield [head | figures | {"rows_a_pass": step.microbatch or ""}], []
            if step.microbatch:
                say(f"memory ends: a batch of {batch} takes passes of {step.microbatch} rows")
                break
            if CUDA:
                torch.cuda.empty_cache()
    step.microbatch = None


def steps_of(source: str, batch: int) -> dict[str, int]:
    """How many of them warm up, which uses up what was read ahead, and at least how many are timed."""
    if source.startswith("clips") and batch > 256:  # ten seconds a batch and more, most of them spent waiting
        return {"warm": 2, "least": 2}
    return {"warm": 10 if "workers" in source else 3, "least": 4}


Opened = Callable[[int], AbstractContextManager[Iterator[Batch]]]


def swept(made: Made) -> dict[str, Opened]:
    """Sources by name: how each is opened for a batch of so many.

    int8, `.pt` and clips have few rows, which a large batch has more than once.
    """
    few, held = made.size.few, made.size.held

    def stored(root: Path, tier: str) -> Opened:
        return lambda batch: supplied(made, features_of(root, max(batch, 2 * few)), tier, batch)

    def from_disk(root: Path) -> Opened:
        def opened(batch: int) -> AbstractContextManager[Iterator[Batch]]:
            evict(root)
            return supplied(made, features_of(root, held), "disk", batch)

        return opened

    def stored_frames(batch: int) -> AbstractContextManager[Iterator[Batch]]:
        return supplied(made, frames_of(made, max(batch, few)), "pinned", batch)

    return {
        "features, RAM": stored(made.held, "pinned"),
        "features, device memory": stored(made.held, "device"),
        "features, disk": from_disk(made.held),
        "features int8, RAM": stored(made.int8, "pinned"),
        "features int8, device memory": stored(made.int8, "device"),
        "features int8, disk": from_disk(made.int8),
        "stored frames in RAM, live encode": stored_frames,
        ".pt files, DataLoader, 4 workers": lambda batch: pt_loaded(made, 4, batch),
        "clips, live decode, live encode": lambda batch: supplied(made, None, "auto", batch),
    }


# --- the run ------------------------------------------------------------------------------------------


Section = Callable[[Made, argparse.Namespace], Iterator[Measured]]
SECTIONS: dict[str, Section] = {"freeze": freezing, "sources": sources, "batches": batch_sizes}


def keep_others(rows: list[Any], goals: list[Any]) -> Measured:
    """In front of them what was not measured again: other sections, and other batches of a source."""
    file = common.RESULTS / f"foveated-{device_name()}.json"
    old = json.loads(file.read_text()) if file.exists() else {"rows": [], "goals": []}

    def place(row: dict[str, Any]) -> tuple[Any, ...]:
        section = row["section"]
        return (section, row["source"], row["batch"]) if section == "batches" else (section,)

    places, sections = {place(row) for row in rows}, {row["section"] for row in rows}
    others = [goal for goal in old["goals"] if goal["goal"].split(":")[0] not in sections]
    together = [*(row for row in old["rows"] if place(row) not in places), *rows]
    return sorted(together, key=place), others + goals


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=SECTIONS, help="these; the others' results stay")
    parser.add_argument("--of", nargs="*", default=[], help="sources of batches; the others' rows stay")
    parser.add_argument("--rounds", type=int, default=3, help="of freezing; 13 times as many of the step")
    parser.add_argument("--small", action="store_true", help="tiny sizes, as without a GPU; nothing is kept")
    parser.add_argument("--scratch", type=Path, help="where everything is made, and stays")
    parser.add_argument("--also", type=Path, help="another folder for the result")
    parser.add_argument("--decode", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.decode:
        decode_share(*given.decode)
        return
    if not find_spec("av"):
        sys.exit("Clips are made and decoded with PyAV: pip install av, or its wheel's folder on PYTHONPATH.")
    if CUDA:
        from torch import _dynamo

        # one process freezes often here; past eight compilations torch would go on without, unasked
        _dynamo.config.recompile_limit = 64
    else:
        torch.set_num_threads(1)  # tiny operations: threads that wait for each other take far longer
    small = given.small or not CUDA
    scratch = given.scratch or Path(tempfile.mkdtemp())
    made = Made(scratch / ("small" if small else "full"), SMALL if small else FULL)
    try:
        measure(made, given, small=small)
    finally:
        if given.scratch is None:
            shutil.rmtree(scratch)


def measure(made: Made, given: argparse.Namespace, *, small: bool) -> None:
    command = shlex.join(["benchmarks/foveated.py", *sys.argv[1:]])
    rows: list[Any] = [{"section": "theirs, RTX 4090", **row} for row in THEIRS]
    goals: list[Any] = []

    def keep(*, quiet: bool = False) -> None:
        if not small:
            kept = keep_others(rows, goals)
            write_results("foveated", device_name(), *kept, command, also=given.also, quiet=quiet)

    for name in given.only or SECTIONS:
        say(f"section {name}")
        for some, reached in SECTIONS[name](made, given):
            rows += [{"commit": common.git_commit(), **row} for row in some]
            goals += reached
            keep(quiet=True)  # a run that is cut off keeps what it has
        print_table(name, [row for row in rows if row["section"] == name])
        gc.collect()
        if CUDA:
            torch.cuda.empty_cache()
    if any("device_busy_pct" in row for row in rows):
        say("how busy the device was")
        add_busy(made, rows)
    for name in ("sources", "batches", "theirs, RTX 4090"):
        print_table(name, [row for row in rows if row["section"] == name])
    keep()
    if small:
        print_table("goals, which mean nothing at this size", goals)
    say("done")


if __name__ == "__main__":
    main()
