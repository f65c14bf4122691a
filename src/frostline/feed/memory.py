"""How much memory there is to take: the host's (or the container's), the device's."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

_CGROUP = Path("/sys/fs/cgroup")


def host_free_bytes() -> int:
    """Bytes that can be taken without swapping, within the container's limit where there is one."""
    free = int(psutil.virtual_memory().available)
    limit = _number(_CGROUP / "memory.max")
    used = _number(_CGROUP / "memory.current")
    if limit is None or used is None:
        return free
    return max(0, min(free, limit - used + _page_cache()))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no cgroup v2 here, or "max": no limit
        return None


def _page_cache() -> int:
    """Counted as used by the cgroup, yet given up on demand. A warm mmap tier is mostly this."""
    try:
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("inactive_file ", "active_file ")))


def device_free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return host_free_bytes()


def in_words(n: float) -> str:
    """
    >>> in_words(5_990_400)
    '6.0 MB'
    """
    for unit in ("B", "KB", "MB", "GB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} TB"
