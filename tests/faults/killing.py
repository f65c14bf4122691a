"""Jobs to kill and run again: a server that forks a child for each run, and what happens to the child.

A request is a line of JSON. Beside what the job itself wants:

    at:       n-th call that changes the disk, at which something happens to the child:
    do:       "kill" it (before, in the middle of or after that call, see `when`), "worker" (kill one of its
              worker processes), a signal's name, or that "twice"
    after_s:  it is killed from outside, wherever it is
    pids:     a file into which the child's worker processes are written at that call
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

HERE = Path(__file__).parent
CALLS = ("write", "fsync", "replace", "rename", "unlink", "mkdir", "rmdir", "ftruncate")
Job = Callable[[dict[str, Any]], int]


def watch(request: dict[str, Any], calls: list[int]) -> None:
    """Wrap what changes the disk: count it, and let happen what was asked for."""
    write, numbers = os.write, count(1)  # several threads write
    for name in CALLS:
        real = getattr(os, name)

        def wrapped(*args: Any, real: Any = real, **options: Any) -> Any:
            number = next(numbers)
            calls[0] = max(calls[0], number)
            here, when = number == request.get("at"), request.get("when")
            if here and request.get("pids"):
                Path(request["pids"]).write_text(json.dumps([child.pid for child in _children()]))
            if here and request["do"] != "kill":
                happen(request["do"])
            elif here and when != "after":
                if when == "half" and real is write:
                    real(args[0], args[1][: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            out = real(*args, **options)
            if here and request["do"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            return out

        setattr(os, name, wrapped)


def _children() -> list[Any]:
    import psutil

    return [*psutil.Process().children()]


def happen(what: str) -> None:
    if what == "worker":
        _children()[0].kill()
        return
    number = signal.Signals[what.split()[0]]
    _send(number)
    if what.endswith("twice"):
        _signals["now"] += 0.25  # a Ctrl-C within 0.2 s counts as the same one
        _send(number)


_signals = {"now": 0.0, "taken": 0}
"""The clock by which signals are told apart, and how many of them were taken."""


def _watch_signals() -> None:
    from frostline import signals

    real = signals.Signals._asked

    def asked(self: signals.Signals, number: int, frame: FrameType | None) -> None:
        try:
            real(self, number, frame)
        finally:
            _signals["taken"] += 1

    signals.Signals._asked = asked  # type: ignore[method-assign]
    signals.time = SimpleNamespace(monotonic=lambda: _signals["now"])  # type: ignore[assignment]


def _send(number: signal.Signals) -> None:
    """Until it was taken, by the main thread: two at once may arrive as one."""
    before, until = _signals["taken"], time.monotonic() + 60
    os.kill(os.getpid(), number)
    while _signals["taken"] == before and time.monotonic() < until:
        time.sleep(0.001)


def _child(job: Job, request: dict[str, Any], answer: int) -> None:
    calls = [0]
    _watch_signals()
    watch(request, calls)
    try:
        status = job(request)
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    os.writev(answer, [str(calls[0]).encode()])
    os._exit(status)


def run(job: Job, request: dict[str, Any]) -> dict[str, Any]:
    """The job in a forked child, with what the request lets happen to it."""
    reader, writer = os.pipe()
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        try:
            _child(job, request, writer)
        finally:
            traceback.print_exc()
            os._exit(99)
    os.close(writer)
    if request.get("after_s") is not None:
        time.sleep(request["after_s"])
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with os.fdopen(reader) as pipe:
        calls = pipe.read()
    return {"exit": status, "calls": int(calls or 0), "seconds": time.monotonic() - started}


def serve(job: Job) -> None:
    import torch

    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    for line in sys.stdin:
        print(json.dumps(run(job, json.loads(line))), flush=True)


def record(name: str, outcome: dict[str, Any], place: Path | None = None) -> None:
    """What `test_<name>.py --full` came to, beside what other tests recorded in the same file."""
    sys.path.insert(0, str(HERE.parent.parent / "benchmarks"))
    import common

    place = place or common.RESULTS / "faults.json"
    others = json.loads(place.read_text()) if place.exists() else {}
    kept = {
        **outcome, "commit": common.git_commit(), "versions": common.versions(),
        "command": f"scripts/test --full tests/faults/test_{name}.py",
    }  # fmt: skip
    place.write_text(json.dumps({**others, name: kept}, indent=1) + "\n")


class Server:
    """Runs `<module>.serve()` in a process of its own, which has no threads and may fork."""

    def __init__(self, module: str, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"import {module}; {module}.serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)]),
                **environment,
            },
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(200)
        self._process.stdout.close()
