"""`metrics.jsonl`: one line for every reading of a training; the same to TensorBoard and W&B when asked."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from numbers import Integral, Real
from pathlib import Path
from types import TracebackType
from typing import Any

from frostline.errors import FrostlineError, UsageError
from frostline.trainer.checkpoint import NO_ROOM, no_room
from frostline.trainer.sinks import KINDS, Sink, TensorBoard, Value, Wandb

log = logging.getLogger("frostline")

METRICS = "metrics.jsonl"

_SPELLED = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
"""JSON has no such numbers. Always these objects, so that two readings of one file are equal, nan and all."""


class Recorder:
    """Writes the metrics of a run.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with Recorder(folder) as recorder:
    ...     recorder.write(10, {"loss": 0.5, "lr": 1e-3})
    ...     recorder.write(10, {"accuracy": float("nan")}, kind="eval")
    >>> print((folder / "metrics.jsonl").read_text(), end="")
    {"step": 10, "kind": "train", "loss": 0.5, "lr": 0.001}
    {"step": 10, "kind": "eval", "accuracy": "nan"}
    >>> read_metrics(folder)[1]
    {'step': 10, 'kind': 'eval', 'accuracy': nan}

    Every line is with the operating system when `write` returns, whole or not at all: a process that is
    killed loses none. A resumed run calls `rewind(step)` with the step of its checkpoint and writes what
    followed again. For that, what belongs to a step must be written before its checkpoint is taken.

    tensorboard: also under `folder/tensorboard`, as "kind/name". wandb: True, a project, or "entity/project";
    also to W&B, likewise. WANDB_MODE and its other variables hold. A run that is already active is used, and
    left open. run_id: W&B's name for the run; made up and kept in `folder/wandb_id` when not given, so that a
    resumed run goes on in the same one. config: shown by both.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        tensorboard: bool = False,
        wandb: bool | str = False,
        config: Mapping[str, Any] | None = None,
        run_id: str | None = None,
    ) -> None:
        self.path = Path(folder) / METRICS
        self._fd = -1
        self._sinks: list[Sink] = []
        try:
            self._open()
            if tensorboard:
                self._sinks.append(TensorBoard(self.path.parent, config or {}))
            if wandb:
                self._sinks.append(Wandb(self.path.parent, wandb, config or {}, run_id))
        except BaseException:
            self.close(failed=True)
            raise

    def write(self, step: int, values: Mapping[str, Value], *, kind: str = "train") -> None:
        """One line. Numbers and texts only: figures on a device are read before, all in one go."""
        values = _checked(step, values, kind)
        spelled = {name: _spelled(value) for name, value in values.items()}
        self._append(json.dumps({"step": step, "kind": kind, **spelled}, allow_nan=False).encode() + b"\n")
        self._pass_on(lambda sink: sink.write(step, kind, values))

    def rewind(self, step: int) -> None:
        """Drop the lines beyond a step: those of a run that got further than its last checkpoint.

        TensorBoard hides what is beyond it, too. W&B takes nothing back: what is written again stands there
        twice, at the same step. It also gets the lines before the step that a killed process may not have
        handed over; and a place that is asked for only now gets all of them.
        """
        self._must_be_open()
        lines = _lines(self.path.read_bytes())
        broken = [number for number, (_, parsed) in enumerate(lines, 1) if parsed is None]
        if broken:
            log.warning("%s: line %s cannot be read and is dropped.", self.path, ", ".join(map(str, broken)))
        kept = [(raw, parsed) for raw, parsed in lines if parsed is not None and parsed["step"] <= step]
        if len(kept) < len(lines):
            self._replace(b"".join(raw for raw, _ in kept))
        self._pass_on(lambda sink: _rewound(sink, step, kept))

    def flush(self) -> None:
        """Onto the disk, so that a checkpoint that is on the disk never knows more than the metrics."""
        self._must_be_open()
        with self._explained(0):
            os.fsync(self._fd)
        self._pass_on(lambda sink: sink.flush())

    def close(self, *, failed: bool = False) -> None:
        """failed: W&B shows the run as failed. A second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        self._pass_on(lambda sink: sink.close(failed))
        self._sinks = []

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)

    def _open(self) -> None:
        with self._explained(0):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            whole = self.path.read_bytes().rfind(b"\n") + 1
            if whole < os.fstat(self._fd).st_size:  # a process was killed, or the disk full, inside a line
                os.ftruncate(self._fd, whole)

    @contextmanager
    def _explained(self, needed: int) -> Iterator[None]:
        """What the disk says, in words; needed: bytes that were to be written."""
        try:
            yield
        except OSError as e:
            if e.errno in NO_ROOM:
                raise no_room("the metrics", self.path, needed=needed, code=e.errno) from e
            raise UsageError(
                f"Metrics cannot be written to {str(self.path)!r}: {e.strerror or e}. Choose another folder, "
                f"or mend that and run the same command again; checkpoints written before are whole."
            ) from e

    def _pass_on(self, do: Callable[[Sink], None]) -> None:
        """One that breaks is given up with a warning: a training does not end for a picture of it."""
        for sink in list(self._sinks):
            try:
                do(sink)
            except sink.errors as e:
                self._sinks.remove(sink)
                log.warning(
                    "%s gets no more metrics (%s: %s). The training goes on, and %s has them all.",
                    *(type(sink).__name__, type(e).__name__, e, self.path),
                )

    def _must_be_open(self) -> None:
        if self._fd < 0:
            raise FrostlineError(f"{str(self.path)!r} is closed; nothing can be recorded any more.")

    def _append(self, line: bytes) -> None:
        self._must_be_open()
        before = os.fstat(self._fd).st_size
        with self._explained(len(line)):
            try:
                while line:
                    line = line[os.write(self._fd, line) :]
            except OSError:
                with suppress(OSError):  # what stays of it, the next `_open` cuts off
                    os.ftruncate(self._fd, before)  # whole lines only
                raise

    def _replace(self, content: bytes) -> None:
        aside = self.path.with_name(f".{METRICS}.aside")
        with self._explained(len(content)):
            try:
                with open(aside, "wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(aside, self.path)
            except OSError:
                aside.unlink(missing_ok=True)
                raise
        os.close(self._fd)
        self._fd = -1
        self._open()


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`, or of the one in a folder; "nan", "inf" and "-inf" are numbers again.

    What follows the last whole line is left out and logged: a process was killed inside it, or is writing it.
    """
    path = Path(path)
    path = path / METRICS if path.is_dir() else path
    try:
        content = path.read_bytes()
    except FileNotFoundError as e:
        raise UsageError(f"There are no metrics at {str(path)!r}: no such file.") from e
    lines = _lines(content)
    while lines and lines[-1][1] is None:
        log.warning("%s: the last line is torn and left out: %.60r", path, lines.pop()[0])
    broken = [f"line {i}: {raw[:60]!r}" for i, (raw, parsed) in enumerate(lines, 1) if parsed is None]
    if broken:
        raise UsageError(f"{str(path)!r} is no file of metrics, or was changed by hand:", problems=broken)
    return [parsed for _, parsed in lines if parsed is not None]


def _rewound(sink: Sink, step: int, kept: Sequence[tuple[bytes, Mapping[str, Any]]]) -> None:
    """And the lines before it, as far as they are not there: asked for only since the resume, or lost."""
    sink.rewind(step)
    room, first = sink.lost_bytes, len(kept)
    while first and room > 0:
        first -= 1
        room -= len(kept[first][0])
    for _, line in kept[first:]:
        values = {name: value for name, value in line.items() if name not in ("step", "kind")}
        sink.write(line["step"], line["kind"], values)


def _lines(content: bytes) -> list[tuple[bytes, dict[str, Any] | None]]:
    """Each line as it is in the file, and what it says; None when it is torn or says nothing."""
    *whole, torn = content.split(b"\n")
    lines: list[tuple[bytes, dict[str, Any] | None]] = [(raw + b"\n", _parsed(raw)) for raw in whole]
    return [*lines, (torn, None)] if torn else lines


def _parsed(raw: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(raw)
    except ValueError:  # not JSON, or not UTF-8
        return None
    if not isinstance(found, dict) or type(found.get("step")) is not int or found.get("kind") not in KINDS:
        return None
    return {name: _SPELLED.get(v, v) if type(v) is str else v for name, v in found.items()}


def _checked(step: int, values: Mapping[str, Value], kind: str) -> dict[str, Value]:
    """The values as plain Python numbers and texts, or everything that is wrong with them."""
    problems = [f"step is {step!r}; a whole number from 0"] if type(step) is not int or step < 0 else []
    problems += [f"kind is {kind!r}; one of {', '.join(KINDS)}"] if kind not in KINDS else []
    problems += [f"{name!r} names the line itself" for name in ("step", "kind") if name in values]
    taken: dict[str, Value] = {}
    for name, value in values.items():
        number = _number(value)
        if type(name) is not str:
            problems.append(f"the name {name!r} is {type(name).__name__}; a text")
        elif number is None and not isinstance(value, str):
            problems.append(f"{name!r} is {type(value).__name__}; a number, or a text")
        else:
            taken[name] = str(value) if number is None else number
    if problems:
        raise UsageError(f"Recorder.write({step!r}, …) cannot take this line:", problems=problems)
    return taken


def _number(value: object) -> float | int | None:
    """numpy's numbers as Python's. Tensors are none: each would be a transfer of its own."""
    if isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else None


def _spelled(value: Value) -> Value:
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)
