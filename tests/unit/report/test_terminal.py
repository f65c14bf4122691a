"""The report on the terminal."""

from __future__ import annotations

import dataclasses
import io
import re
import sys

import pytest
from rich.cells import cell_len

from frostline.report.modules import modules
from frostline.report.terminal import lines, show
from frostline.results import Epoch, Finding, ModuleUse, Profile, Row, Steps, Sync

TITLES = (
    "Where the step goes", "What would help, and by how much at most", "Findings", "Modules, a step",
    "Work on inputs that had been seen before", "The host waits for the device",
    "Copies to the device, a step", "Loaders", "The device has nothing to do",
    "The same steps with one thing changed", "The machine", "Notes",
)  # fmt: skip

HOSTILE = "\x1b[31m[bold]<script>alert(1)</script>\u202e\n漢字" * 4


def text(profile: Profile, width: int = 100) -> str:
    return "\n".join(lines(profile, width))


def flat(profile: Profile) -> str:
    return " ".join(text(profile, 120).split())


@pytest.mark.parametrize("width", [50, 80, 100, 120])
def test_nothing_is_wider_than_asked(make, empty, width):
    long = Sync("/a/very/long/path" * 12 + "/train.py:118", "item", 1, 2.0)
    for profile in (make(), make(syncs=(long,)), make(command=HOSTILE), empty):
        assert max(map(cell_len, lines(profile, width))) <= width


def test_all_that_was_found_is_there_in_order(make):
    said = text(make())
    places = [re.search(f"^{title}", said, re.MULTILINE) for title in TITLES]
    assert all(places)
    assert [p.start() for p in places] == sorted(p.start() for p in places)


def test_the_verdict_comes_first_then_the_step(make):
    found = lines(make())
    assert found[0].startswith("INPUT-BOUND  The step waits for its data")
    said = flat(make())
    assert (
        "step 60.9 ms (60.2–61.6) · 525 samples/s · epoch 14 min · NVIDIA H200 · busy 58.0 % · MFU 5.3 %"
        in said
    )


def test_figures_as_people_say_them(make):
    said = flat(make())
    for figure in ("at most 1.62×", "319,500 of 320,000 (99.8 %)", "train.py:118", "4 (would need 7)"):
        assert figure in said
    assert "Profiling itself cost +0.6 % of the step in pass A (−0.4 % to +1.5 %)." in said


def test_half_a_batch_in_half_the_time_is_not_faster(make):
    row = next(line for line in lines(make()) if line.startswith("half"))
    assert "0.97×" in row


def test_overlap_is_a_row_below_zero_after_the_others(make):
    found = lines(make())
    at = {name: n for n, line in enumerate(found) for name in ("other", "overlap:") if line.startswith(name)}
    assert at["overlap:"] == at["other"] + 1
    assert "−6.1" in found[at["overlap:"]]
    assert "░" in found[at["overlap:"]]


def test_rows_reconcile_with_pass_a(make):
    said = flat(make(wall=Steps(60.8, 60.1, 61.5, 50)))
    assert "rows add up to 61.2 ms; pass A's step took 60.8 ms (+0.7 %)" in said
    assert "WARNING" not in said


def test_rows_that_do_not_reconcile_are_a_warning_and_no_share_exceeds_the_step(make):
    """Document 000: stages of 82.5 ms in a step of 68.0."""
    stages = ("encoder", 53.7, 0.79), ("backbone", 15.9, 0.23), ("head", 12.9, 0.19)
    profile = make(wall=Steps(68.0, 67.5, 68.5, 50), rows=tuple(Row("forward", *stage) for stage in stages))
    said = flat(profile)
    assert "WARNING: The rows do not reconcile: they come to 14.5 ms more than the step" in said
    assert "(+21.3 %)" in said
    table = text(profile).partition("What would help")[0]
    shares = [float(s) for s in re.findall(r"^\w+ +[\d.]+ +([\d.]+) %", table, re.MULTILINE)]
    assert len(shares) == 3
    assert sum(shares) == pytest.approx(100, abs=0.2)


def test_a_row_longer_than_the_step_has_no_share(make):
    rows = (
        Row("save", "save", 90, 1.5),
        Row("forward", "forward", 31, 0.5),
        Row("overlap", "overlap", -60, -1.0),
    )
    profile = make(wall=Steps(61, 60, 62, 50), rows=rows)
    assert "runs beside it" in flat(profile)
    assert not [s for s in re.findall(r"(\d+)(?:\.\d)? %", text(profile)) if int(s) > 100]


def test_a_network_and_the_one_it_is_copied_to_are_two_lines(make):
    sizes = {"rows": (128,), "parameters": 299_000}
    target = ModuleUse("Net#2", "Net", 1, 2.0, **sizes)
    nets = ModuleUse("Net#1", "Net", 1, 2.0, trainable=299_000, **sizes), target
    rows = modules(make(modules=nets)).rows
    assert [(row[0], row[-1]) for row in rows] == [
        ("Net#1 (Net)", "all 299 k"), ("Net#2 (Net)", "no (none of 299 k)"),
    ]  # fmt: skip


def test_parts_that_are_used_alike_share_a_line_and_there_are_twelve_at_most(make):
    assert "encoder.blocks.0–5 (6 × Block)" in flat(make())
    many = tuple(ModuleUse(f"m{chr(97 + n)}", "Linear", 1, n + 1.0) for n in range(26))
    found = lines(make(modules=many))
    assert len([line for line in found if "(Linear)" in line]) == 12
    assert "and 14 modules that took less" in found


def test_an_empty_profile_says_what_it_can(empty):
    said = text(empty)
    assert said.startswith("UNCLEAR  No step was seen")
    assert "step none was timed" in said
    assert "was not measured in this run" in said
    assert not [title for title in TITLES if title != "The machine" and f"\n{title}\n" in said]


def test_names_reach_the_terminal_as_they_are_but_harmless(make):
    finding = Finding("calls", HOSTILE, HOSTILE, 1.0)
    module = ModuleUse(HOSTILE, HOSTILE, 1, 99.0)
    said = text(make(findings=(finding,), modules=(module,), notes=(HOSTILE,), command=HOSTILE))
    assert "\x1b" not in said
    assert "\u202e" not in said
    assert "[bold]" in said, "not markup"


def test_figures_that_are_none_do_not_break_it(make):
    nan = float("nan")
    assert "?" in text(make(wall=Steps(nan, nan, nan, 1), rows=(Row("data", "data", nan, nan),)))


def test_a_pipe_gets_plain_text_of_the_width_of_columns(make, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    show(make())
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert said.splitlines() == lines(make(), 80)


def test_a_pipe_that_takes_ascii_only_gets_ascii(make, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    show(make())
    sys.stdout.flush()
    said = raw.getvalue().decode("ascii")
    assert "at most 1.62x" in said
    assert "####" in said


def test_remedies_start_with_the_best(make):
    turned = dataclasses.replace(make(), remedies=make().remedies[::-1])
    bounds = re.findall(r"at most (\d\.\d+)×", text(turned))
    assert bounds == ["1.62", "1.47", "1.05"]


def test_what_stands_between_epochs_is_told_and_counts(make):
    """30 steps of 32 rows and 60.8 ms, then 6 s: the rate over an epoch is a fourth of the step's."""
    said = flat(make(epoch=Epoch(7.824, 7.82, 7.83, 30, 6.0)))
    assert "525 samples/s, 123 over an epoch" in said
    assert "epoch 7.8 s, 6.0 s of it between epochs" in said
    assert "without what stands between epochs" in said
    assert "between epochs" not in flat(make())
