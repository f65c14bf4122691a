"""The state of every generator a training may draw from: Python's, numpy's, torch's, the devices'."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from frostline.errors import CheckpointError
from frostline.trainer.plain import Plain, whole

log = logging.getLogger("frostline")

_HERE = "device"
"""The training's own device, whatever its number: a run may go on on another one."""


def rng_tensors(device: str | torch.device = "cpu") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and JSON for a checkpoint: `random`, numpy's global generator, torch's of the CPU and of every
    device that is in use (`device` first).

    >>> tensors, about = rng_tensors()
    >>> before = random.random(), np.random.rand(), torch.rand(1)
    >>> restore_rng(tensors, about)
    >>> before == (random.random(), np.random.rand(), torch.rand(1))
    True
    """
    plain = Plain()
    version, words, gauss = random.getstate()
    numbers = {"version": version, "words": np.array(words, dtype=np.int64), "gauss": gauss}
    about = {
        "python": plain.of(numbers, "python"),
        "numpy": plain.of(np.random.get_state(legacy=False), "numpy"),
        "torch": plain.of(torch.get_rng_state(), "torch"),
        "devices": {name: plain.of(state, name) for name, state in _of_devices(device).items()},
        "device_type": torch.device(device).type,
    }
    plain.refuse("The state of a generator cannot be kept in a checkpoint:")
    return plain.tensors, about


def _of_devices(device: str | torch.device) -> dict[str, Tensor]:
    found, own = {}, torch.device(device)
    if own.type != "cpu":
        found[_HERE] = torch.get_device_module(own).get_rng_state(own)
    if _cuda_in_use():
        for i in range(torch.cuda.device_count()):
            if i != _number(own):
                found[f"cuda:{i}"] = torch.cuda.get_rng_state(i)
    return found


def _cuda_in_use() -> bool:
    """Asked so that a training on the CPU starts nothing on a GPU."""
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _number(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    return torch.cuda.current_device() if device.index is None else device.index


def restore_rng(
    tensors: Mapping[str, Tensor], about: Mapping[str, Any], device: str | torch.device = "cpu"
) -> None:
    """Every generator as it was. Those of a device that is not here are left out, and that is said."""
    try:
        python, np_state, cpu = (whole(about[name], tensors) for name in ("python", "numpy", "torch"))
        devices = {name: whole(state, tensors) for name, state in about["devices"].items()}
        words = tuple(int(word) for word in python["words"])
        random.setstate((python["version"], words, python["gauss"]))
        np.random.set_state(np_state)
        torch.set_rng_state(cpu)
    except (KeyError, TypeError, ValueError, RuntimeError) as e:
        raise CheckpointError(f"The checkpoint's state of the generators cannot be restored: {e!r}.") from e
    own = torch.device(device)
    if about.get("device_type") != own.type:
        log.warning(
            "The checkpoint was written on %s, this is %s: random numbers drawn on the device do not go on.",
            about.get("device_type"), own.type,
        )  # fmt: skip
    elif own.type != "cpu":
        torch.get_device_module(own).set_rng_state(devices[_HERE], own)
    _restore_others(devices, own)


def _restore_others(devices: Mapping[str, Tensor], own: torch.device) -> None:
    if not _cuda_in_use():
        return
    for i in range(torch.cuda.device_count()):
        if i != _number(own) and f"cuda:{i}" in devices:
            torch.cuda.set_rng_state(devices[f"cuda:{i}"], i)
