"""`frostline run` as a person runs it: what is said, what is written, and the exit status."""

from __future__ import annotations

import json
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import Shell, shell_with

NAME = "h9_run_work"
FILE = f"{NAME}.py"
WORK = """
import signal
import torch
import frostline as fl

def double(x):
    return float(2 * x)

def pipeline():
    rows = [{"key": f"k{i:02d}", "x": i} for i in range(6)]
    return fl.Pipeline(fl.Source.table(rows), fl.Stage("y", double, reads="x"))

def total(ctx):
    values = [float(x) for batch in ctx.feed(batch_size=4) for x in batch["y"]]
    return {"total": sum(values), "kind": "sum", "values": values}

def workload(*, note: str = ""):
    return fl.Workload(pipeline(), run=total)

def several(*, stop_at: int = -1, times: int = 1):
    def unit(i):
        for _ in range(times if i == stop_at else 0):
            signal.raise_signal(signal.SIGTERM)
        return i * i

    def run(ctx):
        return sum(ctx.once(f"unit-{i}", lambda: unit(i), of={}) for i in ctx.progress(range(3)))

    return fl.Workload(None, run=run)

def trained():
    return fl.Workload(
        pipeline(), model=fl.lazy(torch.nn.Linear, 1, 1), loss=print, optimizer=print, batch_size=4
    )
"""


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    with shell_with(tmp_path, FILE, WORK) as shell:
        yield shell


def test_it_says_what_came_out_and_where_it_is(shell: Shell) -> None:
    code, out, err = shell.run(FILE, "note=a b")
    assert code == 0
    (folder,) = (shell.folder / "runs" / NAME).iterdir()
    assert out == f"ok: total 30, kind sum; 0 units made; runs/{NAME}/{folder.name}\n"
    assert "Traceback" not in err
    assert json.loads((folder / "result.json").read_text())["value"]["values"] == [0, 2, 4, 6, 8, 10]
    assert json.loads((folder / "run.json").read_text())["config"]["parameters"] == {"note": "a b"}
    assert (shell.folder / "stores" / NAME / "manifest.json").exists(), "the store was made first"


def test_live_needs_no_store_and_a_store_may_lie_elsewhere(shell: Shell) -> None:
    assert shell.run(FILE, "--live", "--out", "a")[1].startswith("ok: total 30")
    assert not (shell.folder / "stores").exists()
    assert shell.run(FILE, "--store", "mine", "--out", "b")[1].startswith("ok: total 30")
    assert (shell.folder / "mine" / "manifest.json").exists()


def test_stopped_in_order_it_has_status_3_and_names_the_command_that_goes_on(shell: Shell) -> None:
    words = [f"{FILE}:several", "stop_at=1", "--resume", "never"]
    code, out, err = shell.run(*words)
    assert code == 3
    stopped, again = out.splitlines()
    assert stopped.startswith("stopped (SIGTERM): 2 units made; runs/")
    assert "SIGTERM: finishing this unit, then stopping. Once more stops now." in err
    command = shlex.split(again.removeprefix("Run the same again to go on: "))
    assert command == ["frostline", "run", f"{FILE}:several", "stop_at=1", "--device", "cpu"]
    code, out, _ = shell(*command[1:])
    assert code == 0
    assert out.startswith("ok: 5; 1 unit made, 2 found; runs/")


def test_stopped_at_once_it_has_status_130_and_a_sentence(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frostline.signals._SAME_S", {signal.SIGTERM: 0.0})  # however soon it is asked again
    code, out, err = shell.run(f"{FILE}:several", "stop_at=1", "times=2", "--out", "r")
    assert (code, out) == (130, "")
    assert err.splitlines()[-1].startswith("stopped at once: units that are whole are kept. To go on: ")
    assert "Traceback" not in err
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert shell.run(f"{FILE}:several", "--out", "r")[1] == "ok: 5; 2 units made, 1 found; r\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([f"{FILE}:trained"], "`frostline train TARGET` trains it"),
        ([FILE, "noet=3"], "noet: no such parameter; did you mean note?"),
        ([FILE, "--max-hours", "0"], "max_hours is 0.0"),
        ([FILE, "--device", "tpu"], "tpu"),
        (["h9_not_there.py"], "h9_not_there.py"),
    ],
)
def test_what_is_wrong_is_one_message(shell: Shell, words: list[str], told: str) -> None:
    code, out, err = shell("run", *words, "--live", "--out", "wrong")
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert told in err
    assert not (shell.folder / "wrong").exists()


@pytest.mark.parametrize("verb", ["freeze", "train"])
def test_other_verbs_say_that_it_is_an_experiment(shell: Shell, verb: str) -> None:
    more = ["--steps", "1"] if verb == "train" else []
    code, _, err = shell(verb, f"{FILE}:several", *more)
    assert code == 1
    assert "`frostline run TARGET` runs it" in err
