"""How scripts end, and that they are told so in the way they would have been."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

from frostline.profiler.inside.ends import Ends, Stop


class Agent:
    def __init__(self) -> None:
        self.pid, self.finished, self.notes = os.getpid(), list[str](), list[str]()

    def finish(self, how: str) -> None:
        self.finished.append(how)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the script's own excepthook is given."""
    found: list[Any] = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: found.append(error))
    return found


@pytest.fixture
def ends(told: list[Any]) -> Iterator[Ends]:
    found = Ends(Agent())
    found.install()
    yield found
    found.uninstall()
    atexit.unregister(found._at_exit)


def test_an_error_is_told_to_us_and_then_to_who_was_there(ends: Ends, told: list[Any]) -> None:
    error = KeyError("x")
    sys.excepthook(KeyError, error, None)
    assert ends._agent.finished == ["KeyError: 'x'"]
    assert told == [(KeyError, error, None)]


def test_an_error_in_a_phase_that_we_tried_may_be_ours(ends: Ends, told: list[Any]) -> None:
    """The script cannot take half a batch: that trial is left out, and all else had been measured."""
    ends.trying = "half a batch"
    sys.excepthook(ValueError, ValueError("a batch of 8 was expected"), None)
    assert ends._agent.finished == ["stopped"]
    assert len(told) == 1
    (note,) = ends._agent.notes
    assert "handed out half a batch" in note
    assert "ValueError: a batch of 8 was expected" in note
    assert "--no-replay" in note


def test_an_interrupt_in_such_a_phase_is_not_ours(ends: Ends, told: list[Any]) -> None:
    ends.trying = "half a batch"
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert ends._agent.finished == ["KeyboardInterrupt: "]
    assert len(told) == 1


def test_in_a_forked_child_it_is_the_childs(ends: Ends, told: list[Any]) -> None:
    ends.trying, ends._agent.pid = "half", -1
    sys.excepthook(ValueError, ValueError(), None)
    assert len(told) == 1


def test_everything_is_put_back(told: list[Any]) -> None:
    before = (sys.excepthook, os._exit)
    ends = Ends(Agent())
    ends.install()
    assert (sys.excepthook, os._exit) != before
    ends.uninstall()
    atexit.unregister(ends._at_exit)
    assert (sys.excepthook, os._exit) == before


def test_a_hook_that_the_script_set_since_stays(told: list[Any]) -> None:
    """With --keep-going the script runs on, and rich or wandb want to see its errors."""
    ends = Ends(Agent())
    ends.install()

    def own(*error: Any) -> None: ...

    sys.excepthook = own
    ends.uninstall()
    atexit.unregister(ends._at_exit)
    assert sys.excepthook is own


def test_stop_is_an_exit_with_success() -> None:
    with pytest.raises(SystemExit) as e:
        Ends(Agent()).stop()
    assert isinstance(e.value, Stop)
    assert e.value.code == 0
    assert not issubclass(Stop, Exception)


SCRIPT = """
import os, sys, atexit
from frostline.profiler.inside.ends import Ends

class Agent:
    pid, notes = os.getpid(), []
    def finish(self, how):
        print("finish", how, flush=True)

ends = Ends(Agent())
ends.install()
"""


def ran(code: str) -> subprocess.CompletedProcess[str]:
    text = SCRIPT + textwrap.dedent(code)
    found = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=200, check=False
    )
    return found


@pytest.mark.parametrize(
    ("code", "status", "told"),
    [
        ("pass", 0, ["its own end"]),
        ("sys.exit(3)", 3, ["its own end"]),
        ("os._exit(4)", 4, ["os._exit(4)"]),
        ("1 / 0", 1, ["ZeroDivisionError: division by zero", "its own end"]),
        ("ends.stop(hard=True)", 0, ["os._exit(0)"]),
    ],
)
def test_a_process_ends_as_it_would_have_and_says_how(code: str, status: int, told: list[str]) -> None:
    found = ran(code)
    assert found.returncode == status, found.stderr
    assert found.stdout.splitlines() == [f"finish {how}" for how in told]
    assert ("ZeroDivisionError" in found.stderr) == (code == "1 / 0")


@pytest.mark.parametrize("code", ["sys.exit(1)", "os._exit(1)"])
def test_a_script_that_ends_itself_where_it_cannot_take_half_a_batch_was_stopped(code: str) -> None:
    found = ran(f"ends.trying = 'half a batch'\n{code}")
    assert found.stdout.splitlines() == ["finish stopped"]


HANGS = """
import threading
from frostline.profiler.inside import ends as module
module._THREADS_S, module._CLEAN_UP_S, module._LOOK_S = {limits}, 0.01
atexit.register(lambda: print("atexit", flush=True))
ends.uninstall()
ends.see_to_it()
"""


def test_a_script_that_waits_for_its_own_threads_for_ever_is_ended() -> None:
    """A thread that fills a queue which nobody empties any more; what would have run at its exit does."""
    patient = """
class Told:  # once it is told that it hangs, what runs at its exit has time
    def write(self, text):
        module._THREADS_S = 100
        return sys.__stderr__.write(text)
    def flush(self):
        sys.__stderr__.flush()
sys.stderr = Told()
"""
    waits = "threading.Thread(target=threading.Event().wait, name='ahead').start()\nends.stop()"
    found = ran(HANGS.format(limits="0.3, 100") + patient + waits)
    assert (found.returncode, found.stdout.splitlines()) == (0, ["atexit"])
    assert "threads that are left: ahead" in found.stderr


def test_a_script_that_hangs_while_it_cleans_up_is_ended_later() -> None:
    cleans = "try:\n    ends.stop()\nfinally:\n    threading.Event().wait(150)"
    found = ran(HANGS.format(limits="0.1, 0.6") + cleans)
    assert (found.returncode, found.stdout) == (0, "")
    assert "did not end after it was stopped" in found.stderr


def test_a_script_that_ends_in_time_is_left_alone() -> None:
    found = ran(HANGS.format(limits="150, 150") + "ends.stop()")
    assert (found.returncode, found.stdout, found.stderr) == (0, "atexit\n", "")


def test_a_stop_runs_finally_and_atexit_but_no_except_exception() -> None:
    found = ran(
        """
        atexit.register(lambda: print("atexit"))
        try:
            ends.stop()
        except Exception:
            print("caught")
        finally:
            print("finally")
        """
    )
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.split("\n")[:2] == ["finally", "atexit"]
