"""Buffers come back when nobody holds them, and only then."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import frostline as fl
from frostline.errors import FeedError
from frostline.feed import memory, ring
from frostline.feed.ring import NoRoom, Ring

Make = Callable[..., fl.Store]
SLAB = ring.Slab


def test_a_slab_comes_back_with_its_last_view() -> None:
    r = Ring(depth=2, pinned=False)
    slab = r.take(1000)
    lent = r.lend(slab)
    views: list[Any] = [lent[10:20].view(torch.int16), lent.numpy()[3:], np.asarray(lent[5:9])]
    del lent
    while views:
        assert r.take(1000) is not slab
        views.pop()
    assert r.take(1000) is slab


def test_slabs_are_used_for_what_fits() -> None:
    r = Ring(depth=2, pinned=False)
    small = r.take(1000)
    r.give_back(small)
    large = r.take(100 << 20)
    assert large is not small
    r.give_back(large)
    assert r.take(10) is large, "a short last batch does not cost the ring its buffers"
    assert r.made == 2


def test_no_more_is_kept_than_can_be_used() -> None:
    r = Ring(depth=2, pinned=False)
    slabs = [r.take(10) for _ in range(20)]
    for slab in slabs:
        r.give_back(slab)
    slabs.clear()
    again = [r.take(10) for _ in range(20)]
    assert r.made == 40 - 5
    assert len(again) == 20


def test_memory_of_a_ring_that_is_gone_lives_as_long_as_its_batches() -> None:
    r = Ring(depth=2, pinned=False)
    slab = r.take(100)
    slab.array[:100] = 7
    lent = r.lend(slab)
    alive = weakref.ref(slab)
    del r, slab
    assert lent[:100].eq(7).all()
    assert alive() is not None
    del lent
    assert alive() is None


def test_a_slab_is_private_to_its_process() -> None:
    slab = Ring(depth=1, pinned=False).take(10)
    slab.array[0] = 1
    child = os.fork()
    if not child:
        slab.array[0] = 2
        os._exit(0)
    os.waitpid(child, 0)
    assert slab.array[0] == 1


def test_shrinking_is_said_once_a_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    r = Ring(depth=3, pinned=False)
    monkeypatch.setattr(memory, "host_free_bytes", lambda: 10 << 20)
    with caplog.at_level("WARNING", "frostline"):
        held = [r.take(1000) for _ in range(5)]
    assert r.depth == 1
    assert len(held) == 5
    assert [rec.getMessage().split(": ")[1] for rec in caplog.records] == [
        "the feed now keeps 2 batch(es) ready instead of 3.",
        "the feed now keeps 1 batch(es) ready instead of 2.",
    ]


def test_no_memory_is_said_in_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(ring, "Slab", refuse)
    with pytest.raises(NoRoom, match=r"takes 1\d\d\.\d MB.*smaller batch"):
        Ring(depth=2, pinned=False).take(96 << 20)
    assert issubclass(NoRoom, FeedError)


# through the feed


def rows_of(batches: list[fl.Batch]) -> list[int]:
    return [value for batch in batches for value in batch["number"].tolist()]


def test_kept_batches_stay_right(make_store: Make) -> None:
    store = make_store("s", 200, {"number": fl.Field((), "int64"), "big": fl.Field((300, 100), "float32")})
    want = {key: store[key]["big"].sum().item() for key in store.keys}
    for step in (1, 2):
        feed = fl.Feed(store, 8)
        kept = [batch for i, batch in enumerate(feed) if i % step == 0]
        for _ in feed:  # another epoch over the same ring
            pass
        for batch in kept:
            got = dict(zip(batch.keys_of_rows, batch["big"].sum((1, 2)).tolist(), strict=True))
            assert got == pytest.approx({key: want[key] for key in got}, rel=1e-4, abs=1e-2)
            assert [f"k{n}" for n in batch["number"].tolist()] == batch.keys_of_rows


def test_a_kept_slice_or_array_keeps_its_buffer(make_store: Make) -> None:
    store = make_store("s", 64, {"number": fl.Field((), "int64"), "wide": fl.Field((4, 5000), "float64")})
    feed = fl.Feed(store, 4, order=fl.Sequential())
    kept: list[Any] = []
    for batch in feed:
        kept.append([batch["number"][1:2], batch["number"].numpy()[2:3], batch["number"].view(2, 2)[1][1:]])
    for _ in feed:
        pass
    assert [[int(view[0]) for view in views] for views in kept] == [
        [i + 1, i + 2, i + 3] for i in range(0, 64, 4)
    ]


def test_buffers_are_reused_over_many_batches_and_epochs(make_store: Make) -> None:
    store = make_store("s", 100, {"number": fl.Field((), "int64"), "big": fl.Field((100, 1000), "float32")})
    feed = fl.Feed(store, 8)
    for _ in range(6):
        for _ in feed:
            pass
    assert feed.stats()["buffers_made"] <= 7, "depth, two under way, the one held, one lately let go"


def test_memory_goes_back_when_the_feed_goes(make_store: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Any]] = []
    real = ring.Slab.__init__

    def noted(self: ring.Slab, n_bytes: int, *, pinned: bool) -> None:
        real(self, n_bytes, pinned=pinned)
        made.append(weakref.ref(self))

    monkeypatch.setattr(ring.Slab, "__init__", noted)
    feed = fl.Feed(make_store("s", 100), 4, tier={"half": "pinned"})
    kept = next(iter(feed))["number"]
    for batch in feed:
        del batch
        break
    del feed
    gc.collect()
    assert len([s for s in made if s() is not None]) == 1, "only the batch that is kept"
    assert len(kept) == 4
    del kept
    assert not [s for s in made if s() is not None]


# under pressure


def test_little_memory_shrinks_the_ring_and_the_epoch_completes(
    make_store: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = make_store("s", 100)
    feed = fl.Feed(store, 4)
    monkeypatch.setattr(memory, "host_free_bytes", lambda: 3 << 20)
    with caplog.at_level("WARNING", "frostline"):
        assert sorted(rows_of(list(feed))) == list(range(100))
    assert feed.stats()["ring_depth"] == 1
    assert "Memory is short (3.1 MB of host memory left)" in caplog.text


class Scarce:
    """Slabs while there are fewer than `most` alive; after that, MemoryError."""

    def __init__(self, most: int) -> None:
        self.most, self.alive, self.refused = most, weakref.WeakSet[Any](), 0
        self.some_refused = threading.Event()

    def __call__(self, n_bytes: int, *, pinned: bool) -> ring.Slab:
        if len(self.alive) >= self.most:
            self.refused += 1
            self.some_refused.set()
            raise MemoryError("no more")
        slab = SLAB(n_bytes, pinned=pinned)
        self.alive.add(slab)
        return slab


@pytest.mark.parametrize("most", [2, 3, 4])
@pytest.mark.parametrize("several", [False, True])
def test_refused_memory_is_waited_for(
    make_store: Make, monkeypatch: pytest.MonkeyPatch, most: int, several: bool
) -> None:
    store = make_store("s", 100, {"number": fl.Field((), "int64"), "big": fl.Field((100, 1000), "float32")})
    monkeypatch.setattr("frostline.feed.prefetch._PATIENCE_S", 120.0)
    scarce = Scarce(most * (1 + several))
    monkeypatch.setattr(ring, "Slab", scarce)
    seen = []
    feed = fl.Feed({"a": store, "b": store} if several else store, 8, order=fl.Sequential())
    for batch in feed:
        if most == 2 and not seen:  # who holds a batch for a while is read ahead of
            assert scarce.some_refused.wait(120)
        seen += (batch["a"] if several else batch)["number"].tolist()
    assert seen == list(range(100))


def test_groups_get_smaller_when_memory_is_refused(make_store: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    class OnlySmall(Scarce):
        def __call__(self, n_bytes: int, *, pinned: bool) -> ring.Slab:
            if n_bytes > 2 << 20:
                self.refused += 1
                raise MemoryError("too large")
            return SLAB(n_bytes, pinned=pinned)

    store = make_store("s", 100, {"number": fl.Field((), "int64"), "big": fl.Field((100, 500), "float32")})
    small = OnlySmall(0)
    monkeypatch.setattr(ring, "Slab", small)
    assert rows_of(list(fl.Feed(store, 4, order=fl.Sequential()))) == list(range(100))
    assert small.refused


def test_a_batch_that_never_fits_is_a_clear_error(make_store: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frostline.feed.prefetch._PATIENCE_S", 0.2)
    store = make_store("s", 20)
    monkeypatch.setattr(ring, "Slab", Scarce(0))
    with pytest.raises(FeedError, match="No memory for a batch"):
        list(fl.Feed(store, 4))
    monkeypatch.setattr(ring, "Slab", Scarce(3))
    big = make_store("b", 240, {"number": fl.Field((), "int64"), "big": fl.Field((100, 1000), "float32")})
    feed = fl.Feed(big, 8)
    try:
        list(feed)  # keeps everything, so nothing ever comes back
    except FeedError as e:
        said = str(e)
    assert "No memory for a batch" in said
    gc.collect()
    monkeypatch.setattr("frostline.feed.prefetch._PATIENCE_S", 120.0)  # now there is something to wait for
    assert sorted(v for b in feed for v in b["number"].tolist()) == list(range(240)), "usable afterwards"
