from __future__ import annotations

import json
import logging
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from frostline.errors import CheckpointError
from frostline.trainer.checkpoint import Checkpoints, load
from frostline.trainer.generators import restore_rng, rng_tensors


def draws(device: str = "cpu") -> list[float]:
    return [
        random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.standard_normal()),
        torch.rand(1).item(), torch.randn(1, device=device).item(),
    ]  # fmt: skip


def test_every_generator_goes_on_where_it_was_through_a_checkpoint(tmp_path: Path) -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    draws()  # half of a pair of normal draws is now kept back, in Python's and numpy's
    tensors, about = rng_tensors()
    path = Checkpoints(tmp_path).save(1, {"rng": tensors}, {"rng": about})
    expected = [draws(), draws()]
    random.seed(9)
    np.random.seed(9)
    torch.manual_seed(9)
    assert draws() != expected[0]
    loaded = load(path)
    restore_rng(loaded.groups["rng"], loaded.state["rng"])
    assert [draws(), draws()] == expected


def test_another_generator_of_numpy_is_kept_as_well() -> None:
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(5))
        tensors, about = rng_tensors()
        expected = np.random.rand(4).tolist()
        restore_rng(tensors, json.loads(json.dumps(about)))
        assert np.random.rand(4).tolist() == expected
    finally:
        np.random.set_bit_generator(before)


def test_a_state_that_lacks_something_is_an_error_of_ours() -> None:
    tensors, about = rng_tensors()
    with pytest.raises(CheckpointError, match="cannot be restored"):
        restore_rng(tensors, {k: v for k, v in about.items() if k != "numpy"})
    with pytest.raises(CheckpointError, match="names a tensor"):
        restore_rng({}, about)


def test_another_kind_of_device_is_said(caplog: pytest.LogCaptureFixture) -> None:
    tensors, about = rng_tensors()
    with caplog.at_level(logging.WARNING):
        restore_rng(tensors, {**about, "device_type": "cuda"})
    assert "written on cuda, this is cpu" in caplog.text


@pytest.mark.gpu
def test_the_generator_of_a_gpu_goes_on() -> None:
    tensors, about = rng_tensors("cuda")
    expected = draws("cuda")
    restore_rng(tensors, about, "cuda")
    assert draws("cuda") == expected
