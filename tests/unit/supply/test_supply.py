"""A supply: its state, its threads, what it refuses, and what reaches the consumer when something fails."""

from __future__ import annotations

import gc
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import frostline as fl
from frostline.errors import FeedError, StageFailed, UsageError


def source(n: int = 10) -> fl.Source:
    return fl.Source.table([{"key": f"k{i}", "x": float(i)} for i in range(n)])


def noisy(**options: Any) -> fl.Stage:
    return fl.Stage("y", lambda x, rng: x + rng.random(), reads="x", random=True, **options)


def plain(n: int = 10) -> fl.Pipeline:
    return fl.Pipeline(source(n), fl.Stage("y", lambda x: 2 * x, reads="x"))


BOTH = pytest.mark.parametrize("live", [False, True])


def made(make: Any, data: Any, live: bool, **options: Any) -> Any:
    work = make.workload(data, **{k: options.pop(k) for k in ("order", "splits") if k in options})
    return make.supply(work, None if live else make.stores(work), **options)


# --- state


@BOTH
def test_the_state_says_what_was_handed_out_not_what_is_prepared(make: Any, live: bool) -> None:
    supply = made(make, fl.Pipeline(source(), noisy()), live, batch_size=2)
    assert (supply.epoch, supply.n_batches(), supply.n_batches(7)) == (0, 5, 5)
    for i, _ in enumerate(supply):
        state = supply.state_dict()
        assert (state["epoch"], state["cursor"]) == ((0, i + 1) if i < 4 else (1, 0))
        assert json.loads(json.dumps(state)) == state
    assert (supply.epoch, supply.state_dict()["cursor"]) == (1, 0)


@BOTH
def test_an_iteration_that_is_left_early_is_gone_on_with(make: Any, live: bool) -> None:
    supply = made(make, fl.Pipeline(source(), noisy()), live, batch_size=2)
    whole = [*made(make, fl.Pipeline(source(), noisy()), live, batch_size=2)]
    for batch in supply:
        assert make.same(batch, whole[0])
        break
    gc.collect()
    assert supply.state_dict()["cursor"] == 1
    assert make.same_batches([*supply], whole[1:])
    assert supply.epoch == 1


def test_a_state_of_a_store_goes_on_live(make: Any) -> None:
    work = make.workload(fl.Pipeline(source(), noisy()))
    stores = make.stores(work)
    assert make.supply(work, stores).state_dict() == make.supply(work, None).state_dict()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"batch_size": 3}, "batch_size: then 4, now 3"),
        ({"seed": 1}, "seed: then 0, now 1"),
        ({"split": "a"}, "split: then None, now 'a'"),
    ],
)
def test_another_supply_is_not_continued_in_the_middle_of_an_epoch(
    make: Any, change: dict[str, Any], told: str
) -> None:
    work = make.workload(plain(), splits={"a": 0.8, "b": 0.2})
    supply = make.supply(work, None)
    next(iter(supply))
    other = make.supply(work, None, **change)
    with pytest.raises(FeedError, match=told):
        other.load_state_dict(supply.state_dict())
    with pytest.raises(FeedError, match=r"until the epoch ends, or begin a new run .*--init-from RUN"):
        other.load_state_dict(supply.state_dict())  # what a user of the command line can do
    other.load_state_dict({**supply.state_dict(), "epoch": 1, "cursor": 0})
    assert other.epoch == 1


@pytest.mark.parametrize("change", [{"version": 2}, {"epoch": -1}, {"cursor": "1"}, {"cursor": 99}])
def test_a_state_that_is_none_is_refused(make: Any, change: dict[str, Any]) -> None:
    supply = make.supply(make.workload(plain()), None)
    with pytest.raises(FeedError, match="This"):
        supply.load_state_dict({**supply.state_dict(), **change})
    assert (supply.epoch, supply.state_dict()["cursor"]) == (0, 0)


@BOTH
def test_an_iteration_is_over_when_another_begins_or_the_state_is_set(make: Any, live: bool) -> None:
    supply = made(make, fl.Pipeline(source(), noisy()), live, batch_size=2)
    first = iter(supply)
    next(first)
    second = iter(supply)
    next(second)
    with pytest.raises(FeedError, match="is over"):
        next(first)
    assert supply.state_dict()["cursor"] == 2
    supply.load_state_dict(supply.state_dict())
    with pytest.raises(FeedError, match="is over"):
        next(second)
    supply.close()


@BOTH
def test_what_was_handed_out_is_counted(make: Any, live: bool) -> None:
    supply = made(make, plain(), live)
    [*supply, *supply]  # noqa: B018
    stats = supply.stats()
    assert (stats["batches"], stats["rows"]) == (6, 20)
    assert 0 < stats["wait_s"] <= stats["seconds"]


# --- threads


def test_nothing_is_done_in_threads_of_its_own_where_the_feed_can_deliver(make: Any) -> None:
    data = fl.Pipeline(source(), fl.Stage("y", lambda x: x + 1, reads="x", on="device"))
    work = make.workload(data)
    iteration = iter(make.supply(work, make.stores(work)))
    next(iteration)
    assert not [t for t in threading.enumerate() if t.name.startswith("supply")]
    iteration.close()


@BOTH
def test_closing_while_a_sample_is_slow_does_not_hang(make: Any, live: bool) -> None:
    let_go = threading.Event()

    def slow(x: Any, rng: Any) -> Any:
        if float(x) > 3:
            let_go.wait(120)
        return x

    order = fl.Sequential()
    stage = fl.Stage("y", slow, reads="x", random=True)
    supply = made(make, fl.Pipeline(source(40), stage), live, batch_size=2, order=order)
    iteration = iter(supply)
    next(iteration)
    threading.Timer(0.2, let_go.set).start()
    supply.close()
    assert supply.state_dict()["cursor"] == 1


def test_many_early_ends_leave_no_thread(make: Any) -> None:
    work = make.workload(fl.Pipeline(source(), noisy()))
    stores = make.stores(work)
    before = {*threading.enumerate()}
    for stop in range(4):
        supply = make.supply(work, stores, batch_size=2)
        for i, _ in enumerate(supply):
            if i == stop:
                break
    del supply
    gc.collect()
    assert not {*threading.enumerate()} - before


def test_torch_keeps_its_number_of_threads(make: Any) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    seen: list[int] = []

    def look(x: Any, rng: Any) -> Any:
        seen.append(torch.get_num_threads())
        return x

    try:
        stage = fl.Stage("y", look, reads="x", random=True)
        for _ in make.supply(make.workload(fl.Pipeline(source(), stage)), None):
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert {*seen} == {1}


# --- failures


@BOTH
@pytest.mark.parametrize("options", [{}, {"batch_size": 4}, {"on": "device"}])
def test_a_sample_that_fails_is_named_and_the_batches_before_it_arrive(
    make: Any, live: bool, options: dict[str, Any]
) -> None:
    def fails(x: Any, rng: Any) -> Any:
        if (x == 6).any():
            raise ValueError("no such frame")
        return x

    stage = fl.Stage("y", fails, reads="x", random=True, **options)
    supply = made(make, fl.Pipeline(source(), stage), live, order=fl.Sequential())
    begun = iter(supply)
    assert next(begun).keys_of_rows == ["k0", "k1", "k2", "k3"]
    with pytest.raises(StageFailed, match=r"'y' failed for 'k6': ValueError: no such frame$"):
        next(begun)
    assert supply.state_dict()["cursor"] == 1


@pytest.mark.parametrize("on", ["cpu", "device"])
def test_a_frozen_sample_that_fails_live_says_to_freeze_first(make: Any, on: Any) -> None:
    def fails(x: Any) -> Any:
        if (torch.as_tensor(x) == 6).any():
            raise ValueError("no such frame")
        return x

    data = fl.Pipeline(source(), fl.Stage("y", fails, reads="x", on=on))
    work = make.workload(data, order=fl.Sequential())
    with pytest.raises(
        StageFailed, match=r"for 'k6': ValueError: no such frame\. Freeze this pipeline first"
    ):
        [*make.supply(work, None)]
    rest = [k for b in make.supply(work, make.stores(work, max_bad=1)) for k in b.keys_of_rows]
    assert rest == [f"k{i}" for i in range(10) if i != 6]


class Rows:
    """A data set of which one sample cannot be read."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> dict[str, Any]:
        if i == 6:
            raise OSError("disk on fire")
        return {"x": float(i)}


def test_a_sample_that_cannot_be_read_is_named(make: Any) -> None:
    work = make.workload(fl.Pipeline(fl.Source.dataset(Rows(), version="1"), noisy()))
    with pytest.raises(StageFailed, match=r"'source' failed for '00000006': OSError: disk on fire\. Freeze"):
        [*make.supply(work, None)]


@BOTH
@pytest.mark.parametrize("options", [{}, {"batch_size": 1}])
def test_uneven_values_of_a_random_stage_are_named(make: Any, live: bool, options: Any) -> None:
    def uneven(x: Any, rng: Any) -> torch.Tensor:
        return torch.zeros(*x.shape, 4 if float(x) == 6 else 3)

    stage = fl.Stage("y", uneven, reads="x", random=True, **options)
    supply = made(make, fl.Pipeline(source(), stage), live, order=fl.Sequential())
    told = r"'y' failed for 'k6': 'y' is float32 \[3\] for the others of the batch, but 'k6' is float32 \[4\]"
    with pytest.raises(StageFailed, match=told) as failure:
        [*supply]  # noqa: B018
    assert "fl.Field((None,), 'float32')" in str(failure.value)


def test_a_row_that_the_source_no_longer_lists_is_named(make: Any) -> None:
    stores = make.stores(make.workload(plain()))
    fewer = fl.Pipeline(source(5), fl.Stage("y", lambda x: 2 * x, reads="x"), noisy_z(), outputs=["y", "z"])
    with pytest.raises(UsageError, match=r"The store has 'k\d', which 5 rows does not list"):
        [*make.supply(make.workload(fewer), stores)]


def noisy_z() -> fl.Stage:
    return fl.Stage("z", lambda x, rng: x + rng.random(), reads="x", random=True)


# --- what is refused


def test_evaluation_refuses_random_stages_without_eval_by_name(make: Any) -> None:
    two = fl.Stage("z", lambda y, rng: y, reads="y", random=True, eval=lambda y: y)
    data = fl.Pipeline(source(), noisy(), two)
    with pytest.raises(UsageError, match="stage 'y' is random and has no eval=") as refused:
        make.supply(make.workload(data), None, train=False)
    assert "'z'" not in str(refused.value)


def test_evaluation_refuses_an_eval_that_takes_other_values(make: Any) -> None:
    data = fl.Pipeline(source(), noisy(eval=lambda x, rng: x))
    with pytest.raises(UsageError, match=r"stage 'y': eval=fn\(x, rng\) cannot be called with x"):
        make.supply(make.workload(data), None, train=False)


@BOTH
@pytest.mark.parametrize("options", [{}, {"batch_size": 4}])
def test_evaluation_uses_eval_and_keeps_the_order(make: Any, live: bool, options: Any) -> None:
    data = fl.Pipeline(source(), noisy(eval=lambda x: -x, **options))
    supply = made(make, data, live, train=False)
    assert [y for batch in supply for y in batch["y"].tolist()] == [-float(i) for i in range(10)]


def test_everything_wrong_with_the_arguments_is_said_at_once(make: Any) -> None:
    work = make.workload({"a": plain(), "b": plain()})
    with pytest.raises(UsageError) as refused:
        make.supply(work, {"a": "stores/a", "c": None}, batch_size=0, rank=2, world_size=2)
    for part in (
        "batch_size is 0",
        "rank 2 of world_size 2",
        "the store of 'a' is str",
        "no store for the pi",
    ):
        assert part in str(refused.value)
    assert "given for 'c', which is no pipeline here; there are a, b" in str(refused.value)


@BOTH
def test_a_batch_larger_than_the_set_with_drop_last_is_refused(make: Any, live: bool) -> None:
    with pytest.raises(
        UsageError, match=r"10 samples, a batch has 64, and Shuffle\(.*batch_size of at most 10"
    ):
        made(make, plain(), live, batch_size=64, order=fl.Shuffle(drop_last=True))


def test_a_store_without_rows_is_refused(make: Any, tmp_path: Path) -> None:
    with fl.Store.create(tmp_path / "s", fields={"y": fl.Field((), "float64")}):
        pass
    with pytest.raises(UsageError, match="the store of 'data' has no rows"):
        make.supply(make.workload(plain()), {"data": fl.Store.open(tmp_path / "s")})


def test_a_store_of_something_else_is_refused(make: Any, tmp_path: Path) -> None:
    with fl.Store.create(tmp_path / "s", fields={"other": fl.Field((), "float64")}) as writer:
        writer.append("k0", {"other": 1.0})
    with pytest.raises(UsageError, match="has nothing that y can be computed from"):
        make.supply(make.workload(plain()), {"data": fl.Store.open(tmp_path / "s")})


@pytest.mark.parametrize(
    "order", [fl.Buckets(by="x", max_tokens=9), fl.Episodes(by="x", n_way=1, n_shot=1, n_query=1)]
)
def test_orders_that_look_at_values_need_a_store(make: Any, order: Any) -> None:
    with pytest.raises(UsageError, match=rf"{type(order).__name__} needs a store: it looks at 'x'"):
        make.supply(make.workload(plain(), order=order), None)


def test_fields_of_the_store_that_are_no_outputs_are_not_delivered(make: Any) -> None:
    work = make.workload(plain())
    stores = make.stores(work, cut=["x", "y"])
    assert any(name.startswith("_source.") for name in stores["data"].fields)
    assert [*next(iter([*make.supply(work, stores)]))] == ["y"]


def test_frozen_networks_do_not_notice_the_autocast_of_whoever_iterates(make: Any) -> None:
    seen: list[bool] = []

    def encode(v: Any) -> Any:
        seen.append(torch.is_autocast_enabled("cpu"))
        return v @ torch.eye(1)

    rows = fl.Source.table([{"key": str(i), "v": float(i)} for i in range(4)])
    data = fl.Pipeline(rows, fl.Stage("f", lambda v: torch.tensor([v]), reads="v"),
                       fl.Stage("e", encode, reads="f", on="device", batch_size=2))  # fmt: skip
    supply = make.supply(make.workload(data), None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        kinds = {batch["e"].dtype for batch in supply}
        assert torch.is_autocast_enabled("cpu")  # theirs goes on
    assert kinds == {torch.float32}
    assert seen
    assert not any(seen)
