"""Workloads: splits that stay, and all that can be wrong with one."""

from __future__ import annotations

import math

import pytest
import torch

import frostline as fl
from frostline.errors import UsageError

SHARES = {"train": 0.8, "val": 0.15, "test": 0.05}


def run(ctx):
    return ctx


def data(n: int = 3, **extra) -> fl.Pipeline:
    return fl.Pipeline(fl.Source.table([{"key": f"k{i}", "scene": i % 4, **extra} for i in range(n)]))


def work(**options) -> fl.Workload:
    parts = {"model": torch.nn.Linear(1, 1), "loss": run, "optimizer": run, "batch_size": 4}
    return fl.Workload(data(), **(parts | options))


def problems(make) -> tuple[str, ...]:
    with pytest.raises(UsageError) as caught:
        make()
    return caught.value.problems


# splits


def test_shares_are_met_within_three_standard_deviations() -> None:
    n = 20_000
    splits = fl.Workload(data(), run=run, splits=SHARES)
    found = [splits.split_of(f"clips/{i:05d}.mp4") for i in range(n)]
    for name, share in SHARES.items():
        assert abs(found.count(name) - n * share) < 3 * math.sqrt(n * share * (1 - share))


def test_a_sample_stays_in_its_split() -> None:
    few = fl.Workload(data(50), run=run, splits=SHARES)
    many = fl.Workload(data(500), run=run, splits=SHARES)
    keys = few.data.source.keys
    assert [few.split_of(k) for k in keys] == [many.split_of(k) for k in keys]
    known = {"k0": "train", "k1": "train", "k9": "val", "k23": "test"}
    assert {key: many.split_of(key) for key in known} == known, "people's results hang on these"


def test_equal_groups_stay_together_and_fields_can_name_the_split() -> None:
    grouped = fl.Workload(data(40), run=run, splits={"a": 0.5, "b": 0.5}, group="scene")
    source = grouped.data.source
    of_scene: dict[int, set[str]] = {}
    for i in range(len(source)):
        scene = source.raw(i)["scene"]
        of_scene.setdefault(scene, set()).add(grouped.split_of(str(scene)))
    assert {len(splits) for splits in of_scene.values()} == {1}
    named = fl.Workload(data(part="val"), run=run, splits="part")
    assert named.split_of("val") == "val"
    assert work().split_of("k0") is None


def test_one_split_takes_all() -> None:
    assert {fl.Workload(data(), run=run, splits={"all": 1}).split_of(str(i)) for i in range(100)} == {"all"}


@pytest.mark.parametrize(
    "splits", [{}, {"a": 0.5}, {"a": 1.5, "b": -0.5}, {"a": "0.5", "b": 0.5}, {"a": 0, "b": 1}]
)
def test_shares_that_cannot_be(splits) -> None:
    assert "add up to 1" in problems(lambda: fl.Workload(data(), run=run, splits=splits))[0]


def test_fields_that_are_not_there() -> None:
    assert problems(lambda: fl.Workload(data(), run=run, splits=SHARES, group="scnee")) == (
        "group is 'scnee', which is no field of the source (did you mean 'scene'?)",
    )
    assert "splits is 'part'" in problems(lambda: fl.Workload(data(), run=run, splits="part"))[0]
    assert "splits is 5" in problems(lambda: fl.Workload(data(), run=run, splits=5))[0]
    assert "group= is for splits=" in problems(lambda: fl.Workload(data(), run=run, group="scene"))[0]


# parts


def test_one_pipeline_or_several() -> None:
    assert list(work().pipelines) == ["data"]
    both = fl.Workload({"support": data(), "query": data()}, run=run)
    assert list(both.pipelines) == ["support", "query"]
    assert both.named("mine").name == "mine"


def test_all_that_is_wrong_is_said_at_once() -> None:
    found = problems(
        lambda: fl.Workload(data(), loss=3, batch_size=True, metric=fl.Metric("top1"), group="scene")
    )
    for words in ("model is missing", "optimizer is missing", "loss is int", "batch_size is True",
                  "metric 'top1' needs evaluate=", "group= is for splits="):  # fmt: skip
        assert any(words in problem for problem in found), words


def test_the_loss_is_a_metric_that_needs_no_evaluation_of_its_own() -> None:
    parts = {"model": len, "loss": len, "optimizer": len, "batch_size": 2}
    fl.Workload(data(), **parts, metric=fl.Metric("loss"))
    assert (
        "metric 'top1' needs evaluate="
        in problems(lambda: fl.Workload(data(), **parts, metric=fl.Metric("top1")))[0]
    )


@pytest.mark.parametrize("wrong", [{}, {"a": 3}, [1]])
def test_data_is_a_pipeline(wrong) -> None:
    assert "data is a Pipeline, or a dict of Pipelines by name" in problems(
        lambda: fl.Workload(wrong, run=run)
    )


def test_an_experiment_has_no_model() -> None:
    made = problems(lambda: fl.Workload(data(), run=run, model=torch.nn.Linear(1, 1), loss=run))
    assert made == ("run= is an experiment of its own: leave out model, loss",)
    assert problems(lambda: fl.Workload(data(), run=3)) == ("run is not a function",)
    assert "metric is 'loss'" in problems(lambda: work(metric="loss"))[0]


def test_a_lazy_model_stays_unloaded() -> None:
    never = fl.lazy(pytest.fail, "loaded")
    assert work(model=never).model is never
    assert not never.loaded


# metrics


def test_which_way_is_better() -> None:
    assert fl.Metric("loss").is_better(1.0, than=2.0)
    assert not fl.Metric("loss").is_better(2.0, than=2.0)
    assert fl.Metric("top1", better="higher").is_better(2.0, than=1.0)
    assert not fl.Metric("loss").is_better(math.nan, than=2.0)


@pytest.mark.parametrize("margin", [-1, math.inf, math.nan, "1%"])
def test_a_metric_that_cannot_be(margin) -> None:
    assert len(problems(lambda: fl.Metric("", better="more", margin=margin))) == 3
