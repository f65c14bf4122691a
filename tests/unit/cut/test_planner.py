"""Plans for small pipelines, by a clock that moves by what their stages say they take."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import frostline as fl
from frostline.cut import Budgets, CutPlan, StepCost, plan
from frostline.cut import costing as costing_module
from frostline.errors import StageFailed, UsageError

N = 200
ROOM = Budgets(disk=10**12, ram=10**12, device=0)
FOR_EVER = 1e6
"""Epochs after which any saving pays."""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FROSTLINE_CACHE", str(tmp_path / "cache"))


class Clock:
    """Moves by what stages say they take, and by a millisecond whenever it is looked at."""

    def __init__(self) -> None:
        self._now, self._lock = 0.0, threading.Lock()

    def goes_on(self, seconds: float = 0.001) -> float:
        with self._lock:  # stages run in several threads
            self._now += seconds
            return self._now


CLOCK = Clock()


@pytest.fixture(autouse=True)
def _briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """No figure depends on what else this machine does."""
    times = SimpleNamespace(perf_counter=CLOCK.goes_on, process_time=CLOCK.goes_on)
    for module in ("walk", "trial", "rehearsal"):
        monkeypatch.setattr(f"frostline.cut.{module}.time", times)
    monkeypatch.setattr("frostline.cut.walk._ROUND_S", 0.01)
    monkeypatch.setattr("frostline.cut.walk._LEAST_S", 0.005)
    monkeypatch.setattr("frostline.cut.walk._ROUNDS_S", 0.1)
    monkeypatch.setattr("frostline.cut.trial._SUPPLY_S", 0.05)


def source(n: int = N, **fields: Any) -> fl.Source:
    return fl.Source.table([{"key": f"k{i}", "x": float(i), **fields} for i in range(n)])


def slow(x: float) -> torch.Tensor:
    CLOCK.goes_on(0.004)
    return torch.full((8,), x)


def vector(x: float) -> torch.Tensor:
    return torch.full((8,), x)


def shaken(x: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    return x + float(rng.random())


def planned(data: fl.Pipeline | fl.Workload, **options: Any) -> CutPlan:
    return plan(data, **{"epochs": FOR_EVER, "budgets": ROOM, **options})


def test_what_is_costly_is_stored_and_what_comes_above_is_not() -> None:
    data = fl.Pipeline(
        source(), fl.Stage("y", slow, reads="x"), fl.Stage("z", shaken, reads="y", random=True)
    )
    found = planned(data)
    assert found.cut == ("y",)
    assert found.chosen.break_even is not None
    assert found.chosen.epoch_s < found.option(()).epoch_s  # type: ignore[union-attr]
    assert found.why.startswith("Store y: ")
    assert {s.name: s.frozen for s in found.stages} == {"source": True, "y": True, "z": False}


def test_a_store_that_cannot_pay_in_time_is_not_made() -> None:
    data = fl.Pipeline(source(), fl.Stage("y", vector, reads="x"))
    found = planned(data, epochs=1)
    assert found.cut == ()
    assert found.chosen.bytes == 0
    assert found.why.startswith("Store nothing: ")
    assert {o.fields for o in found.options} == {(), ("y",)}


def test_a_network_below_the_line_is_stored_by_its_features() -> None:
    class Slow(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            CLOCK.goes_on(0.02)
            return 2 * x

    data = fl.Pipeline(
        source(),
        fl.Stage("y", vector, reads="x"),
        fl.Stage("features", Slow(), reads="y", on="device", batch_size=4),
    )
    found = planned(data)
    assert found.cut == ("features",)
    assert found.option(["y"]).epoch_s > found.chosen.epoch_s  # type: ignore[union-attr]


def test_at_most_the_stated_share_of_the_samples_is_looked_at() -> None:
    seen: set[float] = set()

    def watched(x: float) -> torch.Tensor:
        seen.add(x)
        return torch.full((8,), x)

    found = planned(fl.Pipeline(source(1000), fl.Stage("y", watched, reads="x")))
    assert found.measured == len(seen) == 50
    assert len({int(x) // 100 for x in seen}) >= 8, "they are the first ones, or from one corner"
    assert not any("more than 5%" in note for note in found.notes)


def test_where_samples_are_few_the_larger_share_is_told() -> None:
    found = planned(fl.Pipeline(source(20), fl.Stage("y", vector, reads="x")))
    assert found.measured == 8
    assert "measured on 8 of 20 samples, more than 5%: fewer tell too little" in found.notes
    assert planned(fl.Pipeline(source(3), fl.Stage("y", vector, reads="x"))).measured == 3


def test_only_the_first_samples_count_where_there_is_a_limit() -> None:
    data = fl.Pipeline(source(1000), fl.Stage("y", vector, reads="x"))
    whole, part = (planned(data, limit=n).option(["y"]) for n in (None, 100))
    assert part.bytes == pytest.approx(whole.bytes / 10, rel=0.02)  # type: ignore[union-attr]


def test_nothing_is_left_on_the_disk(tmp_path: Path) -> None:
    planned(fl.Pipeline(source(), fl.Stage("y", vector, reads="x")), out=tmp_path / "stores" / "mine")
    assert [p for p in tmp_path.iterdir() if p.name != "cache"] == []


def test_bytes_are_those_that_a_freeze_then_writes(tmp_path: Path) -> None:
    data = fl.Pipeline(
        source(600, caption="a cat on a mat"),
        fl.Stage("y", lambda x: torch.full((3, 64), x), reads="x"),
        fl.Stage("words", lambda x: list(range(int(x) % 50)), reads="x"),
        outputs=["y", "words", "caption"],
    )
    found = planned(data, epochs=1).option(data.cut)
    fl.freeze(data, tmp_path / "store", quiet=True)
    written = sum(p.stat().st_size for p in (tmp_path / "store").rglob("*") if p.is_file())
    assert found is not None
    assert found.bytes == pytest.approx(written, rel=0.15)


def test_what_does_not_fit_the_disk_is_never_chosen() -> None:
    data = fl.Pipeline(source(), fl.Stage("y", slow, reads="x"))
    found = planned(data, budgets=Budgets(disk=10**6, ram=10**12, device=0))
    assert found.cut == ()
    option = found.option(["y"])
    assert option is not None
    assert not option.fits_disk
    assert option.why_not == "it does not fit the disk"
    assert "no cut is possible (it does not fit the disk)" in found.why


def test_what_does_not_fit_memory_would_be_read_from_the_disk() -> None:
    data = fl.Pipeline(source(), fl.Stage("y", slow, reads="x"))
    found = planned(data, budgets=Budgets(disk=10**12, ram=100, device=0)).chosen
    assert (found.fields, found.tier, found.fits_ram, found.fits_device) == (("y",), "disk", False, False)


def test_a_field_that_no_store_can_hold_is_told_and_another_chosen() -> None:
    data = fl.Pipeline(
        source(), fl.Stage("y", slow, reads="x"), fl.Stage("thing", lambda y: object(), reads="y")
    )
    found = planned(data)
    assert found.cut == ("y",)
    told = found.option(["thing"]).why_not  # type: ignore[union-attr]
    assert told is not None
    assert "a store holds tensors, numbers, text" in told
    assert told in found.table()


def test_samples_that_fail_are_passed_over_and_told() -> None:
    def picky(x: float) -> torch.Tensor:
        if int(x) % 3 == 0:
            raise ValueError("a third")
        return vector(x)

    found = planned(fl.Pipeline(source(), fl.Stage("y", picky, reads="x")), epochs=1)
    assert found.measured < 10
    assert any("failed, the first with: Stage 'y' failed for" in note for note in found.notes)


def test_where_no_sample_works_the_reason_is_raised() -> None:
    def broken(x: float) -> torch.Tensor:
        raise ValueError("never")

    with pytest.raises(StageFailed, match=r"'y' failed for .*never"):
        planned(fl.Pipeline(source(), fl.Stage("y", broken, reads="x")))


def test_a_pick_reads_only_what_it_picks_and_stages_behind_it_see_that() -> None:
    lengths: set[int] = set()

    def behind(y: torch.Tensor) -> torch.Tensor:
        lengths.add(len(y))
        return y.sum()

    data = fl.Pipeline(
        source(), fl.Stage("y", vector, reads="x"), fl.Pick("y", n=3), fl.Stage("z", behind, reads="y")
    )
    found = planned(data, epochs=1)
    assert lengths == {3}
    assert {o.fields for o in found.options} == {(), ("y",)}


@pytest.mark.parametrize("on", ["cpu", "device"])
def test_random_stages_that_take_chunks_get_a_stream_for_every_row(on: Any) -> None:
    def noisy(y: torch.Tensor, rng: Any) -> torch.Tensor:
        return y + rng.uniform(8)

    data = fl.Pipeline(
        source(),
        fl.Stage("y", vector, reads="x"),
        fl.Stage("z", noisy, reads="y", on=on, batch_size=16, random=True),
    )
    assert {o.fields for o in planned(data, epochs=1).options} == {(), ("y",)}


def test_a_step_that_is_not_known_is_told_and_one_that_is_counts_in_every_option() -> None:
    data = fl.Pipeline(source(), fl.Stage("y", vector, reads="x"))
    without, with_step = planned(data, epochs=1), planned(data, epochs=1, step=StepCost(16.0, 16))
    assert all(o.compute_s is None for o in without.options)
    assert any("the training step was not measured" in note for note in without.notes)
    assert all(o.compute_s == pytest.approx(N) for o in with_step.options)
    assert all(o.epoch_s > N for o in with_step.options)
    assert not any("not measured" in note for note in with_step.notes)


def test_an_epoch_goes_through_the_training_split_only() -> None:
    data = fl.Pipeline(source(), fl.Stage("y", vector, reads="x"))
    parts: dict[str, Any] = {
        "model": torch.nn.Linear(8, 1),
        "loss": print,
        "optimizer": print,
        "batch_size": 16,
    }
    work = fl.Workload(data, splits={"train": 0.25, "test": 0.75}, **parts)
    found = planned(work, epochs=1, step=StepCost(16.0, 16))
    assert all(o.compute_s == pytest.approx(N / 4) for o in found.options)


def test_lossy_codecs_are_offered_with_their_error_and_never_taken() -> None:
    data = fl.Pipeline(source(), fl.Stage("y", lambda x: slow(x).cumsum(0) / 7, reads="x"))
    found = planned(data)
    offered = {o.codec: o for o in found.offers}
    assert {*offered} == {"bf16", "fp16", "int8"}
    assert 0 < offered["fp16"].error < offered["bf16"].error < 0.01
    assert all(0 < o.bytes < o.raw_bytes for o in found.offers)
    assert offered["bf16"].flag == "--codec y=bf16"
    assert found.chosen.bytes >= 32 * N
    assert "--codec y=bf16" in found.table()


def test_the_table_has_every_stage_every_cut_and_the_reason() -> None:
    data = fl.Pipeline(source(), fl.Stage("y", slow, reads="x"), fl.Stage("zed", torch.square, reads="y"))
    found = planned(data)
    text = found.table()
    for word in ("y", "zed", "nothing", "pays from", "freeze", "→", found.why):
        assert word in text
    assert all(len(line) <= 120 for line in text.splitlines() if line != found.why)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"epochs": 0}, "epochs is 0; expected a number above 0"),
        ({"epochs": float("inf")}, "epochs is inf"),
        ({"limit_share": 2}, "limit_share is 2"),
        ({"n_workers": 0}, "n_workers is 0"),
        ({"limit": 0}, "limit is 0"),
        ({"step": StepCost(-1.0, 4)}, "step is StepCost"),
    ],
)
def test_what_cannot_work_is_told(options: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match="No cut can be planned:") as caught:
        planned(fl.Pipeline(source(), fl.Stage("y", vector, reads="x")), **options)
    assert told in str(caught.value)


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        plan(3, epochs=-1, limit_share=0)  # type: ignore[arg-type]
    assert len(caught.value.problems) == 3


def test_several_pipelines_are_planned_one_by_one() -> None:
    data = fl.Pipeline(source(), fl.Stage("y", vector, reads="x"))
    with pytest.raises(UsageError, match=r"several pipelines \(a, b\)"):
        plan(fl.Workload({"a": data, "b": data}, run=print), epochs=1)


def test_progress_is_told() -> None:
    told: list[str] = []
    planned(fl.Pipeline(source(), fl.Stage("y", vector, reads="x")), epochs=1, progress=told.append)
    assert any("measuring y on 10 samples" in text for text in told)


def test_a_folder_that_cannot_be_written_to_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed: Callable[..., bool] = lambda path, mode: False  # noqa: E731
    monkeypatch.setattr(costing_module.os, "access", allowed)
    found = planned(fl.Pipeline(source(), fl.Stage("y", vector, reads="x")), epochs=1, out=tmp_path / "s")
    assert any("cannot be written to: reading was measured in" in note for note in found.notes)
