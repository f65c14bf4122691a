"""Runs somebody's command with the agent in every Python that it starts, and gathers what they write.

out/parts/reached            a line for each interpreter that the injection reached
out/parts/torch-PID          of each process that imported torch
out/parts/process-PID.json   of each process that took steps
out/parts/worker-PID.jsonl   of each DataLoader worker: a line a batch
out/parts/trace-PID.json     with --trace
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from frostline.errors import UsageError
from frostline.profiler.inside.decodes import MODULES
from frostline.profiler.monitor import Monitor, Sample

INJECT = Path(__file__).parent / "inject"
_VARIABLE = re.compile(r"[A-Za-z_]\w*=")
_ISOLATED = {
    "-I": "isolated mode ignores PYTHONPATH",
    "-S": "it leaves out `site`",
    "-E": "it ignores PYTHONPATH",
}


@dataclass(frozen=True)
class Settings:
    """How a script is profiled.

    steps:      measured in all, in turns: pass A, pass B, and steps without either
    warmup:     at least so many steps before
    keep_going: the script runs to its own end
    trace:      write a trace for Perfetto or chrome://tracing
    replay:     at the end, hand out one batch again and again, and half of it
    """

    steps: int = 50
    warmup: int = 10
    keep_going: bool = False
    trace: bool = False
    replay: bool = True
    quiet: bool = False

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {value}; expected at least {least}"
            for name, value, least in (("steps", self.steps, 6), ("warmup", self.warmup, 2))
            if value < least
        ]
        if problems:
            raise UsageError("This cannot be profiled:", problems=problems)


@dataclass(frozen=True)
class Ran:
    """What came of a command."""

    command: tuple[str, ...]
    status: int
    processes: tuple[dict[str, Any], ...]
    """What each process that took steps wrote, the first rank's first."""
    workers: tuple[dict[str, Any], ...]
    """What DataLoader workers prepared: a record a batch."""
    reached: int
    torches: int
    """Processes that imported torch."""
    samples: tuple[Sample, ...]
    traces: tuple[Path, ...]


def launch(command: Sequence[str], settings: Settings, out: Path) -> Ran:
    """Runs the command; its output comes through, its end is waited for."""
    _refuse(command)
    parts = fresh_parts(out)
    words = _with_python(command)
    process = _started(words, _environment(settings, parts.absolute()))
    with Monitor(process.pid) as monitor:
        status = _waited(process)
    processes = [json.loads(p.read_text(encoding="utf-8")) for p in sorted(parts.glob("process-*.json"))]
    processes.sort(key=_order)
    reached = parts / "reached"
    return Ran(
        tuple(command), status, tuple(processes), tuple(_lines(parts)),
        len(reached.read_text(encoding="utf-8").splitlines()) if reached.exists() else 0,
        len([*parts.glob("torch-*")]),
        tuple(monitor.samples), tuple(sorted(parts.glob("trace-*.json"))),
    )  # fmt: skip


def fresh_parts(out: Path) -> Path:
    """The folder that agents write to; what an earlier run left there is gone."""
    parts = out / "parts"
    try:
        if parts.exists():
            shutil.rmtree(parts)
        parts.mkdir(parents=True)
    except OSError as e:
        raise UsageError(f"A profile cannot be kept in {out}: {e.strerror}. Give another --out.") from e
    return parts


def _order(found: Mapping[str, Any]) -> tuple[int, bool, bool, int]:
    """The first rank; of one rank who was measured, a training before features that are computed for it, then
    who took the most steps."""
    calls = found["boundary"].startswith("call of")
    return found["rank"], not found["blocks"], calls, -found["steps"]


def _lines(parts: Path) -> list[dict[str, Any]]:
    """The workers' records; a last line that a kill cut short is left out."""
    found = []
    for path in sorted(parts.glob("worker-*.jsonl")):
        for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
            found.append({**json.loads(line), "pid": int(path.stem.removeprefix("worker-"))})
    return found


def _refuse(command: Sequence[str]) -> None:
    if not command:
        raise UsageError(
            "There is nothing to profile. Give a command after --: frostline profile -- python train.py"
        )
    _refuse_variables(command)
    if shutil.which(command[0]) is None and not Path(command[0]).is_file():
        raise UsageError(f"There is no command {command[0]!r} to profile.")
    if _is_python(command[0]):
        for word in _options(command[1:]):
            why = next((_ISOLATED[f"-{c}"] for c in word[1:] if f"-{c}" in _ISOLATED), None)
            if why:
                raise UsageError(
                    f"`{command[0]} {word}` cannot be profiled: {why}, which is how the profiler gets in. "
                    f"Run it without {word}."
                )


def _refuse_variables(command: Sequence[str]) -> None:
    """A shell would take them before a command; and PYTHONPATH is how the profiler gets in."""
    behind = Path(command[0]).name == "env"
    words = command[1:] if behind else command
    given = [*takewhile(lambda word: _VARIABLE.match(word) or (behind and word.startswith("-")), words)]
    if any(word.startswith("PYTHONPATH=") for word in given) or (given and not behind):
        wrong = next((word for word in given if word.startswith("PYTHONPATH=")), given[0])
        raise UsageError(
            f"{wrong!r} cannot be set in the command. Set it before frostline: "
            f"{shlex.join([wrong])} frostline profile -- python train.py"
        )


def _options(words: Sequence[str]) -> Iterator[str]:
    """Python's own options before the script, each without the value that may hang on to it.

    >>> [*_options(["-X", "dev", "-uIWignore", "-m", "train", "-S"])]
    ['-uI']
    """
    left = iter(words)
    for word in left:
        if not word.startswith("-") or word.startswith("--") or word == "-":
            return
        letters = word[1:]
        place = next((i for i, letter in enumerate(letters) if letter in "cmWX"), len(letters))
        if place == len(letters) - 1 and letters[place] in "WX":
            next(left, None)
        if letters[:place]:
            yield f"-{letters[:place]}"
        if place < len(letters) and letters[place] in "cm":
            return


def _is_python(word: str) -> bool:
    return Path(word).name.startswith(("python", "pypy"))


def _with_python(command: Sequence[str]) -> list[str]:
    """The command as it can be started: train.py alone is run by this Python."""
    if command[0].endswith(".py") and Path(command[0]).is_file() and not os.access(command[0], os.X_OK):
        return [sys.executable, *command]
    return [*command]


def _environment(settings: Settings, parts: Path) -> dict[str, str]:
    told = {
        "steps": settings.steps, "warmup": settings.warmup, "keep_going": settings.keep_going,
        "trace": settings.trace, "replay": settings.replay, "quiet": settings.quiet, "folder": str(parts),
        "launcher": os.getpid(),
    }  # fmt: skip
    before = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(INJECT.absolute()), *([before] if before else [])]),
        "FROSTLINE_PROFILE": str(parts),
        "FROSTLINE_PROFILE_SETTINGS": json.dumps(told),
        "FROSTLINE_PROFILE_WATCH": ",".join(MODULES),
    }


def _started(words: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(words, env=environment)
    except OSError as e:
        raise UsageError(f"{words[0]!r} cannot be started: {e.strerror}.") from e


def _waited(process: subprocess.Popen[bytes]) -> int:
    """Ctrl-C reaches the script too, from the terminal; SIGTERM is handed on. It ends in its own way, and
    what is known by then is told."""
    here = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate()) if here else None
    try:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                continue
    finally:
        if here:
            signal.signal(signal.SIGTERM, before)
