"""Experiments: units computed once, whatever ends the process; feeds as evaluation gets them."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import frostline as fl
from frostline.errors import UsageError
from frostline.experiment import Context, Result, run
from frostline.supply import supply


def work(fn, data: fl.Pipeline | None = None, **options: Any) -> fl.Workload:
    return fl.Workload(data, run=fn, **options)


def go(fn, out: Path, data: fl.Pipeline | None = None, **options: Any) -> Result:
    """One call with an experiment, on the CPU, in a folder."""
    return run(work(fn, data), out=out, device="cpu", quiet=True, **options)


def numbers(n: int = 10) -> fl.Pipeline:
    rows = [{"key": f"k{i}", "x": float(i)} for i in range(n)]
    return fl.Pipeline(fl.Source.table(rows), fl.Stage("twice", _twice, reads="x"), outputs=("twice",))


def _twice(x: float) -> float:
    return 2 * x


# units


def test_a_unit_is_computed_once_and_found_by_the_next_call(tmp_path: Path) -> None:
    calls: list[str] = []

    def experiment(ctx: Context) -> dict[str, int]:
        def unit(name: str) -> int:
            calls.append(name)
            return len(name)

        return {name: ctx.once(name, lambda name=name: unit(name)) for name in ("a", "bb", "a")}

    first, second = (go(experiment, tmp_path / "run") for _ in range(2))
    assert calls == ["a", "bb"]
    assert first.value == second.value == {"a": 1, "bb": 2}
    assert (first.made, second.made, second.found) == (2, 0, 3)
    assert first.stopped is None


def test_an_experiment_that_fails_goes_on_after_the_last_whole_unit(tmp_path: Path) -> None:
    calls: list[int] = []
    broken = True

    def unit(i: int) -> int:
        calls.append(i)
        if broken and i == 2:
            raise OSError("the network is gone")
        return i

    def experiment(ctx: Context) -> list[int]:
        return [ctx.once(f"unit {i}", lambda i=i: unit(i)) for i in range(4)]

    with pytest.raises(OSError, match="the network is gone"):
        go(experiment, tmp_path / "run")
    assert not (tmp_path / "run" / "result.json").exists()
    broken = False
    assert go(experiment, tmp_path / "run").value == [0, 1, 2, 3]
    assert calls == [0, 1, 2, 2, 3]


def test_a_result_is_the_same_when_it_is_made_and_when_it_is_found(tmp_path: Path) -> None:
    tensor = torch.randn(2, 3, generator=torch.Generator().manual_seed(1))
    given = {
        "none": None, "flag": True, "count": 3, "share": 0.1, "text": "ü\n", "big": 2**80,
        "pair": (1, [2.5, {"deep": "x"}]), "odd": [math.inf, -math.inf], "numpy": np.float32(0.5),
        "tensors": [tensor, {"again": tensor, "half": tensor.bfloat16().T, "none": torch.zeros(0, 4)}],
        "array": np.arange(4, dtype=np.int16)[::2],
    }  # fmt: skip
    made = go(lambda ctx: ctx.once("all", lambda: given), tmp_path / "run")
    found = go(lambda ctx: ctx.once("all", lambda: pytest.fail("made again")), tmp_path / "run")
    for value in (made.value, found.value):
        torch.testing.assert_close(value.pop("tensors"), given["tensors"], rtol=0, atol=0)
        torch.testing.assert_close(value.pop("array"), torch.tensor([0, 2], dtype=torch.int16))
        rest = {name: v for name, v in given.items() if name not in ("tensors", "array")}
        assert value == {**rest, "pair": [1, [2.5, {"deep": "x"}]]}
    assert math.isnan(go(lambda ctx: ctx.once("nan", lambda: math.nan), tmp_path / "nan").value)


def test_what_is_kept_does_not_change_with_what_it_was_made_of(tmp_path: Path) -> None:
    grown = torch.zeros(2)

    def experiment(ctx: Context) -> list[torch.Tensor]:
        kept = []
        for i in range(2):
            kept.append(ctx.once(str(i), lambda: grown.add_(1)))
        return kept

    assert [t.tolist() for t in go(experiment, tmp_path / "run").value] == [[1, 1], [2, 2]]


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"model": torch.nn.Linear(1, 1)}, "value.model is Linear"),
        ({"a": [1, {2}]}, "value.a[1] is set {2}"),
        ({3: "x"}, "value has the key 3"),
        ({"$tensor": "x"}, "value has the key '$tensor'"),
        (torch.ones(2).to_sparse(), "sparse"),
        (np.array(["a"]), "value is an array of <U1"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_its_place(tmp_path: Path, value: Any, told: str) -> None:
    with pytest.raises(UsageError, match="unit 'it' returned something that cannot be kept") as caught:
        go(lambda ctx: ctx.once("it", lambda: value), tmp_path / "run")
    assert told in str(caught.value)
    with pytest.raises(UsageError, match=r"run\(ctx\) returned something that cannot be kept"):
        go(lambda ctx: value, tmp_path / "other")
    assert not (tmp_path / "other" / "result.json").exists()


def test_names_that_files_cannot_have_stay_apart(tmp_path: Path) -> None:
    names = ["a/b", "a b", "../a", "a\0b", "..", "ä", "x" * 300, "x" * 301, ".hidden", "a-b"]
    experiment = lambda ctx: [ctx.once(name, lambda name=name: name) for name in names]  # noqa: E731
    assert go(experiment, tmp_path / "run").value == names
    assert go(experiment, tmp_path / "run").found == len(names)
    assert {p.name for p in tmp_path.iterdir()} == {"run"}
    assert len([*(tmp_path / "run" / "units").glob("*.json")]) == len(names)


def test_other_parameters_make_a_unit_again_with_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def experiment(ctx: Context) -> list[int]:
        n = ctx.parameters["n"]
        return [ctx.once("all", lambda: 10 * n), ctx.once("part", lambda: 5 * n, of={"size": 4})]

    w = work(experiment)
    assert run(w, out=tmp_path / "run", parameters={"n": 1}).value == [10, 5]
    capsys.readouterr()
    again = run(w, out=tmp_path / "run", parameters={"n": 2})
    assert again.value == [20, 5], "what does not depend on n is kept"
    assert "unit 'all' is made again: n was 1, is 2" in capsys.readouterr().err
    assert "unit 'all' is made again: n was 1, is 2" in (tmp_path / "run" / "notes.txt").read_text()
    assert run(w, out=tmp_path / "run", parameters={"n": 2}, seed=1).made == 2


def test_one_name_for_two_things_is_refused(tmp_path: Path) -> None:
    def experiment(ctx: Context) -> None:
        for i in range(2):
            ctx.once("seed", lambda i=i: i, of={"i": i})

    with pytest.raises(UsageError, match=r"two different things \(i was 0, is 1\)"):
        go(experiment, tmp_path / "run")


@pytest.mark.parametrize("suffix", ["json", "safetensors"])
@pytest.mark.parametrize("damage", [lambda b: b[:-9], lambda b: b[:-9] + b"123456789"])
def test_a_damaged_result_is_made_again_with_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str, damage
) -> None:
    experiment = lambda ctx: ctx.once("it", lambda: torch.arange(100.0))  # noqa: E731
    go(experiment, tmp_path / "run")
    (file,) = (tmp_path / "run" / "units").glob(f"*.{suffix}")
    file.write_bytes(damage(file.read_bytes()))
    again = run(work(experiment), out=tmp_path / "run")
    assert again.made == 1
    assert "unit 'it' is made again: " in capsys.readouterr().err
    assert go(experiment, tmp_path / "run").found == 1


@pytest.mark.parametrize("name", ["picture", "{out}/picture"])
def test_a_unit_whose_file_is_gone_is_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    picture = tmp_path / "run" / "picture"
    name = name.format(out=tmp_path / "run")

    def experiment(ctx: Context) -> Any:
        return ctx.once("it", lambda: picture.write_text("drawn"), files=[name])

    assert [go(experiment, tmp_path / "run").made for _ in range(2)] == [1, 0]
    picture.unlink()
    assert run(work(experiment), out=tmp_path / "run").made == 1
    assert f"unit 'it' is made again: {picture} is gone" in capsys.readouterr().err
    assert picture.read_text() == "drawn"


def test_tensors_whose_places_are_spelled_alike_are_kept_apart(tmp_path: Path) -> None:
    given = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}, "c": [torch.zeros(1)], "c[0]": torch.ones(1)}
    for _ in range(2):
        torch.testing.assert_close(
            go(lambda ctx: ctx.once("u", lambda: given), tmp_path / "run").value, given
        )


def test_tensors_of_a_result_that_was_replaced_are_removed(tmp_path: Path) -> None:
    for n in (1, 2):
        experiment = lambda ctx, n=n: ctx.once("it", lambda: torch.full((n,), n), of={"n": n})  # noqa: E731
        assert go(experiment, tmp_path / "run").value.tolist() == [n] * n
    assert len([*(tmp_path / "run" / "units").iterdir()]) == 2
    assert len([*(tmp_path / "run").glob("*.safetensors")]) == 1


def test_random_numbers_of_a_unit_do_not_depend_on_what_was_computed_before(tmp_path: Path) -> None:
    def experiment(ctx: Context, skip: bool = False) -> dict[str, Any]:
        draw = lambda: [random.random(), float(np.random.rand()), float(torch.rand(()))]  # noqa: E731
        if not skip:
            ctx.once("first", draw)
        between = float(torch.rand(()))
        return {"second": ctx.once("second", draw), "between": between}

    def drawn(out: str, skip: bool = False, seed: int = 0) -> dict[str, Any]:
        torch.manual_seed(3)
        return go(lambda ctx: experiment(ctx, skip), tmp_path / out, seed=seed).value

    whole = drawn("whole")
    assert drawn("part", skip=True) == whole
    assert drawn("part") == whole, "the second is found, the first is not"
    assert drawn("other", seed=1)["second"] != whole["second"]


@pytest.mark.parametrize("unit", ["", None, 3])
def test_a_unit_has_a_name(tmp_path: Path, unit: Any) -> None:
    with pytest.raises(UsageError, match="a unit is named by a text"):
        go(lambda ctx: ctx.once(unit, dict), tmp_path / "run")


def test_a_unit_is_a_function(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected a function"):
        go(lambda ctx: ctx.once("it", 3), tmp_path / "run")


# stopping


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_unit_finish_and_the_same_call_goes_on(tmp_path: Path, number: int) -> None:
    sent: list[int] = []

    def unit(i: int) -> int:
        if i == 1 and not sent:
            sent.append(number)
            signal.raise_signal(number)
        return i

    def experiment(ctx: Context) -> list[int]:
        return [ctx.once(str(i), lambda i=i: unit(i)) for i in ctx.progress(range(4))]

    stopped = go(experiment, tmp_path / "run")
    assert (stopped.stopped, stopped.made, stopped.value) == (signal.Signals(number).name, 2, None)
    done = go(experiment, tmp_path / "run")
    assert (done.stopped, done.made, done.found, done.value) == (None, 2, 2, [0, 1, 2, 3])


def test_a_second_signal_stops_inside_the_unit(tmp_path: Path) -> None:
    def unit() -> None:
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.25)  # sooner, it would be the first one delivered twice
        signal.raise_signal(signal.SIGINT)
        pytest.fail("went on")

    with pytest.raises(KeyboardInterrupt):
        go(lambda ctx: ctx.once("it", unit), tmp_path / "run")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_out_of_time_it_stops_between_units_even_where_exceptions_are_caught(tmp_path: Path) -> None:
    def experiment(ctx: Context) -> None:
        try:
            ctx.once("it", lambda: pytest.fail("began"))
        except Exception:  # noqa: BLE001
            pytest.fail("an experiment must not catch this")

    assert go(experiment, tmp_path / "run", max_hours=1e-9).stopped == "the time limit"


def test_killed_at_any_moment_every_unit_is_whole_or_absent(tmp_path: Path) -> None:
    """SIGKILL while it writes a large result: the next call ends as one that nobody killed."""
    code = (
        "import torch, os, signal, sys, frostline as fl\n"
        "from frostline.experiment import run\n"
        "def unit(i):\n"
        "    if str(i) == sys.argv[2]: signal.pause()\n"  # at the latest
        "    print(i, flush=True)\n"
        "    return torch.full((1_000_000,), i)\n"
        "def go(ctx):\n"
        "    return sum(float(ctx.once(str(i), lambda i=i: unit(i)).sum()) for i in range(6))\n"
        "print(run(fl.Workload(None, run=go), out=sys.argv[1], device='cpu', quiet=True).value)\n"
    )
    begun: list[str] = []
    for stop_at, latest in (("1", "2"), ("3", "4"), (None, "none")):
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "run"), latest], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        for line in process.stdout:
            begun.append(line.strip())
            if line.strip() == stop_at:
                process.kill()
                break
        process.stdout.close()
        process.wait()
    assert begun[-1] == "15000000.0"
    assert begun.count("0") == begun.count("2") == begun.count("5") == 1
    assert not [p for p in (tmp_path / "run" / "units").iterdir() if p.name.endswith(".aside")]


# the run's folder


def test_without_a_folder_an_unfinished_run_of_these_parameters_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    broken = True

    def experiment(ctx: Context) -> str:
        ctx.once("first", lambda: 1)
        if broken:
            raise OSError("gone")
        return ctx.out.name

    def call(**options: Any) -> Result:
        return run(work(experiment).named("mine"), quiet=True, device="cpu", **options)

    with pytest.raises(OSError, match="gone"):
        call(parameters={"n": 1})
    (folder,) = (tmp_path / "runs" / "mine").iterdir()
    broken = False
    other = call(parameters={"n": 2})
    assert (other.folder.name != folder.name, other.found) == (True, 0)
    assert call(parameters={"n": 1}, resume="never").found == 0
    on = call(parameters={"n": 1})
    assert (on.value, on.found) == (folder.name, 1)
    assert call(parameters={"n": 1}).found == 0, "a run that is done is not run again, a new one begins"
    assert len([*(tmp_path / "runs" / "mine").iterdir()]) == 4


def test_the_folder_says_what_it_was_run_with_and_what_came_out(tmp_path: Path) -> None:
    go(lambda ctx: {"x": 0.5}, tmp_path / "run", parameters={"n": 3}, seed=7)
    kept = json.loads((tmp_path / "run" / "run.json").read_text())["config"]
    assert kept == {"parameters": {"n": 3}, "seed": 7}
    assert json.loads((tmp_path / "run" / "result.json").read_text())["value"] == {"x": 0.5}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"resume": "later"}, "resume is 'later'"),
        ({"max_hours": 0}, "max_hours is 0"),
        ({"max_hours": math.nan}, "max_hours is nan"),
        ({"device": "tpu"}, "tpu"),
    ],
)
def test_what_cannot_start_says_so(tmp_path: Path, options: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        run(work(lambda ctx: None), **({"out": tmp_path / "run", "device": "cpu", "quiet": True} | options))
    assert not (tmp_path / "run").exists()


def test_folders_that_are_somebody_elses_are_refused(tmp_path: Path) -> None:
    (tmp_path / "trained" / "checkpoints").mkdir(parents=True)
    with pytest.raises(UsageError, match="holds a training"):
        go(lambda ctx: None, tmp_path / "trained")
    go(lambda ctx: None, tmp_path / "done")
    with pytest.raises(UsageError, match="holds a run already"):
        go(lambda ctx: None, tmp_path / "done", resume="never")
    inner = lambda ctx: go(lambda ctx: None, ctx.out)  # noqa: E731
    with pytest.raises(UsageError, match="Another process is running in"):
        go(inner, tmp_path / "twice")
    with pytest.raises(UsageError, match="needs a folder for the run"):
        run(work(lambda ctx: None), quiet=True)


def test_only_experiments_are_run(tmp_path: Path) -> None:
    trained = fl.Workload(
        numbers(), model=torch.nn.Linear(1, 1), loss=print, optimizer=print, batch_size=2, name="t"
    )
    with pytest.raises(UsageError, match="`frostline train TARGET` trains it"):
        run(trained, out=tmp_path / "run")
    with pytest.raises(UsageError, match="expected a Workload"):
        run(print, out=tmp_path / "run")  # type: ignore[arg-type]


def test_torchrun_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="an experiment is one"):
        go(lambda ctx: None, tmp_path / "run")


# data


@pytest.mark.parametrize("live", [True, False])
def test_a_feed_is_what_evaluation_gets(tmp_path: Path, live: bool) -> None:
    splits = {"train": 0.5, "test": 0.5}
    seen: dict[str | None, list[float]] = {}

    def experiment(ctx: Context) -> None:
        for split in ("test", None, "train"):
            feed = ctx.feed(split, batch_size=3)
            seen[split] = [float(x) for batch in feed for x in batch["twice"]]
            assert seen[split] == [float(x) for batch in feed for x in batch["twice"]], "each time the same"

    w = fl.Workload(numbers(), run=experiment, splits=splits)
    run(w, out=tmp_path / "run", store=tmp_path / "store", live=live, device="cpu", quiet=True)
    assert (tmp_path / "store").exists() is not live
    assert seen[None] == [2.0 * i for i in range(10)]
    assert sorted(seen["train"] + seen["test"]) == seen[None]
    like = supply(w, None, split="test", batch_size=3, device="cpu", train=False)
    assert seen["test"] == [float(x) for batch in like for x in batch["twice"]]


def test_no_store_is_made_for_an_experiment_that_asks_for_no_data(tmp_path: Path) -> None:
    go(lambda ctx: None, tmp_path / "run", numbers(), store=tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_data_of_another_workload_can_be_looked_at(tmp_path: Path) -> None:
    other = fl.Workload(numbers(4), run=print, batch_size=2)
    found = go(
        lambda ctx: [batch["twice"] for batch in ctx.feed(workload=other)], tmp_path / "run", live=True
    )
    assert torch.cat(found.value).tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (lambda ctx: ctx.feed("test", batch_size=2), "no split 'test'"),
        (lambda ctx: ctx.feed(), "needs a batch_size"),
    ],
)
def test_data_that_cannot_be_had_is_refused(tmp_path: Path, ask, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        go(ask, tmp_path / "run", numbers(), live=True)


def test_an_experiment_without_data_has_nothing_to_feed_or_freeze(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="an experiment without data"):
        go(lambda ctx: ctx.feed(batch_size=2), tmp_path / "run", live=True)
    with pytest.raises(UsageError, match="an experiment without data"):
        fl.freeze(fl.Workload(None, run=print), tmp_path / "store")
    with pytest.raises(UsageError, match="splits= divides data, and there is none"):
        fl.Workload(None, run=print, splits={"train": 1.0})
    with pytest.raises(UsageError, match="data is a Pipeline"):
        fl.Workload(None, model=print, loss=print, optimizer=print, batch_size=2)


# what is said


def test_progress_says_how_far_it_is_in_whole_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def experiment(ctx: Context) -> list[int]:
        ctx.note("a sentence")
        return [*ctx.progress([1, 2, 3], what="clips"), *ctx.progress(iter([4]), what="rest")]

    assert run(work(experiment), out=tmp_path / "run").value == [1, 2, 3, 4]
    lines = capsys.readouterr().err.splitlines()
    assert lines[:3] == ["a sentence", "clips: 0 of 3 (0%)", "clips: 3 of 3 (100%)"]
    assert "rest: 0" in lines[3:]
    assert (tmp_path / "run" / "notes.txt").read_text().endswith(" a sentence\n")
