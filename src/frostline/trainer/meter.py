"""Means and counts of figures that live on the device, and the time that steps took."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from frostline.errors import UsageError

_UNLESS = "\0unless"
"""No figure's name: the flag that tells whether those beside it are left out."""

_Added = tuple[float, list[tuple[tuple[str, ...], Tensor]]]
"""What was added in one go: its weight, and a vector for each device with the names of what is in it."""


class Meter:
    """Means of figures that live on the device, fetched in one transfer.

    >>> meter = Meter()
    >>> meter.add({"loss": torch.tensor(1.0), "lr": 0.1}, weight=3)
    >>> meter.add({"loss": torch.tensor(5.0), "lr": 0.1})
    >>> meter.count({"overflows": torch.tensor(True)})
    >>> meter.read()
    {'loss': 2.0, 'lr': 0.1, 'overflows': 1.0}
    >>> meter.read()
    {}

    `add` and `count` only queue a copy, because a compiled step may overwrite its outputs; `read` is the one
    place that waits for the device. It fetches all copies and adds them up on the host, in float64 and in
    the order in which they came: a step pays for one small kernel, however many figures it has. Whether a
    step's figures count at all may be known on the device only, and is fetched with them.
    """

    def __init__(self) -> None:
        self._place = torch.device("cpu")
        """Where figures came from at last: ranks add up there."""
        self._reset()

    def _reset(self) -> None:
        self._weights: dict[str, float | None] = {}
        """By name, in the order in which the names came. None: a count."""
        self._host: dict[str, float] = {}
        """Sums of what was on the host."""
        self._device: dict[str, float] = {}
        """Sums of what was on the device and has been fetched."""
        self._waiting: list[_Added] = []

    def add(
        self, values: Mapping[str, Tensor | float], weight: float = 1, unless: Tensor | None = None
    ) -> None:
        """Figures of a step; `weight` is what they are a mean over, such as the number of samples.

        With weight 0 (an empty share of a batch) the figures are named, and their values do not matter.
        unless: a flag on the device; where it is not 0, the figures that are tensors are left out.
        """
        if not (_is_number(weight) and 0 <= weight < math.inf):
            raise UsageError(f"Meter.add(…): weight is {weight!r}; a number from 0, on the host")
        self._take("add", values, weight, unless)
        for name, value in values.items():
            counts = unless is None or not isinstance(value, Tensor)  # else it is known when it is fetched
            self._weights[name] = (self._weights.get(name) or 0) + (weight if counts else 0)

    def count(self, values: Mapping[str, Tensor | float]) -> None:
        """Figures that are added up instead."""
        self._take("count", values, 1)
        self._weights.update(dict.fromkeys(values))

    def read(self, across: Callable[[Tensor], Tensor] | None = None) -> dict[str, float]:
        """Every mean and count since the last reading, then forgets. A mean over nothing is nan.

        across: adds a vector up over the ranks (an all_reduce). All ranks must have named the same figures
        in the same order.
        """
        self._fetch()
        weights, host, device = self._weights, self._host, self._device
        self._reset()
        flat = [host.get(name, 0.0) + device.get(name, 0.0) for name in weights]
        flat += [weight or 0.0 for weight in weights.values()]
        if across is not None:
            precision = _precision(self._place)
            flat = across(torch.tensor(flat, dtype=precision, device=self._place)).tolist()
        totals, over = flat[: len(weights)], flat[len(weights) :]
        return {
            name: total if weight is None else total / whole if whole else math.nan
            for (name, weight), total, whole in zip(weights.items(), totals, over, strict=True)
        }

    def state(self) -> dict[str, Any]:
        """What was added so far, for a checkpoint: plain values, every bit kept. Waits for the device."""
        self._fetch()
        return {"weights": dict(self._weights), "host": dict(self._host), "device": dict(self._device)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on adding where `state` was taken."""
        self._reset()
        self._weights, self._host = dict(state["weights"]), dict(state["host"])
        self._device = dict(state.get("device", {}))
        for names, sums in zip(state.get("names", ()), state.get("sums", ()), strict=True):
            for name, value in zip(names, sums, strict=True):  # as checkpoints had it at first
                self._device[name] = self._device.get(name, 0.0) + value

    def _fetch(self) -> None:
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        vectors = [vector for _, parts in waiting for _, vector in parts]
        devices = (vector.device for vector in vectors)
        self._place = next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
        # vectors are float32 or float64; together they are of the wider one, which holds every bit
        values = iter(torch.cat([vector.to(self._place) for vector in vectors]).tolist())
        sums = self._device
        for weight, parts in waiting:
            found = {name: next(values) for names, _ in parts for name in names}
            unless = found.pop(_UNLESS, None)
            if unless:
                continue
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + value * weight
                if unless is not None:
                    self._weights[name] = (self._weights[name] or 0) + weight

    @torch.no_grad()
    def _take(
        self, verb: str, values: Mapping[str, Tensor | float], weight: float, unless: Tensor | None = None
    ) -> None:
        self._check(verb, values)
        if not weight:
            return
        on_device: dict[torch.device, dict[str, Tensor]] = {}
        for name, value in values.items():
            if isinstance(value, Tensor):
                on_device.setdefault(value.device, {})[name] = value
            else:
                self._host[name] = self._host.get(name, 0.0) + float(value) * weight
        if unless is not None and on_device:
            on_device.setdefault(unless.device, {})[_UNLESS] = unless
        parts = [(tuple(held), _copied([*held.values()], place)) for place, held in on_device.items()]
        if parts:
            self._waiting.append((weight, parts))

    def _check(self, verb: str, values: Mapping[str, Tensor | float]) -> None:
        problems = []
        for name, value in values.items():
            if isinstance(value, Tensor):
                if value.numel() != 1 or value.is_complex():
                    shape = tuple(value.shape)
                    problems.append(f"{name!r} is {value.dtype} of shape {shape}; one real number")
            elif not _is_number(value):
                problems.append(f"{name!r} is {type(value).__name__}; a number, or a tensor of one number")
            if (self._weights.get(name, 0) is None) is (verb == "add") and name in self._weights:
                problems.append(f"{name!r} was a {'count' if verb == 'add' else 'mean'} before")
        if problems:
            raise UsageError(f"Meter.{verb}(…) cannot take these figures:", problems=problems)


class Window:
    """Time and rows of the steps since the last line."""

    def __init__(self, steps_before: int = 0) -> None:
        self.steps_before = steps_before
        self.rows = 0
        self.waited = 0.0
        """Seconds waited for batches."""
        self.away = 0.0
        """Seconds of evaluations and saves, which are no time of the steps."""
        self._began = time.perf_counter()

    def wall(self) -> float:
        """Seconds of the steps."""
        return max(1e-9, time.perf_counter() - self._began - self.away)


def _is_number(value: object) -> bool:
    return isinstance(value, Real)  # numpy's numbers are, tensors are not


def _precision(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _copied(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """One vector of them all: one kernel for figures of float32, which most are."""
    if all(t.dtype == torch.float32 for t in tensors):
        return torch.stack([t if t.dim() == 0 else t.reshape(()) for t in tensors])
    # stacking would round a large count to a float32
    return torch.stack([t.reshape(()).to(_precision(device)) for t in tensors])
