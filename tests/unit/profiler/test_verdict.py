"""Verdicts and remedies from what is made up to be seen: one cause at a time, then two, then too little."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.profiler.remedies import bound, remedies
from frostline.profiler.steps import Start
from frostline.profiler.verdict import FEWEST, Seen, verdict
from frostline.results import (
    Copies,
    Epoch,
    Idle,
    Loader,
    Machine,
    ModuleUse,
    Remedy,
    Row,
    Steps,
    Sync,
    Trial,
)

CPU = Machine("cpu", 8, "2", "3", busy=0.98)
GPU = Machine("NVIDIA H200", 8, "2", "3", busy=0.95)


def rows(**parts: float) -> tuple[Row, ...]:
    whole = sum(parts.values())
    return tuple(Row(kind, kind, took, took / whole) for kind, took in parts.items())


def seen(**given: Any) -> Seen:
    """A healthy script of 100 ms a step, on the CPU, that computes; but for what is given."""
    healthy: dict[str, Any] = {
        "wall": Steps(100, 99, 101, 16), "machine": CPU, "wait_ms": 0.5,
        "rows": rows(forward=40, backward=50, optimizer=8, other=2), "loaders": [loader(wait_ms=0.5)],
    }  # fmt: skip
    return Seen(**(healthy | given))


def on_gpu(busy: float = 0.95, **given: Any) -> Seen:
    return seen(machine=replace(GPU, busy=busy), **given)


def idle(**causes: float) -> tuple[Idle, ...]:
    return tuple(Idle(cause, took, took / 100) for cause, took in causes.items())


def trials(**times: float) -> dict[str, Trial]:
    return {name: Trial(name, took, took, took) for name, took in times.items()}


def bounds(found: Seen) -> dict[str, float]:
    return {remedy.name: remedy.bound for remedy in remedies(found)}


def only(found: Seen) -> Remedy:
    (remedy,) = remedies(found)
    return remedy


def module(name: str, **given: Any) -> ModuleUse:
    return ModuleUse(**({"name": name, "kind": "Net", "calls": 1, "ms": 40, "rows": (8,)} | given))


def loader(**given: Any) -> Loader:
    return Loader(**({"name": "the loader of D", "workers": 2, "batch_size": 8, "batches": 9, "calls": 1.0,
                      "wait_ms": 60.0} | given))  # fmt: skip


@pytest.mark.parametrize("device", [CPU, GPU], ids=["cpu", "gpu"])
def test_a_healthy_script_computes_and_needs_nothing(device: Machine) -> None:
    found = seen(machine=device, trials=trials(replayed=99.5, half=52))
    assert verdict(found).kind == "compute-bound"
    assert remedies(found) == ()


@pytest.mark.parametrize("wall", [None, Steps(100, 99, 101, FEWEST - 1)])
def test_too_few_steps_are_no_verdict(wall: Steps | None) -> None:
    """Not even where everything else speaks for one."""
    found = seen(wall=wall, wait_ms=90, swapped=1000, trials=trials(replayed=10))
    assert verdict(found).kind == "unclear"
    assert str(wall.count if wall else 0) in verdict(found).text


def test_no_rows_are_no_verdict() -> None:
    """The script ended after pass A."""
    assert verdict(seen(rows=(), wait_ms=90)).kind == "unclear"


def test_enough_steps_are_a_verdict() -> None:
    assert verdict(seen(wall=Steps(100, 99, 101, FEWEST))).kind == "compute-bound"


@pytest.mark.parametrize("device", [CPU, replace(GPU, busy=0.4)], ids=["cpu", "gpu"])
def test_what_a_replayed_batch_saves_is_the_loaders(device: Machine) -> None:
    """The bound comes from the trial, not from the wait: 60 ms of it were hidden behind other work."""
    found = seen(machine=device, wait_ms=90, trials=trials(replayed=70, half=40), loaders=[loader()])
    assert verdict(found).kind == "input-bound"
    assert only(found).bound == pytest.approx(100 / 70)


def test_a_trial_is_compared_with_real_data_of_the_same_rounds() -> None:
    """The machine slowed down to half its pace after pass A: 140 of 200 ms are left, not 140 of 100."""
    found = seen(wait_ms=30, trials=trials(real=200, replayed=140))
    assert verdict(found).kind == "input-bound"
    assert only(found).bound == pytest.approx(200 / 140)


def test_without_a_trial_the_wait_itself_is_the_loaders() -> None:
    assert only(seen(wait_ms=60)).bound == pytest.approx(2.5)


def test_a_faster_replay_without_any_wait_is_not_the_loaders() -> None:
    """Workers that share the step's cores slow it down too, but a faster loader is no remedy for that."""
    found = seen(wait_ms=1, trials=trials(replayed=60, half=30))
    assert (verdict(found).kind, remedies(found)) == ("compute-bound", ())


def test_on_a_gpu_a_wait_that_the_device_did_not_notice_is_none() -> None:
    found = on_gpu(wait_ms=60, idle=idle(data=1, launch=2))
    assert verdict(found).kind == "compute-bound"
    assert "an infinitely fast loader" not in bounds(found)


@pytest.mark.parametrize(
    ("cause", "given"),
    [
        ("transfer", {"exposed_copy_ms": 25, "idle": idle(copy=15)}),
        ("sync", {"idle": idle(sync=40)}),
        ("launch", {"idle": idle(launch=30, optimizer=10)}),
    ],
)
def test_what_the_device_waits_for_is_the_verdict_and_its_bound(cause: str, given: dict[str, Any]) -> None:
    found = on_gpu(0.6, **given)
    assert verdict(found).kind == f"{cause}-bound"
    assert only(found).bound == pytest.approx(100 / 60)


def test_pageable_copies_are_to_be_pinned_and_waits_are_told_with_their_place() -> None:
    copies = [Copies("pageable", 1, 1e6, 20, True)]
    assert "pin_memory" in only(on_gpu(0.6, exposed_copy_ms=40, copies=copies)).what
    assert "pin_memory" not in only(on_gpu(0.6, exposed_copy_ms=40)).what
    assert "train.py:7" in only(on_gpu(0.6, idle=idle(sync=40), syncs=[Sync("train.py:7", "", 1, 3)])).what


def test_two_causes_are_mixed_and_both_are_told() -> None:
    found = verdict(on_gpu(0.4, exposed_copy_ms=30, idle=idle(sync=28)))
    assert found.kind == "mixed"
    assert "copies" in found.text
    assert "waits" in found.text


def test_one_cause_twice_as_large_as_the_next_is_the_verdict() -> None:
    assert verdict(on_gpu(0.3, exposed_copy_ms=45, idle=idle(sync=21))).kind == "transfer-bound"


def test_neither_computing_nor_any_known_cause_is_mixed() -> None:
    found = verdict(seen(machine=replace(CPU, busy=0.2), rows=rows(forward=20, other=80)))
    assert found.kind == "mixed"
    assert "80%" in found.text


@pytest.mark.parametrize("given", [{"swapped": 30}, {"retries": 0.5}])
def test_memory_that_is_short_comes_first(given: dict[str, float]) -> None:
    found = seen(wait_ms=60, trials=trials(replayed=40), **given)
    assert verdict(found).kind == "memory-thrashing"


def test_a_few_pages_are_none() -> None:
    assert verdict(seen(swapped=3, retries=0.01)).kind == "compute-bound"


@pytest.mark.parametrize(
    ("operators", "kind"), [(10_000, "launch-bound"), (100, "compute-bound"), (0, "compute-bound")]
)
def test_on_the_cpu_half_a_batch_says_something_where_operators_are_small(operators: int, kind: str) -> None:
    """An optimiser of many weights does not care for the batch either, but it computes."""
    assert verdict(seen(trials=trials(replayed=100, half=97), operators=operators)).kind == kind


@pytest.mark.parametrize(("busy", "kind"), [(0.5, "launch-bound"), (0.9, "compute-bound")])
def test_on_a_gpu_half_a_batch_says_something_where_the_device_idles(busy: float, kind: str) -> None:
    found = on_gpu(busy, trials=trials(replayed=100, half=97), idle=idle(launch=100 * (0.97 - busy)))
    assert verdict(found).kind == kind


def test_on_a_gpu_the_scripts_own_code_is_no_launching() -> None:
    found = on_gpu(0.4, trials=trials(replayed=100, half=97), idle=idle(other=60))
    assert verdict(found).kind == "mixed"


@pytest.mark.parametrize(("replayed", "kind"), [(60, "input-bound"), (98, "compute-bound")])
def test_real_data_in_turns_with_replayed_ones_decide(replayed: float, kind: str) -> None:
    """Epochs of four batches: what their beginnings take is left out of pass A, and there all the same."""
    found = seen(wait_ms=0.5, trials=trials(real=100, replayed=replayed))
    assert verdict(found).kind == kind


def slow_epochs(start_s: float, steps: int = 30, pause_s: float | None = None, **given: Any) -> Seen:
    """Epochs of steps of 100 ms, and what stands between them."""
    pause = start_s if pause_s is None else pause_s
    whole = 0.1 * steps + pause
    epoch = Epoch(whole, whole, whole, steps, pause)
    return seen(epoch=epoch, start=Start(start_s, "D", anew=True), **given)


def test_epochs_that_begin_slowly_are_input_bound() -> None:
    """3 s of steps that compute, 6 s before their first batch."""
    found = slow_epochs(6.0, trials=trials(replayed=99.5))
    assert verdict(found).kind == "input-bound"
    assert "67%" in verdict(found).text
    assert "6.0 s of the 9.0 s" in verdict(found).evidence[0]
    assert only(found).bound == pytest.approx(3)
    assert "persistent_workers=True" in only(found).what
    assert "persistent_workers" not in only(replace(found, start=Start(6.0, "D"))).what


def test_epochs_that_begin_a_little_slowly_are_told() -> None:
    found = slow_epochs(0.5)
    assert verdict(found).kind == "compute-bound"
    assert "begin slowly" in verdict(found).text
    assert only(found).bound == pytest.approx(3.5 / 3)
    found = slow_epochs(0.3)
    assert "Data" in verdict(found).text
    assert remedies(found) == ()


def test_an_evaluation_between_epochs_is_not_the_loaders() -> None:
    found = slow_epochs(0.3, pause_s=27.0)
    assert (verdict(found).kind, remedies(found)) == ("compute-bound", ())


def test_beginnings_and_waits_add_up_to_what_a_faster_loader_gives() -> None:
    """Steps of 100 ms that take 50 with batches that are there, as much again before the first batch."""
    found = slow_epochs(3.0, wait_ms=50, trials=trials(replayed=50))
    assert "75%" in verdict(found).text
    assert bounds(found) == {
        "an infinitely fast loader": pytest.approx(4), "epochs that begin at once": pytest.approx(2),
    }  # fmt: skip


def test_a_workloads_turns_with_their_beginnings_are_no_steps() -> None:
    """Pass A: 100 ms, in turns 400, as epochs begin there too; 80 with batches that are there."""
    found = slow_epochs(0.9, steps=3, wait_ms=20, trials=trials(real=400, replayed=80))
    assert bounds(found) == {
        "an infinitely fast loader": pytest.approx(1.2 / 0.24), "epochs that begin at once": pytest.approx(4),
    }  # fmt: skip


def test_copies_that_take_longer_than_an_epochs_beginning_are_the_verdict() -> None:
    found = replace(slow_epochs(1.5), machine=replace(GPU, busy=0.3), exposed_copy_ms=60)
    assert verdict(found).kind == "transfer-bound"


IDLE = replace(CPU, busy=0.12)


@pytest.mark.parametrize("in_turns", [{}, {"real": 60}])
def test_a_thread_that_reads_ahead_does_not_hide_the_loader(in_turns: dict[str, float]) -> None:
    """Its wait is nobody's; in turns it hands out replayed batches among the others."""
    given = {"wait_ms": 0.0, "rows": rows(forward=12, other=88), "trials": trials(replayed=14, **in_turns)}
    found = seen(machine=IDLE, alone=True, aside=True, **given)
    assert verdict(found).kind == "input-bound"
    assert "14.0 ms, not 100.0" in verdict(found).evidence[-1]
    assert only(found).bound == pytest.approx(100 / 14)


@pytest.mark.parametrize("given", [{"machine": CPU}, {"aside": False}, {"trials": trials(replayed=80)}])
def test_a_thread_that_reads_ahead_is_not_always_waited_for(given: dict[str, Any]) -> None:
    """The step computes; nobody reads ahead; or it is not far faster."""
    held = {"machine": IDLE, "aside": True, "wait_ms": 0.0, "trials": trials(replayed=14)}
    assert remedies(seen(**(held | given))) == ()


def test_a_gpu_that_nobody_watched_is_not_judged() -> None:
    assert verdict(seen(machine=replace(GPU, busy=None))).kind == "unclear"


def test_a_frozen_module_whose_inputs_never_come_again_is_not_to_be_stored() -> None:
    """Items come again, their augmented pictures do not."""
    module = ModuleUse("Net", "Net", 1, 50, frozen="parameters")
    assert [r.name for r in remedies(seen(modules=[module]))] == ["storing what Net computes"]
    assert remedies(seen(modules=[module], items_again=0.8, repeated={"Net": 0.0})) == ()


def test_small_operators_alone_are_not_launch_bound() -> None:
    assert verdict(seen(trials=trials(replayed=100, half=55), operators=10_000)).kind == "compute-bound"


def test_the_loader_comes_before_launches() -> None:
    found = seen(wait_ms=60, trials=trials(replayed=40, half=39), operators=10_000)
    assert verdict(found).kind == "input-bound"


# --- remedies -----------------------------------------------------------------------------------------


@given(st.floats(0.001, 1e6), st.floats(0, 2))
def test_a_bound_is_infinite_only_where_nothing_is_left(step: float, share: float) -> None:
    found = bound(step, share * step)
    assert math.isinf(found) == (share * step >= step)
    assert found >= 1


def test_a_modules_share_is_of_the_pass_that_measured_it() -> None:
    """Pass B's steps took 120 ms, pass A's 100: of 110 ms in a module, 10 of 120 are left, not nothing."""
    parts = [module("Net", ms=110, frozen="parameters")]
    found = only(seen(modules=parts, rows=rows(forward=110, other=10)))
    assert found.bound == pytest.approx(120 / 10)


def test_remedies_that_give_little_are_not_told() -> None:
    assert bounds(on_gpu(idle=idle(sync=2.8))) == {}
    assert bounds(on_gpu(idle=idle(sync=3.2))) == {"no waiting for the device": pytest.approx(100 / 96.8)}


def test_the_largest_remedy_comes_first() -> None:
    causes = {name: random.uniform(5, 30) for name in ("copy", "sync", "launch")}
    found = [remedy.bound for remedy in remedies(on_gpu(idle=idle(**causes)))]
    assert len(found) == 3
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize(
    ("needed", "told"), [(5, "num_workers=5"), (2, "faster"), (12, "store what is prepared")]
)
def test_workers_are_added_where_there_are_cores(needed: int, told: str) -> None:
    assert told in only(seen(wait_ms=60, loaders=[loader(needed=needed)])).what


def test_one_call_instead_of_many_takes_its_backward_along() -> None:
    """44 of 40 + 50 ms: a module of half the forward pass has half of the backward pass."""
    found = only(seen(modules=[module("Net.head", calls=11, ms=20, depth=1)]))
    gone = (20 + 25) * 10 / 11
    assert found.bound == pytest.approx(100 / (100 - gone))


def test_a_frozen_module_that_is_called_often_has_no_backward() -> None:
    found = bounds(seen(modules=[module("Net", calls=4, ms=20, frozen="parameters")]))
    assert found["one call of Net instead of 4"] == pytest.approx(100 / 85)
    assert found["storing what Net computes"] == pytest.approx(100 / 80)


def test_calls_of_several_batches_a_step_are_no_calls_of_one() -> None:
    """Gradients accumulated over four batches: four calls are as they should be."""
    many = [module("Net", calls=4, ms=40)]
    assert remedies(seen(modules=many, loaders=[loader(calls=4.0, wait_ms=0)])) == ()
    assert len(remedies(seen(modules=many, loaders=[loader(calls=1.0, wait_ms=0)]))) == 1


def test_parts_of_a_module_that_is_called_often_are_not_told_again() -> None:
    parts = [module("Net", calls=6, ms=60), module("Net.head", calls=6, ms=30, depth=1)]
    assert [*bounds(seen(modules=parts))] == ["one call of Net instead of 6"]


def test_rows_one_by_one_belong_into_a_batch() -> None:
    assert "one batch" in only(seen(modules=[module("Net", calls=6, ms=40, rows=(1,))])).what


@pytest.mark.parametrize("rows", [(1,), (8,)])
def test_calls_may_need_each_other(rows: tuple[int, ...]) -> None:
    """A block whose weights are shared over depth: nothing that is recorded tells."""
    told = only(seen(modules=[module("Net", calls=12, ms=40, rows=rows)])).what
    assert told.endswith("if none needs what another gave")


def test_a_frozen_prefix_is_worth_what_it_takes() -> None:
    part = module("Net", ms=60, prefix="Net.blocks.5", prefix_ms=30)
    assert bounds(seen(modules=[part])) == {"storing what Net.blocks.5 gives": pytest.approx(100 / 70)}


def test_what_is_inside_of_a_frozen_module_is_told_with_it() -> None:
    parts = [
        module("Net", ms=60, prefix="Net.encoder.last", prefix_ms=30),
        module("Net.encoder", ms=30, frozen="parameters", depth=1),
        module("Net.encoder.last", ms=20, frozen="parameters", depth=2),
    ]
    assert [*bounds(seen(modules=parts))] == ["storing what Net.encoder computes"]


def test_a_module_with_a_similar_name_is_not_inside() -> None:
    parts = [module("Net.a", ms=20, frozen="no_grad"), module("Net.ab", ms=20, frozen="no_grad")]
    assert len(remedies(seen(modules=parts))) == 2


def test_nothing_gives_no_remedies() -> None:
    assert remedies(seen(wall=None)) == ()
    assert remedies(seen(wall=Steps(0, 0, 0, 0))) == ()


def test_copies_never_take_what_kernels_do() -> None:
    found = bounds(on_gpu(busy=1.0, exposed_copy_ms=92.0, idle=idle(copy=10), kernels_ms=5.0))
    assert found["copies that cost nothing"] == pytest.approx(20.0)


def test_with_a_batch_on_the_device_the_bound_of_copies_is_what_was_measured() -> None:
    found = bounds(on_gpu(exposed_copy_ms=95.0, trials=trials(compute=20.0)))
    assert found["copies that cost nothing"] == pytest.approx(5.0)


def test_without_workers_and_not_in_turns_no_more_is_lost_than_is_waited_for() -> None:
    """The machine may have been faster while one batch came again and again: not the loader's doing."""
    found = seen(wait_ms=30, trials=trials(replayed=50), alone=True)
    assert bounds(found)["an infinitely fast loader"] == pytest.approx(1 / 0.7)


@pytest.mark.parametrize("replayed", [5, 50, 150])
def test_without_workers_a_batch_unlike_the_others_does_not_count(replayed: float) -> None:
    """Buckets of lengths: the batch that came again and again was a short one, or a long one."""
    found = seen(wait_ms=12, trials=trials(real=100, replayed=replayed), alone=True)
    assert verdict(found).kind == "compute-bound"
    assert only(found).bound == pytest.approx(1 / 0.88)
    assert only(found).why == "12.0 of 100.0 ms are waits"
    assert bounds(replace(found, wait_ms=0.5)) == {}  # no wait, no loss: the pace has changed


def test_without_workers_on_a_gpu_the_device_may_work_meanwhile() -> None:
    """20 of the 30 ms that the host waits are there for the device, of which the trial saves 10."""
    found = on_gpu(0.6, wait_ms=30, idle=idle(data=20), trials=trials(real=100, replayed=90), alone=True)
    assert bounds(found)["an infinitely fast loader"] == pytest.approx(1 / 0.9)
    found = replace(found, trials=trials(real=100, replayed=10))
    assert bounds(found)["an infinitely fast loader"] == pytest.approx(1 / 0.8)


@pytest.mark.parametrize(("replayed", "left"), [(70, 0.7), (43, 0.83), (150, 0.83)])
def test_with_workers_more_than_waits_bear_out_does_not_count(replayed: float, left: float) -> None:
    """17 ms of waits. 30 may be gone, as workers leave their cores to the step; 57 are another batch's."""
    found = seen(wait_ms=17, trials=trials(replayed=replayed))
    assert only(found).bound == pytest.approx(1 / left)
    assert ("there already" in only(found).why) == (replayed == 70)


@pytest.mark.parametrize(("wait_ms", "told"), [(3, True), (15, False)])
def test_data_that_are_waited_for_hold_the_step_up(wait_ms: float, told: bool) -> None:
    found = verdict(seen(wait_ms=wait_ms))
    assert found.kind == "compute-bound"
    assert ("do not hold it up" in found.text) == told


SLEEPS = {"machine": replace(CPU, busy=0.04), "rows": rows(forward=4, other=96)}


def test_the_scripts_own_code_is_told_with_its_lines_and_what_they_take() -> None:
    """Lines were looked at in other steps than rows: none takes more than all of them."""
    found = seen(lines=[("train.py:7", 0.06), ("train.py:8", 0.99), ("train.py:9", 0.01)], **SLEEPS)
    assert verdict(found).kind == "mixed"
    assert verdict(found).text.endswith("96% of the step is the script's own code between parts that are "
                                        "known: train.py:8, train.py:7.")  # fmt: skip
    assert verdict(found).evidence[-2] == "train.py:8: about 96% of the step"
    assert bounds(found) == {"train.py:8 made free": pytest.approx(25), "train.py:7 made free": 1 / 0.94}


def test_lines_where_the_scripts_own_code_takes_little_are_no_remedy() -> None:
    assert remedies(seen(lines=[("train.py:8", 0.1)])) == ()
    assert "No single cause" in verdict(seen(**SLEEPS)).text  # nobody looked at lines


@pytest.mark.parametrize("loaders", [[], [loader(wait_ms=0, batches=None)]])
def test_without_epochs_a_frozen_module_is_stored_only_if_its_inputs_were_seen_again(loaders: Any) -> None:
    """A replay buffer, or an endless stream."""
    found = seen(modules=[module("Net", frozen="no_grad")], loaders=loaders, repeated={"Net": 0.0})
    assert remedies(found) == ()
    assert [*bounds(replace(found, repeated={"Net": 0.3}))] == ["storing what Net computes"]


def test_half_a_batch_that_takes_longer_does_not_grow_with_the_batch() -> None:
    found = verdict(seen(trials=trials(replayed=100, half=160), operators=10_000))
    assert found.kind == "launch-bound"
    assert "no less time" in found.text
