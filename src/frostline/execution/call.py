"""One stage, ready to be called: loaded, on its device, in its precision, in chunks of one size."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from frostline.errors import ChunkTooLarge, CompileFailed, FrostlineError, StageFailed
from frostline.execution.columns import Column, as_value, joined, padded, stack, unstorable
from frostline.stage import Lazy, Stage

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


Rng = Callable[[Sequence[str]], Any]
"""What a random stage draws from, for samples of these keys."""


class Ready:
    """A stage whose function is loaded. Called with columns; gives back columns.

    inference: False where a network is trained on what comes out: autograd refuses inference tensors.
    """

    def __init__(self, stage: Stage, device: torch.device, *, inference: bool = True) -> None:
        self.stage = stage
        self._without_gradients = torch.inference_mode if inference else torch.no_grad
        self.device = device if stage.on == "device" else torch.device("cpu")
        self.fn: Callable[..., Any] = stage.fn.get() if isinstance(stage.fn, Lazy) else stage.fn
        self.eager: nn.Module | None = None
        """The network without torch.compile, where it is run with it."""
        self.dtype = DTYPES[stage.precision] if stage.precision else None
        if isinstance(self.fn, nn.Module) and stage.on == "device":
            self.fn = self._placed(self.fn)

    def _placed(self, module: nn.Module) -> Callable[..., Any]:
        if self.dtype is not None:
            module = copy.deepcopy(module).to(self.dtype)  # the given one keeps its precision
        module = module.to(self.device)
        if not self.stage.compile:
            return module
        self.eager = module
        return torch.compile(module, dynamic=False)

    def one(self, key: str, values: Sequence[Any], rng: Rng | None = None) -> dict[str, Any]:
        """Call a stage that takes one sample."""
        extra = {} if rng is None else {"rng": rng([key])}
        try:
            with self._without_gradients():
                result = self.fn(*values, **extra)
        except (Exception, SystemExit) as e:  # exit() ends a sample, and not the program that asked for it
            raise StageFailed(self.stage.name, [key], described(e)) from e
        parts = self._parts(result, [key])
        return {name: self._dense(name, [key], as_value(value)) for name, value in parts.items()}

    def many(
        self, keys: Sequence[str], columns: Sequence[Column], rng: Rng | None = None
    ) -> dict[str, Column]:
        """Call a stage that takes chunks: as many calls as needed, each of the same size."""
        size = self.stage.chunk or 1
        pieces: dict[str, list[Column]] = {name: [] for name in self.stage.writes}
        for start in range(0, len(keys), size):
            some = keys[start : start + size]
            inputs = [column[start : start + size] for column in columns]
            # rows that fill up the last call are the last one again, with its draws
            filled = [*some, *[*some[-1:]] * (size - len(some))]
            extra = {} if rng is None else {"rng": rng(filled)}
            for name, column in self._chunk(some, inputs, size, extra).items():
                pieces[name].append(column[: len(some)])
        return {name: joined(found) for name, found in pieces.items()}

    def _chunk(
        self, keys: Sequence[str], columns: Sequence[Column], size: int, extra: dict[str, Any]
    ) -> dict[str, Column]:
        names = self.stage.reads
        inputs = [
            self._cast(padded(stack(self.stage.name, n, keys, c, self.device), size))
            for n, c in zip(names, columns, strict=True)
        ]
        try:
            with self._without_gradients():
                result = self.fn(*inputs, **extra)
        except torch.OutOfMemoryError as e:
            raise ChunkTooLarge(self.stage.name, size, str(e).splitlines()[0]) from e
        except (Exception, SystemExit) as e:
            if self._runs_eagerly(inputs, extra):
                raise CompileFailed(self.stage.name, described(e)) from e
            raise StageFailed(self.stage.name, keys, described(e)) from e
        parts = self._parts(result, keys)
        return {name: self._column(name, keys, value, size) for name, value in parts.items()}

    def _runs_eagerly(self, inputs: Sequence[Column], extra: dict[str, Any]) -> bool:
        """Whether it is torch.compile that fails, and not the network."""
        if self.eager is None:
            return False
        try:
            with self._without_gradients():
                self.eager(*inputs, **extra)
        except (Exception, SystemExit):  # noqa: BLE001 - the first error is the one that is raised
            return False
        return True

    def _cast(self, column: Column) -> Column:
        if self.dtype is not None and isinstance(column, Tensor) and column.is_floating_point():
            return column.to(self.dtype)
        return column

    def _dense(self, name: str, keys: Sequence[str], value: Any) -> Any:
        why = unstorable(name, value)
        if why is not None:
            raise StageFailed(self.stage.name, keys, why)
        return value

    def _column(self, name: str, keys: Sequence[str], value: Any, size: int) -> Column:
        value = self._dense(name, keys, as_value(value))
        if isinstance(value, tuple):
            value = list(value)
        if not isinstance(value, Tensor | list) or (isinstance(value, Tensor) and not value.ndim):
            wanted = f"expected a tensor [{size}, …] or a list of {size}"
            reason = f"it returned {type(value).__name__} for {name!r}; {wanted}"
            raise StageFailed(self.stage.name, keys, reason)
        if len(value) != size:
            got = f"tensor {list(value.shape)}" if isinstance(value, Tensor) else f"list of {len(value)}"
            reason = f"it returned a {got} for {name!r}, called with {size} samples; expected a row for each"
            raise StageFailed(self.stage.name, keys, reason)
        return value

    def _parts(self, result: Any, keys: Sequence[str]) -> dict[str, Any]:
        """What was returned, by the names of the fields."""
        names = self.stage.writes
        if isinstance(result, Mapping) and {*names} <= {*result} and (len(names) > 1 or len(result) == 1):
            return {name: result[name] for name in names}
        if len(names) == 1:
            return {names[0]: result}
        if isinstance(result, tuple | list) and len(result) == len(names):
            return dict(zip(names, result, strict=True))
        kind = type(result).__name__
        got = f"{kind} of {len(result)}" if hasattr(result, "__len__") else kind
        reason = f"it returned {got}; expected {len(names)} values: {', '.join(names)}"
        raise StageFailed(self.stage.name, keys, reason)


def described(error: BaseException) -> str:
    """An error in one line, as it stands in the quarantine list: its kind, unless it is one of ours."""
    text = " ".join(str(error).split())
    if isinstance(error, FrostlineError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
