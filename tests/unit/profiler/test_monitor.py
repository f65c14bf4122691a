"""Looking at processes from outside."""

from __future__ import annotations

import subprocess
import sys
import threading

import psutil
import pytest

from frostline.profiler import monitor
from frostline.profiler.monitor import Monitor


def child(code: str) -> subprocess.Popen[str]:
    """Does as told, says so, and waits to be closed."""
    told = f"{code}\nprint('done', flush=True)\ninput()"
    found = subprocess.Popen(
        [sys.executable, "-c", told], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert found.stdout is not None
    assert found.stdout.readline() == "done\n"
    return found


def end(process: subprocess.Popen[str]) -> None:
    process.communicate("\n", timeout=120)


def test_what_children_use_counts_and_stays_when_they_end() -> None:
    work = "import time\nwhile time.process_time() < 0.4: pass\nprint(1, flush=True); input()"
    around = (
        "import subprocess, sys\n"
        f"inner = subprocess.Popen([sys.executable, '-c', {work!r}],"
        " stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)\n"
        "inner.stdout.readline()\n"
        "print('ready', flush=True); input(); inner.communicate(chr(10))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", f"{around}\nprint('done', flush=True); input()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    watching = Monitor(process.pid)
    watching._look()
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "done\n"
    watching._look()
    end(process)
    first, last = watching.samples
    assert first.cpu_s >= 0.3  # the kernel tells it in whole ticks
    assert last.cpu_s >= first.cpu_s
    assert last.rss < first.rss
    assert last.at >= first.at


def test_a_process_that_is_gone_is_no_sample() -> None:
    process = child("pass")
    end(process)
    watching = Monitor(process.pid)
    watching._look()
    assert watching.samples == []


def test_its_thread_ends_with_it_also_after_an_error() -> None:
    process = child("pass")
    with pytest.raises(KeyError), Monitor(process.pid) as watching:
        raise KeyError
    end(process)
    assert len(watching.samples) >= 1
    assert not [t for t in threading.enumerate() if t.name == "frostline-monitor"]


def test_one_that_may_not_be_looked_at_keeps_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    process = child("pass")
    watching = Monitor(process.pid)

    def refused(process: psutil.Process) -> None:
        raise psutil.AccessDenied(process.pid)

    monkeypatch.setattr(psutil.Process, "io_counters", refused)
    watching._look()
    end(process)
    (sample,) = watching.samples
    assert sample.rss > 0
    assert sample.read_bytes == 0


def test_power_is_the_drivers_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "_gpu", lambda: lambda: {"GPU-1": (250.0, 0.5)})
    process = child("pass")
    watching = Monitor(process.pid)
    watching._look()
    end(process)
    assert watching.samples[0].gpus == {"GPU-1": (250.0, 0.5)}
