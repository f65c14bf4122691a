"""What devices can do at most, dense, in FLOP a second: their makers' figures, for model FLOP utilisation."""

from __future__ import annotations

import re
from collections.abc import Mapping

_T = 1e12
_PEAKS: dict[str, dict[str, float]] = {
    "h200": {"bfloat16": 989, "float16": 989, "float32": 67, "tf32": 495},
    "h100": {"bfloat16": 989, "float16": 989, "float32": 67, "tf32": 495},
    "a100": {"bfloat16": 312, "float16": 312, "float32": 19.5, "tf32": 156},
    "l40s": {"bfloat16": 362, "float16": 362, "float32": 91.6, "tf32": 183},
    "a10": {"bfloat16": 125, "float16": 125, "float32": 31.2, "tf32": 62.5},
    "rtx 4090": {"bfloat16": 165, "float16": 165, "float32": 82.6, "tf32": 82.6},
    "rtx 3090": {"bfloat16": 71, "float16": 71, "float32": 35.6, "tf32": 35.6},
    "t4": {"float16": 65, "float32": 8.1},
}
"""The SXM versions where there are several."""
_LITTLE = 0.01
"""Of all operations: a precision that no peak is known for, and that does not matter."""


def peak_flops(device: str, dtype: str) -> float | None:
    """
    >>> peak_flops("NVIDIA H200", "bfloat16"), peak_flops("cpu", "float32")
    (989000000000000.0, None)
    >>> peak_flops("NVIDIA A100-SXM4-80GB", "tf32")
    156000000000000.0
    """
    for name, peaks in _PEAKS.items():
        if name in re.split(r"[\s-]", device.lower()) or (" " in name and name in device.lower()):
            return peaks[dtype] * _T if dtype in peaks else None
    return None


def of_mix(device: str, flops: Mapping[str, float]) -> float | None:
    """The most that a device could do of a mixture of precisions, each in the time that it takes at best.

    >>> of_mix("NVIDIA H200", {"bfloat16": 989e12, "float32": 67e12}) / 1e12
    528.0
    """
    at_best, total = 0.0, sum(flops.values())
    for dtype, count in flops.items():
        peak = peak_flops(device, dtype)
        if peak is not None:
            at_best += count / peak
        elif count > _LITTLE * total:
            return None
    return total / at_best if at_best else None
