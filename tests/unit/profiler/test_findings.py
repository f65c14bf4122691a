"""Findings, one by one, from what is made up to be seen; and none where nothing is wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from frostline.profiler.findings import findings
from frostline.profiler.steps import Start
from frostline.profiler.verdict import Seen
from frostline.results import (
    Copies,
    Epoch,
    Finding,
    Loader,
    Machine,
    ModuleUse,
    Repeat,
    Row,
    Steps,
    Sync,
    Trial,
)

CPU, GPU = Machine("cpu", 8, "2", "3"), Machine("NVIDIA H200", 8, "2", "3", busy=0.9)


def seen(**given: Any) -> Seen:
    rows = (Row("forward", "forward", 45, 0.45), Row("backward", "backward", 50, 0.5))
    healthy = {"wall": Steps(100, 99, 101, 16), "rows": rows, "machine": CPU, "wait_ms": 0.5,
               "loaders": [loader(wait_ms=0.5)]}  # fmt: skip
    return Seen(**(healthy | given))


def module(name: str, **given: Any) -> ModuleUse:
    return ModuleUse(**({"name": name, "kind": "Net", "calls": 1, "ms": 40, "rows": (8,)} | given))


def loader(**given: Any) -> Loader:
    return Loader(**({"name": "the loader of D", "workers": 2, "batch_size": 8, "batches": 9, "calls": 1.0,
                      "wait_ms": 40.0} | given))  # fmt: skip


def one(found: Seen, *repeats: Repeat) -> Finding:
    (finding,) = findings(found, repeats)
    return finding


def test_a_healthy_script_has_none() -> None:
    found = seen(
        modules=[module("Net", parameters=9, trainable=9), module("Net.head", depth=1, ms=20)],
        loaders=[loader(wait_ms=0.5, prepare_ms=20.0, needed=1)],
        trials={name: Trial(name, took, took, took) for name, took in (("replayed", 99), ("half", 52))},
        copies=[Copies("pinned", 1, 1e6, 9, False)],
    )
    repeats = [
        Repeat("items of D", 100, 0, None), Repeat("items of E", 100, 50, None),
        Repeat("module Net", 90, 0, 0.0), Repeat("decode PIL", 90, 80, 0.2),
    ]  # fmt: skip
    assert findings(found, repeats) == ()


@pytest.mark.parametrize("wall", [None, Steps(0, 0, 0, 0)])
def test_nothing_gives_none(wall: Steps | None) -> None:
    assert findings(seen(wall=wall, modules=[module("Net", frozen="no_grad")]), []) == ()


def test_a_loader_that_cannot_keep_up() -> None:
    finding = one(seen(wait_ms=40, loaders=[loader(prepare_ms=80.0, decode_ms=60.0, needed=5)]))
    assert (finding.kind, finding.ms) == ("loader", 40)
    assert "75%" in finding.text
    assert "5 workers" in finding.text
    assert "cannot keep up" in finding.title


@pytest.mark.parametrize("needed", [None, 2])
def test_a_loader_with_workers_enough_is_waited_for(needed: int | None) -> None:
    assert one(seen(wait_ms=40, loaders=[loader(needed=needed)])).title == "the loader of D is waited for"


def test_what_takes_most_comes_first_and_what_takes_no_time_last() -> None:
    given: dict[str, Any] = {"wait_ms": 40, "loaders": [loader()], "syncs": [Sync("train.py:12", "", 1, 0.0)]}
    repeats = [Repeat("module Net", 90, 80, 12.0), Repeat("decode PIL", 90, 80, 60.0)]
    found = findings(seen(modules=[module("Net", calls=11, ms=30)], **given), repeats)
    assert [finding.ms for finding in found] == [60, 40, 30, 12, None]


def test_items_that_are_prepared_again_are_told_where_they_are_waited_for() -> None:
    items = Repeat("items of D", 90, 80, 30.0)
    found = findings(seen(wait_ms=40, loaders=[loader()]), [items])
    assert [finding.kind for finding in found] == ["loader", "repeat"]
    assert found[1].title == "items of D are prepared again"
    assert "random augmentation must not be" in found[1].text
    assert findings(seen(), [items]) == ()


def test_of_two_loaders_the_one_that_is_waited_for() -> None:
    quick = loader(name="the loader of E", wait_ms=0.1)
    assert "loader of D" in one(seen(wait_ms=40, loaders=[quick, loader()])).title


def test_many_calls_and_many_calls_of_one_row() -> None:
    assert one(seen(modules=[module("Net", calls=11)])).kind == "calls"
    finding = one(seen(modules=[module("Net", calls=6, rows=(1,))]))
    assert finding.kind == "batch"
    assert "6 times" in finding.title


def test_many_calls_that_take_no_time_are_none() -> None:
    assert findings(seen(modules=[module("Net", calls=11, ms=1)]), []) == ()


@pytest.mark.parametrize(("frozen", "told"), [("parameters", "parameters"), ("no_grad", "no_grad")])
def test_a_frozen_module(frozen: str, told: str) -> None:
    finding = one(seen(modules=[module("Net", frozen=frozen)]))
    assert (finding.kind, finding.ms) == ("frozen", 40)
    assert told in finding.text


def test_a_prefix_is_told_with_its_end_and_what_is_frozen() -> None:
    part = module("Net", parameters=1000, trainable=400, prefix="Net.blocks.5", prefix_ms=20)
    finding = one(seen(modules=[part]))
    assert (finding.kind, finding.ms) == ("prefix", 20)
    assert "600 of its 1,000" in finding.text
    assert "Net.blocks.5" in finding.title


def test_a_prefix_that_is_a_frozen_module_is_told_once() -> None:
    parts = [
        module("Net", prefix="Net.encoder", prefix_ms=20),
        module("Net.encoder", ms=20, depth=1, frozen="parameters"),
        module("Net.encoder.stem", ms=10, depth=2, frozen="parameters"),
    ]
    assert [finding.kind for finding in findings(seen(modules=parts), [])] == ["frozen"]


def test_repeats_are_told_with_their_share_and_when_storing_pays() -> None:
    finding = one(seen(), Repeat("module Net", 320_000, 319_500, 12.0, epochs=1.7))
    assert (finding.kind, finding.ms) == ("repeat", 12)
    for told in ("319,500 of 320,000", "99.8%", "1.7 epochs"):
        assert told in finding.text


def test_what_storing_takes_is_told_where_it_is_known() -> None:
    text = one(seen(), Repeat("decode PIL.Image", 90, 80, 12.0, epochs=1.4, stored=1.2e9)).text
    assert text.endswith("Storing the results (1.20 GB) pays in trainings of more than 1.4 epochs.")
    text = one(seen(), Repeat("decode PIL.Image", 90, 80, 12.0, epochs=1.4)).text
    assert text.endswith("Storing the results pays in trainings of more than 1.4 epochs.")


def test_where_storing_does_not_pay_its_size_is_not_told() -> None:
    assert "Storing" not in one(seen(), Repeat("decode av", 90, 80, 12.0, stored=1.2e9)).text


def test_a_module_outside_of_what_is_compiled() -> None:
    parts = [module("Net", compiled=True), module("Loss", ms=10), module("Loss.part", ms=10, depth=1)]
    finding = one(seen(modules=parts))
    assert (finding.kind, finding.title.split()[0]) == ("compile", "Loss")


def test_where_nothing_is_compiled_nothing_is_outside() -> None:
    assert findings(seen(modules=[module("Net")]), []) == ()


def test_a_sync_costs_on_a_gpu_and_is_told_on_the_cpu() -> None:
    sync = Sync("train.py:12", "reads a number back", 2, 4.5)
    on_gpu = one(seen(machine=GPU, syncs=[sync]))
    assert (on_gpu.kind, on_gpu.ms) == ("sync", 4.5)
    assert "2 times" in on_gpu.text
    on_cpu = one(seen(syncs=[Sync("train.py:12", "reads a number back", 1, 0.0)]))
    assert on_cpu.ms is None
    assert "once a step" in on_cpu.text


def test_what_is_read_every_tenth_step_is_none() -> None:
    assert findings(seen(machine=GPU, syncs=[Sync("train.py:12", "", 0.1, 0.2)]), []) == ()


def test_pageable_copies() -> None:
    finding = one(seen(machine=GPU, copies=[Copies("pageable", 2, 64 << 20, 9, True)]))
    assert (finding.kind, finding.ms) == ("copy", 9)


def test_lines_of_the_script_that_take_their_time() -> None:
    lines = [("train.py:9", 0.2), ("train.py:10", 0.01)]
    rows = (Row("forward", "forward", 70, 0.7), Row("other", "other", 30, 0.3))
    finding = one(seen(lines=lines, rows=rows))
    assert (finding.kind, finding.ms, finding.title.split()[0]) == ("code", 20, "train.py:9")
    assert findings(seen(lines=lines), []) == ()


def test_workers_that_share_the_steps_cores() -> None:
    replay = {"replayed": Trial("replayed", 70, 70, 70)}
    finding = one(seen(trials=replay, loaders=[loader(wait_ms=0.5)]))
    assert (finding.kind, finding.ms) == ("loader", 30)
    assert findings(seen(trials=replay, loaders=[loader(wait_ms=0.5, workers=0)]), []) == ()
    assert findings(seen(trials=replay, loaders=[loader(wait_ms=0.5)], machine=GPU), []) == ()
    short = {"replayed": Trial("replayed", 3, 3, 3)}  # of batches that differ in length
    assert findings(seen(trials=short, loaders=[loader(wait_ms=0.5)]), []) == ()


def test_epochs_that_begin_slowly() -> None:
    """Three seconds of steps; one of ten or more before the first batch is told."""
    epoch = Epoch(9, 9, 9, 30, 6)
    finding = one(seen(epoch=epoch, start=Start(6.0, "D", anew=True)))
    assert (finding.kind, finding.ms) == ("loader", 200)
    assert "6.0 s of the 9.0 s" in finding.text
    assert "others are started" in finding.text
    assert "others" not in one(seen(epoch=epoch, start=Start(6.0, "D"))).text
    assert findings(seen(epoch=epoch, start=Start(0.8, "D")), []) == ()


def test_a_loader_behind_a_thread_that_reads_ahead() -> None:
    given: dict[str, Any] = {"machine": replace(CPU, busy=0.12), "wait_ms": 0.0}
    replay = {"replayed": Trial("replayed", 14, 13, 15)}
    finding = one(seen(trials=replay, aside=True, loaders=[loader(wait_ms=0.0, prepare_ms=99.0)], **given))
    assert (finding.kind, finding.ms) == ("loader", 86)
    assert "99.0 ms to prepare" in finding.text


def test_calls_may_need_each_other() -> None:
    assert "need" in one(seen(modules=[module("Net.block", calls=12, depth=1)])).text
    assert "needs" in one(seen(modules=[module("Net.block", calls=12, depth=1, rows=(1,))])).text
