"""The profiler on scripts whose trouble is known: what was planted, what it found, and what it costs.

    .venv/bin/python benchmarks/profile.py                      2 cores, no GPU
    PYTHONPATH=src python3 benchmarks/profile.py                on the GPU
    .venv/bin/python benchmarks/profile.py --only cost gain     some sections; the others' results stay
    .venv/bin/python benchmarks/profile.py --only plants healthy    of this section one script
    .venv/bin/python benchmarks/profile.py --only healthy           to look at; nothing is kept

Plants: every script of tests/unit/profiler/scripts that applies here, judged by tests/unit/profiler/truth.py
with its tight limits. Cost: what three of the scripts print as their step, and
pass A's step of their profiles, in turns. Gain: `input_bound` says how fast it
gets when its loader is replaced; the profile of the slow run has to have foretold it.

A row is kept as soon as it is there, with the commit it was measured at; rows that were not measured stay.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from common import RESULTS, ROOT, device_name, git_commit, goal, print_table, write_results

TARGET = "frostline_recipes.foveated.workload:workload"  # no entry points where nothing can be installed
RECIPE = {
    "cpu": ["n_clips=40", "frame_size=64", "num_frames=8", "stored_frames=8", "batch_size=8"],
    "cuda": ["n_clips=192", "batch_size=32"],
}
COST_SCRIPTS = {"healthy": 400, "few_workers": 100, "repeated_images": 600}
"""Steps that the scripts time without a profiler on shared cores: about as long as a profile takes, since a
core that has been used for ten seconds is slower than in its first."""
STEPS_TIMED = 100


def one(plant: Any, device: str, steps: int, folder: Path) -> dict[str, Any]:
    """A plant's line of the table."""
    from truth import run

    began = time.perf_counter()
    try:
        profile, _ = run(plant, folder / plant.name, device=device, steps=steps)
    except (RuntimeError, subprocess.TimeoutExpired) as e:
        return {"script": plant.name, "planted": plant.planted, "verdict": "none", "wrong": [str(e)[-300:]]}
    return {
        "script": plant.name,
        "planted": plant.planted,
        "verdict": profile.verdict.kind,
        "findings": ", ".join(dict.fromkeys(f.kind for f in profile.findings)),
        "figures": figures(profile),
        "step_ms": profile.wall.ms,
        "reconciled": profile.reconciled,
        "cost": None if profile.cost is None else profile.cost.share,
        "took_s": time.perf_counter() - began,
        "wrong": plant.wrong(profile, device, tight=True),
    }


def figures(profile: Any) -> str:
    """Those that a plant is judged by, where there are any."""
    said = []
    for loader in profile.loaders[:1]:
        if loader.wait_ms > 0.1 * profile.wall.ms:
            made = "" if loader.prepare_ms is None else f" of {loader.prepare_ms:.1f} prepared"
            said.append(f"waits {loader.wait_ms:.1f} ms{made}, {loader.needed} workers needed")
    said += [f"{m.calls:.3g} calls of {m.kind} ({m.rows})" for m in profile.modules[:8] if m.calls > 1.5]
    said += [f"{r.what}: {r.repeats} of {r.seen} again" for r in profile.repeats[:2]]
    said += [f"frozen to {m.prefix}" for m in profile.modules if m.prefix][:1]
    said += [f"{s.calls:.3g} × {s.where.rpartition('/')[2]}" for s in profile.syncs[:3]]
    return "; ".join(said)


def step_ms(name: str, device: str, *args: str) -> float:
    """The step time that a script itself prints."""
    steps = COST_SCRIPTS.get(name, STEPS_TIMED) if device == "cpu" else STEPS_TIMED
    return float(printed("step_ms", name, device, "--print-step-ms", str(steps), *args))


def pass_a_ms(name: str, device: str, folder: Path) -> float:
    from truth import PLANTS, run

    plant = next(plant for plant in PLANTS if plant.name == name)
    return float(run(plant, folder / "cost", device=device, steps=STEPS_TIMED)[0].wall.ms)


def printed(word: str, name: str, device: str, *args: str) -> str:
    from truth import SCRIPTS, environment

    command = [sys.executable, str(SCRIPTS / f"{name}.py"), "--device", device, *args]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False,
                          timeout=120)  # fmt: skip
    if not (found := re.search(rf"^{word} (\S+)$", done.stdout, re.MULTILINE)):
        raise RuntimeError(f"{name} printed no {word}:\n{done.stdout}\n{done.stderr}")
    return found[1]


def cost(name: str, device: str, rounds: int, folder: Path) -> dict[str, Any]:
    """How much longer a step takes in pass A than in the script alone, by the script's own clock."""
    from frostline.timing import interleave, ratio, spread

    found = interleave(
        {
            "plain": lambda: step_ms(name, device),
            "profiled": lambda: pass_a_ms(name, device, folder),
        },
        rounds=rounds,
    )
    share = ratio(found["profiled"], found["plain"])
    return {
        "script": name, "plain_ms": spread(found["plain"]).median,
        "profiled_ms": spread(found["profiled"]).median,
        "cost": share.median - 1, "low": share.low - 1, "high": share.high - 1, "rounds": rounds,
    }  # fmt: skip


def gain(device: str, rounds: int, steps: int, folder: Path) -> dict[str, Any]:
    """What profiles of a slow loader promise of a fast one, and what it brings."""
    from truth import PLANTS, loader_bound, run

    from frostline.timing import interleave, ratio, spread

    depth = printed("depth", "input_bound", device, "--fast", "--print-step-ms", "1")
    plant = next(p for p in PLANTS if p.name == "input_bound")
    fixed = dataclasses.replace(plant, args=("--depth", depth))

    def promised() -> float:
        return loader_bound(run(fixed, folder / "gain", device=device, steps=steps)[0]) or 0.0

    found = interleave(
        {
            "promised": promised,
            "slow": lambda: step_ms("input_bound", device, "--depth", depth),
            "fast": lambda: step_ms("input_bound", device, "--depth", depth, "--fast"),
        },
        rounds=rounds,
    )
    measured, promise = ratio(found["slow"], found["fast"]), spread(found["promised"])
    return {
        "script": "input_bound", "slow_ms": spread(found["slow"]).median,
        "fast_ms": spread(found["fast"]).median, "predicted": promise.median, "measured": measured.median,
        "predictions": found["promised"], "low": measured.low, "high": measured.high, "rounds": rounds,
    }  # fmt: skip


def recipe(device: str, folder: Path) -> Iterator[dict[str, Any]]:
    """The recipe foveated, with the frozen part computed in every step and read from a store."""
    from truth import environment

    from frostline.results import Profile

    sizes = RECIPE[device]
    for name, options in (("foveated, live", ["--live"]), ("foveated, from a store", [])):
        began, out = time.perf_counter(), folder / name.replace(", ", "-").replace(" ", "-")
        command = [sys.executable, "-m", "frostline", "profile", TARGET, *sizes, *options, "--out", str(out)]
        subprocess.run(command, check=True, cwd=folder, env=environment(), capture_output=True, timeout=280)
        profile = Profile.read(out / "profile.json")
        print(f"{name}: {profile.verdict.kind}; {figures(profile)}", flush=True)
        yield {
            "script": name, "planted": " ".join(sizes), "verdict": profile.verdict.kind,
            "findings": ", ".join(dict.fromkeys(f.kind for f in profile.findings)),
            "figures": figures(profile), "step_ms": profile.wall.ms, "reconciled": profile.reconciled,
            "trials": {t.name: t.ms for t in profile.trials}, "samples_per_s": profile.samples_per_s,
            "rows": {row.name: row.ms for row in profile.rows}, "took_s": time.perf_counter() - began,
            "busy": profile.machine.busy, "mfu": profile.machine.mfu,
        }  # fmt: skip


def judge_plants(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = {plant.name for plant in here()}
    rows = [row for row in rows if row["script"] in names]  # others were planted once
    apart = [abs(row["reconciled"]) for row in rows if row.get("reconciled") is not None]
    timing = ("rows and pass A differ", "preparation:", "waiting for", "bound of", "the frozen part's")
    seen = [row["script"] for row in rows if all(text.startswith(timing) for text in row["wrong"])]
    return [
        goal("planted causes found, share of the scripts", 1.0, len(seen) / len(names)),
        goal("rows against the wall clock, the worst script", 0.05, max(apart, default=1.0), at_most=True),
        goal("scripts with a figure beyond its limit", 0, sum(bool(r["wrong"]) for r in rows), at_most=True),
    ]


def judge_cost(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        goal(
            f"cost of profiling, {c['script']}, share of the step", 0.03, c["cost"], at_most=True,
            within=(c["low"], c["high"]),
        )
        for c in rows
    ]  # fmt: skip


def judge_gain(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        goal("foretold over measured gain of a fast loader, minus 1", 0.10,
             abs(g["predicted"] / g["measured"] - 1), at_most=True)
        for g in rows
    ]  # fmt: skip


def here() -> list[Any]:
    """The plants that apply to this machine."""
    from truth import PLANTS

    device = "cpu" if device_name() == "cpu" else "cuda"
    return [plant for plant in PLANTS if device in plant.devices]


def plants(names: list[str], device: str, steps: int, folder: Path) -> Iterator[dict[str, Any]]:
    for plant in here():
        if not names or plant.name in names:
            row = one(plant, device, steps, folder)
            show(row)
            yield row


SECTIONS = {"plants": judge_plants, "cost": judge_cost, "gain": judge_gain, "recipe": lambda rows: []}
"""What each is judged by."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[], help=f"sections: {', '.join(SECTIONS)}; or scripts")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=4, help="of cost and gain")
    parser.add_argument("--also", type=Path, help="another folder for the result")
    parser.add_argument("--profiles", type=Path, help="a folder in which the profiles stay, to be looked at")
    given = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests" / "unit" / "profiler"))
    name = device_name()
    device = "cpu" if name == "cpu" else "cuda"
    scripts = [word for word in given.only if word not in SECTIONS]
    if unknown := {*scripts} - {plant.name for plant in here()}:
        parser.error(f"there is no section or script {', '.join(sorted(unknown))}")
    wanted = [section for section in SECTIONS if not given.only or section in given.only]
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = given.profiles or Path(place)
        runs: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
            "plants": lambda: plants(scripts, device, given.steps, folder),
            "cost": lambda: (cost(script, device, given.rounds, folder) for script in COST_SCRIPTS),
            "gain": lambda: iter([gain(device, given.rounds, given.steps, folder)]),
            "recipe": lambda: recipe(device, folder),
        }
        if not wanted:
            [*runs["plants"]()]
            return
        for section in wanted:
            found[section] = []
            for row in runs[section]():
                found[section].append({"section": section, "commit": git_commit(), **row})
                keep(
                    name, found, given.also, quiet=True
                )  # a machine that is lent may be gone before the last
            print_table(section, [{k: v for k, v in row.items() if k != "figures"} for row in found[section]])
        keep(name, found, given.also)


def keep(
    device: str, found: dict[str, list[dict[str, Any]]], also: Path | None, *, quiet: bool = False
) -> None:
    """With the rows that were not run as they were measured last."""
    file = RESULTS / f"profile-{device}.json"
    before = json.loads(file.read_text())["rows"] if file.exists() else []
    rows = {section: merged(section, before, found.get(section, [])) for section in SECTIONS}
    goals = [goal for section, judge in SECTIONS.items() if rows[section] for goal in judge(rows[section])]
    command = " ".join(["benchmarks/profile.py", *sys.argv[1:]])
    kept = write_results("profile", device, [*chain(*rows.values())], goals, command, also=also, quiet=quiet)
    if not quiet:
        print(f"kept in benchmarks/results/{kept.name}", flush=True)


def merged(section: str, before: list[Any], now: list[Any]) -> list[Any]:
    """A section's rows, those of `now` in the place of the same script's before."""
    new = {row["script"]: row for row in now}
    old = [row for row in before if row.get("section") == section]
    replaced = [new.pop(row["script"], row) for row in old]
    return [*replaced, *new.values()]


def show(row: dict[str, Any]) -> None:
    print(f"{row['script']}: {row['verdict']}; {row.get('figures', '')}", flush=True)
    for text in row["wrong"]:
        print(f"    {text}", flush=True)


def _standard_profile() -> None:
    """`import profile` (torch does, by way of cProfile) means the standard library's, not this file."""
    path = os.path.join(sysconfig.get_path("stdlib"), "profile.py")
    spec = importlib.util.spec_from_file_location("profile", path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["profile"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["profile"])


if __name__ == "__main__":
    main()
elif __name__ == "profile":
    _standard_profile()
