"""Step times out of blocks that are made up here: what counts, what is left out, what is paired with what."""

from __future__ import annotations

from typing import Any

import pytest

from frostline.profiler import steps
from frostline.profiler.reading import _on_device
from frostline.results import Steps


def block(phase: str, *times: float, **more: Any) -> dict[str, Any]:
    """Steps of these seconds, end to end; a batch of 8 each."""
    n = len(times)
    return {
        "phase": phase, "start": 10.0, "end": 10.0 + sum(times), "times": [*times], "waits": [0.0] * n,
        "rows": [8] * n, "batches": [1] * n, "fresh": [0] * n, "before": {"faults": 0, "retries": 0},
        "after": {"faults": 0, "retries": 0}, **more,
    }  # fmt: skip


def loader(batches: int | None, calls: int, a_step: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"dataset": "D", "batches": batches, "calls": calls, "a_step": a_step, "wait_s": 0.0, **more}


def raw(*blocks: dict[str, Any], loaders: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    return {"blocks": [*blocks], "loaders": [*loaders], "inputs": [], "steps": 10}


def test_a_step_is_all_blocks_time_over_all_blocks_steps() -> None:
    found = steps.timed(raw(block("A", 1.0, 3.0), block("B", 9.0, 9.0), block("A", 2.0, 2.0)), "A")
    assert found is not None
    assert found.ms == pytest.approx(2000)
    assert found.count == 4
    assert found.times == (1000, 3000, 2000, 2000)


def test_the_sync_at_a_blocks_end_counts_and_widens_nothing() -> None:
    """On a GPU single steps end when they are launched; only the block's end is waited for."""
    found = steps.timed(raw(block("A", 1.0, 1.0, end=10.0 + 4.0)), "A")
    assert found is not None
    assert (found.ms, found.low, found.high) == pytest.approx((2000, 2000, 2000))


def test_a_block_that_was_cut_short_is_not_a_time() -> None:
    cut = block("A", 1.0)
    del cut["end"]
    assert steps.timed(raw(cut), "A") is None
    assert steps.timed(raw(cut, block("A", 3.0)), "A").ms == pytest.approx(3000)  # type: ignore[union-attr]


def test_steps_between_epochs_are_left_out_and_told() -> None:
    """An evaluation of 7 s stands in the second step, in which the loader began anew."""
    found = raw(block("A", 1.0, 8.0, 1.0, fresh=[0, 1, 0]), block("B", 1.0, 1.0, 1.0))
    wall = steps.timed(found, "A")
    assert wall is not None
    assert (wall.ms, wall.count) == (pytest.approx(1000), 2)
    assert steps.between(found) == pytest.approx([7.0])


def test_a_slow_step_within_an_epoch_counts() -> None:
    found = raw(block("A", 1.0, 8.0, 1.0))
    assert steps.timed(found, "A").ms == pytest.approx(10_000 / 3)  # type: ignore[union-attr]
    assert steps.between(found) == []


def test_a_new_epoch_that_costs_nothing_counts() -> None:
    found = raw(block("A", 1.0, 1.5, 1.0, fresh=[0, 1, 0]))
    assert steps.timed(found, "A").count == 3  # type: ignore[union-attr]
    assert steps.between(found) == []


def test_a_step_under_the_dispatch_mode_is_no_pause_between_epochs() -> None:
    """Looking makes a step slow, whether or not an epoch begins in it."""
    found = raw(block("A", 1.0, 1.0), block("B", 1.0, 1.0), block("look", 9.0, 9.0, fresh=[1, 0]))
    assert steps.between(found) == []


def test_cost_is_paired_by_rounds() -> None:
    """The machine slows down by ten between the rounds; what the profiler takes is 2 % in each."""
    found = steps.cost(
        raw(
            block("A", 1.02, 1.02), block("bare", 1.0, 1.0), block("bare", 10.0, 10.0),
            block("A", 10.2, 10.2), block("A", 5.1, 5.1), block("bare", 5.0, 5.0),
        )
    )  # fmt: skip
    assert found is not None
    assert (found.share, found.low, found.high) == pytest.approx((0.02, 0.02, 0.02))


def test_looking_at_inputs_costs_too_though_bare_steps_do_it_as_well() -> None:
    found = raw(block("A", 1.0), block("bare", 1.0), block("A", 1.0), block("bare", 1.0))
    found["inputs"] = [{"s": 0.01, "calls": 10, "looked": 10}, {"s": 0.5, "calls": 10, "looked": 3}]
    got = steps.cost(found)
    assert got is not None
    assert got.share == pytest.approx(0.01)


def test_a_round_that_an_epochs_end_took_away_does_not_shift_the_pairs() -> None:
    found = steps.cost(
        raw(
            block("A", 40.0, fresh=[1]), block("bare", 1.0), block("A", 2.04), block("bare", 2.0),
            block("A", 4.08), block("bare", 4.0), block("A", 1.02), block("bare", 1.0),
        )
    )  # fmt: skip
    assert found is not None
    assert (found.low, found.high) == pytest.approx((0.02, 0.02))


def test_one_round_tells_no_cost() -> None:
    assert steps.cost(raw(block("A", 1.0), block("bare", 1.0))) is None


def test_an_epoch_is_the_loaders_length_in_steps() -> None:
    found = raw(block("A", 0.5, 0.5), loaders=(loader(200, 100),))
    got = steps.epoch(found, Steps(500, 400, 600, 2))
    assert got is not None
    assert (got.steps, got.seconds, got.low, got.high) == pytest.approx((200, 100, 80, 120))


def test_an_epoch_has_fewer_steps_where_gradients_are_accumulated() -> None:
    found = raw(block("A", 0.5, 0.5, batches=[4, 4]), loaders=(loader(200, 100, 4),))
    got = steps.epoch(found, Steps(500, 500, 500, 2))
    assert got is not None
    assert (got.steps, got.seconds) == pytest.approx((50, 25))


def test_what_stands_between_epochs_is_added_once() -> None:
    found = raw(block("A", 1.0, 1.0, 1.0, 8.0, fresh=[0, 0, 0, 1]), loaders=(loader(10, 4),))
    got = steps.epoch(found, Steps(1000, 1000, 1000, 3))
    assert got is not None
    assert (got.seconds, got.between_s) == pytest.approx((17, 7))


SEEN = {"workers": 1, "persistent": False}


def test_a_beginning_counts_though_its_step_only_settled() -> None:
    """In no block: 7 s from a step's end to the first batch, 6 of them the loader's, and another of 9."""
    starts = [[5.0, 7.25, 6.25], [8.0, 9.25, 8.25]]
    waits = {"waits": [0.25, 0.25]}
    found = raw(
        block("A", 1.0, 1.0, **waits),
        block("B", 1.0, 1.0, **waits),
        loaders=(loader(10, 4, starts=starts, **SEEN),),
    )
    assert steps.between(found) == pytest.approx([7, 9])
    got = steps.epoch(found, Steps(1000, 1000, 1000, 2))
    assert got is not None
    assert (got.seconds, got.between_s) == pytest.approx((18, 8))
    assert steps.start(found) == steps.Start(pytest.approx(7), "D", anew=True)


def test_a_beginning_that_is_no_longer_than_a_step_is_pass_as() -> None:
    """One of two: an epoch has half of the other on average."""
    found = raw(
        block("A", 1.0, 1.0), loaders=(loader(10, 4, starts=[[5.0, 1.5, 1.0], [8.0, 7.0, 6.0]], **SEEN),)
    )
    assert steps.between(found) == pytest.approx([0, 7])
    assert steps.start(found) == steps.Start(pytest.approx(3), "D", anew=True)
    assert (
        steps.start(raw(block("A", 1.0), loaders=(loader(10, 4, starts=[[5.0, 0.1, 0.1]], **SEEN),))) is None
    )


@pytest.mark.parametrize("began", [[], [[40.0, 7.0, 1.0]]])
def test_an_evaluation_every_few_steps_is_part_of_the_epoch(began: list[list[float]]) -> None:
    """5 s of it, in every fourth step; also where the epoch that is seen has no beginning. One more stands
    where an epoch begins: it is told with that."""
    blocks = [
        block("A", 1.0, 6.0, 1.0, 1.0, fresh=[0, 1, 0, 0]),
        block("B", *[1.0] * 4, start=30.0, end=34.0),
    ]
    looked = [[11.0, 2.0, 1.0], [21.0, 2.0, 1.0], *([began[0]] if began else [])]
    loaders = (loader(100, 8, starts=began, **SEEN), loader(5, 8, 0.6, starts=looked, **SEEN))
    found = raw(*blocks, loaders=loaders) | {"steps": 18, "warmup": 10}
    assert steps.interludes(found) == pytest.approx(5 * 2 / 8)
    got = steps.epoch(found, Steps(1000, 1000, 1000, 3))
    assert got is not None
    assert got.seconds == pytest.approx(100 + 100 * 5 / 4 + (7 if began else 0))


def test_steps_in_which_the_main_loader_begins_are_no_evaluations() -> None:
    found = raw(
        block("A", 1.0, 8.0, 1.0, 1.0, fresh=[0, 2, 0, 0]),
        loaders=(
            loader(10, 8, starts=[[11.01, 7.0, 1.0]], **SEEN),
            loader(5, 8, 0.6, starts=[[11.01, 0.1, 0.1]], **SEEN),
        ),
    ) | {"warmup": 2}
    assert steps.interludes(found) == 0
    assert steps.between(found) == pytest.approx([7])


def test_a_beginning_under_the_dispatch_mode_is_slower_than_the_scripts() -> None:
    found = raw(
        block("A", 1.0, 1.0), block("look", 30.0, start=20.0, end=50.0),
        loaders=(loader(10, 4, starts=[[21.0, 29.0, 29.0], [60.0, 7.0, 7.0]], **SEEN),),
    )  # fmt: skip
    assert steps.between(found) == pytest.approx([7])


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, True)])
def test_workers_that_stay_do_not_start_anew(workers: int, persistent: bool) -> None:
    about = loader(10, 4, starts=[[5.0, 7.0, 6.0]], workers=workers, persistent=persistent)
    found = steps.start(raw(block("A", 1.0, 1.0), loaders=(about,)))
    assert found is not None
    assert not found.anew


def test_a_step_that_takes_from_two_loaders_does_not_halve_the_epoch() -> None:
    """Labelled and unlabelled batches, one of each a step: the labelled ones last for 100 steps."""
    found = raw(block("A", 1.0, 1.0, batches=[2, 2]), loaders=(loader(100, 51), loader(400, 50)))
    got = steps.epoch(found, Steps(1000, 1000, 1000, 2))
    assert got is not None
    assert got.steps == pytest.approx(100, rel=0.02)


@pytest.mark.parametrize("a_step", [1.98, 2.0])
def test_an_evaluation_every_few_steps_is_not_what_steps_read_from(a_step: float) -> None:
    """60 batches every 30 steps: two a step on average, and none in most."""
    batches = {"batches": [1, 1, 61, 1], "fresh": [0, 0, 1, 0]}
    loaders = (loader(1000, 750), loader(60, 1500, a_step))
    found = raw(block("A", 1.0, 1.0, 9.0, 1.0, **batches), loaders=loaders)
    assert steps.main_loader(found) is loaders[0]
    assert steps.epoch(found, Steps(1000, 1000, 1000, 3)).steps == 1000  # type: ignore[union-attr]


def test_a_loader_that_most_steps_read_from_comes_before_one_of_a_few() -> None:
    """One or two batches a step, as often as not; and an evaluation of a batch now and then."""
    loaders = (loader(1000, 750, 2.0), loader(60, 1500, 0.5))
    assert steps.main_loader(raw(block("A", 1.0, 1.0, batches=[1, 2]), loaders=loaders)) is loaders[0]
    assert steps.main_loader(raw(block("A", 1.0, 1.0, batches=[0, 0]), loaders=loaders[1:])) is loaders[1]


@pytest.mark.parametrize("loaders", [(), (loader(None, 10),), (loader(10, 0, 0),)])
def test_no_epoch_without_a_loader_that_knows_its_length(loaders: tuple[dict[str, Any], ...]) -> None:
    assert steps.epoch(raw(block("A", 1.0), loaders=loaders), Steps(1, 1, 1, 1)) is None


def test_waits_and_rows_are_of_whole_steps_of_pass_a() -> None:
    found = raw(
        block("A", 1.0, 9.0, waits=[0.25, 5.0], rows=[8, 16], fresh=[0, 1]), block("B", 1.0, waits=[9.0])
    )
    assert steps.a_step(found, "waits") == pytest.approx(0.25)
    assert steps.a_step(found, "rows") == 8
    assert steps.a_step(found, "rows", ("replay",)) is None


def test_counters_are_of_pass_a_alone() -> None:
    more: dict[str, Any] = {"before": {"faults": 5}, "after": {"faults": 11}}
    found = raw(block("A", 1.0, 1.0, **more), block("B", 1.0, **more), block("A", 1.0))
    found["blocks"][2] |= {"before": {"faults": 11}, "after": {"faults": 11}}
    assert steps.grown(found, "faults") == pytest.approx(2)


def test_nothing_gives_nothing() -> None:
    nothing = raw()
    assert steps.usual(nothing) == 0
    assert steps.timed(nothing, "A") is None
    assert steps.trial(nothing, "replay", "replayed", "") is None
    assert steps.cost(nothing) is None
    assert steps.grown(nothing, "faults") == 0
    assert steps.a_step(nothing, "waits") is None
    assert steps.main_loader(nothing) is None


def test_on_a_device_blocks_take_what_its_clock_says() -> None:
    found = steps.timed(raw(block("A", 0.04, 0.04) | {"start": 0.0, "end": 0.001, "device_s": 0.08}), "A")
    assert found is not None
    assert found.ms == pytest.approx(40)


def test_of_a_traced_step_that_took_longer_copies_and_kernels_keep_their_shares() -> None:
    kernels = {"busy_s": 0.012, "exposed_copy_s": 0.009, "idle_s": {"launch": 0.004, "data": 0.004}}
    assert _on_device(kernels, 10.0) == pytest.approx({"exposed_copy_ms": 4.5, "kernels_ms": 1.5})
    assert _on_device(kernels, 50.0) == pytest.approx({"exposed_copy_ms": 9.0, "kernels_ms": 3.0})
    assert _on_device({"steps": 3}, 50.0) == {}
