"""The scaler against torch's own, over long random sequences of overflows."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from frostline.scaling import Scaler

CPU = torch.device("cpu")


def theirs(overflows: list[bool], start: float) -> list[float]:
    """The scale after each update of torch.amp.GradScaler, driven through an optimiser as users drive it."""
    scaler = torch.amp.GradScaler("cpu", init_scale=start)
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], 0.0)
    scaler.scale(torch.zeros(1))  # makes its tensors
    scales = []
    for overflow in overflows:
        weight.grad = torch.full((1,), math.inf if overflow else 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def ours(overflows: list[bool], scaler: Scaler) -> list[float]:
    scales = []
    for overflow in overflows:
        scaler.update(torch.tensor(float(overflow)))
        scales.append(scaler.scale.item())
    return scales


def sequence(seed: int, n: int, *, often: float) -> list[bool]:
    """Overflows at random, with two long quiet stretches so that the scale grows as well."""
    rng = np.random.default_rng(seed)
    drawn = rng.random(n) < often
    drawn[100 : 100 + Scaler.INTERVAL + 50] = False
    drawn[-(2 * Scaler.INTERVAL + 10) :] = False
    return [bool(one) for one in drawn]


@pytest.mark.parametrize(("seed", "often", "start"), [(0, 0.05, 65536.0), (1, 0.002, 2.0**30)])
def test_the_scale_is_torchs_after_every_step(seed: int, often: float, start: float) -> None:
    overflows = sequence(seed, 8000, often=often)
    expected = theirs(overflows, start)
    assert ours(overflows, Scaler(CPU, start=start)) == expected
    assert min(expected) < start
    moves = {after / before for before, after in pairwise(expected)}
    assert moves == {Scaler.BACKOFF, 1.0, Scaler.GROWTH}


def test_it_goes_on_from_its_tensors_where_it_was() -> None:
    overflows = sequence(2, 6000, often=0.01)
    whole = ours(overflows, Scaler(CPU))
    first, second = Scaler(CPU), Scaler(CPU, start=1.0)
    begun = ours(overflows[:1500], first)  # within the stretch in which it grows
    second.load_tensors({name: t.clone() for name, t in first.state_tensors().items()})
    assert begun + ours(overflows[1500:], second) == whole


def test_gradients_are_divided_in_place_and_what_is_no_number_stays_so() -> None:
    scaler = Scaler(CPU, start=1024.0)
    gradients = [torch.tensor([1024.0, -512.0]), torch.tensor([[math.inf, math.nan]]), torch.zeros(0)]
    scaler.unscale(gradients)
    assert gradients[0].tolist() == [1.0, -0.5]
    assert gradients[1][0, 0] == math.inf
    assert gradients[1][0, 1].isnan()


def test_the_division_is_torchs_bit_for_bit() -> None:
    given = torch.randn(1000, generator=torch.Generator().manual_seed(4)) * 3e4
    for start in (65536.0, 2.0**40, 3.0):
        scaler = torch.amp.GradScaler("cpu", init_scale=start)
        weight = nn.Parameter(torch.zeros(1000))
        optimizer = torch.optim.SGD([weight], 0.0)
        scaler.scale(torch.zeros(1))
        weight.grad = given.clone()
        scaler.unscale_(optimizer)
        mine = given.clone()
        Scaler(CPU, start=start).unscale([mine])
        assert torch.equal(mine, weight.grad)
