"""What a training says before its first step: how many steps, until when, with how much memory."""

from __future__ import annotations

import math
import time

import torch

from frostline.supply import Supply
from frostline.trainer.gauges import memory
from frostline.trainer.progress import forecast_text


def forecast(
    step_s: float, left: int | None, limit: float | None, supply: Supply, device: torch.device
) -> str:
    """step_s: of a step that was measured. left: steps to the end; None where only the clock ends it.
    limit: seconds until then."""
    seconds = None if left is None else left * step_s
    if limit is not None and (seconds is None or seconds > limit):
        seconds, left = limit, min(left or math.inf, int(limit / max(step_s, 1e-9)))  # type: ignore[assignment]
    ends = None if seconds is None else _clock_in(seconds)
    epochs = None if left is None else left / max(1, supply.n_batches())
    used = memory(device)
    peak = used.get("peak_allocated_bytes", used.get("rss_bytes"))
    return forecast_text(
        left, epochs, seconds, ends, steps_per_s=1 / max(step_s, 1e-9), memory_bytes=peak,
        memory_total_bytes=_memory_of(device),
    )  # fmt: skip


def _clock_in(seconds: float) -> str:
    """The time of day then, with its date where that is not today."""
    now, then = time.localtime(time.time()), time.localtime(time.time() + seconds)
    today = time.strftime("%Y-%m-%d", now) == time.strftime("%Y-%m-%d", then)
    return time.strftime("%H:%M" if today else "%Y-%m-%d %H:%M", then)


def _memory_of(device: torch.device) -> float | None:
    return float(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else None
