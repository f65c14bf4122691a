"""Reading ahead: what is handed over, and that no thread outlives its iteration."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import frostline as fl
from frostline.errors import FeedError

Make = Callable[..., fl.Store]


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("frostline")]


def exhaust(feed: fl.Feed) -> None:
    list(feed)


def leave(feed: fl.Feed) -> None:
    for _ in feed:
        break


def drop(feed: fl.Feed) -> None:
    it = iter(feed)
    next(it)
    del it


def close(feed: fl.Feed) -> None:
    it: Any = iter(feed)
    next(it)
    it.close()


def never_begin(feed: fl.Feed) -> None:
    iter(feed)


def fail(feed: fl.Feed) -> None:
    try:
        for _ in feed:
            raise KeyError("body")
    except KeyError:
        return


def interrupt(feed: fl.Feed) -> None:
    try:
        for _ in feed:
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        return


@pytest.mark.parametrize("end", [exhaust, leave, drop, close, never_begin, fail, interrupt])
@pytest.mark.parametrize("tier", ["mmap", "disk", "pinned"])
def test_no_thread_is_left(all_kinds: fl.Store, end: Callable[[fl.Feed], None], tier: str) -> None:
    feed = fl.Feed(all_kinds, 2, tier=tier)
    end(feed)
    assert not threads()
    assert sum(len(batch["number"]) for batch in feed) == 40
    assert not threads()


def test_leaving_does_not_wait_for_loading(make_store: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load of minutes is given up between two blocks."""
    from frostline.feed import tiers

    blocks: list[int] = []
    begun = threading.Event()
    load = tiers._load

    def watched(table: Any, name: str, take: Any, stopped: Callable[[], bool]) -> None:
        def slow(*_: Any) -> None:
            blocks.append(1)
            if len(blocks) == 3:
                begun.set()
                while not stopped():  # the block that takes minutes
                    threading.Event().wait(0.001)

        load(table, name, slow, stopped)

    monkeypatch.setattr(tiers, "_LOAD_BYTES", 1)
    monkeypatch.setattr(tiers, "_load", watched)
    feed = fl.Feed(make_store("s", 200), 4, tier="pinned")
    leaving = threading.Thread(target=lambda: (begun.wait(120), feed.set_epoch(3)))
    leaving.start()
    with pytest.raises(FeedError, match="over"):
        list(feed)
    leaving.join()
    assert len(blocks) == 3
    monkeypatch.undo()
    assert len(list(feed)) == 50, "and begun again afterwards"


def test_a_slow_consumer_gets_the_same(all_kinds: fl.Store) -> None:
    seen = []
    for batch in fl.Feed(all_kinds, 16, fields=["number"]):
        threading.Event().wait(0.15)
        seen += batch["number"].tolist()
    assert sorted(seen) == list(range(40))


def test_many_feeds_at_once(all_kinds: fl.Store) -> None:
    feeds = [fl.Feed(all_kinds, 4, fields=["number"], order=fl.Shuffle(seed=s)) for s in range(6)]
    for batches in zip(*feeds, strict=True):
        assert len({tuple(b.keys_of_rows) for b in batches}) == 6
    del batches


# other processes


def in_child(work: Callable[[], Any]) -> str:
    """What `work` gives in a forked child, in words."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            said = repr(work())
        except BaseException as e:  # noqa: BLE001 - told to the parent
            said = f"{type(e).__name__}: {e}"
        os.write(writing, said.encode()[:4000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    return said


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_fork_in_mid_iteration(all_kinds: fl.Store) -> None:
    feed = fl.Feed(all_kinds, 2, fields=["number", "text"])
    want = [batch["number"].tolist() for batch in feed]
    feed.set_epoch(0)
    it = iter(feed)
    got = [next(it)["number"].tolist() for _ in range(3)]
    assert "FeedError: This feed's iterator came here by fork" in in_child(lambda: next(it))
    assert in_child(lambda: sorted(n for b in feed for n in b["number"].tolist())) == repr(list(range(40)))
    got += [batch["number"].tolist() for batch in it]
    assert got == want


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("tier", ["mmap", "disk", "pinned"])
def test_a_feed_made_before_a_fork(all_kinds: fl.Store, tier: str) -> None:
    feed = fl.Feed(all_kinds, 4, tier=tier)
    list(feed)
    assert in_child(lambda: sorted(n for b in feed for n in b["number"].tolist())) == repr(list(range(40)))
    assert len(list(feed)) == 10


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_batch_in_a_child_stays_as_it_was(all_kinds: fl.Store) -> None:
    feed = fl.Feed(all_kinds, 40, order=fl.Sequential(), fields=["number"])
    kept = next(iter(feed))
    (there, say), (told, tell) = os.pipe(), os.pipe()

    def later() -> list[int]:
        os.write(say, b"x")
        os.read(told, 1)
        return list(kept["number"].tolist())

    def overwrite() -> None:
        os.read(there, 1)  # the child is there
        kept["number"].zero_()
        os.write(tell, b"x")

    overwriting = threading.Thread(target=overwrite)
    overwriting.start()
    assert in_child(later) == repr(list(range(40)))
    overwriting.join()
    for end in (there, say, told, tell):
        os.close(end)


def _send_numbers(feed: fl.Feed, pipe: Any) -> None:
    pipe.send(([batch["number"].tolist() for batch in feed], feed.epoch))


@pytest.mark.parametrize("order", [fl.Shuffle(seed=4), fl.Buckets("ragged", max_tokens=30)])
def test_a_feed_travels_to_another_process(all_kinds: fl.Store, order: Any) -> None:
    feed = fl.Feed(
        all_kinds, 8, order=order, fields=["number", fl.Pick("half", n=2)], tier={"half": "pinned"}
    )
    first = [batch["number"].tolist() for batch in feed]
    feed.set_epoch(0)
    for _ in zip(range(2), feed, strict=False):
        pass
    feed.load_state_dict(feed.state_dict())
    here, there = multiprocessing.get_context("spawn").Pipe()
    child = multiprocessing.get_context("spawn").Process(target=_send_numbers, args=(feed, there))
    child.start()
    there.close()  # a child that fails is the end of the file then, and not waited for for ever
    numbers, epoch = here.recv()
    child.join()
    assert (numbers, epoch) == (first[2:], 1)


def test_a_dataset_for_torchs_loader(all_kinds: fl.Store) -> None:
    dataset: Any = all_kinds.dataset(["number", "half", "text"])
    loader: Any = torch.utils.data.DataLoader(dataset, batch_size=16, shuffle=True)
    rows = {int(n): text for batch in loader for n, text in zip(batch["number"], batch["text"], strict=True)}
    assert rows == {i: all_kinds[f"k{i}"]["text"] for i in range(40)}
