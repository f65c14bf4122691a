"""What reading gives back: `Batch` (named fields of rows) and `Ragged` (rows of different lengths)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from frostline.errors import UsageError


@dataclass(frozen=True, eq=False)
class Ragged:
    """Rows of different lengths, laid end to end: row `i` is `values[offsets[i]:offsets[i + 1]]`.

    >>> r = Ragged(torch.tensor([1, 2, 3, 4, 5]), torch.tensor([0, 2, 5]))
    >>> r.padded(value=-1).tolist()
    [[1, 2, -1], [3, 4, 5]]
    >>> [row.tolist() for row in r]
    [[1, 2], [3, 4, 5]]
    """

    values: Tensor
    offsets: Tensor

    def __len__(self) -> int:
        return self.offsets.numel() - 1

    def __getitem__(self, i: int) -> Tensor:
        n = len(self)
        if not -n <= i < n:
            raise IndexError(f"row {i} of a Ragged with {n} rows")
        i %= n
        return self.values[int(self.offsets[i]) : int(self.offsets[i + 1])]

    def __iter__(self) -> Iterator[Tensor]:
        bounds = self.offsets.tolist()
        for start, stop in pairwise(bounds):
            yield self.values[start:stop]

    @property
    def lengths(self) -> Tensor:
        return self.offsets[1:] - self.offsets[:-1]

    def part(self, start: int, stop: int) -> Ragged:
        """Rows start … stop − 1, without a copy of the values."""
        first, last = self.offsets[[start, stop]].tolist()
        return Ragged(self.values[first:last], self.offsets[start : stop + 1] - first)

    def padded(self, value: float = 0, multiple: int = 1, side: Literal["left", "right"] = "right") -> Tensor:
        """One dense tensor `[rows, longest, …]`; the length is rounded up to a multiple of `multiple`."""
        if multiple < 1:
            raise ValueError(f"multiple must be at least 1, got {multiple}")
        if side not in ("left", "right"):
            raise ValueError(f"side must be 'left' or 'right', got {side!r}")
        lengths = self.lengths
        longest = int(lengths.max()) if len(self) else 0
        width = -(-longest // multiple) * multiple
        out = self.values.new_full((len(self), width, *self.values.shape[1:]), value)
        row = torch.repeat_interleave(torch.arange(len(self), device=lengths.device), lengths)
        column = torch.arange(self.values.shape[0], device=lengths.device) - self.offsets[:-1][row]
        if side == "right":
            out[row, column] = self.values
        else:
            out[row, column + (width - lengths)[row]] = self.values
        return out

    def nested(self) -> Tensor:
        """The same rows as torch's jagged nested tensor (no copy)."""
        nested: Tensor = torch.nested.nested_tensor_from_jagged(self.values, self.offsets)
        return nested

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Ragged:
        return Ragged(
            self.values.to(device, non_blocking=non_blocking),
            self.offsets.to(device, non_blocking=non_blocking),
        )


class Batch(dict[str, Any]):
    """Named fields of several rows: tensors `[rows, …]`, `Ragged`, or lists for strings, bytes and JSON.

    `keys_of_rows` names the rows; it is worked out when first asked for. (`keys()` is dict's: the field
    names.)
    """

    def __init__(
        self, fields: dict[str, Any], keys: Sequence[str] | Callable[[], list[str]] | None = None
    ) -> None:
        super().__init__(fields)
        self._keys = keys

    @property
    def keys_of_rows(self) -> list[str]:
        if self._keys is None:
            raise UsageError(
                "This batch was made anew from its fields by another library, and its keys are lost: read "
                "keys_of_rows before that, or move it with batch.to(device)."
            )
        if callable(self._keys):
            self._keys = self._keys()
        return list(self._keys)

    @property
    def n_rows(self) -> int:
        """Rows of the batch; of its first part, where it has several (as an episode has)."""
        first: Any = next(iter(self.values()), [])
        return first.n_rows if isinstance(first, Batch) else len(first)

    def part(self, start: int, stop: int) -> Batch:
        """Rows start … stop − 1, without a copy; a ragged field on a GPU costs a look at its offsets."""
        if any(isinstance(value, Batch) for value in self.values()):
            raise TypeError("a batch of several parts has no rows of its own that could be taken")
        rows = {n: v.part(start, stop) if isinstance(v, Ragged) else v[start:stop] for n, v in self.items()}
        return Batch(rows, lambda: self.keys_of_rows[start:stop])

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """The same rows on a device, with their keys; what Lightning and Accelerate call."""
        moved = {
            n: v.to(device, non_blocking=non_blocking) if isinstance(v, Tensor | Ragged | Batch) else v
            for n, v in self.items()
        }
        return Batch(moved, self._keys)

    def __reduce__(self) -> tuple[Any, ...]:
        return (Batch, (dict(self), None if self._keys is None else self.keys_of_rows))


def handed(batch: Batch) -> Batch:
    """The same rows for a loss that may take fields out, or put others in: the step may need it again."""
    fields = {name: handed(value) if isinstance(value, Batch) else value for name, value in batch.items()}
    return Batch(fields, batch._keys)


def copied(batch: Batch) -> Batch:
    """In memory of its own, for a loss that writes into it, as one that masks tokens does."""
    fields: dict[str, Any] = {}
    for name, value in batch.items():
        if isinstance(value, Batch):
            value = copied(value)
        elif isinstance(value, Ragged):
            value = Ragged(value.values.clone(), value.offsets)
        fields[name] = value.clone() if isinstance(value, Tensor) else value
    return Batch(fields, batch._keys)


def written(batch: Batch) -> bool:
    """Whether something was written into a batch that was copied; parts of it count as they share memory."""
    held = (value.values if isinstance(value, Ragged) else value for value in batch.values())
    return any(
        written(value) if isinstance(value, Batch) else isinstance(value, Tensor) and value._version > 0
        for value in held
    )
