"""A detector's step timed by hand, and by `frostline profile`: docs/profile-example.md.

    .venv/bin/python benchmarks/profile_example.py
    .venv/bin/python benchmarks/profile_example.py --dry-run      nothing is kept

By hand: examples/detector/time_stages.py. What is true: whole epochs of examples/detector/train.py by that
script's own clock, before and after the profile; and how much longer a step takes that makes a forward twice
and drops one. Of two profiles, the one whose steps vary less is kept. What was printed and the table go into
the page, from the same run as the result file.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import ROOT, device_name, goal, print_table, write_results

from frostline.results import ModuleUse, Profile, Repeat

EXAMPLE = "examples/detector"
PAGE = ROOT / "docs" / "profile-example.md"
EPISODES = 100
HAND, OURS, TRUE = "by hand", "frostline", "true"
SUPPORT, QUERY = "support encoding, forward", "backbone, fusion and detection, forward"


def shell(*command: str) -> str:
    """What a command prints; it runs in the repository, with one thread, and this Python is its `python`."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    source = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    more = {"PATH": path, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **more},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
    return done.stdout


def epoch_s() -> float:
    """A whole epoch by the script's own clock; the one before it compiled and warmed up."""
    printed = shell("python", f"{EXAMPLE}/train.py", "--epochs", "2")
    return float(re.findall(r"([\d.]+) s$", printed, re.MULTILINE)[-1])


def by_hand() -> tuple[str, dict[str, float]]:
    """What time_stages.py prints, and the milliseconds (minutes for the epoch) in it."""
    printed = shell("python", f"{EXAMPLE}/time_stages.py")
    return printed, {name: float(ms) for name, ms in re.findall(r"^(.+?):\s+([\d.]+)", printed, re.MULTILINE)}


def profiled(folder: Path) -> tuple[str, Profile]:
    frostline = (sys.executable, "-m", "frostline", "profile", "--out", str(folder))
    printed = shell(*frostline, "--", "python", f"{EXAMPLE}/train.py")
    return printed, Profile.read(folder / "profile.json")


def calmer() -> tuple[str, Profile, float]:
    """Of two profiles, the one whose steps vary less, and the mean of the epochs before and after it."""
    found, before = [], epoch_s()
    for _ in range(2):
        with tempfile.TemporaryDirectory() as folder:
            printed, profile = profiled(Path(folder))
        after = epoch_s()
        print(f"epochs of {before:.1f} and {after:.1f} s, a step of {profile.wall.ms:.1f} ms between them")
        found.append((printed, profile, (before + after) / 2))
        before = after
    return min(found, key=lambda one: (one[1].wall.high - one[1].wall.low) / one[1].wall.ms)


def by_adding(rounds: int) -> dict[str, float]:
    """By what share of itself a step gets longer with one more forward of a part, whose result is dropped."""
    sys.path.insert(0, str(ROOT / EXAMPLE))
    from train import Detector, Episodes, loss_of

    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = torch.compile(Detector().to(device), backend="aot_eager")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    data = Episodes(EPISODES)

    def step(i: int, twice: str) -> float:
        began = time.perf_counter()
        episode = {name: value.to(device) for name, value in data[i].items()}
        prototypes = model.encode_support(episode["supports"])
        if twice == SUPPORT:
            model.encode_support(episode["supports"])
        if twice == QUERY:
            model(episode["frames"], prototypes)
        loss = loss_of(model(episode["frames"], prototypes), episode["boxes"], episode["way"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - began)

    spent: dict[str, list[float]] = {"": [], SUPPORT: [], QUERY: []}
    for i in range(rounds + 3):  # in turns: what else the machine does meets all alike
        for twice, times in spent.items():
            times.append(step(i, twice))
    once = spent.pop("")[3:]
    return {
        name: statistics.median(a / b - 1 for a, b in zip(times[3:], once, strict=True))
        for name, times in spent.items()
    }


def module_of(profile: Profile, kind: str) -> ModuleUse:
    """The outermost module of a class; one that was never called where it was not seen."""
    found = [module for module in profile.modules if module.kind == kind]
    return min(found, key=lambda m: m.depth, default=ModuleUse(name="none", kind=kind, calls=0.0, ms=0.0))


def supports_again(profile: Profile) -> Repeat:
    """What is said of the support encoder's inputs."""
    found = [repeat for repeat in profile.repeats if "support_encoder" in repeat.what]
    return max(found, key=lambda repeat: repeat.repeats, default=Repeat("none", 0, 0, None))


def compare(
    hand: dict[str, float], profile: Profile, truth: dict[str, float], epoch: float
) -> list[dict[str, Any]]:
    """The table: shares are of the total that each way has for the step."""
    total, step, measured = hand["Total iteration"], profile.wall.ms, 1000 * epoch / EPISODES
    stages = ("Support encoding", "Backbone", "Fusion + detection")
    encoder, query = module_of(profile, "SupportEncoder"), module_of(profile, "Detector")
    again, inside = supports_again(profile), (profile.attributed or profile.wall).ms
    kinds = {row.kind: row.share for row in profile.rows}
    fixed = [kinds.get(kind, 0.0) for kind in ("data", "backward", "optimizer")]
    lines = [
        ("a step", "ms", total, step, measured),
        (SUPPORT, "share", hand[stages[0]] / total, encoder.ms / inside, truth[SUPPORT]),
        (QUERY, "share", (hand[stages[1]] + hand[stages[2]]) / total, query.ms / inside, truth[QUERY]),
        ("loader, backward, optimizer", "share", 0.0, sum(fixed), None),
        ("all parts", "share", sum(hand[s] for s in stages) / total, 1 + (profile.reconciled or 0.0), 1.0),
        ("an epoch", "s", 60 * hand["Epoch time"], profile.epoch.seconds if profile.epoch else None, epoch),
        ("steps of an epoch", "", _frames(), profile.epoch.steps if profile.epoch else None, float(EPISODES)),
        ("support encoder: calls a step", "", None, encoder.calls, 6.0),
        (
            "support pictures seen before",
            "share",
            None,
            again.share if again.seen else None,
            _seen_before(again.seen or 6 * EPISODES),
        ),
    ]
    return [dict(zip(("what", "unit", HAND, OURS, TRUE), line, strict=True)) for line in lines]


def _frames() -> float:
    from train import FRAMES, VIDEOS

    return float(VIDEOS * FRAMES)


def _seen_before(drawn: int) -> float:
    """There are so few that all of them have come up."""
    from train import SHOTS, VIDEOS

    return (drawn - VIDEOS * SHOTS) / drawn


def judge(profile: Profile, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    encoder, again = module_of(profile, "SupportEncoder"), supports_again(profile)
    found = {
        "six calls with one picture each": encoder.calls == 6 and encoder.rows == (1,),
        "frozen up to blocks.5": encoder.prefix.endswith("blocks.5"),
        "support encoder outside of what is compiled": any(
            f.kind == "compile" and "support_encoder" in f.title for f in profile.findings
        ),
        "support pictures encoded again": any(
            f.kind == "repeat" and "support_encoder" in f.title for f in profile.findings
        )
        and abs(again.share - _seen_before(again.seen)) <= 0.01,
    }
    epoch = next(row for row in rows if row["what"] == "an epoch")
    forecast = epoch[OURS] / epoch[TRUE] - 1 if epoch[OURS] else 1.0
    apart = 1.0 if profile.reconciled is None else abs(profile.reconciled)
    return [
        goal("detector: rows against the wall clock", 0.05, apart, at_most=True),
        goal("detector: the largest share of a row", 1.0, max(r.share for r in profile.rows), at_most=True),
        goal("detector: epoch forecast against the epoch, minus 1", 0.10, abs(forecast), at_most=True),
        *(goal(f"detector: {what} (1 = found)", 1, int(seen)) for what, seen in found.items()),
    ]


def excerpt(printed: str) -> str:
    """The page's part of what frostline prints: up to the findings that concern the model."""
    text = printed.partition("\nModules, a step")[0]
    text = re.sub(rf"\n *{EXAMPLE}/train.py:.*", "\n…", text, flags=re.DOTALL)
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"| | {HAND} | {OURS} | {TRUE} |", "|---|---|---|---|"]
    for row in rows:
        cells = [cell(row[name], row["unit"]) for name in (HAND, OURS, TRUE)]
        lines.append(f"| {row['what']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(value: float | None, unit: str) -> str:
    """A figure as the page has it.

    >>> cell(0.4567, "share"), cell(1200.4, "s"), cell(None, "ms"), cell(6.0, "")
    ('46 %', '1,200 s', '', '6')
    """
    if value is None:
        return ""
    if unit == "share":
        return f"{100 * value:.0f} %"
    number = f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.1f}"
    return f"{number} {unit}".strip()


def fill(page: str, parts: dict[str, str]) -> str:
    """The page with its measured parts; each lies between `<!-- measured: NAME -->` and `<!-- end -->`."""
    for name, text in parts.items():
        place = re.compile(rf"(<!-- measured: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not place.search(page):
            raise RuntimeError(f"{PAGE.name} has no place for {name}")
        page = place.sub(lambda match, text=text: f"{match[1]}{text}\n{match[2]}", page)
    return page


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=40, help="of the forwards that are made twice")
    parser.add_argument("--dry-run", action="store_true", help="print only")
    given = parser.parse_args()
    stages_printed, hand = by_hand()
    profile_printed, profile, epoch = calmer()
    print(f"{stages_printed}\n{excerpt(profile_printed)}\n")
    rows = compare(hand, profile, by_adding(given.rounds), epoch)
    goals = judge(profile, rows)
    print_table("a detector's step", rows)
    if given.dry_run:
        print_table("goals", goals)
        return
    kept = write_results("profile_example", device_name(), rows, goals, "benchmarks/profile_example.py")
    if device_name() == "cpu":  # the page tells of this machine
        parts = {
            "stages": f"```text\n{stages_printed.strip()}\n```",
            "profile": f"```text\n{excerpt(profile_printed)}\n```",
            "table": table(rows),
        }
        PAGE.write_text(fill(PAGE.read_text(encoding="utf-8"), parts), encoding="utf-8")
    print(f"kept in benchmarks/results/{kept.name}")


if __name__ == "__main__":
    main()
