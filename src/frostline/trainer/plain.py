"""Values of Python as JSON, exactly, and back; tensors among them are taken out under a name of their own.

JSON knows neither tuples, nor infinities, nor keys that are not strings. These become an object of one
marked entry: {"$tuple": […]}, {"$float": "nan"}, {"$items": [[key, value], …]}, {"$tensor": name}.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from frostline.errors import CheckpointError


class Plain:
    """Takes values apart. What cannot be kept is gathered in `problems`, to be told at once.

    >>> plain = Plain()
    >>> plain.of({"betas": (0.9, 0.999), "best": float("inf"), "step": torch.tensor(3.0)}, "adam")
    {'betas': {'$tuple': [0.9, 0.999]}, 'best': {'$float': 'inf'}, 'step': {'$tensor': 'adam/step'}}
    >>> plain.tensors
    {'adam/step': tensor(3.)}
    """

    def __init__(self, *, tensors: bool = True) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.problems: list[str] = []
        self._allowed = tensors

    def of(self, value: Any, place: str) -> Any:
        """`value` as JSON; `place` names it in problems, and its tensors."""
        if value is None or isinstance(value, str | bool):
            return value
        if isinstance(value, np.generic):
            return self.of(value.item(), place)
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
        if isinstance(value, Mapping):
            return self._mapping(value, place)
        if isinstance(value, list):
            return [self.of(v, f"{place}/{i}") for i, v in enumerate(value)]
        if type(value) is tuple:
            return {"$tuple": [self.of(v, f"{place}/{i}") for i, v in enumerate(value)]}
        if isinstance(value, Tensor | np.ndarray) and self._allowed:
            return self._array(value, place)
        self.problems.append(f"{place}: a {type(value).__qualname__} cannot be kept in a checkpoint")
        return None

    def _mapping(self, value: Mapping[Any, Any], place: str) -> dict[str, Any]:
        if all(isinstance(k, str) for k in value) and not any(k.startswith("$") for k in value):
            return {k: self.of(v, f"{place}/{k}") for k, v in value.items()}
        return {"$items": [[self.of(k, place), self.of(v, f"{place}/{k}")] for k, v in value.items()]}

    def _array(self, value: Tensor | np.ndarray[Any, Any], place: str) -> dict[str, str]:
        """Under its place; one that is taken (keys 1 and "1") gets a number."""
        name, n = place, 1
        while name in self.tensors:
            name, n = f"{place}~{n}", n + 1
        if isinstance(value, Tensor):
            self.tensors[name] = value.detach()
            return {"$tensor": name}
        try:
            self.tensors[name] = torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape).copy())
        except TypeError:
            self.problems.append(f"{place}: an array of {value.dtype} cannot be kept in a checkpoint")
        return {"$array": name}

    def refuse(self, message: str) -> None:
        if self.problems:
            raise CheckpointError(message, problems=self.problems)


def whole(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `Plain.of` took apart.

    >>> whole({"betas": {"$tuple": [0.9, 0.999]}, "worst": {"$float": "-inf"}}, {})
    {'betas': (0.9, 0.999), 'worst': -inf}
    """
    if isinstance(value, list):
        return [whole(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not (mark := next(iter(value))).startswith("$"):
        return {k: whole(v, tensors) for k, v in value.items()}
    inner = value[mark]
    match mark:
        case "$tuple":
            return tuple(whole(v, tensors) for v in inner)
        case "$float":
            return float(inner)
        case "$items":
            return {whole(k, tensors): whole(v, tensors) for k, v in inner}
        case "$tensor" | "$array" if inner in tensors:
            return tensors[inner] if mark == "$tensor" else tensors[inner].numpy()
        case "$tensor" | "$array":
            raise CheckpointError(f"The checkpoint names a tensor {inner!r} that is not in it.")
    raise CheckpointError(
        f"The checkpoint has a value of the kind {mark!r}, which this version does not know."
    )
