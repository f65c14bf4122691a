"""`frostline train` and `frostline evaluate` as a person runs them: what is said, written, and the status."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from frostline.cli.train import _told
from frostline.step import Step
from frostline.trainer.checkpoint import Checkpoints, load
from frostline.trainer.job import TrainResult
from frostline.trainer.recorder import read_metrics

from .conftest import Answer, Shell, shell_with

NAME = "h8_train_work"
WORK = """
import numpy as np
import time
import torch
import frostline as fl

def features(x):
    return torch.tensor(x).cos()

def picky(x):
    if x[0] > 1:
        raise ValueError("too large")
    return features(x)

def loss(model, batch):
    return (model(batch["features"])[:, 0] - batch["y"]).square().mean()

def slow_loss(model, batch):
    time.sleep(0.05)
    return loss(model, batch)

def error(model, feed):
    return {"error": float(np.mean([float(loss(model, batch)) for batch in feed]))}

def workload(*, n: int = 40, note: str = "", slow: bool = False, wide: bool = False, bad: bool = False,
             warmup_steps: int = 0):
    rng = np.random.default_rng(5)
    drawn = [rng.standard_normal(3) for _ in range(n)]
    rows = [{"key": f"k{i:02d}", "x": x.tolist(), "y": float(x.sum())} for i, x in enumerate(drawn)]
    stages = fl.Stage("features", picky if bad else features, reads="x")
    return fl.Workload(
        fl.Pipeline(fl.Source.table(rows), stages, outputs=("features", "y")),
        model=fl.lazy(torch.nn.Linear, 3, 2 if wide else 1), loss=slow_loss if slow else loss, batch_size=8,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.05),
        evaluate=error, metric=fl.Metric("error"), splits={"train": 0.6, "val": 0.2, "test": 0.2},
        training={"log_every": 2, "warmup_steps": warmup_steps},
    )

def nothing(): ...

def experiment():
    return fl.Workload(fl.Pipeline(fl.Source.table([{"key": "a"}])), run=nothing)
"""
FILE = f"{NAME}.py"


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    with shell_with(tmp_path_factory.mktemp("training"), FILE, WORK) as shell:
        yield shell


@pytest.fixture(scope="module")
def done(shell: Shell) -> Answer:
    """A training of six steps that most tests look at."""
    return shell.train("--steps", "6", "--out", "done", "--save-every", "3")


@pytest.fixture
def signalled(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sends signals to this process, as a scheduler does, within the second step."""

    def by(*numbers: int) -> None:
        left, told = [*numbers], Step.__call__
        seen: list[int] = []

        def called(self: Step, *args: Any, **options: Any) -> Any:
            seen.append(1)
            while len(seen) > 1 and left:
                signal.raise_signal(left.pop(0))
            return told(self, *args, **options)

        monkeypatch.setattr(Step, "__call__", called)

    return by


def weights(folder: Path) -> dict[str, list[float]]:
    return {name: t.flatten().tolist() for name, t in load(folder).groups["model"].items()}


# what comes out


def test_a_training_ends_with_one_line_of_figures_and_where_they_are(done: Answer) -> None:
    code, out, _ = done
    assert code == 0
    assert len(out.splitlines()) == 1
    assert out.startswith("ok: 6 steps, ")
    assert "loss " in out
    assert "error " in out
    assert out.endswith("; done\n")


def test_what_is_said_on_the_way_is_whole_lines(done: Answer) -> None:
    _, out, err = done
    assert "\r" not in out + err
    assert "\x1b" not in out + err
    assert err.endswith("\n")
    lines = err.splitlines()
    forecast = next(i for i, line in enumerate(lines) if line.startswith("6 steps ("))
    first = next(i for i, line in enumerate(lines) if line.startswith("step 2 of 6"))
    assert forecast < first
    assert any(line.startswith("step 6 of 6 (100%)") for line in lines[first:])


def test_a_runs_folder_holds_metrics_settings_and_checkpoints_without_a_pickle(
    shell: Shell, done: Answer
) -> None:
    folder = shell.folder / "done"
    assert {p.name for p in folder.iterdir()} >= {"run.json", "metrics.jsonl", "checkpoints"}
    assert [line["step"] for line in read_metrics(folder) if line["kind"] == "train"] == [2, 4, 6]
    names = {p.name for p in (folder / "checkpoints").iterdir()}
    assert names == {"step-00000003", "step-00000006", "latest.json", "best.json"}
    files = {p.suffix for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}
    assert files == {".json", ".jsonl", ".safetensors"}
    with safe_open(folder / "checkpoints/step-00000006/model.safetensors", "pt") as file:
        assert sorted(file.keys()) == ["bias", "weight"]


def test_a_call_ends_with_its_figures_and_says_of_which_step_they_are() -> None:
    def told(step: int, loss: float | None, error: float | None, at: int | None) -> str:
        figures = {} if loss is None else {"loss": loss, "lr": 0.1}
        held_out = {} if error is None else {"error": error}
        return _told(
            TrainResult(Path("run"), step, 1.0, figures, held_out, None, None, torch.nn.Identity(), at)
        )

    assert told(6, None, None, None) == ""
    assert told(6, 0.5, None, None) == ": loss 0.5"
    assert told(6, 0.5, 2.0, 6) == ": loss 0.5 (held out: error 2)"
    assert told(6, 0.5, 2.0, 4) == ": loss 0.5 (held out at step 4: error 2)"
    assert told(6, None, 2.0, 4) == ": held out at step 4: error 2"


def test_the_same_again_has_nothing_to_do(shell: Shell, done: Answer) -> None:
    before = {p: p.read_bytes() for p in (shell.folder / "done").rglob("*") if p.is_file()}
    code, out, err = shell.train("--steps", "6", "--out", "done", "--save-every", "3")
    assert code == 0
    assert re.fullmatch(r"ok: 6 steps, \d\.\d\d epochs; done\n", out)  # no figures, and no colon for them
    assert "nothing to do: 6 steps are trained" in err
    assert {p: p.read_bytes() for p in (shell.folder / "done").rglob("*") if p.is_file()} == before


def test_without_a_folder_it_is_one_of_the_targets_and_the_same_command_finds_it(shell: Shell) -> None:
    words = ("--steps", "2", "note=a b", "--live")
    assert shell.train(*words)[0] == 0
    runs = [*(shell.folder / "runs" / NAME).iterdir()]
    assert len(runs) == 1
    assert "nothing to do" in shell.train(*words)[2]
    assert [*(shell.folder / "runs" / NAME).iterdir()] == runs
    kept = json.loads((runs[0] / "run.json").read_text())["config"]
    assert kept["parameters"]["note"] == "a b"
    assert kept["target"] == FILE
    usual = f"n={kept['parameters']['n']}"  # a default that is given changes nothing
    assert "nothing to do" in shell.train(*words, usual)[2]


def test_options_reach_the_run(shell: Shell) -> None:
    code, _, err = shell.train(
        "--steps", "4", "--out", "options", "--precision", "bf16", "--microbatch", "3", "--schedule",
        "cosine", "--seed", "7", "--log-every", "1", "--eval-every", "2", "--save-every", "3", "n=30",
        "--live",
    )  # fmt: skip
    assert code == 0
    kept = json.loads((shell.folder / "options" / "run.json").read_text())["config"]
    assert kept["parameters"]["n"] == 30
    told = {name: kept["training"][name] for name in ("precision", "microbatch", "schedule", "seed")}
    assert told == {"precision": "bf16", "microbatch": 3, "schedule": "cosine", "seed": 7}
    every = {name: kept["training"][name] for name in ("log_every", "eval_every", "save_every")}
    assert every == {"log_every": 1, "eval_every": 2, "save_every": 3}
    assert "cosine: down to 0 of it at step 4" in err
    lines = read_metrics(shell.folder / "options")
    rates = [line["lr"] for line in lines if line["kind"] == "train"]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < rates[0]
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [2, 4]


# stopping


def test_out_of_time_it_saves_and_names_the_command_that_goes_on(shell: Shell, done: Answer) -> None:
    words = [
        "note=two words",
        "--steps",
        "6",
        "--max-hours",
        "1e-9",
        "--out",
        "my runs/a",
        "--save-every",
        "3",
    ]
    for step in (1, 2):
        code, out, _ = shell.train(*words)
        assert code == 0
        stopped, again = out.splitlines()
        figures = "" if step == 1 else ": loss "  # a line every two steps
        assert stopped.startswith(f"stopped (the time limit of 1e-09 h) at step {step}{figures}")
        command = again.removeprefix("Run the same again to go on: ")
        assert shlex.split(command) == ["frostline", "train", FILE, *words, "--device", "cpu"]
        assert load(shell.folder / "my runs/a").step == step
    assert shell.train("note=two words", "--steps", "6", "--out", "my runs/a", "--save-every", "3")[0] == 0
    assert weights(shell.folder / "my runs/a") == weights(shell.folder / "done")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_after_the_step_in_order(
    shell: Shell, done: Answer, signalled: Callable[..., None], number: signal.Signals
) -> None:
    words = ("--steps", "6", "--out", number.name)
    signalled(number)
    code, out, err = shell.train(*words)
    assert code == 0
    stopped, again = out.splitlines()
    assert stopped.startswith(f"stopped ({number.name}) at step 2: ")
    assert again.startswith("Run the same again to go on: frostline train ")
    assert f"{number.name}: finishing this step, saving, then stopping. Once more stops now." in err
    assert shell.train(*words)[0] == 0
    assert weights(shell.folder / number.name) == weights(shell.folder / "done")


@pytest.fixture
def each_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No two signals are so close together that they are one."""
    monkeypatch.setattr("frostline.signals._SAME_S", dict.fromkeys((signal.SIGTERM, signal.SIGINT), 0.0))


@pytest.mark.usefixtures("each_counts")
def test_a_second_signal_ends_it_at_once_with_a_sentence(
    shell: Shell, done: Answer, signalled: Callable[..., None]
) -> None:
    words = ("--steps", "6", "--out", "twice", "--save-every", "1")
    signalled(signal.SIGINT, signal.SIGTERM)
    code, out, err = shell.train(*words)
    assert (code, out) == (130, "")
    told = f"stopped at once. To go on: frostline train {FILE} {' '.join(words)} --device cpu"
    assert err.splitlines()[-2:] == ["the checkpoint of step 1 is kept", told]
    assert "Traceback" not in err
    assert load(shell.folder / "twice").step == 1
    assert shell.train(*words)[0] == 0
    assert weights(shell.folder / "twice") == weights(shell.folder / "done")


@pytest.mark.usefixtures("each_counts")
def test_a_checkpoint_is_not_promised_where_there_is_none(
    shell: Shell, signalled: Callable[..., None]
) -> None:
    signalled(signal.SIGINT, signal.SIGTERM)
    code, _, err = shell.train("--steps", "6", "--out", "none", "--live")
    assert code == 130
    assert err.splitlines()[-2] == "no checkpoint was written yet"
    assert not (shell.folder / "none" / "checkpoints").exists()


def test_a_signal_while_it_saves_for_the_time_limit_is_the_first_one(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(self: Checkpoints, *args: Any, **options: Any) -> Path:
        signal.raise_signal(signal.SIGTERM)
        return saved(self, *args, **options)

    saved = Checkpoints.save
    monkeypatch.setattr(Checkpoints, "save", save)
    code, _, _ = shell.train("--steps", "6", "--max-hours", "1e-9", "--out", "late", "--live")
    assert code == 0
    assert load(shell.folder / "late").step == 1


def test_a_process_with_a_log_file_is_read_while_it_runs_and_stopped_by_a_scheduler(shell: Shell) -> None:
    words = ["train", FILE, "slow=true", "--steps", "100000", "--live", "--out", "job", "--log-every", "1"]
    log = shell.folder / "log.txt"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "frostline", *words, "--device", "cpu"], stdout=file, stderr=file,
            cwd=shell.folder, env={**os.environ, "COLUMNS": "20"},
        )  # fmt: skip
    try:
        while b"step 1 of 100,000" not in log.read_bytes():  # said at once, not when a buffer is full
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=200) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
    text = log.read_bytes()
    assert b"\r" not in text
    assert b"Traceback" not in text
    stopped, again = text.decode().splitlines()[-2:]
    assert stopped.startswith("stopped (SIGTERM) at step ")
    assert again == f"Run the same again to go on: frostline {shlex.join(words)} --device cpu"
    assert load(shell.folder / "job").step >= 1


# what is wrong


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([FILE], "say how long: steps=, epochs=, max_hours= or schedule_hours="),
        ([FILE, "--steps", "2", "--epochs", "1"], "steps and epochs are both given"),
        ([FILE, "--steps", "0"], "steps is 0; a number above 0"),
        ([FILE, "--max-hours", "nan"], "max_hours is nan; a number above 0"),
        ([FILE, "--epochs", "inf"], "epochs is inf; a number above 0"),
        ([FILE, "--steps", "2", "--microbatch", "0"], "microbatch is 0; a whole number from 1"),
        ([FILE, "--steps", "2", "--log-every", "-3"], "log_every is -3; a whole number from 1"),
        pytest.param(
            [FILE, "--steps", "2", "--device", "tpu"],
            "tpu",
        ),
        ([FILE, "--steps", "2", "noet=3"], "noet: no such parameter; did you mean note?"),
        ([FILE, "--steps", "2", "n=many"], "n=many"),
        ([FILE, "--steps", "2", "--resume", "nowhere"], "nowhere holds no whole checkpoint"),
        ([FILE, "--steps", "2", "--init-from", "weights.pt"], "there is no such file or folder"),
        ([f"{FILE}:experiment", "--steps", "2"], "`frostline run TARGET` runs it"),
        (["h8_not_there.py", "--steps", "2"], "h8_not_there.py"),
    ],
)
def test_what_is_wrong_is_one_message(shell: Shell, words: list[str], told: str) -> None:
    code, out, err = shell("train", *words, "--live", "--out", "wrong")
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert told in err
    assert "Traceback" not in err
    assert not (shell.folder / "wrong" / "checkpoints").exists()


def test_a_schedule_that_cannot_be_kept_shows_before_the_store_is_made(shell: Shell) -> None:
    words = ("--steps", "4", "--schedule", "linear", "--store", "unmade", "--out", "unmade-run")
    code, _, err = shell.train("warmup_steps=9", *words)
    assert code == 1
    assert "warmup_steps is 9 of 4 in all; no step is left at the peak" in err
    assert not (shell.folder / "unmade").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--precision", "fp8"], "'fp8' is not one of 'fp32', 'tf32', 'bf16', 'fp16'"),
        (["--schedule", "cosin"], "'cosin' is not one of"),
        (["--steps", "many"], "Invalid value for '--steps'"),
        (["--step", "3"], "No such option: --step"),
    ],
)
def test_options_that_do_not_exist_are_told_with_the_usage(shell: Shell, words: list[str], told: str) -> None:
    code, out, err = shell("train", FILE, *words)
    assert (code, out) == (2, "")
    assert told in " ".join(err.split())
    assert "Traceback" not in err


def test_too_many_samples_that_fail_are_an_error_and_may_be_allowed(shell: Shell) -> None:
    code, out, err = shell.train("bad=true", "--steps", "2", "--store", "bad", "--out", "bad-run")
    assert (code, out) == (1, "")
    assert "samples failed, 1 may (max_bad=1%)" in err
    assert "too large" in err
    more = ("--steps", "2", "--store", "bad", "--out", "bad-run", "--max-bad", "50%")
    assert shell.train("bad=true", *more)[0] == 0


def test_a_finished_run_is_not_begun_again_in_its_own_folder(shell: Shell, done: Answer) -> None:
    code, out, err = shell.train("--steps", "6", "--out", "done", "--resume", "never")
    assert (code, out) == (1, "")
    assert "done holds a training already (step-00000006)" in err


def test_an_attempt_that_fails_leaves_a_run_as_it_was(shell: Shell) -> None:
    words = ("--steps", "2", "--live", "--seed", "11")
    folder = Path(shell.train(*words)[1].split("; ")[-1].strip())
    before = (folder / "run.json").read_bytes()
    code, _, err = shell.train(*words, "wide=true", "--resume", str(folder))
    assert code == 1
    assert "does not fit this model" in err
    assert (folder / "run.json").read_bytes() == before


@pytest.mark.parametrize("words", [("train", "--steps", "2", "--resume"), ("evaluate", "--checkpoint")])
def test_a_checkpoint_of_something_else_is_one_message(shell: Shell, words: tuple[str, ...]) -> None:
    Checkpoints(shell.folder / "else" / "checkpoints").save(1, {"model": {"w": torch.zeros(1)}}, {})
    code, _, err = shell(words[0], FILE, *words[1:], "else", "--live", "--device", "cpu")
    assert code == 1
    assert err.startswith("error: ")


# evaluating


def test_a_checkpoint_is_evaluated_by_run_by_name_and_by_split(shell: Shell, done: Answer) -> None:
    def figures(*words: str) -> dict[str, float]:
        code, out, _ = shell("evaluate", FILE, "--device", "cpu", *words)
        assert code == 0
        return {name: float(value) for name, value in (line.split(": ") for line in out.splitlines())}

    trained = [line for line in read_metrics(shell.folder / "done") if line["kind"] == "eval"][-1]
    on_val = figures("--checkpoint", "done", "--split", "val")
    assert on_val == {"error": pytest.approx(trained["error"], rel=1e-5)}
    assert figures("--checkpoint", "done/checkpoints/best", "--split", "val") == on_val
    assert figures("--checkpoint", "done/checkpoints/step-00000003", "--split", "val") != on_val
    assert figures("--checkpoint", "done") == figures("--checkpoint", "done", "--split", "test")
    assert figures("--checkpoint", "done") != on_val


def test_a_checkpoint_is_evaluated_with_the_parameters_of_its_run(shell: Shell) -> None:
    """Otherwise its 'test' samples may be some that it was trained on."""
    assert shell.train("--steps", "2", "--out", "larger", "--live", "n=90")[0] == 0
    words = ("evaluate", FILE, "--device", "cpu", "--live", "--checkpoint", "larger")
    code, out, err = shell(*words)
    assert code == 0
    assert "as the run was started: n=90" in err
    assert out == shell(*words, "n=90")[1]
    assert out != shell(*words, "n=40")[1]


def test_a_run_of_something_else_is_not_evaluated_on_this_ones_data(shell: Shell, done: Answer) -> None:
    (shell.folder / "another_work.py").write_text(WORK.replace("n: int = 40", "size: int = 40, n: int = 4"))
    assert (
        shell("train", "another_work.py", "size=50", "--steps", "1", "--out", "elsewhere", "--live")[0] == 0
    )
    code, _, err = shell("evaluate", FILE, "--device", "cpu", "--live", "--checkpoint", "elsewhere")
    assert code == 1
    told = " ".join(err.split())
    assert f"was trained from another_work.py with size, which {FILE} does not take" in told
    assert "frostline evaluate another_work.py --checkpoint elsewhere" in told


def test_without_a_checkpoint_the_newest_run_of_the_target_is_evaluated(shell: Shell) -> None:
    (shell.folder / "other_work.py").write_text(WORK)
    code, out, err = shell("evaluate", "other_work.py", "--device", "cpu")
    assert (code, out) == (1, "")
    assert "frostline train other_work" in err
    assert shell("train", "other_work.py", "--steps", "2", "--device", "cpu")[0] == 0
    found = next((shell.folder / "runs" / "other_work").iterdir())
    asked = shell("evaluate", "other_work.py", "--device", "cpu")
    assert asked[0] == 0
    assert asked == shell("evaluate", "other_work.py", "--device", "cpu", "--checkpoint", str(found))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--checkpoint", "nowhere"], "nowhere holds no whole checkpoint"),
        (
            ["--checkpoint", "nowhere", "m=3"],
            "nowhere holds no whole checkpoint",
        ),  # before a target is called
        (["--checkpoint", "done", "--split", "dev"], "no split 'dev'; there are train, val, test"),
        (["--checkpoint", "done", "m=3"], "m: no such parameter"),
    ],
)
def test_what_cannot_be_evaluated_is_one_message(
    shell: Shell, done: Answer, words: list[str], told: str
) -> None:
    code, out, err = shell("evaluate", FILE, *words, "--device", "cpu")
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert told in err
    assert "Traceback" not in err
