"""What a stage uses is found; what it does not use is not."""

from __future__ import annotations

import logging
import random
from collections import deque
from functools import partial

import numpy as np
import torch
from torch import nn

from frostline.inspector.reach import reach
from frostline.stage import lazy

LOGGER = logging.getLogger("test")
TABLE = {"mean": np.zeros(3), "names": ["a", "b"]}


def test_values_of_closures_globals_and_partials_by_name() -> None:
    rng = random.Random(0)

    def fn(x, scale):
        LOGGER.debug("x")
        return TABLE["mean"], rng.random(), scale

    found = reach(partial(fn, scale=2))
    assert found.values["scale"] == 2
    assert found.values["TABLE['mean']"] is TABLE["mean"]
    assert found.values["TABLE['names'][1]"] == "b"
    assert found.values["rng"] is rng
    assert not any("LOGGER" in name for name in found.values)


def test_a_part_of_a_found_network_is_not_named_twice() -> None:
    network = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    part = network[0]
    found = reach(lambda x: network(part(x)))
    assert list(found.modules) == ["network"]
    assert list(found.tensors()) == ["network.0.weight", "network.0.bias"]


def test_lazy_networks_count_once_they_are_loaded() -> None:
    encoder = lazy(nn.Linear, 1, 1)

    def fn(x):
        return encoder.get()(x)

    assert reach(fn).modules == {}
    encoder.get()
    assert list(reach(fn).modules) == ["encoder"]


def test_circles_and_large_data_come_to_an_end() -> None:
    class Node:
        def __init__(self) -> None:
            self.me, self.rows, self.recent = self, list(range(100_000)), deque([1])

        def __call__(self, x):
            return x

    found = reach(Node())
    assert found.values == {"recent.len()": 1, "recent[0]": 1}


def test_uses_reach_through_own_functions_and_submodules() -> None:
    class Inner(nn.Module):
        def forward(self, x):
            return helper(x)

    def helper(x):
        return x + random.random() + torch.rand(1)

    found = reach(nn.Sequential(Inner()))
    assert {"random.random", "torch.rand"} <= {use.path for use in found.uses}
