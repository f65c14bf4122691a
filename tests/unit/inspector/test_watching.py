"""Generators, entropy and clocks are watched, and left as they were."""

from __future__ import annotations

import os
import random
import time
from os import urandom

import numpy as np
import pytest
import torch

from frostline.inspector.reach import reach
from frostline.inspector.watching import (
    Draws,
    clocks_shifted,
    entropy_watched,
    generator_states,
    generators_kept,
    moved,
)


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda: torch.rand(1), "torch's CPU generator"),
        (lambda: np.random.rand(), "numpy's global generator"),
        (random.random, "Python's random generator"),
    ],
)
def test_the_generator_that_moved_is_named_and_put_back(draw, name: str) -> None:
    before = generator_states()
    with generators_kept():
        draw()
        assert moved(before, generator_states()) == [name]
    assert moved(before, generator_states()) == []


def test_operators_that_draw_are_recorded_and_others_are_not() -> None:
    q = torch.ones(1, 1, 2, 4)
    with torch.inference_mode(), Draws() as draws, generators_kept():
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
        torch.nn.functional.dropout(q, 0.5, training=False)
        torch.rand(2, generator=torch.Generator().manual_seed(0))
        assert draws.found == {}
        torch.randperm(3)
        torch.nn.functional.dropout(q, 0.5)
    assert list(draws.found) == ["aten.randperm", "aten.dropout"]
    assert "test_operators_that_draw_are_recorded" in draws.found["aten.randperm"]


def test_entropy_is_seen_under_any_name() -> None:
    def fn():
        return urandom(1)

    real = os.urandom
    with entropy_watched(reach(fn).uses) as found:
        fn()
        np.random.default_rng()
        random.SystemRandom().random()
        np.random.default_rng(3)
    assert len(found) == 3
    assert "fn (test_watching.py:" in found[0]
    assert os.urandom is urandom is real
    assert random._urandom is real


def test_a_random_name_made_while_importing_is_no_part_of_the_result(tmp_path, monkeypatch) -> None:
    (tmp_path / "made_in_mid_call.py").write_text("import uuid\nNAME = uuid.uuid4()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with entropy_watched([]) as found:
        import made_in_mid_call  # noqa: F401
    assert found == []


def test_clocks_are_ahead_and_then_right_again() -> None:
    real = time.time, time.localtime, time.strftime
    before = time.time()
    with clocks_shifted([], 7200):
        assert 7100 < time.time() - before < 9000
        assert time.time_ns() - before * 1e9 > 7100e9
        assert time.mktime(time.localtime()) - before > 7100
        assert time.gmtime(0).tm_year == 1970
        assert time.strftime("%Y", time.gmtime(0)) == "1970"
        assert time.strftime("%s") >= str(int(before) + 7100)
    assert (time.time, time.localtime, time.strftime) == real
    with pytest.raises(RuntimeError), clocks_shifted([], 5):
        raise RuntimeError
    assert time.time is real[0]
