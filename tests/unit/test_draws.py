"""Draws of a chunk: one stream a row, the same in any company, spread as they should be."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from frostline import keyed
from frostline.draws import Draws
from frostline.errors import UsageError

KEYS = [f"clip-{i}" for i in range(40)]


def draw(keys: list[str], **options: object) -> list[torch.Tensor]:
    rng = Draws(5, 2, keys, "noise", **options)
    return [
        rng.uniform(), rng.uniform(3, 5), rng.normal(7), rng.normal(), rng.integers(0, 10, 2),
        rng.integers(-(2**31), 2**31), rng.uniform(0), rng.normal(2, 3),
    ]  # fmt: skip


@given(st.lists(st.integers(0, len(KEYS) - 1), min_size=1, max_size=40))
def test_a_row_draws_the_same_whatever_its_company(rows: list[int]) -> None:
    whole = draw(KEYS)
    for alone, all_of_them in zip(draw([KEYS[i] for i in rows]), whole, strict=True):
        assert torch.equal(alone, all_of_them[rows])


def test_shapes_and_types() -> None:
    rng = Draws(0, 0, KEYS[:3], "x")
    assert len(rng) == 3
    assert (rng.uniform(2, 4).shape, rng.uniform().shape) == ((3, 2, 4), (3,))
    assert (rng.uniform(2).dtype, rng.normal(2).dtype) == (torch.float32, torch.float32)
    assert rng.integers(0, 5, 6).shape == (3, 6)
    assert rng.integers(0, 5).dtype == torch.int64
    assert Draws(0, 0, [], "x").normal(4).shape == (0, 4)


def test_every_name_and_every_call_draws_anew() -> None:
    names = [(0, 0, "a", "x"), (1, 0, "a", "x"), (0, 1, "a", "x"), (0, 0, "b", "x"), (0, 0, "a", "y")]
    firsts = {Draws(seed, epoch, [key], stage).uniform().item() for seed, epoch, key, stage in names}
    assert len(firsts) == len(names)
    rng = Draws(0, 0, ["a"], "x")
    assert len({rng.uniform().item() for _ in range(20)}) == 20


def test_a_rows_generator_is_the_one_of_a_stage_of_single_samples_and_goes_on() -> None:
    rng = Draws(3, 4, ["a", "b"], "crop")
    rng.uniform(100)  # has no influence on it
    expected = keyed.generator(3, 4, "b", "crop").random(4)
    np.testing.assert_array_equal([rng[1].random(), rng[-1].random(), *rng[1].random(2)], expected)
    with pytest.raises(IndexError, match="row 2 of 2"):
        rng[2]


def test_uniform_numbers_are_in_range_and_even() -> None:
    u = Draws(0, 0, KEYS, "x").uniform(5000)
    assert 0 <= u.min() < 1e-4
    assert 0.9999 < u.max() < 1
    counts = torch.histc(u, 50, 0, 1)
    assert (counts / (u.numel() / 50) - 1).abs().max() < 0.08  # 5 deviations


def test_normal_numbers_have_the_moments_of_a_normal() -> None:
    z = Draws(0, 0, KEYS, "x").normal(5000).double()
    assert torch.isfinite(z).all()
    for power, expected in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0)):
        assert abs((z**power).mean().item() - expected) < 0.15
    assert abs((z[:, 1:] * z[:, :-1]).mean().item()) < 0.02
    assert abs((z[1:] * z[:-1]).mean().item()) < 0.02


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3, 4), (5, 1005), (0, 2**32), (2**40, 2**40 + 3)])
def test_integers_stay_in_their_range_and_are_even(low: int, high: int) -> None:
    found = Draws(0, 0, KEYS, "x").integers(low, high, 2000).double()
    assert low <= found.min()
    assert found.max() < high
    middle = (low + high - 1) / 2
    assert abs(found.mean().item() - middle) <= 0.02 * (high - low)
    if high - low < 100:
        assert {*found.flatten().tolist()} == {*map(float, range(low, high))}


@pytest.mark.parametrize(("low", "high"), [(3, 3), (4, 3), (0, 2**32 + 1)])
def test_a_range_without_numbers_or_with_too_many_is_refused(low: int, high: int) -> None:
    with pytest.raises(UsageError, match="low below high"):
        Draws(0, 0, ["a"], "x").integers(low, high)


@pytest.mark.gpu
def test_a_gpu_draws_the_same_numbers() -> None:
    for n in (3, 5001):  # copied, and made there
        here, there = Draws(0, 0, KEYS, "x"), Draws(0, 0, KEYS, "x", device="cuda")
        for _ in range(2):
            assert torch.equal(here.uniform(n), there.uniform(n).cpu())
            assert torch.equal(here.integers(0, 1000, n), there.integers(0, 1000, n).cpu())
            torch.testing.assert_close(here.normal(n), there.normal(n).cpu())
    assert there.uniform(2, device="cpu").device.type == "cpu"
