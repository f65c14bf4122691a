"""Loaders that hand out one batch again and again: the same content, for that loader, as it was kept."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from frostline.profiler.inside.loaders import Loaders


class Numbers(Dataset[Any]):
    def __init__(self, n: int = 10) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": torch.full((2,), float(i)), "name": f"item{i}"}


def keep(loaders: Loaders, loader: DataLoader[Any], steps: int = 2) -> None:
    """Steps that read from a loader, of which a batch is kept."""
    loaders.keep = True
    for _ in islice(loader, steps):
        loaders.step()
    loaders.keep = False


def test_a_kept_batch_comes_again_and_again_in_containers_of_its_own(loaders: Loaders) -> None:
    loader = DataLoader(Numbers(8), batch_size=4)
    keep(loaders, loader)
    assert loaders.replayable("replay")
    assert loaders.replayable("half")
    loaders.replay = "replay"
    first, second = islice(loader, 2)
    assert first["x"] is second["x"]
    assert first["name"][0] == "item0"
    first.pop("x")
    assert torch.equal(next(iter(loader))["x"], second["x"])
    loaders.replay = "half"
    assert [len(v) for v in next(iter(loader)).values()] == [2, 2]
    loaders.replay = ""
    assert next(iter(loader))["name"][0] == "item0"


def test_a_kept_batch_lies_on_the_device_and_comes_anew_when_a_step_wrote_into_it(loaders: Loaders) -> None:
    loader = DataLoader(Numbers(8), batch_size=4)
    keep(loaders, loader)
    loaders.replay, loaders.device = "compute", "meta"
    first, second = islice(loader, 2)
    assert first["x"].device.type == "meta"
    assert first["x"] is second["x"]
    assert first["name"] == ["item0", "item1", "item2", "item3"]
    first["x"].mul_(2)
    assert next(iter(loader))["x"] is not first["x"]
    loaders.replay = "half"
    given = next(iter(loader))
    assert (given["x"].device.type, len(given["x"])) == ("meta", 2)
    assert [name for name in loaders.summary()[0] if name in ("kept", "there", "as")] == []


def test_another_loader_has_its_own_batches_while_one_is_replayed_and_an_end(loaders: Loaders) -> None:
    """An evaluation every few steps: `for batch in evaluation` would never end."""
    training, evaluation = DataLoader(Numbers(8), batch_size=4), DataLoader(Numbers(6), batch_size=2)
    loaders.keep = True
    list(evaluation)  # before the steps: its batch is kept too, but no step reads from it
    keep(loaders, training)
    loaders.replay = "replay"
    given = list(islice(evaluation, 10))
    assert len(given) == 3
    assert all(len(batch["x"]) == 2 for batch in given)


def test_also_where_training_and_evaluation_look_alike(loaders: Loaders) -> None:
    """Within one step a kept batch comes so often only: a loop over the loader has an end."""
    data = Numbers(8)
    keep(loaders, DataLoader(data, batch_size=4))
    loaders.replay = "replay"
    assert 2 < len(list(islice(DataLoader(data, batch_size=4), 500))) < 100


def test_one_batch_is_kept_and_only_a_larger_one_takes_its_place(loaders: Loaders) -> None:
    """Memory that is held a step longer, again and again, slowed the step by a tenth."""
    loader = DataLoader(Numbers(9), batch_sampler=[[0, 1], [2, 3, 4, 5], [6, 7, 8, 0], [1]])
    keep(loaders, loader, steps=4)
    loaders.replay = "replay"
    assert next(iter(loader))["name"] == ["item2", "item3", "item4", "item5"]


def test_a_loader_that_steps_did_not_read_from_is_not_replayed(loaders: Loaders) -> None:
    keep(loaders, DataLoader(Numbers(8), batch_size=4), steps=1)
    assert not loaders.replayable("replay")


def test_what_is_replayed_is_told_like_any_batch_and_prepares_nothing(loaders: Loaders) -> None:
    loader = DataLoader(Numbers(8), batch_size=4)
    keep(loaders, loader)
    loaders.replay = "replay"
    prepared, told = len(loaders.prepared), list[int]()
    loaders.told = lambda start, end, rows, came: told.append(rows)
    list(islice(loader, 5))
    assert told == [4] * 5
    assert len(loaders.prepared) == prepared


def test_nothing_is_kept_unless_it_is_asked_for(loaders: Loaders) -> None:
    for _ in DataLoader(Numbers(8)):
        loaders.step()
    assert not loaders.replayable("replay")
