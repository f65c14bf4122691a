"""What an agent knows, as JSON: one file a process, replaced as a whole."""

from __future__ import annotations

import json
import os
import platform
import resource
import sys
from typing import Any

import torch

from . import cuda


def write(agent: Any, how: str) -> None:
    known = {
        "pid": agent.pid, "rank": ranks()[0], "world": ranks()[1], "ended": how,
        "argv": sys.argv, "boundary": agent.boundary_name, "steps": agent.n + agent.starts.missed,
        "asked": agent.settings["steps"], "trace": agent.settings["trace"], "left": _left(agent),
        "warmup": agent.warmup,
        "blocks": agent.blocks, "modules": _modules(agent), "inputs": _inputs(agent),
        "loaders": agent.loaders.summary(), "prepared": agent.loaders.prepared, "notes": agent.notes,
        "device": _device(), "torch": torch.__version__, "python": platform.python_version(),
        "threads": torch.get_num_threads(), "swallowed": agent.swallowed,
        "lines": agent.instruments.samples.told(), **agent.instruments.found,
    }  # fmt: skip
    path = agent.folder / f"process-{agent.pid}.json"
    aside = path.with_suffix(".part")
    aside.write_text(json.dumps(known), encoding="utf-8")
    aside.replace(path)


def _left(agent: Any) -> list[str]:
    """Phases that were planned, and are not over."""
    blocks = [block for block in (agent.block, *agent.queue) if block is not None]
    return [*dict.fromkeys(block.phase for block in blocks)]


def ranks() -> tuple[int, int]:
    """(rank, how many there are): known when a process group is made, or told by the launcher."""
    group = torch.distributed
    if group.is_available() and group.is_initialized():
        return group.get_rank(), group.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _modules(agent: Any) -> list[dict[str, Any]]:
    """What moved meanwhile, as a moving average does, is not frozen."""
    if agent.modules.watching:
        return []
    moved = {key for key, held in agent.inputs.items() if held.moved() or held.fed}
    found: list[dict[str, Any]] = agent.modules.summary(moved)
    return found


def _inputs(agent: Any) -> list[dict[str, Any]]:
    names = {key: use.name for key, use in agent.modules.uses.items()}
    return [
        {
            "name": names.get(key, ""), "calls": held.calls, "looked": held.looked, "rows": held.rows,
            "repeats": held.repeats, "moved": held.moved() or held.fed, "s": held.typical_s,
        }
        for key, held in agent.inputs.items()
    ]  # fmt: skip


def counters() -> dict[str, float]:
    """What only ever grows: pages read back from disk, and times that the allocator had to start over."""
    retries = torch.cuda.memory_stats().get("num_alloc_retries", 0) if cuda.used() else 0
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    return {"faults": faults, "retries": retries, "swapped": _swapped()}


def _swapped() -> float:
    """Pages that the machine has read back from swap so far."""
    try:
        with open("/proc/vmstat", encoding="ascii") as lines:
            return float(next((line.split()[1] for line in lines if line.startswith("pswpin ")), 0))
    except OSError:  # not on Linux
        return 0.0


def _device() -> dict[str, Any]:
    if not cuda.used():
        return {"name": "cpu"}
    stats = torch.cuda.memory_stats()
    index = torch.cuda.current_device()
    return {
        "name": torch.cuda.get_device_name(index), "index": index,
        "uuid": str(getattr(torch.cuda.get_device_properties(index), "uuid", "?")),
        "peak_allocated": stats.get("allocated_bytes.all.peak", 0),
        "peak_reserved": stats.get("reserved_bytes.all.peak", 0),
        "alloc_retries": stats.get("num_alloc_retries", 0), "total": torch.cuda.mem_get_info()[1],
    }  # fmt: skip
