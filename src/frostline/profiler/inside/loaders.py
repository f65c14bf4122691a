"""DataLoaders: what a script waits for them, what they hand out, and what their workers take.

In the script's process `__next__` is wrapped. What a worker takes is written by the worker itself, a line a
batch, into a file of its own: workers end without a word.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import operator
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch.utils.data
from torch import Tensor
from torch.utils.data import dataloader
from torch.utils.data._utils import fetch

from .batches import again, half, n_rows, tensors
from .epochs import Epochs
from .made import Made, length
from .patches import Patches

Decoded = list[Any]
About = dict[str, Any]
_EMPTY: About = {
    "workers": 0, "calls": 0, "wait_s": 0.0, "batch_size": None, "pinned": False, "items": 0, "repeats": 0,
    "batches": None, "samples": None, "kept": None, "as": None, "steps": 0, "now": 0, "there": None,
    "made": None, "anew": 0, "persistent": False, "ending": 0.0, "aside": 0, "missed": 0, "given": 0,
}  # fmt: skip
_SCRIPT: dict[str, Any] = {"dataset": "the script itself", "start": -1.0, "s": 0.0, "n": 0}
_PRIVATE = ("known", "kept", "steps", "now", "each", "as", "there", "made", "ending", "missed", "given")
_MOST_ITEMS = 4_000_000
"""Items of a data set whose numbers are remembered."""
_MOST_UNCOUNTED = 1_000_000
"""Items that wait to be counted; then it is done at once, as in scripts that only read."""
_AHEAD = 8
"""Steps without a batch after which a loader that another thread reads from is none of theirs: that thread
is now ahead of the steps, now behind."""
_MOST_STEPS = 0.75
"""Of all steps: a loader that fewer read from takes turns with another, or is read from between them."""
_MOST_AGAIN = 64
"""Times that a kept batch is handed out within a step: a loop that wants more waits for an epoch's end."""


class Loaders:
    """Watches all loaders of this process.

    told: called with (start, end, rows, whether a batch came) for everything that was waited for.
    """

    def __init__(self, folder: Path) -> None:
        self.told: Callable[[float, float, int, bool], None] | None = None
        self.ended: Callable[[], None] | None = None
        """Called where a loader has no batch left that has handed out one again."""
        self.handed = False
        """Whether a batch was handed out that the script would not have had."""
        self.spans: Any = None
        self.replay = ""
        """"replay", "compute" or "half": what was kept is handed out instead of new batches."""
        self.device = "cpu"
        """Where it lies for "compute" and "half"."""
        self.keep = False
        self.begun = 0
        """Iterators made so far: an epoch begins."""
        self.seen: dict[Any, About] = {}
        self.decodes: list[Decoded] = []
        """[what, key, start, seconds, bytes (0: unknown)] since the last batch was prepared here."""
        self._own: list[Decoded] = []
        """Those of the script itself, between the batches of a step."""
        self._asked: list[tuple[About, set[Any], tuple[Any, ...]]] = []
        """Items that are not counted yet: whose, what had been asked for before, and which."""
        self._uncounted = 0
        self._epochs = Epochs()
        self.prepared: list[dict[str, Any]] = []
        """What this process prepared itself: loaders without workers."""
        self._folder, self._always, self._next = folder, Patches(), Patches()
        self._within, self._steps, self._watching = threading.local(), 0, False
        self._original: Any = dataloader._BaseDataLoaderIter.__next__

    def install(self) -> None:
        base: Any = dataloader._BaseDataLoaderIter
        begin, reset, index = base.__init__, base._reset, base._next_index

        def __init__(iterator: Any, loader: Any) -> None:
            begin(iterator, loader)
            iterator._frostline = self._about(loader, iterator)
            self._begins(iterator)

        def _reset(iterator: Any, loader: Any, first_iter: bool = False) -> None:
            reset(iterator, loader, first_iter)
            if not first_iter:  # workers that stay: one iterator for all epochs
                iterator._frostline_over = False
                self._begins(iterator)

        def _next_index(iterator: Any) -> Any:
            try:
                found = index(iterator)
            except StopIteration:
                iterator._frostline_over = True
                raise
            self._items(iterator, found)
            return found

        self._always.set(dataloader._BaseDataLoaderIter, "__init__", __init__)
        self._always.set(dataloader._BaseDataLoaderIter, "_reset", _reset)
        self._always.set(dataloader._BaseDataLoaderIter, "_next_index", _next_index)
        for kind in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
            self._always.set(kind, "fetch", self._fetching(kind.fetch))
        self.watch(True)

    def _fetching(self, get: Any) -> Any:
        def fetched(fetcher: Any, possibly_batched_index: Any) -> Any:
            before, self.decodes = self.decodes, []
            nested, self._within.fetch = getattr(self._within, "fetch", False), True
            began = time.perf_counter()
            try:
                batch = get(fetcher, possibly_batched_index)
                self._prepared(fetcher, possibly_batched_index, began, time.perf_counter() - began)
            finally:
                self._within.fetch = nested
                if nested:  # a loader that reads from a loader goes on where it was
                    self.decodes[:0] = before
                elif torch.utils.data.get_worker_info() is None:
                    self._own += before
            return batch

        return fetched

    def _begins(self, iterator: Any) -> None:
        self.begun += 1
        if (about := getattr(iterator, "_frostline", None)) is not None:
            about["given"] = 0
            self._epochs.begins(iterator, about)

    def watch(self, on: bool) -> None:
        """Waiting is measured, or not."""
        self._next.undo()
        self._watching = on
        if on:
            original = self._original

            def __next__(iterator: Any) -> Any:
                return self._waited(iterator, original)

            self._next.set(dataloader._BaseDataLoaderIter, "__next__", __next__)

    def uninstall(self) -> None:
        self._next.undo()
        self._always.undo()
        for about in self.seen.values():
            about["kept"] = about["there"] = None

    # in the script's process

    def watched(self, name: str, batches: Iterable[Any], *, rows: Callable[[Any], int]) -> Iterator[Any]:
        """The same batches; waiting for each counts like waiting for a DataLoader."""
        about = self.seen.setdefault(-1, _new(dataset=name, persistent=True))  # threads
        source, first = iter(batches), True
        while True:
            began, spans = time.perf_counter(), self.spans
            place = spans.enter("data", "waiting for data") if spans is not None else -1
            try:
                batch = next(source, None)
            finally:
                if spans is not None:
                    spans.leave(place)
            if batch is None:
                return
            ended = time.perf_counter()
            self._count(about, began, ended, rows(batch), True)
            if first:
                self._epochs.came(about)
            first = False
            yield batch

    def _waited(self, iterator: Any, original: Any) -> Any:
        if getattr(self._within, "one", False):  # a loader that reads from a loader
            return original(iterator)
        about = getattr(iterator, "_frostline", None) or _new()
        spans, self._within.one = self.spans, True
        place = spans.enter("data", "waiting for data") if spans is not None else -1
        began = time.perf_counter()
        came, rows = False, 0
        try:
            batch = self._again(about) if self.replay else None
            self.handed = self.handed or batch is not None
            batch = original(iterator) if batch is None else batch
            came, rows = True, n_rows(batch)
        except StopIteration:
            iterator._frostline_over = True
            about["ending"] = time.perf_counter() - began
            if self.handed and self.ended is not None:
                self.ended()
            raise
        finally:
            self._within.one = False
            ended = time.perf_counter()
            if spans is not None:
                spans.leave(place)
            self._count(about, began, ended, rows, came)
        if self.keep and rows > n_rows(about["kept"]):
            # one for all: memory that is held a step longer, again and again, is never the same twice
            about["kept"], about["as"] = batch, _versions(batch)
        return batch

    def _count(self, about: About, began: float, ended: float, rows: int, came: bool) -> None:
        about["calls"] += came
        about["given"] += came
        about["now"] += came
        about["aside"] += came and self._epochs.aside
        about["wait_s"] += ended - began
        if self.told is not None:
            self.told(began, ended, rows, came)

    def _again(self, about: About) -> Any:
        """The batch that was kept of a loader which every step reads from; None: it goes on as it would."""
        if not _ready(about) or about["now"] > _MOST_AGAIN:
            return None
        if self.replay == "replay":
            return again(about["kept"])
        there = self._there(about)
        return again(there) if self.replay == "compute" else half(there)

    def _there(self, about: About) -> Any:
        """The kept batch on the device; anew where a step wrote into it."""
        held = about["there"]
        if held is None or held[1] != _versions(held[0]):
            batch = again(about["kept"], self._moved)
            held = about["there"] = batch, _versions(batch)
        return held[0]

    def _moved(self, leaf: Any) -> Any:
        return leaf.to(self.device) if isinstance(leaf, Tensor) else leaf

    def step(self) -> None:
        """A step ended: loaders that gave it a batch are those that it reads from."""
        if self._own or self.decodes:  # by the script itself, outside of every loader
            self.prepared.append({**_SCRIPT, "decodes": [*self._own, *self.decodes]})
            self._own.clear()
            self.decodes.clear()
        self._epochs.step()
        if not self._watching:
            return
        self._steps += 1
        for about in self.seen.values():
            about["missed"] = 0 if about["now"] else about["missed"] + 1
            if about["missed"] > (_AHEAD if about["aside"] else 0):
                about["steps"] = 0
            if about["now"]:
                about["steps"] += 1
                about["each"][about["now"]] += 1
            about["now"] = 0

    def left(self) -> float:
        """Batches that are yet to come, of the loader of which the fewest are among those that steps read
        from; no end where that is not known."""
        return min((a["batches"] - a["given"] for a in self._sized()), default=math.inf)

    def over_again(self) -> bool:
        """Whether one of these has begun anew."""
        return any(a["calls"] > a["batches"] for a in self._sized())

    def _sized(self) -> list[About]:
        return [a for a in self.seen.values() if a["steps"] and a["batches"]]

    def replayable(self, how: str) -> bool:
        """Whether there is a batch to hand out again, or half of one."""
        kept = [about["kept"] for about in self.seen.values() if _ready(about)]
        return any(n_rows(batch) and (how != "half" or half(batch) is not None) for batch in kept)

    def _about(self, loader: Any, iterator: Any) -> About:
        """What is known of a loader; one record for all its epochs, also where each makes it anew."""
        made, data = Made(loader, iterator), loader.dataset
        held = [about for about in self.seen.values() if about["made"] is not None]
        alike = [about for about in held if about["made"].looks == made.looks and about["made"].over]
        found = next((about for about in held if about["made"].by(loader)), None)
        found = found or next((about for about in alike if about["made"].reads(data)), None)
        if found is None:
            # other data; what looks like a loader that is gone, as in the next fold, goes on in its place
            found = next((about for about in alike if about["made"].gone), None)
            if found is None:
                found = self.seen[len(self.seen)] = _new(
                    dataset=type(data).__name__, workers=loader.num_workers, batch_size=made.size,
                    pinned=bool(loader.pin_memory), batches=length(loader), samples=length(data),
                    persistent=bool(loader.persistent_workers),
                )  # fmt: skip
            else:
                found |= {"kept": None, "as": None, "there": None, "steps": 0, "anew": found["anew"] + 1}
            found["known"] = next((a["known"] for a in held if a["made"].reads(data)), set())
        found["made"] = made
        return found

    def _items(self, iterator: Any, index: Any) -> None:
        """Which items of a data set are asked for. They are counted between the blocks of steps: thousands of
        them a batch would be felt."""
        about = getattr(iterator, "_frostline", None)
        if about is None or index is None or len(about["known"]) > _MOST_ITEMS:
            return
        items = tuple(index) if isinstance(index, list | tuple) else (index,)
        self._asked.append((about, about["known"], items))
        self._uncounted += len(items)
        if self._uncounted > _MOST_UNCOUNTED:
            self.count_items()

    def count_items(self) -> None:
        """Exact, as items have numbers; those of a sampler of something else are left out."""
        asked, self._asked, self._uncounted = self._asked, [], 0
        for about, known, items in asked:
            names = _names(items)
            fresh = {*names} - known
            about["items"] += len(names)
            about["repeats"] += len(names) - len(fresh)
            known |= fresh

    def summary(self) -> list[dict[str, Any]]:
        self.count_items()
        return [
            {n: v for n, v in about.items() if n not in _PRIVATE} | {"a_step": self._a_step(about)}
            for about in self.seen.values()
        ]

    def _a_step(self, about: About) -> float:
        """Batches a step: the usual number of a loader that most steps read from. An evaluation now and then
        is no part of a step, and a loop that fetches ahead has two batches in one and none in another."""
        (usual, _), *_ = about["each"].most_common(1) or [(0, 0)]
        seldom = sum(about["each"].values()) < _MOST_STEPS * self._steps
        return sum(n * k for n, k in about["each"].items()) / max(1, self._steps) if seldom else float(usual)

    # in the process that prepares

    def decoded(self, what: str, key: str, start: float, seconds: float, size: int = 0) -> None:
        self.decodes.append([what, key, start, seconds, size])

    def _prepared(self, fetcher: Any, index: Any, began: float, seconds: float) -> None:
        n = len(index) if isinstance(index, list | tuple) else 1
        line = {
            "dataset": type(fetcher.dataset).__name__, "start": began, "s": seconds, "n": n,
            "decodes": [*self.decodes],
        }  # fmt: skip
        self.decodes.clear()
        if torch.utils.data.get_worker_info() is None:
            self.prepared.append(line)
            return
        line["of"] = _parent()
        path = self._folder / f"worker-{os.getpid()}.jsonl"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(fd, (json.dumps(line) + "\n").encode())
        finally:
            os.close(fd)


def _parent() -> int:
    """The process whose loader this worker belongs to; a server may have forked it."""
    parent = multiprocessing.parent_process()
    return os.getppid() if parent is None or parent.pid is None else parent.pid


def _versions(batch: Any) -> list[int]:
    return [t._version for t in tensors(batch) if not t.is_inference()]


def _names(items: tuple[Any, ...]) -> tuple[Any, ...]:
    """Items by what tells them apart; none where that is no number or string.

    >>> _names((1, "a")), _names((torch.tensor(2), 3)), _names((0.5,))
    ((1, 'a'), (2, 3), ())
    """
    if {*map(type, items)} <= {int, str}:
        return items
    try:
        return tuple(item if isinstance(item, str) else operator.index(item) for item in items)
    except TypeError:
        return ()


def _ready(about: About) -> bool:
    """Whether a loader's batch can be handed out again: steps read from it, and did not write into it."""
    kept = about["kept"]
    return kept is not None and about["steps"] >= 2 and _versions(kept) == about["as"]


def _new(**known: Any) -> About:
    return {**_EMPTY, "known": set(), "each": Counter(), "starts": [], **known}
