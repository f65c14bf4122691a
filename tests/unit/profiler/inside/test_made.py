"""Loaders are told apart by what they are: two that look alike are two, one that is made anew is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, SubsetRandomSampler, TensorDataset

from frostline.profiler.inside.loaders import Loaders


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> int:
        return i


def counted(loaders: Loaders) -> list[tuple[int, int]]:
    return [(about["items"], about["repeats"]) for about in loaders.summary()]


def pair() -> tuple[Any, Any]:
    """Labelled and unlabelled, of one length."""
    return TensorDataset(torch.rand(8, 2), torch.zeros(8)), TensorDataset(torch.rand(8, 2))


def test_two_data_sets_of_one_kind_and_length_are_two(loaders: Loaders) -> None:
    labelled, unlabelled = pair()
    a, b = DataLoader(labelled, 2), DataLoader(unlabelled, 2)
    for _ in zip(a, b, strict=True):
        loaders.step()
    assert counted(loaders) == [(8, 0), (8, 0)]
    assert [about["a_step"] for about in loaders.summary()] == [1, 1]


def test_also_where_nobody_holds_the_loaders(loaders: Loaders) -> None:
    labelled, unlabelled = pair()
    list(zip(DataLoader(labelled, 2), DataLoader(unlabelled, 2), strict=True))
    assert counted(loaders) == [(8, 0), (8, 0)]


def test_each_is_handed_its_own_batch_again(loaders: Loaders) -> None:
    labelled, unlabelled = pair()
    a, b = DataLoader(labelled, 2), DataLoader(unlabelled, 2)
    loaders.keep = True
    for _ in zip(a, b, strict=True):
        loaders.step()
    loaders.keep, loaders.replay = False, "replay"
    (x, _), (u,) = next(zip(a, b, strict=True))
    assert torch.equal(x, labelled[:2][0])
    assert torch.equal(u, unlabelled[:2][0])


def test_two_over_the_same_data_are_two_and_know_the_same_items(loaders: Loaders) -> None:
    """Training and evaluation on halves of one data set."""
    data = Numbers()
    train, held = (DataLoader(data, 2, sampler=SubsetRandomSampler(part)) for part in ([0, 1], [2, 3]))
    for _ in range(2):
        list(train)
        list(held)
    assert counted(loaders) == [(4, 2), (4, 2)]
    list(zip(DataLoader(data, 2), DataLoader(data, 2), strict=True))  # two iterators at once
    assert len(loaders.summary()) == 4


@pytest.mark.parametrize("data", [Numbers(), [1, 2, 3, 4, 5, 6, 7, 8]])
def test_one_that_every_epoch_makes_anew_is_one(loaders: Loaders, data: Any) -> None:
    for _ in range(3):
        list(DataLoader(data, 2, shuffle=True))
    assert counted(loaders) == [(24, 16)]


def test_also_where_the_old_iterator_is_still_there(loaders: Loaders) -> None:
    data = Numbers()
    for _ in range(3):
        iterator = iter(DataLoader(data, 2))
        assert len([*iterator]) == 4
    assert counted(loaders) == [(24, 16)]


@pytest.mark.parametrize("kind", ["subsets", "lists"])
def test_folds_go_on_in_one_record_and_repeat_nothing(loaders: Loaders, kind: str) -> None:
    """Item 3 of one fold is not item 3 of the next, and no batch of the last one comes again."""
    whole = [f"file{i}" for i in range(12)]
    loaders.keep = True
    for k in range(3):
        part = range(4 * k, 4 * k + 4)
        fold: Any = Subset(whole, part) if kind == "subsets" else [whole[i] for i in part]  # type: ignore[arg-type]
        for _ in DataLoader(fold, 2):
            loaders.step()
        del fold
    assert counted(loaders) == [(12, 0)]
    assert loaders.summary()[0]["anew"] == 2
    loaders.keep, loaders.replay = False, "replay"
    assert next(iter(DataLoader(["new"] * 4, 2))) == ["new"] * 2
