"""Batches as scripts have them: rows, copies of their containers, halves."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import default_collate

from frostline.profiler.inside.batches import again, first_tensor, half, n_rows

Pair = namedtuple("Pair", ["x", "y"])


class Encoding(UserDict):  # type: ignore[type-arg]
    """As transformers' BatchEncoding."""


def rows(n: int = 6) -> Tensor:
    return torch.randn(n, 3)


@pytest.mark.parametrize(
    ("batch", "n"),
    [
        (rows(5), 5),
        ([rows(5), torch.arange(7)], 5),
        ({"id": ["a"], "n": torch.tensor(3), "x": rows(4)}, 4),
        (Pair(rows(4), None), 4),
        (Encoding(x=rows(4)), 0),
        ("text", 0),
        ([], 0),
        (None, 0),
    ],
)
def test_rows_are_the_first_tensors(batch: Any, n: int) -> None:
    if isinstance(batch, Encoding):
        n = n_rows(batch.data)  # whatever it is a mapping of
    assert n_rows(batch) == n


IMAGES = [torch.ones(3, 4, 4) for _ in range(8)]


@pytest.mark.parametrize(
    ("batch", "n"),
    [
        ((IMAGES, [{"boxes": torch.ones(2, 4)} for _ in IMAGES]), 8),
        (tuple(zip(*((image, i) for i, image in enumerate(IMAGES)), strict=True)), 8),
        ({"image": IMAGES, "name": ["a"] * 8}, 8),
        ([{"image": image, "label": 1} for image in IMAGES], 8),
        (([torch.ones(n) for n in (4, 9, 2)], [torch.ones(n) for n in (3, 1, 2)]), 3),
        (([rows(5), rows(5)], [torch.arange(5), torch.arange(5)]), 5),
        (([rows(5), rows(5)], torch.arange(5)), 5),
        ([[rows(5), torch.ones(1)]], 5),
        (([rows(5), 3],), 5),
    ],
)
def test_lists_of_samples_have_as_many_rows_as_samples(batch: Any, n: int) -> None:
    """As detection has them; lists of views or of fields have their tensors' rows."""
    assert n_rows(batch) == n


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_have_rows_and_are_not_halved(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([rows(n) for n in (2, 4, 3, 5)], layout=layout)
    assert n_rows((nested,)) == 4
    assert half([nested, torch.arange(4)]) is None


def test_a_batch_that_contains_itself_has_an_end() -> None:
    batch: list[Any] = []
    batch.append(batch)
    assert first_tensor(batch) is None
    again(batch)


def test_again_is_the_same_content_in_containers_of_its_own() -> None:
    x, y = rows(), rows()
    batch = {"x": x, "more": [y, ("a", {"z": x})]}
    copied = again(batch)
    copied.pop("x")
    copied["more"][1][1].clear()
    copied["more"].append(1)
    assert batch["x"] is x
    assert batch["more"][0] is y
    assert batch["more"][1] == ("a", {"z": x})


def test_again_of_an_encoding_can_be_changed_too() -> None:
    batch = Encoding(x=rows())
    copied = again(batch)
    assert type(copied) is Encoding
    copied.pop("x")
    assert "x" in batch


def test_tensors_are_not_copied() -> None:
    x = rows()
    assert again([x])[0] is x


@pytest.mark.parametrize(
    "batch",
    [
        rows(),
        [rows(), torch.arange(6)],
        (rows(), torch.arange(6)),
        {"x": rows(), "y": {"z": torch.arange(6)}},
        Pair(rows(), torch.arange(6)),
        OrderedDict(x=rows(), y=torch.arange(6)),
        Encoding(x=rows(), y=torch.arange(6)),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_half_a_batch_has_half_its_rows_everywhere(batch: Any) -> None:
    """What is not cut would be told as a step that takes as long with half the batch: launch-bound."""
    found = half(batch)
    assert type(found) is type(batch)
    found = found.data if isinstance(found, Encoding) else found
    batch = batch.data if isinstance(batch, Encoding) else batch
    assert n_rows(found) == 3
    assert torch.equal(first_tensor(found), first_tensor(batch)[:3])  # type: ignore[index,arg-type]
    assert {len(leaf) for leaf in leaves(found)} == {3}


def leaves(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    return [leaf for item in items for leaf in leaves(item)]


def test_names_are_halved_with_their_rows_as_torch_collates_them() -> None:
    """torch leaves strings of (x, name) items as a tuple."""
    found = half(default_collate([(torch.ones(2), f"image{i}") for i in range(6)]))
    assert [len(part) for part in found] == [3, 3]


def test_what_has_no_rows_stays_whole() -> None:
    scale, mask = torch.tensor(2.0), torch.ones(1, 2)
    found = half({"x": rows(6), "scale": scale, "mask": mask, "epoch": 3})
    assert (found["scale"], found["mask"], found["epoch"]) == (scale, mask, 3)


def test_a_batch_with_much_of_another_length_is_not_halved() -> None:
    """An episode's support images: half of the queries would not be half of the work."""
    assert half({"x": rows(6), "support": torch.ones(12, 3)}) is None


@pytest.mark.parametrize("batch", [rows(3), "text", {"x": torch.tensor(3)}, []])
def test_what_cannot_be_halved_is_none(batch: Any) -> None:
    assert half(batch) is None
