"""What stands between epochs: seen whenever a loader begins anew, whoever else is looking."""

from __future__ import annotations

import gc
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

from frostline.profiler.inside.loaders import Loaders


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> int:
        return i


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """It stands still but for what a test lets go by."""
    made = SimpleNamespace(now=50.0)
    for module in ("epochs", "loaders"):
        times = SimpleNamespace(perf_counter=lambda: made.now)
        monkeypatch.setattr(f"frostline.profiler.inside.{module}.time", times)
    return made


class Slow(DataLoader[Any]):
    """Takes two seconds to begin an epoch."""

    clock: SimpleNamespace

    def _get_iterator(self) -> Any:
        found = super()._get_iterator()
        self.clock.now += 2
        return found


def epochs(
    loaders: Loaders, loader: DataLoader[Any], n: int, between: Any = lambda: None
) -> list[list[float]]:
    for _ in range(n):
        for _ in loader:
            loaders.step()
        between()
    (about,) = loaders.summary()
    starts: list[list[float]] = about["starts"]
    return starts


@pytest.mark.parametrize("watched", [True, False])
def test_each_epoch_but_the_first_begins_after_a_step(
    loaders: Loaders, clock: SimpleNamespace, watched: bool
) -> None:
    """Also in steps that nothing but their end is seen of."""
    loaders.watch(watched)
    loader = Slow(Numbers())
    loader.clock = clock
    assert epochs(loaders, loader, 3) == [[52, 2, 2], [54, 2, 2]]


def test_an_evaluation_is_between_epochs_and_not_the_loaders(
    loaders: Loaders, clock: SimpleNamespace
) -> None:
    def evaluated() -> None:
        clock.now += 3

    loader = Slow(Numbers())
    loader.clock = clock
    assert epochs(loaders, loader, 2, evaluated) == [[52, 5, 2]]
    clock.now += 1
    assert epochs(loaders, loader, 1, evaluated)[1:] == [[57, 6, 2]]


def test_workers_that_stay_begin_epochs_too(loaders: Loaders) -> None:
    loader = DataLoader(Numbers(), num_workers=1, multiprocessing_context="fork", persistent_workers=True)
    assert len(epochs(loaders, loader, 3)) == 2
    assert (loaders.begun, loaders.summary()[0]["persistent"]) == (3, True)


def test_what_another_thread_begins_is_not_waited_for_here(loaders: Loaders) -> None:
    loaders.step()
    thread = threading.Thread(target=lambda: list(DataLoader(Numbers())))
    thread.start()
    thread.join()
    (about,) = loaders.summary()
    assert (about["starts"], about["aside"]) == ([], 4)


def test_a_loader_that_another_thread_reads_is_replayed_though_steps_have_none_of_it(
    loaders: Loaders,
) -> None:
    """A thread is now ahead, now behind: two batches in one step, none in the next."""
    loaders.step()
    loaders.keep = True
    loader = DataLoader(Numbers(), 2)
    for _ in range(2):
        thread = threading.Thread(target=lambda: list(loader))
        thread.start()
        thread.join()
        for _ in range(3):
            loaders.step()
    assert loaders.replayable("replay")
    for _ in range(9):
        loaders.step()
    assert not loaders.replayable("replay")


def test_one_that_began_while_steps_went_on_is_no_pause(loaders: Loaders) -> None:
    loaders.step()
    ahead = iter(DataLoader(Numbers()))
    loaders.step()
    next(ahead)
    assert loaders.summary()[0]["starts"] == []


def test_an_iterator_that_nobody_asks_is_gone_with_its_name(loaders: Loaders) -> None:
    """It may hold processes: they are not to wait for the collector."""
    gc.disable()
    try:
        iterator = iter(DataLoader(Numbers()))
        gone = weakref.ref(iterator)
        del iterator
        assert gone() is None
    finally:
        gc.enable()


def test_other_supplies_begin_epochs_too(loaders: Loaders) -> None:
    for _ in range(3):
        for _ in loaders.watched("mine", [1, 2], rows=lambda batch: 1):
            loaders.step()
    assert len(loaders.summary()[0]["starts"]) == 2
