"""A worker process, and the pipe to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import ForkingPickler, send_handle
from typing import Any, TypeVar

from frostline.errors import FrostlineError
from frostline.execution import Block
from frostline.execution.wire import receive

_T = TypeVar("_T")


class WorkerDied(FrostlineError):
    """A worker process ended. answered: whether it had ever computed something."""

    def __init__(self, message: str, *, answered: bool) -> None:
        self.answered = answered
        super().__init__(message)


def close_all(children: Iterable[Child]) -> None:
    """All of them go at the same time: an interpreter that has torch takes half a second to end."""
    children = list(children)
    for child in children:
        child.hang_up()
    for child in children:
        child.close()


class Child:
    """A worker process that is starting, or waits for samples."""

    def __init__(self) -> None:
        ours, theirs = Pipe()
        command = [sys.executable, "-m", "frostline.execution.worker", str(theirs.fileno())]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        # a group of its own: Ctrl-C is for the parent, which ends its workers when the shard is whole
        self._process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            env=environment,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self._pipe: Connection[Any, Any] = ours
        self._answered = False
        self._ended_by_us = False
        self.alive = True

    def set_up(self, setup: bytes, slab: int | None) -> dict[str, dict[str, str]]:
        """Send it the stages, and the shared memory; → what the stages stand on there (`parts_of`)."""

        def exchange() -> dict[str, dict[str, str]]:
            self._pipe.send_bytes(setup)
            if slab is not None:
                send_handle(self._pipe, slab, self._process.pid)
            told: dict[str, dict[str, str]] = json.loads(self._pipe.recv_bytes())
            return told

        parts = self._guarded(exchange)
        self._answered = True  # it has started: from here on, samples end it
        return parts

    def ask(self, request: tuple[Any, ...]) -> Block:
        data = ForkingPickler.dumps(request)

        def exchange() -> Block:
            self._pipe.send_bytes(data)
            return receive(self._pipe)

        block = self._guarded(exchange)
        self._answered = True
        return block

    def _guarded(self, do: Callable[[], _T]) -> _T:
        try:
            return do()
        except (EOFError, OSError) as e:
            self.alive = False
            self._pipe.close()
            status = self._ended()
            how = f"died (signal {-status})" if status < 0 else f"died (exit status {status})"
            if status == -signal.SIGKILL and not self._ended_by_us:
                how = (
                    "was killed (signal 9: perhaps for memory)"  # so does the kernel when there is none left
                )
            what = f"the worker process {how}"
            if not self._answered and status > 0:
                what = f"A worker process could not start (exit status {status}); what it said stands above. "
                what += "Use threads."
            raise WorkerDied(what, answered=self._answered or status < 0) from e

    def hang_up(self) -> None:
        """Let it go: it reads the end of its pipe."""
        if self.alive:
            self.alive = False
            self._pipe.close()

    def close(self) -> None:
        self.hang_up()
        self._ended()

    def _ended(self) -> int:
        """Its exit status; one that does not go by itself is killed."""
        try:
            return self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._ended_by_us = True
            self._process.kill()
            return self._process.wait()
