"""A writer that is killed loses nothing that was committed, and run again ends with the same bytes.

Killed at random moments and at every call that changes the disk; compared with a run that nobody killed.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import frostline as fl
from frostline.errors import StoreError
from frostline.store.manifest import commit_numbers

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import killed_writer as job  # noqa: E402
import killing  # noqa: E402

WHEN = ("before", "half", "after")


class Server:
    """Runs the job in children of a process of its own, which has no threads and may fork."""

    def __init__(self, folder: Path) -> None:
        self._server = killing.Server("killed_writer", {})
        self.folder = folder
        self.whole = folder / "whole"
        unbroken = self.run(self.whole)
        assert unbroken["exit"] == 0
        self.calls: int = unbroken["calls"]
        self.seconds: float = unbroken["seconds"]
        self.files = files_of(self.whole)

    def run(self, root: Path, **kill: Any) -> dict[str, Any]:
        return self._server.ask(root=str(root), **kill)

    def close(self) -> None:
        self._server.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    found = Server(tmp_path_factory.mktemp("kills"))
    yield found
    found.close()


def files_of(root: Path) -> dict[str, bytes]:
    """All files but those that hold times and hosts."""
    return {
        p.relative_to(root).as_posix(): p.read_bytes()
        for p in sorted(root.rglob("*"))
        if p.is_file() and p.name not in ("log.txt", ".lock")
    }


def survivors(root: Path) -> dict[str, int]:
    """What a killed job left, read and checked as anybody would: key → n."""
    if not commit_numbers(root):
        with pytest.raises(StoreError, match=r"No store at|never begun"):
            fl.Store.open(root)
        return {}
    store = fl.Store.open(root, check="read")
    result = store.check(deep=True)
    assert result.ok, result.problems
    batch = store.rows(list(store.keys), list(job.FIELDS))
    for key, n, x, text in zip(batch.keys_of_rows, batch["n"].tolist(), batch["x"], batch["t"], strict=True):
        want = job.values(n % 1000, replaced=n >= 1000)
        assert key == job.KEYS[n % 1000]
        assert text == want["t"]
        assert float((x - want["x"]).abs().max()) < 0.05
    return dict(zip(batch.keys_of_rows, batch["n"].tolist(), strict=True))


def _lost(before: dict[str, int], after: dict[str, int]) -> set[str]:
    """Keys that were committed, were not to be deleted, and are gone or older than they were."""
    return {key for key, n in before.items() if key not in job.DELETED and after.get(key, -1) < n}


def _kill_at_random(server: Server, kills: int, seed: int) -> dict[str, Any]:
    """Kill until it was done `kills` times; a store that is finished makes room for a new one."""
    draw = random.Random(seed)
    done, lost, stores, different = 0, 0, 0, 0
    while done < kills:
        root = server.folder / f"random-{seed}-{stores}"
        before: dict[str, int] = {}
        stores += 1
        while done < kills:
            answer = server.run(root, after_s=draw.uniform(0, 0.7 * server.seconds))
            if answer["exit"] == 0:
                break
            assert answer["exit"] == -9
            done += 1
            after = survivors(root)
            lost += len(_lost(before, after))
            before = after
        assert server.run(root)["exit"] == 0
        lost += len(_lost(before, survivors(root)))
        different += files_of(root) != server.files
    return {"kills": done, "stores": stores, "lost": lost, "identical": different == 0}


def _kill_at_calls(server: Server, places: list[tuple[int, str]]) -> dict[str, Any]:
    """Each on a store of its own: killed there, looked at, finished, compared."""
    lost, different = 0, []
    for call, when in places:
        root = server.folder / f"call-{call}-{when}"
        assert server.run(root, at=call, do="kill", when=when)["exit"] == -9
        before = survivors(root)
        assert server.run(root)["exit"] == 0
        lost += len(_lost(before, survivors(root)))
        if files_of(root) != server.files:
            different.append((call, when))
    return {
        "kills": len(places),
        "calls": server.calls,
        "lost": lost,
        "identical": not different,
        "different": different,
    }


def test_recording_an_outcome_keeps_those_of_others(tmp_path: Path) -> None:
    place = tmp_path / "faults.json"
    for name, kills in (("write_kill", 1), ("freeze_kill", 2), ("write_kill", 3)):
        killing.record(name, {"kills": kills}, place)
    kept = json.loads(place.read_text())
    assert {name: outcome["kills"] for name, outcome in kept.items()} == {"write_kill": 3, "freeze_kill": 2}
    assert kept["write_kill"]["command"] == "scripts/test --full tests/faults/test_write_kill.py"


def test_the_job_is_the_same_bytes_each_time_and_running_it_again_changes_nothing(server: Server) -> None:
    assert server.run(server.folder / "again")["exit"] == 0
    assert files_of(server.folder / "again") == server.files
    assert server.run(server.whole)["exit"] == 0
    assert files_of(server.whole) == server.files
    assert set(survivors(server.whole)) == set(job.KEYS) - job.BAD - set(job.DELETED)


def test_killed_at_random_moments(server: Server) -> None:
    outcome = _kill_at_random(server, kills=5, seed=1)
    assert (outcome["kills"], outcome["lost"], outcome["identical"]) == (5, 0, True)


def test_killed_before_during_and_after_calls_that_change_the_disk(server: Server) -> None:
    every = [(call, when) for call in range(1, server.calls + 1) for when in WHEN]
    outcome = _kill_at_calls(server, random.Random(2).sample(every, 8))
    assert (outcome["lost"], outcome["different"]) == (0, [])


@pytest.mark.full
def test_killed_sixty_times_and_at_120_calls(server: Server) -> None:
    at_random = _kill_at_random(server, kills=60, seed=3)
    every = [(call, when) for call in range(1, server.calls + 1) for when in WHEN]
    at_calls = _kill_at_calls(server, random.Random(4).sample(every, 120))
    killing.record("write_kill", {**at_random, "at_calls": at_calls})
    assert (at_random["lost"], at_random["identical"]) == (0, True)
    assert (at_calls["lost"], at_calls["different"]) == (0, [])
