"""How a script ends: by itself, by an exception, by `os._exit`, or by us after the steps asked for."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import traceback
from typing import Any, NoReturn

from .patches import Patches
from .samples import LIBRARIES

_THREADS_S, _CLEAN_UP_S = 10.0, 60.0
"""How long a script that was stopped may wait for threads of its own; and take to end in all."""
_LOOK_S = 0.2


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
        self._watched = self._exiting = False

    def install(self) -> None:
        leave, told = os._exit, sys.excepthook

        def _exit(status: int) -> NoReturn:
            self._agent.finish(self._how(f"os._exit({status})"))
            leave(status)

        def excepthook(kind: Any, error: Any, trace: Any) -> None:
            how = f"{kind.__name__}: {error}"
            ours = bool(self.trying) and issubclass(kind, Exception) and os.getpid() == self._agent.pid
            try:
                self._agent.finish(self._how(f"{how}{_where(trace)}") if ours else how)
            except Exception as e:  # noqa: BLE001 -- a device that failed may fail us too
                sys.stderr.write(f"frostline: what was measured is lost: {type(e).__name__}: {e}\n")
            finally:
                told(kind, error, trace)
                if ours:
                    sys.stderr.write(f"frostline: {self._agent.notes[-1]}\n")

        self._patches.set(os, "_exit", _exit)
        self._patches.set(sys, "excepthook", excepthook)
        atexit.register(self._at_exit)

    def uninstall(self) -> None:
        atexit.unregister(self._at_exit)
        self._patches.undo()

    def _at_exit(self) -> None:
        self.finished = True
        self._agent.finish(self._how("its own end"))

    def _how(self, own: str) -> str:
        """An end that our own trial may have brought about is one after the steps asked for: a script may
        need batches of one size."""
        if not self.trying or os.getpid() != self._agent.pid:
            return own
        self._agent.notes.append(
            f"the script ended while the profiler handed out {self.trying}, which may be the reason: {own}. "
            f"What was measured before stands; --no-replay leaves that out"
        )
        self.trying = ""
        return "stopped"

    def see_to_it(self) -> None:
        """The script is about to be stopped: one that hangs then, as it waits for threads that nobody takes
        anything from any more, is ended."""
        if not self._watched:
            self._watched = True
            atexit.register(self._exits)
            threading.Thread(target=self._see_to_it, name="frostline: end", daemon=True).start()

    def _exits(self) -> None:
        self._exiting = True

    def _see_to_it(self) -> None:
        pid, main, began = os.getpid(), threading.main_thread(), time.monotonic()
        waits = began
        while os.getpid() == pid:
            time.sleep(_LOOK_S)
            now = time.monotonic()
            if main.is_alive() or self._exiting:
                waits = now
            if now - waits > _THREADS_S or now - began > _CLEAN_UP_S:
                break
        alive = [t.name for t in threading.enumerate() if not t.daemon and t is not main]
        threads = f"; threads that are left: {', '.join(alive)}" if alive else ""
        sys.stderr.write(f"frostline: the script did not end after it was stopped{threads}; ended hard\n")
        if not main.is_alive() and not self._exiting:  # what would have come next
            last = threading.Thread(target=atexit._run_exitfuncs, daemon=True)
            last.start()
            last.join(_THREADS_S)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def stop(self, *, hard: bool = False) -> None:
        """Ends the script; again and again, where it catches everything."""
        if hard:
            sys.stdout.flush()
            sys.stderr.write("frostline: the script caught the end of the profile three times; ended hard\n")
            sys.stderr.flush()
            os._exit(0)
        raise Stop(0)


def _where(trace: Any) -> str:
    """The script's own line that an error came from."""
    frames = traceback.extract_tb(trace)
    own = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)]
    return next((f" ({frame.filename}:{frame.lineno})" for frame in [*own[-1:], *frames[-1:]]), "")
