"""A run's folder: which one a call goes on in, what it was started with, one process at a time."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from frostline.errors import CheckpointError, UsageError
from frostline.trainer.checkpoint import Checkpoints
from frostline.trainer.folder import CHECKPOINTS, RUN, STABLE, Chosen, choose, config_of, describe, held

CONFIG: dict[str, Any] = {
    "target": "a/work.py", "parameters": {"n": 3}, "training": {"clip": None, "unused": ()}, "batch_size": 8,
}  # fmt: skip
OTHER: dict[str, Any] = {**CONFIG, "training": {"clip": 1.0, "unused": ()}}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(folder: str | Path, *steps: int, config: dict[str, Any] | None = None, **state: Any) -> Path:
    """A run's folder as a training leaves it."""
    with held(Chosen(Path(folder))):
        describe(Path(folder), config or CONFIG)
        for step in steps:
            save(Path(folder), step, **state)
    return Path(folder)


def save(folder: Path, step: int, *, best: bool = False, label: str | None = None, **state: Any) -> Path:
    kept = Checkpoints(folder / CHECKPOINTS, keep=9)
    return kept.save(step, {"model": {"w": torch.zeros(1)}}, state, best=best, label=label)


# "auto"


def test_auto_begins_where_there_is_no_run() -> None:
    chosen = choose("work", None, "auto", CONFIG)
    assert chosen.folder.parent == Path("runs/work")
    assert chosen.checkpoint is None
    assert not Path("runs").exists()  # choosing writes nothing


def test_auto_takes_the_newest_run_with_the_same_settings() -> None:
    run("runs/work/2026-01-01T00-00-00", 5)
    same = run("runs/work/2026-01-02T00-00-00", 3, 4)
    run("runs/work/2026-01-03T00-00-00", 9, config=OTHER)
    run("runs/work/2026-01-04T00-00-00")  # killed before its first checkpoint
    chosen = choose("work", None, "auto", CONFIG)
    assert chosen == Chosen(same, same / CHECKPOINTS / "step-00000004")
    assert choose("work", None, "auto", OTHER).folder.name == "2026-01-03T00-00-00"
    assert choose("else", None, "auto", CONFIG).checkpoint is None


@pytest.mark.parametrize(
    "change",
    [
        {"batch_size": 4},
        {"parameters": {}},
        {"parameters": {"n": 4}},
        {"parameters": {"n": 3, "m": 1}},
        {"training": {"clip": None, "unused": ("head",)}},
    ],
)
def test_any_other_setting_is_another_run(change: dict[str, Any]) -> None:
    run("runs/work/2026-01-01T00-00-00", 5)
    chosen = choose("work", None, "auto", {**CONFIG, **change})
    assert chosen.checkpoint is None
    assert chosen.notes[0].startswith("a new run, since the newest, runs/work/2026-01-01T00-00-00, differs: ")


def test_a_target_of_the_same_name_elsewhere_is_another_run() -> None:
    run("runs/work/2026-01-01T00-00-00", 5)
    chosen = choose("work", None, "auto", {**CONFIG, "target": "b/work.py"})
    assert chosen.notes[0].endswith("differs: target was 'a/work.py', is 'b/work.py'")


def test_a_run_that_names_no_target_knows_given_parameters_only() -> None:
    folder = run("runs/work/2026-01-01T00-00-00", 5)
    old = {name: value for name, value in CONFIG.items() if name != "target"}
    (folder / RUN).write_text(json.dumps({"version": 1, "config": old}))
    now = {**CONFIG, "parameters": {**CONFIG["parameters"], "m": 1}}
    assert choose("work", None, "auto", now).checkpoint is not None


def test_the_config_of_a_run_is_found_from_its_checkpoints() -> None:
    folder = run("runs/work/a", 5)
    for place in (folder, folder / CHECKPOINTS, folder / CHECKPOINTS / "step-00000005"):
        assert config_of(place) == json.loads(json.dumps(CONFIG))
    assert config_of(folder.parent.parent) is None


def test_auto_goes_on_from_the_newest_whole_checkpoint() -> None:
    folder = run("runs/work/a", 3, 7)
    (folder / CHECKPOINTS / "step-00000007" / "model.safetensors").write_bytes(b"cut")
    assert choose("work", None, "auto", CONFIG).checkpoint == folder / CHECKPOINTS / "step-00000003"


def damaged(folder: Path, step: int) -> Path:
    (folder / CHECKPOINTS / f"step-{step:08d}" / "model.safetensors").unlink()
    return folder


@pytest.mark.parametrize("resume", ["auto", "never", "mine"])
def test_a_run_without_a_whole_checkpoint_is_not_begun_anew_in_its_folder(resume: str) -> None:
    out = damaged(damaged(run("mine", 3, 7), 3), 7)
    with pytest.raises(CheckpointError, match=r"mine holds no whole .*--resume never and another --out") as e:
        choose("work", out, resume, CONFIG)
    assert [problem.split(":")[0] for problem in e.value.problems] == ["step-00000003", "step-00000007"]
    assert all("model.safetensors" in problem for problem in e.value.problems)


def test_auto_does_not_go_on_with_such_a_run_and_says_so() -> None:
    name = damaged(run("runs/work/2026-01-02T00-00-00", 3), 3)
    begun = choose("work", None, "auto", CONFIG)
    assert begun.checkpoint is None
    assert begun.folder != name
    assert begun.notes[0].startswith(f"passed over: {name}, no checkpoint in it is whole: step-00000003: ")
    older = run("runs/work/2026-01-01T00-00-00", 5)
    chosen = choose("work", None, "auto", CONFIG)
    assert (chosen.folder, chosen.notes) == (older, begun.notes)


def test_a_state_in_which_the_rate_fell_sends_back_to_the_one_before() -> None:
    folder = run("runs/work/a")
    save(folder, 3, label=STABLE, decaying=False)
    save(folder, 7, decaying=True)
    assert choose("work", None, "auto", CONFIG).checkpoint == folder / CHECKPOINTS / "step-00000003"
    assert choose("work", folder, "auto", CONFIG).checkpoint == folder / CHECKPOINTS / "step-00000003"
    save(folder, 9, decaying=False)
    assert choose("work", None, "auto", CONFIG).checkpoint == folder / CHECKPOINTS / "step-00000009"


# "never", and a folder that is given


def test_never_begins_in_a_folder_of_its_own() -> None:
    folder = run("runs/work/2026-01-01T00-00-00", 5)
    chosen = choose("work", None, "never", CONFIG)
    assert chosen.checkpoint is None
    assert chosen.folder != folder


def test_runs_that_begin_within_one_second_have_a_folder_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.strftime", lambda form: "2026-01-01T00-00-00")
    folders = [run(choose("work", None, "never", CONFIG).folder, n).name for n in (1, 2, 3)]
    assert folders == ["2026-01-01T00-00-00", "2026-01-01T00-00-00-2", "2026-01-01T00-00-00-3"]
    assert choose("work", None, "auto", CONFIG).folder.name == folders[-1]


def test_never_does_not_write_over_a_training_that_is_there() -> None:
    out = run("mine", 5)
    with pytest.raises(UsageError, match=r"mine holds a training already \(step-00000005\)"):
        choose("work", out, "never", CONFIG)
    assert choose("work", Path("empty"), "never", CONFIG) == Chosen(Path("empty"))


def test_in_a_folder_that_is_given_other_settings_go_on_and_are_told() -> None:
    out = run("mine", 5)
    assert choose("work", out, "auto", CONFIG) == Chosen(out, out / CHECKPOINTS / "step-00000005")
    told = choose(None, out, "auto", {**OTHER, "batch_size": 4})
    assert told.checkpoint == out / CHECKPOINTS / "step-00000005"
    assert told.notes == ["training.clip was None, is 1.0", "batch_size was 8, is 4"]


def test_without_a_name_and_a_folder_there_is_no_place() -> None:
    with pytest.raises(UsageError, match=r"needs a folder for the run"):
        choose(None, None, "auto", CONFIG)


# a path


@pytest.mark.parametrize(
    ("path", "step"),
    [
        ("mine", 7),
        ("mine/checkpoints", 7),
        ("mine/checkpoints/step-00000003", 3),
        ("mine/checkpoints/best", 5),
        ("mine/checkpoints/best.json", 5),
    ],
)
def test_a_path_goes_on_in_its_own_run(path: str, step: int) -> None:
    out = run("mine", 3)
    save(out, 5, best=True)
    save(out, 7)
    assert choose("work", None, path, CONFIG) == Chosen(out, out / CHECKPOINTS / f"step-{step:08d}")
    assert choose("work", None, path, OTHER).notes == ["training.clip was None, is 1.0"]
    elsewhere = choose("work", Path("new"), path, OTHER)
    assert elsewhere == Chosen(Path("new"), out / CHECKPOINTS / f"step-{step:08d}")


def test_a_checkpoint_that_was_copied_out_needs_a_folder() -> None:
    out = run("mine", 3)
    (out / CHECKPOINTS / "step-00000003").rename("taken")
    with pytest.raises(UsageError, match=r"taken lies in no run's folder: say with --out"):
        choose("work", None, "taken", CONFIG)
    assert choose("work", Path("new"), "taken", CONFIG) == Chosen(Path("new"), Path("taken"))


@pytest.mark.parametrize("path", ["nowhere", "mine", "mine/checkpoints/best", "Auto"])
def test_a_path_without_a_checkpoint_is_an_error(path: str) -> None:
    run("mine")
    with pytest.raises(CheckpointError, match="holds no whole checkpoint"):
        choose("work", None, path, CONFIG)


# run.json


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"version": 1}', "null"])
def test_a_damaged_description_is_told_not_taken_for_equal(text: str) -> None:
    out = run("mine", 3)
    (out / RUN).write_text(text)
    with pytest.raises(UsageError, match=r"mine/run\.json is damaged"):
        choose("work", out, "auto", CONFIG)


def test_auto_does_not_pass_over_a_damaged_description_in_silence() -> None:
    run("runs/work/2026-01-01T00-00-00", 3)
    (run("runs/work/2026-01-02T00-00-00", 9) / RUN).write_text("{")
    with pytest.raises(UsageError, match=r"2026-01-02T00-00-00/run\.json is damaged"):
        choose("work", None, "auto", CONFIG)


@pytest.mark.parametrize("text", ['{"config": null}', '{"config": [1]}'])
def test_a_description_with_no_settings_in_it_is_damaged_too(text: str) -> None:
    out = run("mine", 3)
    (out / RUN).write_text(text)
    with pytest.raises(UsageError, match=r"mine/run\.json is damaged"):
        choose("work", out, "auto", CONFIG)


def test_a_run_without_its_description_goes_on_where_it_is_named_and_is_not_found_by_itself() -> None:
    out = run("runs/work/a", 3)
    (out / RUN).unlink()
    assert choose("work", None, "auto", CONFIG).checkpoint is None
    assert choose("work", out, "auto", CONFIG).checkpoint == out / CHECKPOINTS / "step-00000003"


def test_a_description_of_other_settings_is_replaced_by_those_that_go_on() -> None:
    out = run("mine", 3)
    run(out, 4, config=OTHER)
    assert json.loads((out / RUN).read_text())["config"]["training"]["clip"] == 1.0
    assert choose("work", out, "auto", OTHER).notes == []


# one at a time


@contextmanager
def in_another_process(out: Path) -> Iterator[None]:
    """The folder, held by a child until the block ends."""
    context = multiprocessing.get_context("fork")
    ours, its = context.Pipe()

    def work() -> None:
        with held(Chosen(out)):
            describe(out, CONFIG)
            its.send("held")
            its.recv()

    child = context.Process(target=work)
    child.start()
    try:
        assert ours.recv() == "held"
        yield
    finally:
        ours.send("go")
        child.join()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # fork beside threads, from 3.12 on
def test_a_folder_is_one_processes_at_a_time() -> None:
    out = Path("mine")
    with in_another_process(out):
        before = (out / RUN).read_bytes()
        with pytest.raises(UsageError, match="Another process is training in mine"), held(Chosen(out)):
            pytest.fail("it was held twice")
        assert (out / RUN).read_bytes() == before
    with held(Chosen(out)) as folder:
        assert folder == out


def test_a_folder_is_free_again_after_an_error_and_nothing_lies_about() -> None:
    with pytest.raises(ZeroDivisionError), held(Chosen(Path("deep/mine"))):
        raise ZeroDivisionError
    with held(Chosen(Path("deep/mine"))) as folder:
        describe(folder, CONFIG)
        assert sorted(p.name for p in folder.iterdir()) == [".lock", RUN]


def test_a_file_in_the_way_is_told() -> None:
    Path("mine").write_text("")
    with (
        pytest.raises(UsageError, match=r"A run cannot be written to mine: File exists. Give --out another"),
        held(Chosen(Path("mine"))),
    ):
        pytest.fail("it was held")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_is_told(here: Path) -> None:
    (here / "shut").mkdir(mode=0o500)
    with (
        pytest.raises(UsageError, match=r"A run cannot be written to shut/mine: Permission denied"),
        held(Chosen(Path("shut/mine"))),
    ):
        pytest.fail("it was held")
