"""How a script ends: by itself, by an exception, by `os._exit`, or by us after the steps asked for."""

from __future__ import annotations

import atexit
import os
import sys
from typing import Any, NoReturn

from .patches import Patches


class Stop(SystemExit):
    """Ends the script as `sys.exit(0)` would: `finally` and `atexit` run, `except Exception` does not see
    it."""


class Ends:
    """Tells an agent that the script ends."""

    def __init__(self, agent: Any) -> None:
        self._agent, self._patches = agent, Patches()
        self.trying = ""
        """What the script is given instead of its own data, which it may not be able to take."""
        self.finished = False

    def install(self) -> None:
        leave, told = os._exit, sys.excepthook

        def _exit(status: int) -> NoReturn:
            self._agent.finish(f"os._exit({status})")
            leave(status)

        def excepthook(kind: Any, error: Any, trace: Any) -> None:
            if self.trying and os.getpid() == self._agent.pid:
                self._agent.notes.append(
                    f"the error came while the profiler handed out {self.trying}, which may be its reason; "
                    f"--no-replay leaves that out"
                )
            try:
                self._agent.finish(f"{kind.__name__}: {error}")
            except Exception as e:  # noqa: BLE001 -- a device that failed may fail us too
                sys.stderr.write(f"frostline: what was measured is lost: {type(e).__name__}: {e}\n")
            finally:
                told(kind, error, trace)

        self._patches.set(os, "_exit", _exit)
        self._patches.set(sys, "excepthook", excepthook)
        atexit.register(self._at_exit)

    def uninstall(self) -> None:
        atexit.unregister(self._at_exit)
        self._patches.undo()

    def _at_exit(self) -> None:
        self.finished = True
        self._agent.finish("its own end")

    def stop(self, *, hard: bool = False) -> None:
        """Ends the script; again and again, where it catches everything."""
        if hard:
            sys.stdout.flush()
            sys.stderr.write("frostline: the script caught the end of the profile three times; ended hard\n")
            sys.stderr.flush()
            os._exit(0)
        raise Stop(0)
