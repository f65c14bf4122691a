"""`frostline freeze` as a person runs it: what is said, what is written, and the exit status."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import frostline as fl
from frostline.cli.main import main
from frostline.cut.costs import Cost
from frostline.cut.rehearsal import Rehearsed
from frostline.cut.trial import Trial, Tried
from frostline.freezer import attempt, run
from frostline.freezer.progress import Reporter

NAME = "h8_freeze_work"
WORK = """
import frostline as fl

def double(x):
    if x == 13:
        raise ValueError("thirteen")
    return float(2 * x)

def pipeline(n):
    rows = [{"key": f"k{i:02d}", "x": i} for i in range(n)]
    return fl.Pipeline(fl.Source.table(rows), fl.Stage("y", double, reads="x"))

def nothing(): ...

def workload(*, n: int = 12, note: str = ""):
    return fl.Workload(pipeline(n), run=nothing)

def loss(model, batch):
    return model(batch["y"].float()[:, None]).square().mean()

def broken_loss(model, batch):
    raise ValueError("no loss today")

def trained(*, broken: bool = False):
    import torch
    return fl.Workload(
        pipeline(12), model=fl.lazy(torch.nn.Linear, 1, 1), loss=broken_loss if broken else loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1), batch_size=4,
    )

def two():
    return fl.Workload({"first": pipeline(12), "second": pipeline(12)}, run=nothing)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("FROSTLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(attempt, "_MOST_ROWS", 4)  # three shards
    monkeypatch.setattr("frostline.cut.walk._ROUND_S", 0.01)  # a dry run's figures need not be steady here
    monkeypatch.setattr("frostline.cut.walk._LEAST_S", 0.005)
    monkeypatch.setattr("frostline.cut.trial._SUPPLY_S", 0.05)
    (tmp_path / f"{NAME}.py").write_text(WORK)
    yield tmp_path
    sys.modules.pop(NAME, None)


@pytest.fixture
def freeze(folder: Path, capsys, monkeypatch):
    monkeypatch.delenv("FROSTLINE_TRACEBACK", raising=False)

    def call(target: str, *words: str) -> tuple[int, str, str]:
        arguments = ["freeze", target, *words]
        monkeypatch.setattr(sys, "argv", ["/somewhere/bin/frostline", *arguments])
        with pytest.raises(SystemExit) as end:
            main(arguments)
        return int(end.value.code or 0), *capsys.readouterr()

    return call


@pytest.fixture
def signalled(monkeypatch) -> Any:
    """Sends signals to this process, as a scheduler does, when the first samples are written."""

    def by(*numbers: int) -> None:
        left = [*numbers]
        told = Reporter.computed

        def computed(self: Reporter, *args: Any) -> None:
            told(self, *args)
            while left:
                signal.raise_signal(left.pop(0))

        monkeypatch.setattr(Reporter, "computed", computed)

    return by


def test_the_folder_is_called_store_too_as_training_calls_it(freeze, folder: Path) -> None:
    assert freeze(f"{NAME}.py", "--store", "mine")[0] == 0
    assert len(fl.Store.open(folder / "mine")) == 12


def test_a_dry_run_writes_nothing(freeze, folder: Path) -> None:
    code, out, _ = freeze(f"{NAME}.py", "--dry-run")
    assert code == 0
    last = out.splitlines()[-1]
    assert last.startswith("dry run: 12 samples, ")
    assert last.endswith("nothing was written.")
    assert not (folder / "stores").exists()


def test_a_dry_run_compares_all_cuts(freeze) -> None:
    _, out, _ = freeze(f"{NAME}.py", "--dry-run")
    assert "all samples, for a run of 10 epochs" in out
    assert "the training step was not measured" in out
    assert [line.split()[0] for line in out.splitlines() if line.startswith("Store ")] == ["Store"]


@pytest.fixture
def figures(monkeypatch) -> None:
    """A millisecond a sample live, next to none from a store, and a second to freeze it."""
    live, stored = Cost(1e-3, 1e-3), Cost(1e-6, 1e-6)
    tried = Tried(frozen=Rehearsed(1.0, 1e-4), start=1.0, write=stored, read=stored, supplied=stored)
    monkeypatch.setattr(Trial, "nothing", lambda self, expected: live)
    monkeypatch.setattr(Trial, "stored", lambda self, *what: tried)


@pytest.mark.usefixtures("figures")
def test_a_run_is_as_long_as_is_said_and_the_best_cut_is_frozen(freeze, folder: Path) -> None:
    code, out, _ = freeze(f"{NAME}.py", "--dry-run", "--for-epochs", "1e9")
    assert code == 0
    assert "for a run of 1e+09 epochs" in out
    assert "Store y: " in out
    assert out.splitlines()[-1].startswith("dry run: 12 samples, ")
    assert freeze(f"{NAME}.py", "--for-epochs", "1e9")[0] == 0
    assert len(fl.Store.open(folder / "stores" / NAME)) == 12


@pytest.mark.usefixtures("figures")
def test_where_nothing_pays_nothing_is_frozen_unless_it_is_asked_for(freeze, folder: Path) -> None:
    code, out, _ = freeze(f"{NAME}.py", "--for-epochs", "1")
    assert code == 0
    assert "Store nothing: " in out
    assert out.endswith("nothing was written; to store fields all the same, name them: --cut\n")
    assert not (folder / "stores").exists()
    code, out, _ = freeze(f"{NAME}.py", "--for-epochs", "1", "--cut", "y")
    assert code == 0
    assert "Store nothing: " in out
    assert len(fl.Store.open(folder / "stores" / NAME)) == 12


@pytest.mark.usefixtures("figures")
def test_a_dry_run_says_what_the_command_stores_where_another_cut_is_best(freeze) -> None:
    told = "note: as it stands, this command stores y; --for-epochs 10 would store nothing"
    assert told in freeze(f"{NAME}.py", "--dry-run")[1]  # ten epochs of twelve samples do not pay a second
    for options in (("--for-epochs", "1"), ("--cut", "y"), ("--for-epochs", "1e9")):
        assert "as it stands" not in freeze(f"{NAME}.py", "--dry-run", *options)[1]


def test_a_dry_run_of_a_store_that_is_there_compares_cuts_only_if_it_is_asked_to(freeze) -> None:
    freeze(f"{NAME}.py")
    assert "Store " not in freeze(f"{NAME}.py", "--dry-run")[1]
    assert "Store " in freeze(f"{NAME}.py", "--dry-run", "--for-epochs", "3")[1]


def test_each_of_several_pipelines_is_planned(freeze) -> None:
    code, out, _ = freeze(f"{NAME}.py:two", "--dry-run")
    assert code == 0
    assert out.count("all samples, for a run of 10 epochs") == 2


def test_the_step_of_a_model_counts_and_one_that_fails_is_told(freeze) -> None:
    code, out, _ = freeze(f"{NAME}.py:trained", "--dry-run")
    assert code == 0
    assert "the training step was not measured" not in out
    code, out, err = freeze(f"{NAME}.py:trained", "broken=true", "--dry-run")
    assert code == 0
    assert "the training step was not measured" in out
    assert "the training step is not counted: " in err
    assert "no loss today" in err
    assert "Traceback" not in err


def test_codecs_and_limits_of_a_dry_run_are_told_and_counted(freeze) -> None:
    code, out, _ = freeze(f"{NAME}.py", "--dry-run", "--codec", "y=fp16", "--limit", "5")
    assert code == 0
    assert "note: the bytes above are those without --codec" in out
    assert "of 5:" in out.splitlines()[0]


def test_all_is_done_and_then_there_is_nothing_to_do(freeze, folder: Path) -> None:
    code, out, _ = freeze(f"{NAME}.py", "n=10")
    assert code == 0
    assert out.startswith("ok: 10 samples, ")
    store = Path("stores") / NAME
    assert out.endswith(f"{store} has 10 rows.\n")
    assert fl.Store.open(folder / store)["k09"]["y"].item() == 18
    assert freeze(f"{NAME}.py", "n=10")[:2] == (
        0,
        f"ok: {store} is up to date (10 rows); nothing to compute.\n",
    )
    dry = freeze(f"{NAME}.py", "n=10", "--dry-run")
    assert dry[:2] == (0, f"dry run: {store} is up to date; nothing to compute.\n")


def test_what_failed_is_named(freeze) -> None:
    code, out, _ = freeze(f"{NAME}.py", "n=16", "--max-bad", "1")
    assert code == 0
    assert "quarantined: k13: " in out
    assert "thirteen" in out
    assert out.endswith("has 15 rows, 1 in quarantine.\n")


def test_too_many_failures_are_an_error(freeze) -> None:
    code, out, err = freeze(f"{NAME}.py", "n=16", "--max-bad", "0")
    assert code == 1
    assert "ok:" not in out
    assert "error: " in err
    assert "thirteen" in err
    assert "Traceback" not in err


def test_out_of_time_it_stops_with_a_status_and_the_command_that_goes_on(freeze, folder: Path) -> None:
    words = ["n=12", "note=two words", "--out", "my stores/a", "--cut", "y", "--max-hours", "1e-9"]
    code, out, _ = freeze(f"{NAME}.py", *words)
    assert code == 3
    stopped, again = out.splitlines()
    assert stopped.startswith("stopped (the time limit of 1e-09 h): 4 samples, ")
    command = again.removeprefix("Run the same again to go on: ")
    assert shlex.split(command) == ["frostline", "freeze", f"{NAME}.py", *words]
    assert [freeze(*shlex.split(command)[2:])[0] for _ in range(3)] == [3, 0, 0]
    assert len(fl.Store.open(folder / "my stores/a")) == 12


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_after_the_shard(freeze, signalled, folder: Path, number: signal.Signals) -> None:
    signalled(number)
    code, out, err = freeze(f"{NAME}.py")
    assert code == 3
    assert f"stopped ({number.name}): " in out
    assert f"{number.name}: finishing this shard, then stopping. Once more stops now." in err
    assert "Traceback" not in err
    assert len(fl.Store.open(folder / "stores" / NAME)) % 4 == 0
    assert freeze(f"{NAME}.py")[0] == 0
    assert len(fl.Store.open(folder / "stores" / NAME)) == 12


def test_a_second_signal_ends_it_at_once_with_a_sentence(
    freeze, signalled, folder: Path, monkeypatch
) -> None:
    monkeypatch.setattr("frostline.signals._SAME_S", {signal.SIGTERM: 0.0})  # however soon
    signalled(signal.SIGINT, signal.SIGTERM)
    code, out, err = freeze(f"{NAME}.py", "n=12")
    assert (code, out) == (130, "")
    last = err.splitlines()[-1]
    assert last == f"stopped at once: whole shards are kept. To go on: frostline freeze {NAME}.py n=12"
    assert "Traceback" not in err
    assert freeze(f"{NAME}.py", "n=12")[0] == 0
    assert fl.Store.open(folder / "stores" / NAME).check(deep=True).ok


def test_several_pipelines_have_a_folder_each(freeze, folder: Path) -> None:
    code, out, _ = freeze(f"{NAME}.py:two", "--out", "both")
    assert code == 0
    assert [line.split(":")[0] for line in out.splitlines()] == ["ok", "ok"]
    assert sorted(p.name for p in (folder / "both").iterdir()) == ["first", "second"]
    code, out, _ = freeze(f"{NAME}.py:two", "--out", "one", "--pipeline", "second")
    assert code == 0
    assert [p.name for p in (folder / "one").iterdir()] == ["second"]


def test_stopped_in_one_pipeline_the_next_is_not_begun(freeze, signalled, folder: Path) -> None:
    signalled(signal.SIGTERM)
    assert freeze(f"{NAME}.py:two", "--out", "both")[0] == 3
    assert [p.name for p in (folder / "both").iterdir()] == ["first"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([f"{NAME}.py:two", "--pipeline", "secund"], "has no pipeline 'secund' (did you mean 'second'?)"),
        ([f"{NAME}.py", "m=3"], "m: no such parameter"),
        ([f"{NAME}.py", "--cut", "z"], "'z'"),
        ([f"{NAME}.py", "--cut", "z", "--dry-run"], "'z'"),
        ([f"{NAME}.py", "--for-epochs", "0"], "epochs is 0.0; expected a number above 0"),
        (["h8_not_there.py"], "h8_not_there.py"),
    ],
)
def test_what_is_wrong_is_one_sentence(freeze, folder: Path, words: list[str], told: str) -> None:
    code, out, err = freeze(*words)
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert told in err
    assert "Traceback" not in err
    assert not (folder / "stores").exists()


def test_what_is_ours_keeps_its_traceback(folder: Path, monkeypatch) -> None:
    def broken(*args: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(run, "run", broken)
    with pytest.raises(ZeroDivisionError):
        main(["freeze", f"{NAME}.py"])


SENDS = """
import os, signal
from frostline.freezer import attempt
from frostline.freezer.progress import Reporter

def once(*args, left=[signal.SIGTERM]):
    if left:
        os.kill(os.getpid(), left.pop())

attempt._MOST_ROWS = 4
Reporter.computed = once
"""


def test_a_shell_does_not_go_on_after_a_stop(folder: Path) -> None:
    (folder / f"{NAME}.py").write_text(WORK + SENDS)
    frostline = shlex.join([sys.executable, "-m", "frostline"])
    done = subprocess.run(
        f"{frostline} freeze {NAME}.py n=12 --workers threads && echo training",
        shell=True, capture_output=True, text=True, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert "training" not in done.stdout
    assert done.stdout.endswith(f"to go on: frostline freeze {NAME}.py n=12 --workers threads\n")
    assert "Traceback" not in done.stderr
