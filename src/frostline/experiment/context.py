"""`Context`: what an experiment is given."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any, TypeVar

import torch

from frostline.errors import UsageError
from frostline.experiment.feeds import Feeds
from frostline.experiment.progress import Progress
from frostline.experiment.units import Units
from frostline.signals import Signals
from frostline.supply import Supply
from frostline.workload import Workload

T = TypeVar("T")


class Stopped(BaseException):
    """The experiment was asked to stop, between two units. No Exception: an experiment must not catch it."""


class Context:
    """What `run(ctx)` of a workload gets: its data, a folder, and units that are computed once.

    >>> import frostline as fl, tempfile
    >>> from frostline.experiment import run
    >>> def squares(ctx):
    ...     found = [ctx.once(f"square-{i}", lambda i=i: i * i) for i in ctx.progress(range(4))]
    ...     return {"sum": sum(found)}
    >>> done = run(fl.Workload(None, run=squares), out=tempfile.mkdtemp() + "/run", quiet=True)
    >>> done.value, done.made
    ({'sum': 14}, 4)

    out:        the run's folder; pictures and tables go there.
    device:     where it computes.
    parameters: the `key=value` that the workload was made with.
    workload, seed
    """

    def __init__(
        self,
        workload: Workload,
        out: Path,
        *,
        device: torch.device,
        seed: int,
        parameters: Mapping[str, Any],
        feeds: Feeds,
        progress: Progress,
        signals: Signals,
        until: float | None,
    ) -> None:
        self.workload, self.out, self.device, self.seed = workload, out, device, seed
        self.parameters = dict(parameters)
        self._feeds, self._progress, self._signals, self._until = feeds, progress, signals, until
        self._within = 0
        self._units = Units(out / "units", parameters=parameters, seed=seed, device=device, note=self.note)

    def feed(
        self,
        split: str | None = None,
        *,
        batch_size: int | None = None,
        workload: Workload | None = None,
        train: bool = False,
        live: bool = False,
    ) -> Supply:
        """Batches as evaluation gets them: from a store, which is made or completed first, or live.

        split:    whose samples; None: all.
        workload: whose data, if not this experiment's own: that of a model that is looked at.
        train:    True: shuffled, random stages draw anew each epoch.
        live:     True: from no store, whatever the call says; for a few samples that are not worth one.
        """
        whose = self.workload if workload is None else workload
        return self._feeds.feed(
            whose, split=split, batch_size=batch_size, train=train, seed=self.seed, live=live
        )

    def once(
        self,
        unit: str,
        fn: Callable[[], T],
        *,
        of: Mapping[str, Any] | None = None,
        files: Iterable[str | Path] = (),
    ) -> T:
        """fn(), computed once: killed and run again, the experiment finds its result and goes on after it.

        The result is kept in the run's folder: None, numbers, texts, lists, dicts, and tensors. Also the
        first time it is given back as a file holds it: tuples become lists, arrays tensors, all on the CPU.
        Random numbers of Python, numpy and torch are drawn from the run's seed and the unit's name.

        of: what the result depends on. A kept one that was made with other values is made again, with a word;
            default: all parameters of the workload. Code is not looked at: `--resume never` begins anew.
        files: what fn writes into `out` beside its result, as pictures. Where one is gone, it is made again.
        """
        if not callable(fn):
            raise UsageError(f"ctx.once({unit!r}, {fn!r:.60}): expected a function, as lambda: measure(3).")
        kept = self._units.kept(unit, of, [self.out / file for file in files])
        if kept is not None:
            value: T = kept.value
            return value
        self._stop_here(anyhow=True)
        self._within += 1
        try:
            made: T = self._units.make(unit, fn, of)
            return made
        finally:
            self._within -= 1

    def note(self, text: str) -> None:
        """A sentence on standard error, and in notes.txt of the run's folder."""
        self._progress.note(text)

    def progress(self, items: Iterable[T], *, what: str = "done", total: int | None = None) -> Iterator[T]:
        """The same items, with lines that say how far it is and how long the rest takes.

        Items whose units were all found are not counted for the time that is left. total: where items have
        no length.
        """
        n = len(items) if total is None and isinstance(items, Sized) else total
        spent, counted = 0.0, 0
        for i, item in enumerate(items):
            self._stop_here()
            self._progress.at(what, i, n, _left(spent, counted, n, i))
            began, made, found = time.monotonic(), self._units.made, self._units.found
            yield item
            if self._units.made > made or self._units.found == found:
                spent, counted = spent + time.monotonic() - began, counted + 1
        if n is not None:
            self._progress.at(what, n, n)
        self._progress.end()

    @property
    def counts(self) -> tuple[int, int]:
        """Units that were made, and that were found."""
        return self._units.made, self._units.found

    @property
    def why_stop(self) -> str | None:
        """What asks it to stop: a signal, or the time that this call may take."""
        if self._signals.why is not None:
            return self._signals.why
        return "the time limit" if self._until is not None and time.monotonic() >= self._until else None

    def _stop_here(self, *, anyhow: bool = False) -> None:
        """Between units; inside of one, only before another begins (anyhow): what is whole is kept."""
        if (anyhow or not self._within) and (why := self.why_stop) is not None:
            raise Stopped(why)


def _left(spent: float, counted: int, total: int | None, done: int) -> float | None:
    return (total - done) * spent / counted if counted and total is not None else None
