"""Which loader is which: by what it is, not by what it looks like. Nothing is kept alive by knowing it."""

from __future__ import annotations

import weakref
from typing import Any


class Made:
    """A loader, the data set it reads and the iterator that it made last.

    >>> from torch.utils.data import DataLoader
    >>> files = ["a", "b", "c"]
    >>> first, other = DataLoader(files), DataLoader(["a", "b", "c"])
    >>> made = Made(first, iter(first))
    >>> made.by(first), made.by(other), made.reads(files), made.reads(["a", "b", "c"]), made.over
    (True, False, True, False, False)
    """

    def __init__(self, loader: Any, iterator: Any) -> None:
        data, sampler = loader.dataset, loader.batch_sampler
        self.size = loader.batch_size or getattr(sampler, "batch_size", None)
        self.looks = (type(data), loader.num_workers, self.size, length(loader), type(loader.sampler))
        """The same for a loader that is made anew, an epoch or a fold later."""
        self._loader, self._iterator = weakref.ref(loader), weakref.ref(iterator)
        self._data, self._name = _weakly(data), _name(data)

    def by(self, loader: Any) -> bool:
        return self._loader() is loader

    def reads(self, data: Any) -> bool:
        return self._name == _name(data) if self._data is None else self._data() is data

    @property
    def over(self) -> bool:
        """Nobody can ask it for a batch any more: another that looks like it takes its place."""
        iterator = self._iterator()
        return self._loader() is None and (iterator is None or getattr(iterator, "_frostline_over", False))

    @property
    def gone(self) -> bool:
        """And its data set is no more, as far as can be told."""
        return self.over and (self._data is None or self._data() is None)


def length(thing: Any) -> int | None:
    try:
        return len(thing)
    except (TypeError, NotImplementedError):
        return None


def _weakly(data: Any) -> Any:
    try:
        return weakref.ref(data)
    except TypeError:  # a list: by its name
        return None


def _name(data: Any) -> tuple[int, ...]:
    """Of a data set that cannot be held weakly. Where it lies is not enough: a later one may lie there."""
    ends = [data[0], data[-1]] if isinstance(data, list | tuple) and data else []
    return id(data), length(data) or 0, *map(id, ends)
