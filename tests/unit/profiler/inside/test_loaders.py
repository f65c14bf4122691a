"""DataLoaders: what is waited for is told, and nothing about their batches changes."""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, dataloader
from torch.utils.data._utils import fetch

from frostline.profiler.inside.loaders import Loaders
from frostline.profiler.inside.spans import Spans
from frostline.profiler.launch import Settings, launch

Told = list[tuple[float, float, int]]


class Numbers(Dataset[Any]):
    def __init__(self, n: int = 10) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": torch.full((2,), float(i)), "name": f"item{i}"}


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.arange(6.0)


@pytest.fixture
def told(loaders: Loaders) -> Told:
    found: Told = []
    loaders.told = lambda *what: found.append(what)
    return found


def about(loaders: Loaders) -> dict[str, Any]:
    (found,) = loaders.summary()
    return found


def test_each_batch_is_told_once_with_its_rows(loaders: Loaders, told: Told) -> None:
    list(DataLoader(Numbers(10), batch_size=4))
    assert [rows for *_, rows, came in told if came] == [4, 4, 2]
    assert all(end >= start for start, end, *_ in told)
    known = about(loaders)
    assert (known["dataset"], known["workers"], known["batch_size"]) == ("Numbers", 0, 4)
    assert (known["batches"], known["samples"], known["calls"], loaders.begun) == (3, 10, 3, 1)
    assert known["wait_s"] == pytest.approx(sum(end - start for start, end, *_ in told))


def test_the_end_of_an_epoch_is_no_batch(loaders: Loaders, told: Told) -> None:
    """What is told is counted as batches a step, and those give the epoch's length."""
    loader = DataLoader(Numbers(10), batch_size=5)
    for _ in range(3):
        list(loader)
    assert [came for *_, came in told] == [True, True, False] * 3


def test_batches_are_the_very_ones_that_the_script_made(loaders: Loaders) -> None:
    made: list[Any] = []

    def collate(items: list[Any]) -> Any:
        made.append(items)
        return items

    given = list(DataLoader(Numbers(), batch_size=4, collate_fn=collate))
    assert all(a is b for a, b in zip(given, made, strict=True))


@pytest.mark.parametrize("watched", [False, True])
def test_shuffled_batches_and_random_numbers_are_the_same(watched: bool, tmp_path: Path) -> None:
    loader = DataLoader(Numbers(30), batch_size=4, shuffle=True)
    found: list[Any] = []
    for on in (False, watched):
        torch.manual_seed(5)
        loaders = Loaders(tmp_path)
        if on:
            loaders.install()
        found.append([*(name for batch in loader for name in batch["name"]), torch.rand(()).item()])
        loaders.uninstall()
    assert found[0] == found[1]


def test_items_and_repeats_are_exact_over_epochs(loaders: Loaders) -> None:
    loader = DataLoader(Numbers(10), batch_size=4, shuffle=True)
    list(loader)
    assert (about(loaders)["items"], about(loaders)["repeats"]) == (10, 0)
    list(loader)
    list(loader)
    assert (about(loaders)["items"], about(loaders)["repeats"], loaders.begun) == (30, 20, 3)


def test_items_that_a_sampler_takes_twice_are_repeats(loaders: Loaders) -> None:
    list(DataLoader(Numbers(10), batch_size=2, sampler=[1, 1, 2, 3, 1, 9]))
    assert (about(loaders)["items"], about(loaders)["repeats"]) == (6, 2)


def test_items_are_counted_without_batches(loaders: Loaders) -> None:
    list(DataLoader(Numbers(10), batch_size=None, sampler=[1, 1, 2]))
    assert about(loaders)["items"] == 3


def test_numpys_numbers_are_numbers(loaders: Loaders) -> None:
    order: Any = np.random.default_rng().permutation(10)
    list(DataLoader(Numbers(10), batch_size=2, sampler=order))
    assert about(loaders)["items"] == 10


class Place:
    """An item's number that knows how often it was looked at."""

    looks = 0

    def __index__(self) -> int:
        Place.looks += 1
        return 3


def test_items_are_not_looked_at_within_a_step(loaders: Loaders) -> None:
    """Eight thousand a batch took longer than the step itself."""

    class Whole(Numbers):
        def __getitems__(self, places: list[Any]) -> list[int]:
            return [1]

    Place.looks = 0
    list(DataLoader(Whole(), batch_sampler=2 * [[Place(), Place()]]))
    assert Place.looks == 0
    loaders.count_items()
    assert (Place.looks, about(loaders)["items"], about(loaders)["repeats"]) == (4, 4, 3)


def test_a_sampler_may_use_its_list_again(loaders: Loaders) -> None:
    class Reusing:
        def __iter__(self) -> Iterator[list[int]]:
            held = [0, 0]
            for k in range(4):
                held[:] = 2 * k, 2 * k + 1
                yield held

    list(DataLoader(Numbers(), batch_sampler=Reusing()))  # type: ignore[arg-type]
    assert (about(loaders)["items"], about(loaders)["repeats"]) == (8, 0)


def test_a_script_that_only_reads_does_not_fill_the_memory(
    loaders: Loaders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frostline.profiler.inside.loaders._MOST_UNCOUNTED", 20)
    loader = DataLoader(Numbers(10), batch_size=4)
    for _ in range(10):
        list(loader)
        assert loaders._uncounted <= 20
    assert (about(loaders)["items"], about(loaders)["repeats"]) == (100, 90)


def test_a_stream_has_no_items_and_no_length(loaders: Loaders, told: Told) -> None:
    given = torch.cat(list(DataLoader(Stream(), batch_size=4)))
    assert torch.equal(given, torch.arange(6.0))
    known = about(loaders)
    assert (known["items"], known["samples"], known["calls"]) == (0, None, 2)


def test_what_is_prepared_here_is_told_with_its_decodes(loaders: Loaders) -> None:
    class Decoded(Numbers):
        def __getitem__(self, i: int) -> dict[str, Any]:
            loaders.decoded("PIL", f"file{i}", 1.0, 0.5)
            return super().__getitem__(i)

    list(DataLoader(Decoded(4), batch_size=2))
    assert [(line["dataset"], line["n"]) for line in loaders.prepared] == [("Decoded", 2)] * 2
    assert [[d[1] for d in line["decodes"]] for line in loaders.prepared] == [
        ["file0", "file1"],
        ["file2", "file3"],
    ]


def test_what_the_script_decodes_between_batches_of_a_step_is_counted(loaders: Loaders) -> None:
    """Four batches of paths, gradients accumulated: the next batch does not clear what was decoded."""
    for i, _ in enumerate(DataLoader(Numbers(4))):
        loaders.decoded("PIL", f"file{i}", 1.0, 0.5)
    loaders.step()
    own = [line for line in loaders.prepared if line["dataset"] == "the script itself"]
    assert [d[1] for line in own for d in line["decodes"]] == ["file0", "file1", "file2", "file3"]
    assert len(own) == 1


def test_a_loader_that_reads_from_a_loader_keeps_what_it_has_decoded(loaders: Loaders) -> None:
    class Around(Numbers):
        def __getitem__(self, i: int) -> dict[str, Any]:
            loaders.decoded("PIL", f"outer{i}", 1.0, 0.5)
            return {"x": len([*DataLoader(Numbers(1))])}

    list(DataLoader(Around(2)))
    loaders.step()
    told = [(line["dataset"], [d[1] for d in line["decodes"]]) for line in loaders.prepared]
    assert [each for each in told if each[1]] == [("Around", ["outer0"]), ("Around", ["outer1"])]


def test_loaders_that_steps_take_turns_with_give_a_part_of_a_batch_each(loaders: Loaders) -> None:
    each = [iter(DataLoader(Numbers(40), batch_size=2)) for _ in range(2)]
    for i in range(12):
        next(each[i % 2])
        loaders.step()
    assert [found["a_step"] for found in loaders.summary()] == [0.5, 0.5]


def test_workers_write_a_line_a_batch_and_the_script_waits_for_them(
    loaders: Loaders, told: Told, tmp_path: Path
) -> None:
    given = list(DataLoader(Numbers(10), batch_size=2, num_workers=2, multiprocessing_context="fork"))
    assert [batch["name"][0] for batch in given] == [f"item{i}" for i in range(0, 10, 2)]
    files = sorted(tmp_path.glob("worker-*.jsonl"))
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert len(files) == 2
    assert sorted(line["n"] for line in lines) == [2] * 5
    assert {*lines[0]} == {"dataset", "start", "s", "n", "decodes", "of"}
    assert {line["of"] for line in lines} == {os.getpid()}
    assert [rows for *_, rows, _ in told if rows] == [2] * 5
    assert loaders.prepared == []
    assert about(loaders)["items"] == 10


SCRIPT = """
import torch, os
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        return torch.tensor(i)

if __name__ == "__main__":
    for batch in DataLoader(Numbers(), batch_size=2, num_workers=2, multiprocessing_context="spawn"):
        print(batch.tolist(), flush=True)
"""


def test_workers_that_are_spawned_write_their_lines_too(tmp_path: Path) -> None:
    """They are new interpreters: the injection reaches each."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ran = launch([sys.executable, str(script)], Settings(quiet=True), tmp_path)
    assert ran.status == 0
    assert ran.reached >= 3
    assert len({line["pid"] for line in ran.workers}) == 2
    assert [(line["dataset"], line["n"]) for line in ran.workers] == [("Numbers", 2)] * 4


def test_a_loader_that_reads_from_a_loader_is_waited_for_once(loaders: Loaders, told: Told) -> None:
    class Around(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from DataLoader(Numbers(4), batch_size=2)

    assert len(list(DataLoader(Around(), batch_size=None))) == 2
    assert [rows for *_, rows, came in told if came] == [2, 2]


def test_a_loader_of_another_thread_does_not_hide_the_scripts_own(loaders: Loaders, told: Told) -> None:
    inside, go_on = threading.Event(), threading.Event()

    class Slow(Numbers):
        def __getitem__(self, i: int) -> dict[str, Any]:
            inside.set()
            go_on.wait(120)
            return super().__getitem__(i)

    thread = threading.Thread(target=lambda: list(DataLoader(Slow(1))))
    thread.start()
    assert inside.wait(120)
    list(DataLoader(Numbers(2)))
    mine = len([rows for *_, rows, _ in told if rows])
    go_on.set()
    thread.join()
    assert mine == 2


def test_waits_are_spans_also_where_a_batch_fails(loaders: Loaders) -> None:
    class Fails(Numbers):
        def __getitem__(self, i: int) -> dict[str, Any]:
            raise ValueError("broken file")

    loaders.spans = Spans(cuda=False)
    with pytest.raises(ValueError, match="broken file"):
        next(iter(DataLoader(Fails())))
    next(iter(DataLoader(Numbers())))
    assert [(s.kind, s.parent) for s in loaders.spans.found] == [("data", -1), ("data", -1)]
    assert all(s.end >= s.start for s in loaders.spans.found)


def test_a_bare_step_is_not_told(loaders: Loaders, told: Told) -> None:
    loaders.watch(False)
    assert len(list(DataLoader(Numbers(4)))) == 4
    assert told == []
    loaders.watch(True)
    next(iter(DataLoader(Numbers(4))))
    assert len(told) == 1


def test_uninstalling_puts_everything_back(tmp_path: Path) -> None:
    def now() -> list[dict[str, Any]]:
        return [dict(vars(kind)) for kind in (dataloader._BaseDataLoaderIter, fetch._MapDatasetFetcher)]

    before, loaders = now(), Loaders(tmp_path)
    loaders.install()
    loaders.watch(False)
    loaders.watch(True)
    assert now() != before
    loaders.uninstall()
    assert now() == before


def test_a_loader_that_the_script_dropped_is_gone(loaders: Loaders) -> None:
    """One an epoch is usual; each holds a data set and, with persistent_workers, processes."""
    data = Numbers()
    gone = weakref.ref(data)
    list(DataLoader(data))
    del data
    gc.collect()
    assert gone() is None
    assert len(loaders.summary()) == 1


def test_other_supplies_are_waited_for_in_the_same_way(loaders: Loaders, told: Told) -> None:
    batches = [torch.ones(3), torch.ones(2)]
    loaders.spans = Spans(cuda=False)
    given = list(loaders.watched("mine", batches, rows=len))
    assert all(a is b for a, b in zip(given, batches, strict=True))
    assert [rows for *_, rows, _ in told] == [3, 2]
    known = about(loaders)
    assert (known["dataset"], known["calls"]) == ("mine", 2)
    assert all(s.end >= s.start for s in loaders.spans.found)


def test_the_end_of_a_loop_that_was_given_a_batch_twice_is_told(loaders: Loaders) -> None:
    ends: list[int] = []
    loaders.ended = lambda: ends.append(1)
    loader = DataLoader(Numbers(10), batch_size=1)
    loaders.keep = True
    for _ in loader:
        loaders.step()
    assert (ends, loaders.handed, loaders.over_again()) == ([], False, False)
    lefts, n = [], 0
    for _ in loader:
        loaders.step()
        n += 1
        loaders.replay = "replay" if 3 <= n < 6 else ""
        lefts.append(loaders.left())
    assert (ends, loaders.handed, loaders.over_again()) == ([1], True, True)
    assert n == 13
    assert lefts[:3] == [9, 8, 7]
