"""State is compared bit by bit, and put back whatever happened to it."""

from __future__ import annotations

import itertools
import random
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn

from frostline.inspector.reach import reach
from frostline.inspector.snapshot import Snapshot, content


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor([float("nan"), 1.0]),
        lambda: torch.ones(2, 2).bfloat16().t(),
        lambda: torch.tensor(3),
        lambda: torch.arange(9.0)[4::9],  # contiguous, and its stride is 9
        lambda: torch.zeros(0, 3),
        lambda: torch.eye(2).to_sparse(),
        lambda: torch.view_as_complex(torch.ones(2, 2)).conj(),
        lambda: torch.empty(2, device="meta"),
        lambda: np.array(["a", None], dtype=object),
        lambda: np.random.default_rng(1),
        lambda: np.random.RandomState(1),
        lambda: torch.Generator().manual_seed(1),
        lambda: random.Random(1),
        lambda: random.SystemRandom(),
        lambda: itertools.count(3),
        lambda: float("nan"),
        lambda: [1, {"a": torch.ones(1)}],
    ],
)
def test_equal_things_have_equal_content(make) -> None:
    assert content(make()) == content(make())


def test_different_things_do_not() -> None:
    drawn = np.random.default_rng(1)
    drawn.random()
    different = [0, 0.0, -0.0, False, "0", b"0", None, torch.zeros(1), torch.zeros(1, 1), -torch.zeros(1)]
    different += [torch.zeros(1, dtype=torch.int32), np.zeros(1), np.random.default_rng(1), drawn]
    seen = [content(value) for value in different]
    assert all(a != b for a, b in itertools.combinations(seen, 2))


class Busy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("steps", torch.zeros(1))
        self.log, self.recent, self.seen = [], deque([1]), {1}
        self.rng, self.gen, self.old = np.random.default_rng(0), torch.Generator(), np.random.RandomState(0)
        self.python, self.array, self.n = random.Random(0), np.zeros(2), 0

    def act(self) -> None:
        with torch.inference_mode():
            self.steps = self.steps + 1
            self.inner.weight.mul_(2)
            self.cache = torch.ones(1)
        self.inner.bias.requires_grad_(False)
        self.eval()
        self.log.append(1)
        self.recent.append(2)
        self.seen.add(2)
        self.rng.random(), torch.rand(1, generator=self.gen), self.old.rand(), self.python.random()
        self.array += 1
        self.n += 1


def test_everything_a_call_changed_is_told_and_put_back() -> None:
    busy = Busy()
    steps, weight = busy.steps, busy.inner.weight.detach().clone()
    before = Snapshot(reach(busy))
    busy.act()
    later = Snapshot(reach(busy), weights=False)
    assert before.moved(later) == ["inner.weight", "steps"]
    told = " ".join(before.changed(later))
    for name in ("'n' (0 → 1)", "'rng' (a generator)", "'gen'", "'old'", "'python'", "'array' (an array)"):
        assert name in told
    before.restore()
    again = Snapshot(reach(busy))
    assert before.moved(again) == []
    assert before.changed(again) == []
    assert busy.steps is steps
    assert torch.equal(busy.inner.weight, weight)
    assert busy.training
    assert busy.inner.bias.requires_grad
    assert not hasattr(busy, "cache")
    assert (busy.log, list(busy.recent), busy.seen) == ([], [1], {1})


def test_what_did_not_change_is_not_written_to() -> None:
    network = nn.Linear(2, 2)
    before, version = Snapshot(reach(network)), network.weight._version
    before.restore()
    assert network.weight._version == version
