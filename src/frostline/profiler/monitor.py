"""Looks at a process and all it starts from outside, a few times a second: cores, disk, power."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import psutil

_EVERY_S = 0.2


@dataclass(frozen=True)
class Sample:
    """What had been used up to a moment; clocks of all processes of a machine agree."""

    at: float
    cpu_s: float
    read_bytes: float
    rss: float
    gpus: dict[str, tuple[float, float]]
    """Each GPU's UUID → watts, and the driver's own utilisation."""


class Monitor:
    """
    >>> import os
    >>> with Monitor(os.getpid()) as monitor:
    ...     pass
    >>> monitor.samples[-1].rss > 0
    True
    """

    def __init__(self, pid: int) -> None:
        self.samples: list[Sample] = []
        self._pid, self._over = pid, threading.Event()
        self._cpu: dict[int, float] = {}
        self._read: dict[int, float] = {}
        self._gpu = _gpu()
        self._thread = threading.Thread(target=self._watch, name="frostline-monitor", daemon=True)

    def __enter__(self) -> Monitor:
        self._look()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_EVERY_S):
            self._look()

    def _look(self) -> None:
        """Those that ended keep what they had used."""
        rss = 0.0
        try:
            mine = psutil.Process(self._pid)
            everybody = [mine, *mine.children(recursive=True)]
        except psutil.Error:
            return
        for process in everybody:
            try:
                times = process.cpu_times()
                self._cpu[process.pid] = times.user + times.system
                rss += process.memory_info().rss
                if hasattr(process, "io_counters"):  # not on macOS
                    self._read[process.pid] = float(process.io_counters().read_bytes)
            except (
                psutil.Error,
                ValueError,
                OSError,
            ):  # ended, or not ours to see: what is known stays
                continue
        gpus = self._gpu() if self._gpu is not None else {}
        self.samples.append(
            Sample(
                time.perf_counter(), sum(self._cpu.values()), sum(self._read.values()), rss, gpus
            )
        )  # fmt: skip


def _gpu() -> Any:
    """Asks the driver for watts and its own utilisation of all GPUs; None where there is no driver."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        names = [_text(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    except pynvml.NVMLError:
        return None

    def ask() -> dict[str, tuple[float, float]]:
        found = {}
        for name, handle in zip(names, handles, strict=True):
            try:
                watts = pynvml.nvmlDeviceGetPowerUsage(handle) / 1000
                found[name] = (watts, pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
            except pynvml.NVMLError:  # some cards do not tell
                continue
        return found

    return ask


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name
