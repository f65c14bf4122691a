"""Writes the figures that pages quote, from benchmarks/results/*.json.

`--check` only compares.
A page says where with a comment `<!-- figures: NAME … -->` and ends the place with `<!-- end of figures -->`.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
RECIPES = ROOT / "src" / "frostline_recipes"
PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md", RECIPES / "foveated" / "README.md")
_PLACE = re.compile(r"(<!-- figures: (\w+)[^>]*-->\n).*?(<!-- end of figures -->)", re.DOTALL)
_DEVICES = {"cpu": "2 cores, no GPU", "h200": "NVIDIA H200, 16 cores"}


_HEADLINES = {
    "checkpoint-cpu": ("save", "load"),
    "feed-cpu": ("6 MB rows: over the best peer", "1.5 KB rows: over the best peer", "cold rows"),
    "feed-h200": ("6 MB bf16 rows, RAM (pinned tier)", "device tier"),
    "foveated_gaze-h200": ("caption loss", "over a coarse-only model"),
    "freeze-h200": ("DINOv3 ViT-S/16 256², JPEG",),
    "open_store-cpu": ("open",),
    "profile-cpu": ("planted causes found", "rows against the wall clock", "foretold"),
    "train_overhead-cpu": ("overhead",),
}
"""Goals that the first page shows, by how they begin."""


def load() -> dict[str, dict[str, Any]]:
    """Result files of our own shape, by file name without its ending."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    return {name: record for name, record in found.items() if "goals" in record}


def goals(records: dict[str, dict[str, Any]]) -> str:
    """Every goal, what was measured, whether it was met."""
    return _goals([(name, record, goal) for name, record in records.items() for goal in record["goals"]])


def headlines(records: dict[str, dict[str, Any]]) -> str:
    """What people ask for first, and every goal that was not met."""
    found, n, missed = [], 0, 0
    for name, record in records.items():
        wanted = _HEADLINES.get(name, ())
        if lost := [text for text in wanted if not any(g["goal"].startswith(text) for g in record["goals"])]:
            raise SystemExit(f"{name}: no goal begins with {lost}; see _HEADLINES in scripts/figures.py")
        for goal in record["goals"]:
            n, missed = n + 1, missed + (not goal["met"])
            if not goal["met"] or goal["goal"].startswith(wanted):
                found.append((name, record, goal))
    told = f"{n} goals are measured, {missed} of them not met; the table has all of those."
    return f"{_goals(found)}\n\n{told}"


def _goals(found: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> str:
    lines = ["| measured | goal | figure | |", "|---|---|---|---|"]
    for name, record, goal in found:
        where = f"{goal['goal']} ({_DEVICES.get(record['device'], record['device'])})"
        below = goal["value"] < goal["target"] if goal["met"] else goal["value"] > goal["target"]
        met = "" if goal["met"] else "**not met**"
        value = f"[{figure(goal['value'])}](benchmarks/results/{name}.json)"
        if "low" in goal:
            value += f" ({figure(goal['low'])} to {figure(goal['high'])})"
            if goal["met"] and goal["low"] < goal["target"] < goal["high"]:
                met = "by its middle only"
        lines.append(f"| {where} | {'at most ' if below else ''}{figure(goal['target'])} | {value} | {met} |")
    return "\n".join(lines)


def rows(records: dict[str, dict[str, Any]]) -> str:
    """Every row of every benchmark."""
    parts = []
    for name, record in records.items():
        versions = ", ".join(f"{k} {v}" for k, v in record["versions"].items())
        device = _DEVICES.get(record["device"], record["device"])
        where = f"`{record['command']}` on {device}; {versions}; commit {record['commit']}."
        parts.append(f"### {name}\n\n{where}\n")
        sections: dict[str, list[dict[str, Any]]] = {}
        for row in record["rows"]:
            sections.setdefault(row.get("section", ""), []).append(row)
        for section, some in sections.items():
            at = ", ".join(dict.fromkeys(row["commit"] for row in some if "commit" in row))
            if section:
                parts.append(f"{section}{f', commit {at}' if at else ''}:\n")
            parts.append(_table(some))
    return "\n".join(parts)


def _table(entries: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(key for entry in entries for key in entry if key not in ("section", "commit")))
    columns = [name for name in names if any(figure(entry.get(name)) for entry in entries)]
    lines = ["| " + " | ".join(c.replace("_", " ") for c in columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(figure(entry.get(c)) for c in columns) + " |" for entry in entries]
    return "\n".join(lines) + "\n"


def gaze(records: dict[str, dict[str, Any]]) -> str:
    """What came of foveated's hypothesis, on test clips; losses in nats a token."""
    found = records["foveated_gaze-h200"]["rows"]
    lines = [
        "| seed | coarse | fine | ratio | coarse only, trained alone | that over fine | random queries |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in (row for row in found if "ratio" in row):
        cells = [row["seed"], row["loss_coarse"], row["loss_fine"], _between(row, "ratio", "low", "high")]
        cells += [row["coarse_alone"], _between(row, "over_alone", "over_low", "over_high"), row["random"]]
        lines.append("| " + " | ".join(map(figure, cells)) + " |")
    first, text = (
        figure(next(row["loss_coarse"] for row in found if row["seed"] == name))
        for name in ("first frame", "text prior")
    )
    lines.append(
        f"\nWho reads the first frame of each clip without a fault, and guesses the rest, gets {first}; "
        f"who sees nothing, {text}. [All of it](benchmarks/results/foveated_gaze-h200.json)."
    )
    return "\n".join(lines)


def sources(records: dict[str, dict[str, Any]]) -> str:
    """foveated's step at one batch size, from each source of batches."""
    kept = _foveated(records, "sources")
    lines = [
        "| batches of 64 from | samples/s | waits | device busy | W | GB on the device | bytes a video |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in (row for row in kept if "wait_pct" in row):
        from_where = f"{row['source']} ({row['state']})" if row.get("state") else row["source"]
        cells = [
            from_where,
            row["samples_per_s"],
            f"{row['wait_pct']:.1f} %",
            f"{row['device_busy_pct']:.0f} %",
        ]
        cells += [f"{row['watts']:.0f}", f"{row['peak_gb']:.1f}", row["bytes_per_video"]]
        lines.append("| " + " | ".join(map(figure, cells)) + " |")
    share = next(row for row in kept if row["source"].startswith("in turns: RAM over"))
    between = _between(share, "share", "low", "high")
    lines.append(f"\nFeatures in RAM over one batch that stays on the device, in turns: {between}.")
    return "\n".join(lines)


def batches(records: dict[str, dict[str, Any]]) -> str:
    """Samples/s and memory of foveated's step by batch size."""
    found: dict[str, dict[int, Any]] = {}
    for row in _foveated(records, "batches"):
        found.setdefault(row["source"], {})[row["batch"]] = row
    sizes = sorted({size for by_size in found.values() for size in by_size})
    tables = []
    for title, name in (("samples/s at batch", "samples_per_s"), ("GB on the device at batch", "peak_gb")):
        lines = [f"| {title} | " + " | ".join(map(str, sizes)) + " |", "|---" * (len(sizes) + 1) + "|"]
        for source, by_size in found.items():
            cells = [figure(by_size[n][name]) if n in by_size else "" for n in sizes]
            lines.append(f"| {source} | " + " | ".join(cells) + " |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def freezing(records: dict[str, dict[str, Any]]) -> str:
    """foveated's freeze against what it is made of."""
    lines = ["| frames/s | median | low to high |", "|---|---|---|"]
    for row in _foveated(records, "freeze"):
        cells = [row["what"], row["frames_per_s"], f"{figure(row['low'])} to {figure(row['high'])}"]
        lines.append("| " + " | ".join(map(figure, cells)) + " |")
    return "\n".join(lines)


def _foveated(records: dict[str, dict[str, Any]], section: str) -> list[dict[str, Any]]:
    return [row for row in records["foveated-h200"]["rows"] if row["section"] == section]


def _between(row: dict[str, Any], *names: str) -> str:
    value, low, high = (figure(row[name]) for name in names)
    return f"**{value}** ({low} to {high})"


def figure(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {figure(one)}" for name, one in value.items())
    if isinstance(value, list):
        return ", ".join(map(figure, value))
    return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "\\|")


def filled(text: str, records: dict[str, dict[str, Any]], page: Path) -> str:
    writers = {"goals": goals, "headlines": headlines, "rows": rows, "gaze": gaze}
    writers |= {"sources": sources, "batches": batches, "freezing": freezing}

    def fill(match: re.Match[str]) -> str:
        content = writers[match[2]](records)
        up = "../" * len(page.parent.relative_to(ROOT).parts)
        content = content.replace("](benchmarks/", f"]({up}benchmarks/")
        return f"{match[1]}{content}\n{match[3]}"

    return _PLACE.sub(fill, text)


def main() -> None:
    records = load()
    stale = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        fresh = filled(text, records, page)
        if fresh != text:
            stale.append(page.name)
            if "--check" not in sys.argv:
                page.write_text(fresh, encoding="utf-8")
    if stale and "--check" in sys.argv:
        raise SystemExit(
            f"{', '.join(stale)}: the figures are not those of benchmarks/results; run scripts/figures"
        )


if __name__ == "__main__":
    main()
