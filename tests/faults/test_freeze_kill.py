"""A freeze that is killed loses nothing that was committed, and run again ends with the same bytes.

Killed at random moments, at calls that change the disk, in its worker processes; asked to stop once and
twice; out of time. Compared with a run that nobody touched.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest

import frostline as fl
from frostline.errors import StoreError
from frostline.store.manifest import commit_numbers

pytest.importorskip("PIL")

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import killed_freeze as job  # noqa: E402
import killing  # noqa: E402

WHEN = ("before", "half", "after")
PROCESSES = {"workers": "processes"}


class Server:
    """Runs the job in children of a process of its own, which has no threads and may fork."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.inputs = folder, folder / "inputs"
        job.make_inputs(self.inputs)
        self.mark = uuid4().hex
        """In the environment of everything that this server starts, and of nothing else."""
        more = {"FROSTLINE_CACHE": str(folder / "cache"), "FROSTLINE_TEST": self.mark}
        self._server = killing.Server("killed_freeze", more)
        self.whole = folder / "whole"

    def begin(self) -> None:
        """The run that nobody touches."""
        unbroken = self.run(self.whole)
        assert unbroken["exit"] == 0
        self.calls: int = unbroken["calls"]
        self.seconds: float = unbroken["seconds"]
        self.files = files_of(self.whole)
        self.rows = rows_of(self.whole)

    def run(self, root: Path, **request: Any) -> dict[str, Any]:
        return self._server.ask(root=str(root), inputs=str(self.inputs), **request)

    def workers(self) -> list[psutil.Process]:
        """Worker processes that are alive, whoever their parent is now."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("FROSTLINE_TEST") == self.mark and (
                    "frostline.execution.worker" in process.cmdline()
                ):
                    found.append(process)
            except (psutil.Error, OSError):  # gone meanwhile, or somebody else's
                continue
        return found

    def close(self) -> None:
        self._server.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    found = Server(tmp_path_factory.mktemp("freezes"))
    try:
        found.begin()
        yield found
    finally:
        found.close()


def files_of(root: Path) -> dict[str, bytes]:
    """All files but those that hold times and hosts."""
    return {
        p.relative_to(root).as_posix(): p.read_bytes()
        for p in sorted(root.rglob("*"))
        if p.is_file() and p.name not in ("log.txt", ".lock")
    }


def rows_of(root: Path) -> dict[str, dict[str, Any]]:
    """What a killed job left, read and checked as anybody would: key → field → plain value."""
    if not commit_numbers(root):
        with pytest.raises(StoreError, match=r"No store at|never begun"):
            fl.Store.open(root)
        return {}
    store = fl.Store.open(root, check="read")
    result = store.check(deep=True)
    assert result.ok, result.problems
    found: dict[str, dict[str, Any]] = {key: {} for key in store.keys}
    for name in store.fields:
        part = store.with_fields([name])
        column = part.rows(list(part.keys), [name])[name] if len(part) else []
        for key, value in zip(part.keys, column, strict=True):
            found[key][name] = value if isinstance(value, str) else value.tolist()
    return found


def _wrong(server: Server, rows: dict[str, dict[str, Any]]) -> list[str]:
    """Rows whose encoder output is not that of their input: half-written, stale or mixed up."""
    moving = (job.CHANGED, job.SPOILT, job.GONE, job.RENAMED)  # their inputs differ between the two times
    return [
        key
        for key, row in rows.items()
        if key not in moving and row["features"] != server.rows[key]["features"]
    ]


def _lost(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """Keys that were committed, whose inputs stayed as they were, and that are gone."""
    return {*before} - {*after} - {job.CHANGED, job.SPOILT, job.GONE, job.RENAMED}


def _kill_at_random(server: Server, kills: int, seed: int) -> dict[str, Any]:
    """Kill until it was done `kills` times; a store that is finished makes room for a new one."""
    draw = random.Random(seed)
    done, lost, wrong, stores, different = 0, 0, 0, 0, 0
    while done < kills:
        root = server.folder / f"random-{seed}-{stores}"
        before: dict[str, Any] = {}
        stores += 1
        while done < kills:
            answer = server.run(root, after_s=draw.uniform(0, 0.9 * server.seconds))
            if answer["exit"] == 0:
                break
            assert answer["exit"] == -9
            done += 1
            after = rows_of(root)
            lost += len(_lost(before, after))
            wrong += len(_wrong(server, after))
            before = after
        assert server.run(root)["exit"] == 0
        lost += len(_lost(before, rows_of(root)))
        different += files_of(root) != server.files
    return {"kills": done, "stores": stores, "lost": lost, "wrong": wrong, "identical": different == 0}


def _kill_at_calls(server: Server, places: list[tuple[int, str]]) -> dict[str, Any]:
    """Each on a store of its own: killed there, looked at, finished, compared."""
    lost, wrong, different = 0, 0, []
    for call, when in places:
        root = server.folder / f"call-{call}-{when}"
        assert server.run(root, at=call, do="kill", when=when)["exit"] == -9
        before = rows_of(root)
        wrong += len(_wrong(server, before))
        assert server.run(root)["exit"] == 0
        lost += len(_lost(before, rows_of(root)))
        if files_of(root) != server.files:
            different.append((call, when))
    return {
        "kills": len(places),
        "calls": server.calls,
        "lost": lost,
        "wrong": wrong,
        "identical": not different,
        "different": different,
    }


def _places(server: Server, n: int, seed: int) -> list[tuple[int, str]]:
    every = [(call, when) for call in range(1, server.calls + 1) for when in WHEN]
    return random.Random(seed).sample(every, n)


# killed


def test_the_job_is_the_same_bytes_each_time_and_running_it_again_changes_nothing(server: Server) -> None:
    assert server.run(server.folder / "again")["exit"] == 0
    assert files_of(server.folder / "again") == server.files
    assert server.run(server.whole)["exit"] == 0
    assert files_of(server.whole) == server.files


def test_the_job_does_what_it_is_there_for(server: Server) -> None:
    store = fl.Store.open(server.whole)
    failed = {e["key"]: e for e in store.quarantine}
    good = {f"p{i:02d}" for i in range(job.N)} - {*job.BAD, job.SPOILT, job.GONE} | {job.REPAIRED, job.ADDED}
    assert {*store.keys} == good
    assert {*failed} == {"p05", "p40", job.SPOILT, job.UNSAYABLE}
    assert failed[job.UNSAYABLE]["reason"] == "tokens: ValueError: no tokens for this"
    assert "0 bytes" in failed["p05"]["reason"]
    assert store[job.RENAMED]["caption"].startswith("picture new")
    assert len({len(row["tokens"]) for row in server.rows.values() if "tokens" in row}) > 2


def test_killed_at_random_moments(server: Server) -> None:
    outcome = _kill_at_random(server, kills=5, seed=1)
    assert outcome == {**outcome, "kills": 5, "lost": 0, "wrong": 0, "identical": True}


def test_killed_before_during_and_after_calls_that_change_the_disk(server: Server) -> None:
    outcome = _kill_at_calls(server, _places(server, 3, seed=2))
    assert (outcome["lost"], outcome["wrong"], outcome["different"]) == (0, 0, [])


@pytest.mark.full
def test_killed_forty_times_and_at_forty_calls(server: Server) -> None:
    at_random = _kill_at_random(server, kills=40, seed=3)
    at_calls = _kill_at_calls(server, _places(server, 40, seed=4))
    killing.record("freeze_kill", {**at_random, "at_calls": at_calls})
    assert (at_random["lost"], at_random["wrong"], at_random["identical"]) == (0, 0, True)
    assert (at_calls["lost"], at_calls["wrong"], at_calls["different"]) == (0, 0, [])


# worker processes


def test_a_worker_process_is_killed_and_the_run_goes_on(server: Server) -> None:
    root = server.folder / "worker"
    assert server.run(root, asked=3, do="worker", options=PROCESSES)["exit"] == 0
    assert files_of(root) == server.files
    assert not server.workers()


def test_a_stage_that_crashes_on_one_sample_costs_that_sample(server: Server) -> None:
    root = server.folder / "crash"
    assert server.run(root, job="crash", options=PROCESSES)["exit"] == 0
    store = fl.Store.open(root)
    failed = {e["key"]: e["reason"] for e in store.quarantine}
    bad = {f"{name}.png" for name in (*job.BAD, job.CRASHING)}
    assert {*failed} == bad
    assert failed[f"{job.CRASHING}.png"] == "image: the worker process died (signal 11) on this sample, twice"
    assert {*store.keys} == {f"p{i:02d}.png" for i in range(job.N)} - bad
    assert store.check(deep=True).ok


def test_the_parent_is_killed_and_its_workers_go_away(server: Server) -> None:
    root, pids = server.folder / "parent", server.folder / "pids.json"
    answer = server.run(
        root, at=3 * server.calls // 4, do="kill", when="before", options=PROCESSES, pids=str(pids)
    )
    assert answer["exit"] == -9
    there = json.loads(pids.read_text())
    assert len(there) == 2
    orphans = [worker for worker in server.workers() if worker.pid in there]
    assert not psutil.wait_procs(orphans, timeout=200)[1]
    assert not server.workers()
    assert len(rows_of(root)) > 0
    assert server.run(root, options=PROCESSES)["exit"] == 0
    assert files_of(root) == server.files


# asked to stop


def rows_a_shard(root: Path) -> int:
    """Shards hold whole chunks, so more rows than were asked for."""
    rows: int = json.loads((root / "manifest.json").read_text())["rows_per_shard"]
    return rows


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_one_signal_finishes_the_shard(server: Server, name: str) -> None:
    root = server.folder / name
    answer = server.run(root, asked=3, do=name)
    assert answer["exit"] == job.STOPPED
    store = fl.Store.open(root)
    done = len(store) + len(store.quarantine)
    assert done == 2 * rows_a_shard(root) < job.N
    assert store.check(deep=True).ok
    assert server.run(root)["exit"] == 0
    assert files_of(root) == server.files


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_two_signals_stop_now_and_nothing_is_lost(server: Server, name: str) -> None:
    """Two SIGTERMs a moment apart are one that was delivered twice: the shard is finished."""
    root = server.folder / f"{name}-twice"
    answer = server.run(root, at=80, do=f"{name} twice")
    assert answer["exit"] == (130 if name == "SIGINT" else job.STOPPED)
    before = rows_of(root)
    assert before
    assert len(before) < job.N
    assert server.run(root)["exit"] == 0
    assert not _lost(before, rows_of(root))
    assert files_of(root) == server.files


def test_out_of_time_after_every_shard_and_the_same_call_goes_on(server: Server) -> None:
    root, seen = server.folder / "hours", [0]
    while (answer := server.run(root, options={"max_hours": 1e-9}))["exit"] == job.STOPPED:
        seen.append(commit_numbers(root)[-1])
        assert seen[-1] > seen[-2]  # every call gets further
    assert answer["exit"] == 0
    assert len(seen) >= 8  # four shards of twelve rows the first time, and again the second
    assert files_of(root) == server.files
