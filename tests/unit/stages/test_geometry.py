"""Sizes: what a fit makes of a picture's sides."""

from __future__ import annotations

import numpy as np
import pytest

from frostline.stages import geometry


@pytest.mark.parametrize(
    ("fit", "expected"),
    [("stretch", (30, 40)), ("cover", (40, 40)), ("contain", (30, 30)), ("shortest", (30, 30))],
)
def test_scaled_sides_of_a_square(fit: str, expected: tuple[int, int]) -> None:
    size = 30 if fit == "shortest" else (30, 40)
    assert geometry.scaled(100, 100, size, fit) == expected  # type: ignore[arg-type]


def test_no_side_becomes_zero() -> None:
    assert geometry.scaled(1, 10_000, 64, "contain") == (1, 64)


def test_cover_is_at_least_and_contain_at_most_the_size() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        height, width, a, b = (int(v) for v in rng.integers(1, 500, 4))
        covering = geometry.scaled(height, width, (a, b), "cover")
        contained = geometry.scaled(height, width, (a, b), "contain")
        assert covering[0] >= a
        assert covering[1] >= b
        assert contained[0] <= a
        assert contained[1] <= b
        for fit, sides in (("cover", covering), ("contain", contained)):
            assert geometry.centred(np.ones((*sides, 3), np.uint8), (a, b), fit).shape == (a, b, 3)


def test_the_middle_is_kept() -> None:
    pixels = np.arange(9, dtype=np.uint8).reshape(1, 9, 1)
    assert geometry.centred(pixels, (1, 3), "cover").ravel().tolist() == [3, 4, 5]
    assert geometry.centred(pixels[:, :3], (1, 5), "contain").ravel().tolist() == [0, 0, 1, 2, 0]
