"""What a feed delivers: the right bits, in the right order, once an epoch, from wherever it was left."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import frostline as fl
from frostline.batch import Ragged
from frostline.errors import FeedError, UsageError
from frostline.store.gc import collect

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

Make = Callable[..., fl.Store]
Same = Callable[[Any, Any], bool]
TIERS = ["device", "pinned", "mmap", "disk", "auto"]


def keys(feed: fl.Feed) -> list[list[str]]:
    return [batch.keys_of_rows for batch in feed]


# the right bits


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("batch_size", [1, 3, 16, 100])
def test_every_field_in_every_tier_is_what_the_store_holds(
    all_kinds: fl.Store, is_same: Same, tier: str, batch_size: int
) -> None:
    feed = fl.Feed(all_kinds, batch_size, tier=tier)
    seen = []
    for batch in feed:
        assert list(batch) == list(all_kinds.fields)
        seen += batch.keys_of_rows
        want = all_kinds.rows(batch.keys_of_rows)
        for name, value in batch.items():
            assert is_same(value, want[name]), name
    assert sorted(seen) == sorted(all_kinds.keys)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("train", [True, False])
def test_pick_delivers_those_lines(long_rows: fl.Store, is_same: Same, tier: str, train: bool) -> None:
    fixed = fl.Pick(("half", "brain", "cast", "token", "channel", "wide"), n=3)
    alone = fl.Pick("vector", n=5)
    ragged = fl.Pick(("ragged", "ragged_cast", "ragged_token", "ragged_channel"), n=3)
    feed = fl.Feed(
        long_rows, 6, fields=[fixed, "text", ragged, alone], tier=tier, train=train, order=fl.Shuffle(seed=5)
    )
    rows = {key: long_rows[key] for key in long_rows.keys}
    for batch in feed:
        names = batch.keys_of_rows
        for pick in (fixed, ragged, alone):
            for row, key in enumerate(names):
                for field in pick.fields:
                    whole = rows[key][field]
                    index = pick.indices(5, 0, [key], [len(whole)], train)[0]
                    assert is_same(batch[field][row], whole[torch.from_numpy(index)]), (field, key)
        assert batch["text"] == [rows[key]["text"] for key in names]


def test_picks_do_not_depend_on_layout(long_rows: fl.Store, is_same: Same) -> None:
    def picked(batch_size: int, world_size: int, tier: str) -> dict[str, torch.Tensor]:
        fields = [fl.Pick(("half", "token"), n=2), fl.Pick("ragged", n=2)]
        options: dict[str, Any] = {
            "fields": fields,
            "tier": tier,
            "world_size": world_size,
            "order": fl.Shuffle(seed=3),
        }
        out = {}
        for rank in range(world_size):
            for batch in fl.Feed(long_rows, batch_size, rank=rank, **options):
                for i, key in enumerate(batch.keys_of_rows):
                    out[key] = torch.cat(
                        [batch[n][i].double().reshape(-1) for n in ("half", "token", "ragged")]
                    )
        return out

    want = picked(4, 1, "mmap")
    assert len(want) == len(long_rows)
    for layout in [(1, 1, "disk"), (7, 3, "pinned"), (40, 2, "mmap")]:
        got = picked(*layout)
        assert got.keys() == want.keys()
        assert all(is_same(got[key], want[key]) for key in want), layout


def test_picks_change_with_the_epoch_and_not_in_evaluation(long_rows: fl.Store) -> None:
    def two_epochs(train: bool) -> list[torch.Tensor]:
        feed = fl.Feed(long_rows, 40, fields=[fl.Pick("wide", n=2)], order=fl.Sequential(), train=train)
        return [next(iter([b["wide"].clone() for b in feed])) for _ in range(2)]

    first, second = two_epochs(True)
    assert not torch.equal(first, second)
    assert torch.equal(*two_epochs(False))


def test_fields_that_cannot_be(all_kinds: fl.Store) -> None:
    with pytest.raises(UsageError) as caught:
        fl.Feed(
            all_kinds,
            4,
            fields=[
                "half",
                "half",
                "nix",
                fl.Pick("text", n=1),
                fl.Pick("number", n=1),
                fl.Pick("cast", n=7),
            ],
        )
    assert len(caught.value.problems) == 5
    with pytest.raises(UsageError, match="shorter"):
        list(fl.Feed(all_kinds, 4, fields=[fl.Pick("ragged", n=3)]))
    with pytest.raises(UsageError, match="differ in length"):
        list(fl.Feed(all_kinds, 4, fields=[fl.Pick(("ragged", "half"), n=1)]))
    assert list(next(iter(list(fl.Feed(all_kinds, 4, fields="half"))))) == ["half"]


def test_arguments_that_cannot_be(all_kinds: fl.Store) -> None:
    with pytest.raises(UsageError) as caught:
        fl.Feed("path", 0, rank=2, world_size=2, order=3, fields={"a": ["x"]})  # type: ignore[arg-type]
    assert len(caught.value.problems) == 5
    with pytest.raises(UsageError, match="no store"):
        fl.Feed({}, 4)
    with pytest.raises(UsageError, match="'b', which is no store"):
        fl.Feed({"a": all_kinds}, 4, fields={"b": ["half"]})
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="CUDA"):
            fl.Feed(all_kinds, 4, device="cuda")


def test_an_empty_store_and_unfinished_fields(make_store: Make, caplog: pytest.LogCaptureFixture) -> None:
    store = make_store("s", 20)
    path = store.path
    with fl.Store.extend(path, {"late": fl.Field((), "float32")}) as extender:
        for key in list(store.keys)[:7]:
            extender.append(key, {"late": 1.0})
    with caplog.at_level("WARNING", "frostline"):
        feed = fl.Feed(fl.Store.open(path), 4)
    assert "13 of 20 rows lack" in caplog.text
    assert sum(len(batch["late"]) for batch in feed) == 7
    with fl.Store.append(path) as writer:
        for key in store.keys:
            writer.delete(key)
    with pytest.raises(UsageError, match="no row"):
        fl.Feed(fl.Store.open(path), 4)


def test_deleted_and_replaced_rows(make_store: Make) -> None:
    store = make_store("s", 30)
    with fl.Store.append(store.path) as writer:
        writer.delete("k3")
        writer.replace("k4", {"number": 444, "half": torch.zeros(6, 4, dtype=torch.float16)})
    after = dict(zip(*[[*col] for col in _columns(fl.Feed(fl.Store.open(store.path), 4))], strict=True))
    assert "k3" not in after
    assert after["k4"] == 444
    assert len(after) == 29
    before = dict(zip(*[[*col] for col in _columns(fl.Feed(store, 4))], strict=True))
    assert before == {f"k{i}": i for i in range(30)}, "an open store stays as it was"


def _columns(feed: fl.Feed) -> tuple[list[str], list[int]]:
    batches = list(feed)
    return [k for b in batches for k in b.keys_of_rows], [v for b in batches for v in b["number"].tolist()]


# once an epoch, on any layout


@settings(max_examples=25)
@given(st.data())
def test_each_row_once_and_ranks_make_up_the_global_batches(all_kinds: fl.Store, data: Any) -> None:
    n = data.draw(st.integers(1, 40))
    batch_size, world_size = data.draw(st.integers(1, 50)), data.draw(st.integers(1, 5))
    block_rows = data.draw(st.none() | st.integers(1, 9))
    order = fl.Shuffle(seed=data.draw(st.integers(0, 9)), block_rows=block_rows)
    table = all_kinds.at(np.arange(n))
    whole = keys(fl.Feed(table, batch_size, fields=["number"], order=order))
    assert sorted(k for batch in whole for k in batch) == sorted(table.keys)
    assert [len(batch) for batch in whole[:-1]] == [batch_size] * (len(whole) - 1)
    ranks = [
        keys(fl.Feed(table, batch_size, fields=["number"], order=order, rank=r, world_size=world_size))
        for r in range(world_size)
    ]
    assert [[k for share in shares for k in share] for shares in zip(*ranks, strict=True)] == whole


@settings(max_examples=25)
@given(st.data())
def test_resume_from_any_cursor_onto_any_world(all_kinds: fl.Store, data: Any) -> None:
    batch_size = data.draw(st.integers(1, 12))
    old, new = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    order = data.draw(
        st.sampled_from([fl.Shuffle(seed=2), fl.Sequential(), fl.Buckets("ragged", max_tokens=9)])
    )

    def feed(rank: int, world_size: int) -> fl.Feed:
        fields: list[str | fl.Pick] = ["number", fl.Pick("wide", n=2)]
        return fl.Feed(all_kinds, batch_size, fields=fields, order=order, rank=rank, world_size=world_size)

    whole = feed(0, 1)
    want = [(b.keys_of_rows, b["wide"].sum().item()) for _ in range(2) for b in whole]
    stopped = feed(0, old)
    cursor = data.draw(st.integers(0, len(stopped)))
    for _ in zip(range(cursor), stopped, strict=False):
        pass
    state = json.loads(json.dumps(stopped.state_dict()))
    assert state["cursor"] == cursor
    got: list[list[str]] = []
    for rank in range(new):
        resumed = feed(rank, new)
        resumed.load_state_dict(state)
        mine = [b.keys_of_rows for _ in range(2) for b in resumed]
        got = [a + b for a, b in zip(got, mine, strict=True)] if got else mine
    assert got == [rows for rows, _ in want[cursor:]]


def test_state_in_the_loop_after_break_and_the_next_epoch(all_kinds: fl.Store) -> None:
    feed = fl.Feed(all_kinds, 8, fields=["number"])
    epochs = [keys(feed) for _ in range(3)]
    assert feed.epoch == 3
    assert epochs[0] != epochs[1]
    feed = fl.Feed(all_kinds, 8, fields=["number"])
    for i, batch in enumerate(feed):
        assert feed.state_dict()["cursor"] == i + 1
        assert batch.keys_of_rows == epochs[0][i]
        if i == 2:
            break
    assert (feed.state_dict()["epoch"], feed.state_dict()["cursor"]) == (0, 3)
    other = fl.Feed(all_kinds, 8, fields=["number"])
    other.load_state_dict(feed.state_dict())
    assert keys(other) == epochs[0][3:]
    assert keys(feed) == epochs[1], "after a break the next iteration is the next epoch"
    feed.set_epoch(0)
    assert keys(feed) == epochs[0]
    assert feed.epoch == 1


@pytest.mark.parametrize(
    "options",
    [
        {"tier": None},
        {"tier": 3},
        {"fields": 3},
        {"device": None},
        {"device": "gpu"},
        {"budget_bytes": "1GB"},
    ],
)
def test_arguments_of_another_kind_are_named(all_kinds: fl.Store, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        fl.Feed(all_kinds, 4, **options)


def test_state_that_does_not_fit_is_refused(all_kinds: fl.Store) -> None:
    feed = fl.Feed(all_kinds, 8, fields=["number"])
    begun = feed.state_dict()
    for _ in feed:
        break
    middle = feed.state_dict()
    others = [
        fl.Feed(all_kinds, 9, fields=["number"]),
        fl.Feed(all_kinds, 8, fields=["number"], order=fl.Shuffle(seed=1)),
        fl.Feed(all_kinds.at(np.arange(39)), 8, fields=["number"]),
    ]
    for other in others:
        with pytest.raises(FeedError, match="set_epoch"):
            other.load_state_dict(middle)
        other.load_state_dict(begun)
    for bad in ({}, {**middle, "version": 2}, {**middle, "cursor": -1}, {**middle, "epoch": None}):
        with pytest.raises(FeedError, match="no state"):
            feed.load_state_dict(bad)


def test_two_iterations_at_once(all_kinds: fl.Store) -> None:
    feed = fl.Feed(all_kinds, 2, fields=["number"])
    epochs = [keys(feed) for _ in range(2)]
    feed = fl.Feed(all_kinds, 2, fields=["number"])
    one, two = iter(feed), iter(feed)
    assert next(one).keys_of_rows == epochs[0][0]
    assert next(two).keys_of_rows == epochs[1][0]
    with pytest.raises(FeedError, match="over"):
        next(one)
    assert feed.state_dict()["cursor"] == 1
    assert [b.keys_of_rows for b in two] == epochs[1][1:]
    three = iter(feed)
    next(three)
    feed.set_epoch(0)
    with pytest.raises(FeedError, match="over"):
        next(three)
    assert keys(feed) == epochs[0]


def test_small_shares_and_short_batches(all_kinds: fl.Store, is_same: Same) -> None:
    one = all_kinds.at(np.arange(1))
    for rank in range(3):
        (batch,) = fl.Feed(one, 10, rank=rank, world_size=3)
        want = all_kinds.rows(["k0"] if rank == 2 else [])
        for name, value in batch.items():
            assert is_same(value, want[name]), name
        assert len(batch.keys_of_rows) == (rank == 2)
    empty = next(b for b in [*fl.Feed(one, 10, rank=0, world_size=3, fields=[fl.Pick("half", n=2)])])
    assert empty["half"].shape == (0, 2, 4)
    for tier in TIERS[:4]:
        (batch,) = fl.Feed(one, 10, rank=0, world_size=2, tier=tier)
        assert batch["half"].shape == (0, 6, 4)
        assert isinstance(batch["ragged"], Ragged)
        assert len(batch["ragged"]) == 0


def test_drop_last(all_kinds: fl.Store) -> None:
    for order in (fl.Shuffle(drop_last=True), fl.Sequential(drop_last=True)):
        feed = fl.Feed(all_kinds, 12, fields=["number"], order=order)
        assert [len(b["number"]) for b in feed] == [12, 12, 12]
        assert len(feed) == 3
        none = fl.Feed(all_kinds, 50, fields=["number"], order=order)
        assert list(none) == []
        assert none.epoch == 1


# orders


def test_sequential_and_buckets(all_kinds: fl.Store) -> None:
    assert [
        k for batch in keys(fl.Feed(all_kinds, 7, fields=["number"], order=fl.Sequential())) for k in batch
    ] == list(all_kinds.keys)
    feed = fl.Feed(all_kinds, 100, fields=["ragged"], order=fl.Buckets("ragged", max_tokens=12))
    batches = list(feed)
    assert sorted(k for b in batches for k in b.keys_of_rows) == sorted(all_kinds.keys)
    assert all(len(b["ragged"]) * int(b["ragged"].lengths.max()) <= 12 for b in batches)


def class_store(make_store: Make, name: str, n: int, first: int = 0) -> fl.Store:
    path = make_store(name + "-base", 1).path.parent / name
    with fl.Store.create(
        path, fields={"class": fl.Field((), "int64"), "x": fl.Field((), "float32")}
    ) as writer:
        for i in range(first, first + n):
            writer.append(f"k{i}", {"class": i % 5, "x": float(i)})
    return fl.Store.open(path)


def test_episodes_from_one_store_and_from_two(make_store: Make) -> None:
    a, b = class_store(make_store, "a", 50), class_store(make_store, "b", 60, first=100)
    order = fl.Episodes(by="class", n_way=3, n_shot=2, n_query=4, n_episodes=5)
    for stores in (a, {"only": a}):
        feed = fl.Feed(stores, 2, order=order)
        batches = list(feed)
        assert [len(batch["support"]["x"]) for batch in batches] == [12, 12, 6]
        assert len(batches[0]["query"]["x"]) == 24
        first = batches[0]
        assert not set(first["support"].keys_of_rows[:6]) & set(first["query"].keys_of_rows[:12])
    frames = fl.Episodes(by="class", n_way=3, n_shot=2, n_query=4, n_episodes=5, query="frames")
    for batch in fl.Feed({"support": a, "frames": b}, 1, order=frames, fields={"frames": ["x", "class"]}):
        assert list(batch) == ["support", "frames"]
        assert float(batch["support"]["x"].max()) < 100 <= float(batch["frames"]["x"].min())
        assert batch["support"]["class"][::2].tolist() == batch["frames"]["class"][::4].tolist()
    ranks = [list(fl.Feed(a, 2, order=order, rank=r, world_size=2)) for r in range(2)]
    whole = list(fl.Feed(a, 2, order=order))
    for one, two, both in zip(*ranks, whole, strict=True):
        assert one["query"].keys_of_rows + two["query"].keys_of_rows == both["query"].keys_of_rows


def test_several_stores_are_joined_by_key(make_store: Make) -> None:
    a, b = class_store(make_store, "a", 30), class_store(make_store, "b", 30, first=10)
    for order in (fl.Shuffle(seed=1), fl.Sequential(), fl.Buckets("class", max_tokens=20)):
        feed = fl.Feed({"left": a, "right": b}, 4, order=order)
        batches = list(feed)
        assert sorted(float(x) for batch in batches for x in batch["left"]["x"]) == list(
            map(float, range(10, 30))
        )
        assert all(torch.equal(batch["left"]["x"], batch["right"]["x"]) for batch in batches)
        assert all(batch.keys_of_rows == batch["right"].keys_of_rows for batch in batches)
    with pytest.raises(UsageError, match="in common"):
        fl.Feed({"a": a, "b": class_store(make_store, "c", 5, first=900)}, 4)


@pytest.mark.parametrize("tier", TIERS)
def test_a_join_is_fed_like_one_store(make_store: Make, tier: str) -> None:
    a, b = class_store(make_store, "a", 30), make_store("b", 20)
    joined = fl.Store.join(a, b)
    feed = fl.Feed(joined, 6, tier=tier)
    rows = {
        key: (x, n)
        for batch in feed
        for key, x, n in zip(batch.keys_of_rows, batch["x"].tolist(), batch["number"].tolist(), strict=True)
    }
    assert rows == {f"k{i}": (float(i), i) for i in range(20)}


class Mine:
    """Somebody's own order, with an attribute that must not be taken for anything."""

    def __init__(self, batches: list[Any]) -> None:
        self.rows = batches

    def n_batches(self, epoch: int) -> int:
        return len(self.rows)

    def batch(self, epoch: int, i: int) -> Any:
        return self.rows[i]


def test_somebodys_own_order(make_store: Make) -> None:
    a, b = class_store(make_store, "a", 9), class_store(make_store, "b", 9, first=50)
    feed = fl.Feed(a, 4, order=Mine([[1, 1, 2], np.array([8], np.uint8), [], torch.tensor([3])]))
    assert [batch["x"].tolist() for batch in feed] == [[1, 1, 2], [8], [], [3]]
    feed = fl.Feed(a, 4, order=Mine([{"q": [1], "s": [2, 3]}]))
    assert [(batch["q"]["x"].tolist(), batch["s"]["x"].tolist()) for batch in feed] == [([1.0], [2.0, 3.0])]
    feed = fl.Feed({"a": a, "b": b}, 4, order=Mine([{"a": [1, 2], "b": [0]}]))
    assert [(batch["a"]["x"].tolist(), batch["b"]["x"].tolist()) for batch in feed] == [([1.0, 2.0], [50.0])]
    feed = fl.Feed({"a": a, "again": a}, 4, order=Mine([[1, 2]]))
    assert [batch["again"]["x"].tolist() for batch in feed] == [[1, 2]]
    with pytest.raises(UsageError, match="same keys"):
        fl.Feed({"a": a, "b": b}, 4, order=Mine([[1, 2]]))


def test_somebodys_own_order_with_over(make_store: Make) -> None:
    class Late:
        def over(self, tables: dict[str, Any], batch_size: int) -> Mine:
            return Mine([{name: [len(table) - 1] for name, table in tables.items()}])

    a, b = class_store(make_store, "a", 9), class_store(make_store, "b", 5, first=50)
    (batch,) = fl.Feed({"a": a, "b": b}, 4, order=Late())
    assert (batch["a"]["x"].item(), batch["b"]["x"].item()) == (8, 54)


@pytest.mark.parametrize("rows", [[9], [-1], [0.5], np.array(3), [True], ["k1"]])
def test_rows_that_are_none(make_store: Make, rows: Any) -> None:
    feed = fl.Feed(class_store(make_store, "a", 9), 4, order=Mine([[1], rows]))
    with pytest.raises(FeedError, match="whole numbers"):
        list(feed)


def test_orders_that_fail_and_wrong_names(make_store: Make) -> None:
    a = class_store(make_store, "a", 9)
    with pytest.raises(FeedError, match=r"rows for \['x'\]"):
        list(fl.Feed(a, 4, order=Mine([{"s": [1]}, {"x": [1]}])))

    class Broken(Mine):
        def batch(self, epoch: int, i: int) -> Any:
            if i == 3:
                raise RuntimeError("no more")
            return [i]

    feed = fl.Feed(a, 4, order=Broken([0] * 5))
    seen: list[float] = []
    with pytest.raises(FeedError, match="RuntimeError: no more") as caught:
        seen.extend(x for batch in feed for x in batch["x"].tolist())
    assert seen == [0, 1, 2], "the batches before it come first"
    assert isinstance(caught.value.__cause__, RuntimeError)


# what a feed says of itself


def test_repr_stats_and_length(all_kinds: fl.Store) -> None:
    feed = fl.Feed(all_kinds, 16, fields=["number", "text"], tier="mmap")
    assert "40 rows, batches of 16 on cpu; mmap: " in repr(feed)
    list(feed)
    stats = feed.stats()
    assert (stats["batches"], stats["rows"], len(feed)) == (3, 40, 3)
    assert stats["tiers"] == {"number": "mmap", "text": "mmap"}
    assert stats["seconds"] >= stats["wait_s"] >= 0


def test_two_parts_of_one_store_load_it_once(make_store: Make) -> None:
    store = make_store("s", 30, {"number": fl.Field((), "int64")})

    class Pairs:
        def n_batches(self, epoch: int) -> int:
            return 3

        def batch(self, epoch: int, i: int) -> dict[str, Any]:
            return {"left": [i, i + 1], "right": [i + 2]}

    feed = fl.Feed(store, 2, order=Pairs(), tier="pinned")
    seen = [(b["left"]["number"].tolist(), b["right"]["number"].tolist()) for b in feed]
    assert seen == [([i, i + 1], [i + 2]) for i in range(3)]
    assert feed._portions["left"] is feed._portions["right"]


def test_a_text_that_does_not_decode_is_an_error_with_its_key(tmp_path: Path) -> None:
    with fl.Store.create(tmp_path / "s", {"t": fl.Field((), "str")}) as writer:
        for i in range(20):
            writer.append(f"k{i}", {"t": f"text {i:02d}"})
    file = next((tmp_path / "s" / "data").glob("*/*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    got: list[str] = []
    batches = iter(fl.Feed(fl.Store.open(tmp_path / "s", check="open"), 2, order=fl.Sequential()))
    for _ in range(9):
        got += next(batches)["t"]
    with pytest.raises(FeedError, match="Key 'k19', field 't', shard 0"):
        next(batches)
    assert got == [f"text {i:02d}" for i in range(18)], "the batches before it arrive"


@pytest.mark.parametrize("tier", ["mmap", "disk", "pinned"])
@pytest.mark.parametrize("codec", ["raw", "int8/token"])
def test_a_pick_of_lines_without_bytes(tmp_path: Path, tier: str, codec: str) -> None:
    fields = {"x": fl.Field((3, 0), "float32", codec), "r": fl.Field((None, 0), "float32", codec)}
    with fl.Store.create(tmp_path / "s", fields) as writer:
        for i in range(5):
            writer.append(f"k{i}", {"x": torch.zeros(3, 0), "r": torch.zeros(4, 0)})
    feed = fl.Feed(fl.Store.open(tmp_path / "s"), 2, fields=[fl.Pick("x", 2), fl.Pick("r", 3)], tier=tier)
    shapes = [(tuple(batch["x"].shape), tuple(batch["r"].shape)) for batch in feed]
    assert shapes == [((n, 2, 0), (n, 3, 0)) for n in (2, 2, 1)]


@pytest.mark.parametrize("epoch", [np.int64(3), np.uint8(3), 3])
def test_a_state_is_of_plain_numbers_whatever_the_epoch_was_given_as(all_kinds: fl.Store, epoch: int) -> None:
    feed = fl.Feed(all_kinds, 4, fields="number")
    feed.set_epoch(epoch)
    next(iter(feed))
    state = json.loads(json.dumps(feed.state_dict()))
    assert (state["epoch"], state["cursor"]) == (3, 1)
    other = fl.Feed(all_kinds, 4, fields="number")
    other.load_state_dict(state)
    assert other.epoch == 3


@pytest.mark.parametrize("epoch", ["3", None, -1, 1.5])
def test_epochs_that_cannot_be(all_kinds: fl.Store, epoch: Any) -> None:
    with pytest.raises(UsageError, match="an epoch is a whole number from 0"):
        fl.Feed(all_kinds, 4).set_epoch(epoch)


@pytest.mark.parametrize(("rank", "world_size"), [("0", 2), (0, "2"), (None, 1), (0.0, 1), (-1, 2), (2, 2)])
def test_ranks_that_cannot_be(all_kinds: fl.Store, rank: Any, world_size: Any) -> None:
    """RANK and WORLD_SIZE of the environment are strings."""
    with pytest.raises(UsageError, match="whole numbers, ranks run from 0"):
        fl.Feed(all_kinds, 4, rank=rank, world_size=world_size)


@pytest.mark.parametrize("change", ["replace", "delete and append"])
def test_as_many_rows_in_another_order_are_not_gone_on_with(make_store: Make, change: str) -> None:
    """Positions mean other rows then: some would come twice and others not at all."""
    store = make_store("s", 12)
    feed = fl.Feed(store, 4)
    next(iter(feed))
    state = json.loads(json.dumps(feed.state_dict()))
    key = list(store)[3]
    values = store[key]
    with fl.Store.append(store.path) as writer:
        if change == "replace":
            writer.replace(key, values)
        else:
            writer.delete(key)
            writer.append("another", values)
    collect(store.path)
    same, other = fl.Feed(store, 4), fl.Feed(fl.Store.open(store.path), 4)
    with pytest.raises(FeedError, match="keys: then"):
        other.load_state_dict(state)
    other.load_state_dict({**state, "cursor": 0})
    other.load_state_dict({name: value for name, value in state.items() if name != "keys"})  # as once written
    same.load_state_dict(state)
    assert len(list(same)) == 2


def test_a_state_fits_a_copy_of_the_rows_however_they_were_written(tmp_path: Path) -> None:
    made = []
    for name, rows_per_shard, cut in (("a", 3, 4), ("b", 5, 9)):
        with fl.Store.create(
            tmp_path / name, {"n": fl.Field((), "int64")}, rows_per_shard=rows_per_shard
        ) as w:
            for i in range(12):
                w.append(f"k{i}", {"n": i})
                if i == cut:
                    w.commit()
        made.append(fl.Feed(fl.Store.open(tmp_path / name), 4))
    batches = iter(made[0])
    next(batches)
    made[1].load_state_dict(made[0].state_dict())
    assert keys(made[1]) == [batch.keys_of_rows for batch in batches]
    some = fl.Store.open(tmp_path / "a").at(np.arange(12)[::-1].copy())
    with pytest.raises(FeedError, match="keys: then"):
        fl.Feed(some, 4).load_state_dict({**made[0].state_dict(), "epoch": 0, "cursor": 1})
