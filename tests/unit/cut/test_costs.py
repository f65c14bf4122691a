"""Figures of cuts that were made up: what goes on at once, tiers, the first epoch that pays, the choice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from frostline.cut.costing import Lanes, break_even
from frostline.cut.costs import Budgets, Cost, Option, StepCost
from frostline.cut.planner import WORTH, _chosen
from frostline.cut.words import why
from frostline.freezer.workers import cores

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def option(*fields: str, freeze: float = 0.0, epoch: float = 1.0, epochs: int = 10, size: int = 0) -> Option:
    return Option(
        fields=fields, bytes=size, freeze_s=freeze, read_s=0, prepare_s=0, compute_s=0, epoch_s=epoch,
        total_s=freeze + epochs * epoch, break_even=None, fits_disk=True, fits_ram=True, fits_device=True,
        tier="mmap" if fields else None,
    )  # fmt: skip


NOTHING = option(epoch=10.0)


def test_on_a_gpu_the_slowest_lane_is_the_epoch_and_on_a_cpu_they_add_up() -> None:
    lanes = Lanes(read=Cost(1), prepare=Cost(4), late=Cost(2), step=Cost(3))
    assert lanes.epoch(one_processor=False) == 5
    assert lanes.epoch(one_processor=True) == 10


def test_lanes_that_want_more_cores_than_there_are_share_them() -> None:
    busy = Cost(1.0, 2.0 * cores())
    lanes = Lanes(read=busy, prepare=busy, late=Cost(), step=Cost())
    assert lanes.epoch(one_processor=False) == pytest.approx(4.0)


def test_a_step_takes_all_cores_of_a_cpu_unless_it_is_known_better() -> None:
    assert StepCost(2.0, 4).a_sample(CPU, 8) == Cost(0.5, 4.0)
    assert StepCost(2.0, 4).a_sample(GPU, 8) == Cost(0.5, 0.5)
    assert StepCost(2.0, 4, cores=3).a_sample(CPU, 8) == Cost(0.5, 1.5)


@pytest.mark.parametrize(
    ("size", "device", "tier"),
    [
        (10, GPU, "device"),
        (30, GPU, "pinned"),
        (60, GPU, "mmap"),
        (80, GPU, "disk"),
        (10, CPU, "mmap"),
        (71, CPU, "disk"),
    ],
)
def test_the_tier_is_the_one_a_feed_would_take(size: int, device: torch.device, tier: str) -> None:
    assert Budgets(disk=10**9, ram=100, device=100).tier(size, device) == tier


@pytest.mark.parametrize(
    ("freeze", "epoch", "expected"),
    [(0.0, 5.0, 1), (4.9, 5.0, 1), (5.0, 5.0, 2), (12.0, 8.0, 7), (1.0, 10.0, None), (1.0, 12.0, None)],
)
def test_break_even_is_the_first_epoch_with_less_time_spent(
    freeze: float, epoch: float, expected: int | None
) -> None:
    found = break_even(option("f", freeze=freeze, epoch=epoch), NOTHING)
    assert found == expected
    if found is not None:
        assert freeze + found * epoch < found * NOTHING.epoch_s
        assert found == 1 or freeze + (found - 1) * epoch >= (found - 1) * NOTHING.epoch_s


def test_the_shortest_run_is_chosen() -> None:
    fast, faster = option("a", freeze=20, epoch=3), option("b", freeze=40, epoch=0.5)
    assert _chosen([NOTHING, fast, faster]) is faster
    assert _chosen([NOTHING, replace(faster, why_not="too large"), fast]) is fast


def test_nothing_is_stored_for_a_gain_that_may_be_none() -> None:
    least = NOTHING.total_s * (1 - WORTH)  # so long may the run be with a store
    clear, unclear = option("a", freeze=least - 11, epoch=1), option("a", freeze=least - 9, epoch=1)
    assert _chosen([NOTHING, clear]) is clear
    assert unclear.total_s < NOTHING.total_s
    assert _chosen([NOTHING, unclear]) is NOTHING


def test_of_equals_the_smaller_is_chosen() -> None:
    large, small = option("a", freeze=10, epoch=1, size=500), option("b", freeze=10.1, epoch=1, size=5)
    assert _chosen([NOTHING, large, small]) is small


def test_why_says_what_it_costs_and_when_it_pays() -> None:
    best = replace(option("features", freeze=20, epoch=2, size=3_000_000), break_even=3)
    told = why(best, [best, NOTHING], 10, WORTH)
    assert told == (
        "Store features: 20 s to freeze 3.00 MB, then 2.0 s an epoch instead of 10 s; it pays from epoch 3, "
        "40 s instead of 2 min for 10 epochs."
    )


def test_why_not_says_what_the_best_cut_would_need() -> None:
    late = replace(option("features", freeze=200, epoch=2), break_even=26)
    told = why(NOTHING, [NOTHING, late], 10, WORTH)
    assert told.startswith("Store nothing: live, 10 epochs take 2 min; the best cut, features takes 4 min")
    assert "pays from epoch 26" in told
    never = option("features", freeze=1, epoch=11)
    assert "would not be shorter with features stored" in why(NOTHING, [NOTHING, never], 1, WORTH)
    full = replace(never, why_not="it does not fit the disk")
    assert "no cut is possible (it does not fit the disk)" in why(NOTHING, [NOTHING, full], 1, WORTH)
    assert "nothing here is the same in every epoch" in why(NOTHING, [NOTHING], 1, WORTH)
