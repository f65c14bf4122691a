"""Starting somebody's command with the injection in its way: what is refused, what reaches it, what it
leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from frostline.errors import UsageError
from frostline.profiler.launch import (
    INJECT,
    Settings,
    _environment,
    _is_python,
    _lines,
    _order,
    _refuse,
    _with_python,
    launch,
)

PYTHON = sys.executable


@pytest.mark.parametrize("flag", ["-I", "-S", "-E", "-IS", "-BI", "-uE"])
def test_an_interpreter_that_cannot_be_reached_is_refused(flag: str) -> None:
    with pytest.raises(UsageError, match=f"without {flag}"):
        _refuse([PYTHON, flag, "train.py"])


def test_also_after_an_option_with_a_value() -> None:
    with pytest.raises(UsageError, match="-I"):
        _refuse([PYTHON, "-X", "dev", "-W", "ignore", "-I", "train.py"])


@pytest.mark.parametrize(
    "words",
    [
        ["train.py", "-I"],
        ["-m", "train", "-S"],
        ["-c", "pass", "-E"],
        ["-u", "-B", "train.py"],
        ["-Xdev", "train.py"],
        ["-W", "ignore", "train.py", "-E"],
    ],
)
def test_the_scripts_own_options_are_its_own(words: list[str]) -> None:
    _refuse([PYTHON, *words])


@pytest.mark.parametrize("word", ["-Wignore::ImportWarning", "-Werror::SyntaxWarning", "-mEval"])
def test_an_options_value_is_no_option(word: str) -> None:
    _refuse([PYTHON, word, "train.py"])


def test_nothing_and_a_command_that_is_not_there_are_refused() -> None:
    with pytest.raises(UsageError, match=r"frostline profile -- python train\.py"):
        _refuse([])
    with pytest.raises(UsageError, match="no command 'no-such-command'"):
        _refuse(["no-such-command", "train.py"])


def test_other_programs_have_their_own_options() -> None:
    _refuse(["bash", "-E", "train.sh"])


@pytest.mark.parametrize(
    ("word", "is_one"), [("python3.11", True), ("/a/b/pypy3", True), ("torchrun", False), ("bash", False)]
)
def test_interpreters_are_known_by_their_name(word: str, is_one: bool) -> None:
    assert _is_python(word) == is_one


def test_a_script_alone_is_run_by_this_python(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("pass")
    assert _with_python([str(script), "a"]) == [PYTHON, str(script), "a"]
    script.chmod(0o755)
    assert _with_python([str(script), "a"]) == [str(script), "a"]
    assert _with_python(["python", "train.py"]) == ["python", "train.py"]


@pytest.mark.parametrize("before", [None, "", "/a:/b"])
def test_the_injection_comes_first_and_what_was_there_stays(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEPT", "yes")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if before is not None:
        monkeypatch.setenv("PYTHONPATH", before)
    found = _environment(Settings(steps=7), Path("/parts"))
    assert found["PYTHONPATH"].split(":") == [str(INJECT), *(["/a", "/b"] if before else [])]
    assert found["KEPT"] == "yes"
    told = json.loads(found["FROSTLINE_PROFILE_SETTINGS"])
    assert (told["steps"], told["folder"]) == (7, "/parts")


def test_settings_tell_everything_that_is_wrong_at_once() -> None:
    with pytest.raises(UsageError) as e:
        Settings(steps=5, warmup=1)
    assert "steps is 5" in str(e.value)
    assert "warmup is 1" in str(e.value)


def test_a_workers_line_that_was_cut_short_is_skipped(tmp_path: Path) -> None:
    whole = {"dataset": "D", "s": 1.5}
    (tmp_path / "worker-71.jsonl").write_text(
        f"{json.dumps(whole)}\n{json.dumps(whole)}\n" + '{"dataset": "D'
    )
    (tmp_path / "worker-72.jsonl").write_text("")
    assert _lines(tmp_path) == [{**whole, "pid": 71}] * 2


def started(tmp_path: Path, code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    environment = _environment(Settings(), tmp_path)
    environment["PYTHONPATH"] = os.pathsep.join([str(INJECT), *map(str, path)])
    return subprocess.run(
        [PYTHON, "-c", code], env=environment, capture_output=True, text=True, timeout=200, check=False
    )


def test_a_sitecustomize_that_is_hidden_runs_and_the_interpreter_is_marked(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import sys\nsys.own = __file__\n")
    found = started(tmp_path, "import sys, sitecustomize; print(sys.own, sitecustomize.__file__)", own)
    assert found.stdout.split() == [str(own / "sitecustomize.py")] * 2, found.stderr
    assert len((tmp_path / "reached").read_text().splitlines()) == 1


def test_what_is_watched_for_is_told_once_after_its_import(tmp_path: Path) -> None:
    """A torch that is none: the agent's `start` is called when it is there, and not before."""
    (tmp_path / "torch.py").write_text("whole = True\n")
    code = (
        "import sys, sitecustomize, types\n"
        "sys.modules['_frostline_inside'] = types.SimpleNamespace("
        "start=lambda: print('started', sys.modules['torch'].whole))\n"
        "print('before'); import torch; import torch; print('after')\n"
    )
    found = started(tmp_path, code, tmp_path)
    assert found.stdout.split("\n") == ["before", "started True", "after", ""], found.stderr


def test_without_the_variable_the_injection_does_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(INJECT)}
    environment.pop("FROSTLINE_PROFILE", None)
    code = "import sys; print([type(f).__name__ for f in sys.meta_path].count('Watch'))"
    found = subprocess.run([PYTHON, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout == "0\n"


def test_a_command_runs_and_leaves_what_it_left(tmp_path: Path) -> None:
    """Without torch; what an earlier run left is gone."""
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "process-1.json").write_text("{}")
    children = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'pass']); sys.exit(3)"
    ran = launch([PYTHON, "-c", children], Settings(), tmp_path)
    assert (ran.status, ran.reached, ran.processes, ran.workers, ran.traces) == (3, 2, (), (), ())


def test_the_first_rank_comes_first_and_of_one_rank_who_took_the_most_steps(tmp_path: Path) -> None:
    code = (
        "import json, os, pathlib\n"
        "parts = pathlib.Path(os.environ['FROSTLINE_PROFILE'])\n"
        "for pid, rank, steps in ((1, 1, 90), (2, 0, 3), (3, 0, 50)):\n"
        "    told = {'pid': pid, 'rank': rank, 'steps': steps, 'boundary': 'SGD.step', 'blocks': [{}]}\n"
        "    text = json.dumps(told)\n"
        "    (parts / f'process-{pid}.json').write_text(text)\n"
    )
    ran = launch([PYTHON, "-c", code], Settings(), tmp_path)
    assert [found["pid"] for found in ran.processes] == [3, 2, 1]


def test_a_training_comes_before_the_features_that_another_process_computed_for_it() -> None:
    told = [
        {"rank": 0, "steps": 700, "boundary": "call of Encoder", "blocks": [{}]},
        {"rank": 0, "steps": 90, "boundary": "SGD.step", "blocks": [{}]},
        {"rank": 0, "steps": 900, "boundary": "SGD.step", "blocks": []},
    ]
    assert [found["steps"] for found in sorted(told, key=_order)] == [90, 700, 900]


@pytest.mark.parametrize(
    "command",
    [
        ["PYTHONPATH=src", "python", "train.py"],
        ["CUDA_VISIBLE_DEVICES=0", "python", "train.py"],
        ["env", "-u", "A=1", "PYTHONPATH=src", "python", "train.py"],
    ],
)
def test_variables_go_before_frostline(command: list[str]) -> None:
    with pytest.raises(UsageError, match=r"(PYTHONPATH=src|CUDA_VISIBLE_DEVICES=0) frostline profile --"):
        _refuse(command)


def test_other_variables_may_be_set_by_env() -> None:
    _refuse(["env", "A=1", PYTHON, "train.py", "PYTHONPATH=src"])


@pytest.mark.parametrize("out", ["file", "file/below"])
def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path, out: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot be kept in .*Give another --out"):
        launch([PYTHON, "-c", "pass"], Settings(), tmp_path / out)


def test_what_cannot_be_started_says_so(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("not a program")
    with pytest.raises(UsageError, match="cannot be started"):
        launch([str(program)], Settings(), tmp_path)
