"""The first samples of a pipeline, and a batch as training would get it."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import frostline as fl
from frostline import Ragged, keyed
from frostline.errors import StageFailed
from frostline.inspector.samples import NoneWorked, collated, frozen_values, training_batch

CPU = torch.device("cpu")


def source(n: int = 6) -> fl.Source:
    return fl.Source.table([{"key": f"k{i}", "x": torch.arange(5.0) + i} for i in range(n)])


def test_more_samples_are_tried_when_the_first_fail() -> None:
    def picky(x):
        if x[0] < 3:
            raise ValueError("too small")
        return x

    data = fl.Pipeline(source(), fl.Stage("y", picky, reads="x"))
    block = frozen_values(data, 2, CPU)
    assert block.keys == ["k3", "k4"]
    assert list(block.failed) == ["k0", "k1", "k2"]
    with pytest.raises(StageFailed, match="too small"):
        frozen_values(fl.Pipeline(source(3), fl.Stage("y", picky, reads="x")), 2, CPU)


def test_random_stages_get_their_keyed_generator() -> None:
    def noise(x, rng):
        return x + float(rng.random())

    data = fl.Pipeline(
        source(),
        fl.Stage("doubled", lambda x: 2 * x, reads="x"),
        fl.Stage("noisy", noise, reads="doubled", random=True),
        fl.Stage("summed", lambda x: x.sum(1), reads="noisy", batch_size=4),
        fl.Stage("chunky", lambda x, rng: x + rng.uniform(1), reads="x", random=True, batch_size=2),
    )
    batch = training_batch(data, frozen_values(data, 3, CPU), CPU)
    drawn = keyed.generator(0, 0, "k1", "noisy").random()
    assert batch["summed"][1].item() == pytest.approx(2 * (10 + 5) + 5 * drawn)
    assert batch["chunky"].shape == (3, 5)
    assert batch.keys_of_rows == ["k0", "k1", "k2"]


def test_stages_before_a_pick_read_all_and_those_behind_it_the_picked() -> None:
    data = fl.Pipeline(
        source(),
        fl.Stage("all", lambda x: len(x), reads="x"),
        fl.Pick("x", n=2),
        fl.Stage("some", lambda x: len(x), reads="x"),
    )
    batch = training_batch(data, frozen_values(data, 3, CPU), CPU)
    assert batch["all"].tolist() == [5, 5, 5]
    assert batch["some"].tolist() == [2, 2, 2]
    assert batch["x"].shape == (3, 2)


def test_values_are_collated_as_a_feed_does() -> None:
    with torch.inference_mode():
        made = torch.ones(2)
    assert not collated([made, made], CPU).is_inference()
    assert collated(["a", "b"], CPU) == ["a", "b"]
    assert collated([np.float32(1), np.float32(2)], CPU).tolist() == [1, 2]
    ragged = collated([torch.ones(1, 3), torch.ones(2, 3)], CPU)
    assert isinstance(ragged, fl.Ragged)
    assert ragged.lengths.tolist() == [1, 2]
    assert len(collated([torch.ones(1, 3), torch.ones(2, 4)], CPU)) == 2
    even = collated([torch.ones(2, 3), torch.ones(2, 3)], CPU, ragged=True)
    assert isinstance(even, Ragged)
    assert even.offsets.tolist() == [0, 2, 4]


def test_a_field_that_is_declared_ragged_is_so_in_a_batch_of_even_rows() -> None:
    words = fl.Stage(
        "words", lambda x: torch.arange(4), reads="x", writes={"words": fl.Field((None,), "int64")}
    )
    data = fl.Pipeline(fl.Source.table([{"key": str(i), "x": i} for i in range(3)]), words)
    batch = training_batch(data, frozen_values(data, 3, CPU), CPU)
    assert isinstance(batch["words"], Ragged)


def late(first: int):
    def picky(x):
        if x[0] < first:
            raise ValueError(f"{int(x[0])} is too small")
        return x

    return picky


def test_it_looks_on_for_samples_that_work() -> None:
    data = fl.Pipeline(source(90), fl.Stage("y", late(70), reads="x"))
    block = frozen_values(data, 4, CPU)
    assert block.keys == ["k70", "k71", "k72", "k73"]
    assert len(block.columns["y"]) == 4
    assert list(block.failed) == [f"k{i}" for i in range(70)]


def test_it_looks_no_further_than_it_may() -> None:
    data = fl.Pipeline(source(90), fl.Stage("y", late(70), reads="x"))
    with pytest.raises(NoneWorked, match="Stage 'y' failed for 'k0': ValueError: 0 is too small") as caught:
        frozen_values(data, 4, CPU, tries=50)
    assert len(caught.value.failed) == 50
    again = copy.copy(caught.value)
    assert (str(again), again.failed) == (str(caught.value), caught.value.failed)
    with pytest.raises(NoneWorked) as caught:
        frozen_values(data, 4, CPU, tries=1)
    assert len(caught.value.failed) == 16  # four times as many as asked for are always tried


def test_a_few_that_work_are_enough() -> None:
    tried: list[int] = []

    def rarely(x):
        tried.append(int(x[0]))
        if x[0] != 2:
            raise ValueError("no")
        return x

    assert frozen_values(fl.Pipeline(source(90), fl.Stage("y", rarely, reads="x")), 4, CPU).keys == ["k2"]
    assert max(tried) == 15


def test_read_only_arrays_are_copied_without_a_warning(warnings_always: None) -> None:
    array = np.arange(3.0)
    array.flags.writeable = False
    assert collated([array, array], CPU).shape == (2, 3)
    stage = fl.Stage("y", lambda x, rng: x * 2, reads="x", random=True, batch_size=2)
    data = fl.Pipeline(fl.Source.dataset([{"x": array}] * 3), stage)
    assert training_batch(data, frozen_values(data, 2, CPU), CPU)["y"].tolist() == [[0, 2, 4]] * 2
