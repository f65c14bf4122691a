"""Does choosing where to look help? The foveated model on the embedded set, with its controls.

    PYTHONPATH=src python3 benchmarks/foveated_gaze.py                      on the GPU
    .venv/bin/python benchmarks/foveated_gaze.py --small                    2 cores, no GPU

Three seeds, each with a coarse-only model trained alone: the same parameters, steps and clips. All are
trained side by side (a small model leaves a GPU idle), judged by their best checkpoint on the validation
clips, and compared on test clips that none of them saw. Beside them stand two figures that need no model,
from how often words follow each other in the training captions: the text prior, with nothing seen; and what
is left for one who reads the first frame without a fault, the most that one frame tells (it alone shows the
target's bracket, and nothing has changed yet). With --scratch, clips, store and finished trainings stay, and
the next call goes on with them; the minutes are those of all calls.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from common import device_name, goal, print_table, write_results

import frostline as fl
from frostline.supply import supply
from frostline.trainer import restored
from frostline_recipes.foveated import metrics
from frostline_recipes.foveated.workload import workload

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
LARGE: dict[str, Any] = {
    "n_clips": 8192, "clip_fps": 2, "precision": "bf16", "encoder_precision": "bf16", "eval_every": 300,
    "max_tokens": 16,
}  # fmt: skip
SMALL: dict[str, Any] = {
    "n_clips": 1024, "objects": 3, "glyph_scale": 1.8, "changes": 1, "clip_size": 64, "clip_fps": 1,
    "frame_size": 64, "stored_frames": 8, "num_frames": 6, "encoder": "tiny", "llm": "tiny", "batch_size": 32,
    "max_tokens": 16, "warmup_steps": 100, "eval_every": 175,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "foveated": {},
    "coarse only": {"fine_iterations": 0},
}


def parameters(small: bool, model: str, seed: int) -> dict[str, Any]:
    return {**(SMALL if small else LARGE), **MODELS[model], "seed": seed}


def train_one(small: bool, model: str, seed: int, steps: int, out: str, store: str) -> None:
    given = parameters(small, model, seed)
    fl.train(
        workload(**given), steps=steps, out=out, store=store, parameters=given, device=DEVICE,
        training={"schedule": "linear", "log_every": 50},
    )  # fmt: skip
    Path(out, "done").touch()


def losses(run: Path, given: dict[str, Any], store: fl.Store) -> tuple[dict[str, Any], dict[str, float]]:
    """Of every test clip, by the run's best checkpoint."""
    work = workload(**given)
    model = restored(work, run / "checkpoints" / "best", device=DEVICE)
    feed = supply(
        work, {"data": store}, split="test", batch_size=work.batch_size or 1, device=DEVICE, train=False
    )
    with torch.no_grad():
        found = metrics.by_clip(model, feed, coarse_only=given.get("fine_iterations") == 0)
    feed.close()
    return found


def priors(given: dict[str, Any]) -> tuple[float, float]:
    """(with nothing seen, with the first frame read) nats a token of the test captions.

    A word's chances are those that it has in the training captions after the word that it cannot repeat: a
    colour after the colour before, a kind after the kind before. Begin and end tokens cost nothing.
    """
    source = workload(**given).pipelines["data"].source
    captions: dict[str, list[list[str]]] = {"train": [], "val": [], "test": []}
    for i in range(len(source)):
        row = source.raw(i)
        captions[row["split"]].append(row["caption"].split())
    shown = captions["train"][0].index("turns")
    words = range(len(captions["train"][0]))
    # a red star turns blue and then becomes a disc: what a place is told from, beside its own counts
    before = {shown + 1: 1, len(words) - 1: 2} if len(words) > shown + 2 else {shown + 1: 1}
    costs = [0.0 for _ in words]
    for k in words:
        seen: dict[str, Counter[str]] = {}
        for caption in captions["train"]:
            seen.setdefault(caption[before[k]] if k in before else "", Counter())[caption[k]] += 1
        for caption in captions["test"]:
            found = seen.get(caption[before[k]] if k in before else "", Counter())
            costs[k] -= math.log((found[caption[k]] + 1) / (found.total() + len(found) + 1))
    tokens = len(captions["test"]) * (len(words) + 2)
    return sum(costs) / tokens, sum(costs[shown:]) / tokens


def measure(small: bool, seeds: int, steps: int, folder: Path) -> tuple[list[Any], list[Any]]:
    base = parameters(small, "foveated", 0)
    each = range(seeds)
    jobs = [*(("foveated", s) for s in each), *(("coarse only", s) for s in each)]
    with clock(folder / "freeze_s"):
        store = fl.freeze(workload(**base), out=folder / "store", device=DEVICE)
    with clock(folder / "train_s"):
        train_all(jobs, small, steps, folder)
    with clock(folder / "judge_s"):
        rows, goals = judge(small, each, folder, store)
    took = {name: seconds(folder / name) for name in ("freeze_s", "train_s", "judge_s")}
    most = 2.0 if small else 15.0
    goals.append(goal(f"minutes, clips and {len(jobs)} models", most, sum(took.values()) / 60, at_most=True))
    text, first = priors(base)
    worst = max(row["loss_fine"] for row in rows)
    goals.append(
        goal("one frame does not do: the first one, read without a fault, over fine", 1.10, first / worst)
    )
    rows += [
        {"seed": "text prior", "loss_coarse": text},
        {"seed": "first frame", "loss_coarse": first},
        {"seed": "all", **took, "steps": steps},
    ]
    return rows, goals


def judge(small: bool, each: range, folder: Path, store: fl.Store) -> tuple[list[Any], list[Any]]:
    """On the test clips."""

    def told(model: str, seed: int) -> tuple[dict[str, Any], dict[str, float]]:
        return losses(folder / f"{model}-{seed}", parameters(small, model, seed), store)

    rows = [row_of(seed, *told("foveated", seed), told("coarse only", seed)[0]["coarse"]) for seed in each]
    goals = [
        goal("caption loss, coarse over fine, worst seed", 1.10, min(r["ratio"] for r in rows)),
        goal("with random queries instead, worst seed", 1.02, max(r["random"] for r in rows), at_most=True),
        goal("over a coarse-only model trained alone, worst seed", 1.10, min(r["over_alone"] for r in rows)),
    ]
    return rows, goals


@contextmanager
def clock(file: Path) -> Iterator[None]:
    """Add up what all calls took, also those that were cut off by an error."""
    began = time.perf_counter()
    try:
        yield
    finally:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(str(seconds(file) + time.perf_counter() - began))


def seconds(file: Path) -> float:
    return float(file.read_text()) if file.exists() else 0.0


def row_of(seed: int, each: dict[str, Any], health: dict[str, float], alone: Any) -> dict[str, Any]:
    ratio, low, high = metrics.ratio_of(each["coarse"], each["fine"])
    over, over_low, over_high = metrics.ratio_of(alone, each["fine"])
    controls = {
        name: metrics.ratio_of(each["coarse"], each[name])[0]
        for name in ("random", "shuffled", "autoregressive")
    }
    judged = {name: controls[name] for name in metrics.CONTROLS}
    return {
        "seed": seed, "loss_fine": float(each["fine"].mean()), "loss_coarse": float(each["coarse"].mean()),
        "ratio": ratio, "low": low, "high": high, **controls,
        "coarse_alone": float(alone.mean()), "over_alone": over, "over_low": over_low, "over_high": over_high,
        "text": float(each["text"].mean()), "entropy": health["entropy"],
        "correlation": health["correlation"],
        "verdict": metrics.verdict(ratio, low, high, judged, metrics.over(each)),
    }  # fmt: skip


def train_all(jobs: list[tuple[str, int]], small: bool, steps: int, folder: Path) -> None:
    """Side by side: on a GPU all, otherwise one a core, each with one thread."""

    def one(model: str, seed: int) -> None:
        run = folder / f"{model}-{seed}"
        if (run / "done").exists():
            return
        given = json.dumps([small, model, seed, steps, str(run), str(folder / "store")])
        env = {**os.environ} if CUDA else {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, __file__, "--one", given], env=env, capture_output=True, text=True, check=False
        )
        (folder / f"{model}-{seed}.log").write_text(done.stdout + done.stderr)
        if done.returncode:
            raise SystemExit(f"{model}, seed {seed}: {done.stderr[-3000:]}")
        print(f"[{time.strftime('%H:%M:%S')}] {model}, seed {seed}: trained", flush=True)

    with ThreadPoolExecutor(len(jobs) if CUDA else os.cpu_count()) as pool:
        for _ in pool.map(lambda job: one(*job), jobs):
            pass


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="the variant for two cores")
    parser.add_argument("--seeds", type=int, help="default: 3; small: 1")
    parser.add_argument("--steps", type=int)
    parser.add_argument(
        "--scratch", type=Path, help="where clips, stores and runs are kept; default: nowhere"
    )
    parser.add_argument("--also", type=Path, help="another folder for the result")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        train_one(*json.loads(given.one))
        return
    command = " ".join(["benchmarks/foveated_gaze.py", *sys.argv[1:]])
    steps = given.steps or (350 if given.small else 2400)
    with tempfile.TemporaryDirectory() as place:
        folder = (given.scratch or Path(place)) / f"{'small' if given.small else 'large'}-{steps}"
        folder.mkdir(parents=True, exist_ok=True)
        rows, goals = measure(given.small, given.seeds or (1 if given.small else 3), steps, folder)
    print_table("foveated: where to look", rows)
    name = "foveated_gaze_small" if given.small else "foveated_gaze"
    kept = write_results(name, device_name(), rows, goals, command, also=given.also)
    print(f"kept in benchmarks/results/{kept.name}")


if __name__ == "__main__":
    main()
