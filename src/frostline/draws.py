"""`Draws`: random numbers for a stage that takes many samples a call, one stream for each row.

A row's numbers are a function of (seed, epoch, sample key, stage) and of how many draws its stage made
before: not of its batch, its chunk, its rank or its device. See `keyed.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from frostline import keyed
from frostline.errors import UsageError

_LARGE = 1 << 16
"""From so many numbers on a GPU makes its own words: integer arithmetic, so the bits are the same."""
_WORD = 1 << 32


class Draws:
    """What a random stage with chunks is given as `rng=`. Every call draws new numbers.

    >>> rng = Draws(seed=0, epoch=3, keys=["a", "b"], stage="flip")
    >>> first, second = rng.uniform(), rng.uniform()
    >>> first.shape, bool((first != second).all())
    (torch.Size([2]), True)
    >>> Draws(0, 3, ["b"], "flip").uniform().item() == first[1].item()
    True

    `rng[i]` is a numpy Generator of row i's own, for all that is not here; it goes on from call to call. The
    tensors lie on the stage's device, unless another one is named.
    """

    def __init__(
        self, seed: int, epoch: int, keys: Sequence[str], stage: str, *, device: torch.device | str = "cpu"
    ) -> None:
        self.device = torch.device(device)
        self._names = (seed, epoch, stage)
        self._keys = list(keys)
        self._ids = keyed.derive_many(seed, epoch, self._keys, stage)
        self._generators: dict[int, np.random.Generator] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, i: int) -> np.random.Generator:
        """The numpy Generator of a row: the one that a stage of single samples gets for this key."""
        n = len(self)
        if not -n <= i < n:
            raise IndexError(f"row {i} of {n}")
        i %= n
        if i not in self._generators:
            seed, epoch, stage = self._names
            self._generators[i] = keyed.generator(seed, epoch, self._keys[i], stage)
        return self._generators[i]

    def uniform(self, *shape: int, device: torch.device | str | None = None) -> Tensor:
        """float32 `[rows, *shape]` in [0, 1): the same bits on any device."""
        words = self._words(shape, device)
        return ((words >> 8).to(torch.float32) * 2.0**-24).view(len(self), *shape)

    def normal(self, *shape: int, device: torch.device | str | None = None) -> Tensor:
        """float32 `[rows, *shape]` of mean 0 and deviation 1, from two words each (Box and Muller).

        Logarithms differ in their last bits between devices, and so do these numbers.
        """
        words = self._words((2, *shape), device).view(len(self), 2, math.prod(shape))
        # float64 where it was made: in float32 the smallest words would round to log(0) or repeat
        if words.device.type == "cuda":
            u, angle = (words[:, 0] + 1).double() / _WORD, words[:, 1].double() * (2 * math.pi / _WORD)
            return ((-2 * u.log()).sqrt() * angle.cos()).float().view(len(self), *shape)
        whole = words.cpu().numpy()
        radius = np.sqrt(-2 * np.log((whole[:, 0] + 1.0) / _WORD))
        found = (radius * np.cos(whole[:, 1] * (2 * math.pi / _WORD))).astype(np.float32)
        return torch.from_numpy(found).view(len(self), *shape).to(words.device)

    def integers(self, low: int, high: int, *shape: int, device: torch.device | str | None = None) -> Tensor:
        """int64 `[rows, *shape]` from low up to high - 1: the same bits on any device."""
        width = high - low
        if not 0 < width <= _WORD:
            raise UsageError(
                f"rng.integers({low}, {high}): expected low below high, and at most 2**32 numbers between."
            )
        words = self._words((2, *shape), device).view(len(self), 2, math.prod(shape))
        top, rest = words[:, 0], words[:, 1]
        # 64 random bits times width, of which the upper ones count: uneven by less than 1 in 2**32
        spill = (rest * width) >> 32 & (_WORD - 1)
        upper = _upper(top, width, spill)
        return (upper + low).view(len(self), *shape)

    def _words(self, shape: tuple[int, ...], device: torch.device | str | None) -> Tensor:
        """`[rows, prod(shape)]` new random 32-bit words in int64; the streams go on."""
        where = self.device if device is None else torch.device(device)
        n = math.prod(shape)
        self._ids = keyed.children(self._ids, 1)[:, 0]
        if where.type == "cuda" and n * len(self) >= _LARGE:
            return self._words_on(where, n)
        return _sent(keyed.words(self._ids, n).astype(np.int64), where)

    def _words_on(self, device: torch.device, n: int) -> Tensor:
        """`keyed.words` with torch, where the numbers are wanted: a copy of large noise would take longer."""
        low, high = (self._ids & np.uint64(_WORD - 1)), self._ids >> np.uint64(32)
        key = [_sent(part.astype(np.int64)[:, None], device) for part in (low, high)]
        blocks = torch.arange((n + 3) // 4, device=device)[None, :]
        zero = torch.zeros((1, 1), dtype=torch.int64, device=device)
        four = torch.stack(keyed.philox((blocks, zero, zero, zero), (key[0], key[1])), dim=-1)
        return four.reshape(len(self), -1)[:, :n]


def _sent(array: NDArray[np.int64], device: torch.device) -> Tensor:
    """On the device; a GPU is not waited for, as it would be with memory that is not page-locked."""
    here = torch.from_numpy(array)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here.to(device)


def _upper(top: Tensor, width: int, spill: Tensor) -> Tensor:
    """(top · width + spill) >> 32 for 32-bit words: by halves of top, so that nothing passes 2**63."""
    high, low = top >> 16, top & 0xFFFF
    carried = low * width + spill  # below 2**49
    return (high * width + (carried >> 16)) >> 16
