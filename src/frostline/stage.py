"""What is computed from a sample's fields. So far: `Pick`, which reads only part of a row.

A picked read touches the bytes of its frames and no others: the indices are known before the read, because
they are a function of (seed, epoch, sample key, stage) and of nothing that happens at run time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from frostline import keyed
from frostline.errors import UsageError

Rows = NDArray[np.int64]
Eval = Literal["spread", "first", "random"]


@dataclass(frozen=True, init=False)
class Pick:
    """n of the entries along the first dimension of a field, the same for all its fields.

    >>> Pick("features", n=4).indices(0, 0, ["clip-7"], [24], train=False)
    array([[ 0,  8, 15, 23]])

    In training they are drawn at random without replacement, in ascending order, anew each epoch. In
    evaluation: "spread" evenly over the whole length with both ends (n=1: the middle), "first" n, or
    "random" as in training.
    """

    fields: tuple[str, ...]
    n: int
    axis: int
    eval: Eval

    def __init__(self, fields: str | Sequence[str], n: int, *, axis: int = 0, eval: Eval = "spread") -> None:
        names = (fields,) if isinstance(fields, str) else tuple(fields)
        problems = []
        if not names or len(set(names)) < len(names):
            problems.append(f"fields are {names}; name at least one, each once")
        if n < 1:
            problems.append(f"n is {n}; at least 1")
        if axis != 0:
            problems.append(f"axis is {axis}; only axis=0, the first dimension of a row, can be read in part")
        if eval not in get_args(Eval):
            problems.append(f"eval is {eval!r}; one of {', '.join(map(repr, get_args(Eval)))}")
        if problems:
            raise UsageError("Pick(...) cannot work:", problems=problems)
        for name, value in (("fields", names), ("n", n), ("axis", axis), ("eval", eval)):
            object.__setattr__(self, name, value)

    def indices(self, seed: int, epoch: int, keys: Sequence[str], lengths: ArrayLike, train: bool) -> Rows:
        """[B, n] ascending indices for samples whose first dimensions are lengths [B] (or one for all)."""
        sizes = np.broadcast_to(np.asarray(lengths, np.int64), (len(keys),))
        self._check(keys, sizes)
        if train or self.eval == "random":
            ids = keyed.derive_many(seed, epoch, keys, "pick/" + "/".join(self.fields))
            return keyed.choose(ids, self.n, sizes)
        if self.eval == "first":
            return np.tile(np.arange(self.n, dtype=np.int64), (len(keys), 1))
        return self._spread(sizes)

    def _spread(self, sizes: Rows) -> Rows:
        """The nearest to n evenly spaced points; in whole numbers, so that every machine rounds alike."""
        if self.n == 1:
            return (sizes // 2)[:, None]
        gaps = self.n - 1
        return (2 * np.arange(self.n) * (sizes[:, None] - 1) + gaps) // (2 * gaps)

    def _check(self, keys: Sequence[str], sizes: Rows) -> None:
        short = np.flatnonzero(sizes < self.n)
        if short.size:
            raise UsageError(
                f"Pick({', '.join(map(repr, self.fields))}, n={self.n}) needs rows at least that "
                f"long; {short.size} of these {len(keys)} are shorter. Lower n, or leave them out:",
                problems=[f"{keys[i]!r} has length {sizes[i]}" for i in short[:5]],
            )
