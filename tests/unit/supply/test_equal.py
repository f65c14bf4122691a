"""Bit for bit: batches from a store and from the source, on any layout, before and after a resume."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import frostline as fl
from frostline import keyed
from frostline.draws import Draws
from frostline.errors import UsageError

N = 13


class Patches(nn.Module):
    """A small ViT: patches, positions, a layer of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, stride=4)
        self.place = nn.Parameter(torch.randn(1, 4, 16))
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.layer(self.patch(x_BCHW).flatten(2).transpose(1, 2) + self.place)


def conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Flatten(2))


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 37), nn.Unflatten(1, (37, 1)))


NETWORKS = {"conv": conv, "vit": Patches, "linear": linear}


def network(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return NETWORKS[name]().requires_grad_(False).eval()


def decode(x: int) -> Tensor:
    return torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(x))


def flip(features: Tensor, rng: np.random.Generator) -> Tensor:
    return features.flip(0) if rng.random() < 0.5 else features * float(rng.normal())


def noise(features: Tensor, rng: Any) -> Tensor:
    return features + rng.normal(*features.shape[1:]) * rng.uniform(*[1] * (features.ndim - 1))


def pipeline(name: str, n: int = N) -> fl.Pipeline:
    return fl.Pipeline(
        fl.Source.table([{"key": f"k{i}", "x": i, "label": i % 3, "weight": i / 7} for i in range(n)]),
        fl.Stage("pixels", decode, reads="x"),
        fl.Stage("features", network(name), reads="pixels", on="device", batch_size=4),
        fl.Stage("flipped", flip, reads="features", random=True, eval=lambda features: features),
        fl.Stage("sum", lambda x: x.flatten(1).sum(1), reads="flipped", on="device", batch_size=3),
        fl.Stage("noisy", noise, reads="features", on="device", batch_size=4, random=True),
        outputs=["features", "flipped", "sum", "noisy", "label", "weight"],
    )


@pytest.mark.parametrize("name", NETWORKS)
def test_live_batches_are_the_stored_ones(make: Any, name: str) -> None:
    work = make.workload(pipeline(name))
    stored, live = make.supply(work, make.stores(work), seed=3), make.supply(work, None, seed=3)
    for _ in range(2):
        some = [*stored]
        assert make.same_batches(some, [*live])
        assert [*some[0]] == ["features", "flipped", "sum", "noisy", "label", "weight"]
    assert some[0]["label"].dtype == torch.int64
    assert some[0]["weight"].dtype == torch.float64


def test_frozen_stages_that_the_store_does_not_hold_are_computed_after_the_feed(make: Any) -> None:
    work = make.workload(pipeline("vit"))
    whole = [*make.supply(work, make.stores(work))]
    for cut in (["pixels", "label", "weight"], ["pixels"], ["x", "label", "weight"]):
        assert make.same_batches(whole, [*make.supply(work, make.stores(work, cut=cut))])


def rows_by_key(batches: Any) -> dict[str, list[Any]]:
    return {
        key: [batch[n][i] for n in batch] for batch in batches for i, key in enumerate(batch.keys_of_rows)
    }


@pytest.mark.parametrize("live", [False, True])
def test_a_samples_values_do_not_depend_on_batch_size_ranks_or_threads(
    make: Any, live: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = make.workload(pipeline("conv"))
    stores = None if live else make.stores(work)
    expected = rows_by_key(make.supply(work, stores, batch_size=5))
    monkeypatch.setattr("frostline.supply.batches.n_threads", lambda: 5)
    layouts = [{"batch_size": 1}, {"batch_size": 13}]
    layouts += [{"batch_size": 8, "rank": rank, "world_size": 2} for rank in range(2)]
    found = [rows_by_key(make.supply(work, stores, **layout)) for layout in layouts]
    assert {*found[2]} | {*found[3]} == {*expected}
    assert not {*found[2]} & {*found[3]}
    for some in (*found[:2], found[2] | found[3]):
        assert {*some} == {*expected}
        assert all(make.same(a, b) for key in some for a, b in zip(some[key], expected[key], strict=True))


def test_epochs_and_seeds_draw_differently(make: Any) -> None:
    work = make.workload(pipeline("linear"))
    supply = make.supply(work, None)
    epochs = [rows_by_key(supply) for _ in range(2)]
    other = rows_by_key(make.supply(work, None, seed=1))
    assert not make.same(epochs[0]["k0"][3], epochs[1]["k0"][3])
    assert not make.same(epochs[0]["k0"][3], other["k0"][3])


@pytest.mark.parametrize("live", [False, True])
def test_a_stage_draws_from_seed_epoch_key_and_its_name(make: Any, live: bool) -> None:
    data = fl.Pipeline(
        fl.Source.table([{"key": f"k{i}", "x": 0.0} for i in range(6)]),
        fl.Stage("one", lambda x, rng: rng.random(), reads="x", random=True),
        fl.Stage("many", lambda x, rng: rng.uniform(3), reads="x", random=True, batch_size=4),
    )
    work = make.workload(data)
    supply = make.supply(work, None if live else make.stores(work), seed=5)
    for epoch in range(2):
        for batch in supply:
            keys = batch.keys_of_rows
            assert batch["one"].tolist() == [keyed.generator(5, epoch, k, "one").random() for k in keys]
            assert torch.equal(batch["many"], Draws(5, epoch, keys, "many").uniform(3))


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_resume_in_the_middle_of_an_epoch_goes_on_with_the_same_bits(
    make: Any, live: bool, stop: int
) -> None:
    work = make.workload(pipeline("linear"))
    stores = None if live else make.stores(work)
    whole = [batch for s in [make.supply(work, stores)] for _ in range(2) for batch in s]
    first = make.supply(work, stores)
    begun = iter(first)
    head = [next(begun) for _ in range(stop)]
    state = first.state_dict()  # more is prepared by now
    first.close()
    second = make.supply(work, stores)
    second.load_state_dict(state)
    rest = [*second]
    if second.epoch < 2:
        rest += [*second]
    assert make.same_batches(whole, head + rest)


def test_a_run_goes_on_with_another_number_of_ranks(make: Any) -> None:
    work = make.workload(pipeline("conv"))
    stores = make.stores(work)
    whole = [*make.supply(work, stores)]
    one = make.supply(work, stores)
    begun = iter(one)
    next(begun)
    state = one.state_dict()
    one.close()
    for others in (stores, None):
        shares = []
        for rank in range(3):
            supply = make.supply(work, others, rank=rank, world_size=3)
            supply.load_state_dict(state)
            shares.append([*supply])
        for i, batch in enumerate(whole[1:]):
            assert [k for share in shares for k in share[i].keys_of_rows] == batch.keys_of_rows
            for name in batch:
                assert make.same(torch.cat([share[i][name] for share in shares]), batch[name])


def test_a_rank_without_rows_gets_a_batch_of_none(make: Any) -> None:
    work = make.workload(pipeline("linear", n=5))
    for stores in (make.stores(work), None):
        shares = [[*make.supply(work, stores, rank=rank, world_size=2)] for rank in range(2)]
        last = shares[0][1]
        assert last.keys_of_rows == []
        for name, value in shares[1][1].items():
            assert last[name].shape == (0, *value.shape[1:])
            assert last[name].dtype == value.dtype


# --- picks


def picked(where: str) -> fl.Pipeline:
    stages = [
        fl.Stage("frames", lambda x: torch.arange(6.0).view(6, 1) + 100 * x, reads="x"),
        fl.Stage("times", lambda x: torch.arange(6) + x, reads="x"),
    ]
    late = fl.Stage("dim", lambda frames, rng: frames * rng.random(), reads="frames", random=True)
    pick = fl.Pick(["frames", "times"], n=2)
    order = [late, pick] if where == "before" else [pick, late]
    rows = [{"key": f"k{i}", "x": i} for i in range(7)]
    return fl.Pipeline(fl.Source.table(rows), *stages, *order, outputs=["frames", "times", "dim"])


@pytest.mark.parametrize(("where", "frames_seen"), [("before", 6), ("after", 2)])
def test_picks_are_those_of_the_feed_and_stages_before_them_see_all(
    make: Any, where: str, frames_seen: int
) -> None:
    work = make.workload(picked(where))
    stores = make.stores(work)
    stored = [*make.supply(work, stores)]
    assert make.same_batches(stored, [*make.supply(work, None)])
    assert stored[0]["frames"].shape == (4, 2, 1)
    assert stored[0]["dim"].shape == (4, frames_seen, 1)
    feed = fl.Feed(stores["data"], 4, order=fl.Shuffle(0), fields=fl.Pick(["frames", "times"], n=2))
    assert [b["frames"].tolist() for b in feed] == [b["frames"].tolist() for b in stored]


def test_only_picked_rows_are_read_where_nothing_needs_the_others(make: Any) -> None:
    work = make.workload(picked("after"))
    stores = make.stores(work)
    wide = make.supply(make.workload(picked("before")), stores)._rows.feed
    narrow = make.supply(work, stores)._rows.feed
    assert narrow._portions[""].row_bytes() * 3 == wide._portions[""].row_bytes()  # 2 of 6 frames


def test_evaluation_picks_as_its_pick_says_and_is_the_same_each_time(make: Any) -> None:
    rows = [{"key": f"k{i}", "x": i} for i in range(7)]
    frames = fl.Stage("frames", lambda x: torch.arange(5) + 10 * x, reads="x")
    for how in ("spread", "random"):
        work = make.workload(fl.Pipeline(fl.Source.table(rows), frames, fl.Pick("frames", n=2, eval=how)))
        for stores in (make.stores(work), None):
            supply = make.supply(work, stores, train=False)
            first, second = [*supply], [*supply]
            assert make.same_batches(first, second)
            assert [k for b in first for k in b.keys_of_rows] == [f"k{i}" for i in range(7)]
            if how == "spread":
                assert first[0]["frames"][1].tolist() == [10, 14]


# --- kinds of values


def test_texts_numbers_and_ragged_fields_come_as_a_feed_delivers_them(make: Any) -> None:
    rows = [
        {"key": f"k{i}", "text": "a" * i, "tree": {"i": (i, 1)}, "maybe": None if i == 2 else i, "f": i / 3}
        for i in range(9)
    ]
    data = fl.Pipeline(
        fl.Source.table(rows),
        fl.Stage("tokens", lambda text: torch.arange(len(text)), reads="text"),
        fl.Stage("ids", len, reads="text", writes={"ids": fl.Field((), "int32")}),
        fl.Stage(
            "words", lambda text: [7] * (len(text) % 2), reads="text",
            writes={"words": fl.Field((None,), "int16")},
        ),
        fl.Stage("cut", lambda tokens, rng: tokens[: rng.integers(0, 3)], reads="tokens", random=True,
                 writes={"cut": fl.Field((None,), "int64")}),
        fl.Stage("coin", lambda f, rng: bool(rng.random() < f), reads="f", random=True),
        fl.Stage("shout", lambda text, rng: text.upper() + str(rng.integers(9)), reads="text", random=True),
        outputs=["text", "tree", "maybe", "f", "tokens", "ids", "words", "cut", "coin", "shout"],
    )  # fmt: skip
    work = make.workload(data)
    stored = [*make.supply(work, make.stores(work), batch_size=1)]
    assert make.same_batches(stored, [*make.supply(work, None, batch_size=1)])
    stored = [*make.supply(work, make.stores(work))]
    assert make.same_batches(stored, [*make.supply(work, None)])
    assert isinstance(stored[0]["cut"], fl.Ragged)
    assert stored[0]["coin"].dtype == torch.bool
    assert isinstance(stored[0]["maybe"], list)


def test_sums_over_many_numbers_are_the_same_with_any_threads(make: Any) -> None:
    """Above the line samples are computed with one thread; below it as freezing computes them."""

    def data(outputs: list[str]) -> fl.Pipeline:
        return fl.Pipeline(
            fl.Source.table([{"key": f"k{i}", "x": i} for i in range(4)]),
            fl.Stage("wide", lambda x: decode(x).repeat(1, 40, 40), reads="x"),
            fl.Stage("same", lambda wide: wide * 1.1, reads="wide", on="device", batch_size=2),
            fl.Stage("total", lambda same: same.sum(), reads="same"),
            fl.Stage("noisy", lambda same, rng: (same * rng.random()).sum(), reads="same", random=True),
            outputs=outputs,
        )

    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        work = make.workload(data(["total", "noisy"]))
        whole = [*make.supply(work, make.stores(work))]
        assert make.same_batches(whole, [*make.supply(work, None)])
        assert make.same_batches(whole, [*make.supply(work, make.stores(work, cut=["same"]))])
        assert make.same_batches(whole, [*make.supply(work, make.stores(work, cut=["wide"]))])
    finally:
        torch.set_num_threads(before)


def test_nobody_elses_generators_are_touched(make: Any) -> None:
    work = make.workload(pipeline("linear"))
    stores = make.stores(work)
    before = (torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate())
    for given in (stores, None):
        assert [*make.supply(work, given)]
    after = (torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate())
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def test_a_stage_that_works_in_place_changes_nothing_else(make: Any) -> None:
    whole = torch.ones(6, 3)
    rows = [{"x": whole[i]} for i in range(6)]
    data = fl.Pipeline(
        fl.Source.dataset(rows, version="1"),
        fl.Stage("one", lambda x, rng: x.add_(rng.random()), reads="x", random=True),
        fl.Stage("two", lambda x, rng: x.add_(rng.uniform(1)), reads="x", random=True, batch_size=4),
        outputs=["x", "one", "two"],
    )
    work = make.workload(data)
    for stores in (make.stores(work), None):
        for batch in make.supply(work, stores):
            assert batch["x"].eq(1).all()
            assert batch["one"].gt(1).all()
            assert batch["one"].lt(2).all()
            assert batch["two"].lt(2).all()
    assert whole.eq(1).all()


def test_batches_can_be_trained_on(make: Any) -> None:
    work = make.workload(pipeline("conv"))
    layer = nn.Linear(36, 2)
    for stores in (make.stores(work), None):
        for batch in make.supply(work, stores):
            (layer(batch["features"]).sum() + layer(batch["noisy"]).sum()).backward()


# --- several pipelines, orders with parts


def test_several_pipelines_give_a_batch_of_batches(make: Any) -> None:
    def data(n: int, stage: fl.Stage) -> fl.Pipeline:
        return fl.Pipeline(fl.Source.table([{"key": f"k{i}", "x": float(i)} for i in range(n)]), stage)

    noise = fl.Stage("y", lambda x, rng: x + rng.random(), reads="x", random=True)
    twice = fl.Stage("z", lambda x: 2 * x, reads="x")
    work = make.workload({"a": data(9, noise), "b": data(7, twice)})
    stored = [*make.supply(work, make.stores(work))]
    assert make.same_batches(stored, [*make.supply(work, None)])
    assert sorted(k for b in stored for k in b.keys_of_rows) == [f"k{i}" for i in range(7)]
    assert all(b["a"].keys_of_rows == b["b"].keys_of_rows for b in stored)


def test_episodes_come_in_parts_and_need_a_store(make: Any) -> None:
    rows = [{"key": f"k{i}", "label": i % 3, "x": float(i)} for i in range(18)]
    order = fl.Episodes(by="label", n_way=2, n_shot=1, n_query=2)
    noisy = fl.Stage("y", lambda x, rng: x + rng.random(), reads="x", random=True)
    data = fl.Pipeline(fl.Source.table(rows), noisy, outputs=["y", "label"])
    work = make.workload(data, order=order)
    batch = next(iter([*make.supply(work, make.stores(work), batch_size=2)]))
    assert [*batch] == ["support", "query"]
    assert batch["support"]["y"].shape == (4,)
    with pytest.raises(UsageError, match="Episodes needs a store"):
        make.supply(work, None)
