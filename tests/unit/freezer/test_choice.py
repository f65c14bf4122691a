"""Threads or processes, and how many samples a task, with workers whose speed the test decides."""

from __future__ import annotations

import io
import threading
from typing import Any

import pytest

import frostline as fl
from frostline.errors import UsageError
from frostline.execution import Early
from frostline.freezer import choice
from frostline.freezer.progress import Reporter
from frostline.freezer.workers import Threads, rate_of

SOURCE = fl.Source.table([{"key": f"k{i}", "x": i} for i in range(100)])
STAGE = fl.Stage("y", abs, reads="x")
EARLY = Early(SOURCE, [STAGE], ["x"], ["y"])


@pytest.mark.parametrize(
    ("sample_s", "early", "size"),
    [(0.1, True, 1), (0.0005, True, 4), (0.0, True, 32), (1e-5, True, 32), (0.1, False, 32)],
)
def test_a_task_takes_about_two_milliseconds(sample_s: float, early: bool, size: int) -> None:
    assert choice.group_size(sample_s, 32, early=early) == size


class Fake:
    """Stands for the processes."""

    def __init__(self, early: Early, n: int, **options: Any) -> None:
        self.kind, self.n, self.closed = "processes", n, False
        if early.raw_fields == ("bad",):
            raise UsageError("they cannot travel")

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "Processes", Fake)


@pytest.mark.parametrize(
    ("asked", "samples", "wanted", "n"),
    [
        ("auto", 1000, True, 4),
        ("processes", 1, True, 4),
        ("auto", 999, True, 0),
        ("threads", 1000, True, 0),
        ("auto", 1000, False, 0),
        ("processes", 1000, False, 0),
    ],
)
def test_interpreters_are_started_ahead_where_they_will_be_used(
    monkeypatch: pytest.MonkeyPatch, asked: Any, samples: int, wanted: bool, n: int
) -> None:
    made: list[int] = []
    monkeypatch.setattr(choice, "Child", lambda: made.append(1))
    assert len(choice.hatch(EARLY, samples, asked=asked, n=4, wanted=wanted)) == len(made) == n


def start(early: Early = EARLY, **changes: Any) -> tuple[Any, str]:
    out = io.StringIO()
    given = changes.pop("given", None)
    wanted = choice.Wanted(**{"n": 2, "sample_s": 1.0, "block": 32} | changes)
    workers = choice.start(early, range(100), wanted, given=given, reporter=Reporter(out=out))
    return workers, out.getvalue()


def rates(monkeypatch: pytest.MonkeyPatch, threads: float, processes: float) -> None:
    rate = lambda w, places, **how: threads if w.kind == "threads" else processes  # noqa: E731
    monkeypatch.setattr(choice, "rate_of", rate)


@pytest.mark.parametrize(
    ("threads", "processes", "kind"), [(8, 13, "processes"), (8, 9, "threads"), (8, 5, "threads")]
)
def test_the_faster_ones_are_taken_and_both_rates_told(
    monkeypatch: pytest.MonkeyPatch, threads: float, processes: float, kind: str
) -> None:
    rates(monkeypatch, threads, processes)
    workers, said = start()
    assert workers.kind == kind
    told = f"{threads} samples/s prepared in threads, {processes} in processes"
    assert said == f"{kind} it is: {told}\n"
    workers.close()


@pytest.mark.parametrize(("processes", "kind"), [(9, "processes"), (7, "threads")])
def test_processes_that_are_as_fast_are_taken_where_the_networks_need_the_same_cores(
    monkeypatch: pytest.MonkeyPatch, processes: float, kind: str
) -> None:
    rates(monkeypatch, 8, processes)
    workers, _ = start(turns=True)
    assert workers.kind == kind
    workers.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"asked": "threads"},
        {"sample_s": 0.01},
        {"n": 1},
        {"given": lambda keys: {}},
        {"early": Early(SOURCE, [], ["x"], ["x"])},
    ],
    ids=["asked for", "short", "one worker", "rows of a store", "nothing to compute"],
)
def test_threads_where_measuring_is_not_worth_it(monkeypatch: pytest.MonkeyPatch, changes: Any) -> None:
    rates(monkeypatch, 1, 1000)
    workers, said = start(**changes)
    assert isinstance(workers, Threads)
    assert said == ""
    workers.close()


def test_stages_that_cannot_travel_run_in_threads_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    rates(monkeypatch, 1, 1)
    workers, said = start(Early(SOURCE, [STAGE], ["bad"], ["y"]))
    assert isinstance(workers, Threads)
    assert said == "threads it is: they cannot travel\n"
    workers.close()


def test_processes_that_fail_while_they_are_measured_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def rate(workers: Any, places: Any, **how: Any) -> float:
        if workers.kind == "processes":
            raise UsageError("'y' is a set")
        return 1.0

    monkeypatch.setattr(choice, "rate_of", rate)
    workers, said = start()
    assert isinstance(workers, Threads)
    assert "threads it is: 'y' is a set" in said
    workers.close()


def test_processes_are_used_when_asked_for_unless_rows_of_a_store_are_given() -> None:
    assert start(asked="processes")[0].kind == "processes"
    workers, said = start(asked="processes", given=lambda keys: {})
    assert isinstance(workers, Threads)
    assert "worker processes cannot be given rows of a store" in said
    workers.close()


def test_a_rate_is_of_finished_samples() -> None:
    threads = Threads(EARLY, 2)
    assert rate_of(threads, range(5), group=1, block=4, seconds=0.0) > 0
    threads.close()


def test_a_rate_is_of_all_workers_also_where_a_block_is_one_sample() -> None:
    """Each waits for the others: with fewer under way at once, nobody would get through."""
    meeting = threading.Barrier(4, timeout=120)

    def met(x: int) -> int:
        meeting.wait()
        return x

    threads = Threads(Early(SOURCE, [fl.Stage("y", met, reads="x")], ["x"], ["y"]), 4)
    assert rate_of(threads, range(8), group=1, block=1, seconds=0.0) > 0
    assert not meeting.broken
    threads.close()
