"""Means and counts are right, and adding to them makes nothing wait."""

from __future__ import annotations

import json
import math
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from frostline.errors import UsageError
from frostline.trainer.meter import Meter


class NoTransfers(TorchDispatchMode):
    """Fails at what would make the host wait for a device: reading a value, or copying one over."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "item", "nonzero", "equal", "is_nonzero"):
            raise AssertionError(f"{name} waits for the device")
        out = func(*args, **(kwargs or {}))
        before = {a.device for a in args if isinstance(a, Tensor)}
        if before and isinstance(out, Tensor) and out.device not in before:
            raise AssertionError(f"{name} copies from {before} to {out.device}")
        return out


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the methods of tensors that read values, as they are called."""
    called: list[str] = []

    def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return real(self, *args, **kwargs)

        return read

    for name in ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "__index__"):
        monkeypatch.setattr(Tensor, name, watched(name, getattr(Tensor, name)))
    return called


def test_the_check_for_transfers_notices_one() -> None:
    with NoTransfers():
        with pytest.raises(AssertionError, match="waits for the device"):
            torch.tensor(1.0).item()
        with pytest.raises(AssertionError, match="copies from"):
            torch.tensor(1.0).to("meta")


def test_adding_reads_nothing_and_a_reading_is_one_transfer(reads: list[str]) -> None:
    meter = Meter()
    loss, norm, bad = torch.tensor(1.5, requires_grad=True), torch.tensor([2.5]), torch.tensor(True)
    with NoTransfers():
        for _ in range(20):
            meter.add({"loss": loss * 1, "norm": norm, "lr": 0.5}, weight=4)
            meter.count({"bad": bad, "tokens": torch.tensor(7)})
    assert reads == []
    assert meter.read() == {"loss": 1.5, "norm": 2.5, "lr": 0.5, "bad": 20, "tokens": 140}
    assert reads == ["tolist"]


def test_figures_whose_flag_is_up_are_left_out_without_a_look(reads: list[str]) -> None:
    meter, plain = Meter(), Meter()
    with NoTransfers():
        for i, bad in enumerate([0.0, 1.0, 0.0]):
            loss = torch.tensor(math.nan if bad else 0.1 + i)
            meter.add({"loss": loss, "lr": float(i)}, weight=3, unless=torch.tensor(bad))
            if not bad:
                plain.add({"loss": loss, "lr": float(i)}, weight=3)
    assert reads == []
    state = meter.state()
    assert reads == ["tolist"]
    meter.load_state(state)
    assert meter.read() == plain.read() | {"lr": 1.0}
    meter.add({"loss": torch.tensor(2.0)}, unless=torch.tensor(1.0))
    assert math.isnan(meter.read()["loss"])


@pytest.mark.gpu
def test_adding_does_not_synchronise_a_gpu() -> None:
    meter = Meter()
    values = {"loss": torch.tensor(1.5, device="cuda"), "lr": 0.5}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            meter.add(values, weight=3)
            meter.count({"bad": values["loss"] > 1})
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert meter.read() == {"loss": 1.5, "lr": 0.5, "bad": 20}


def test_means_are_weighted() -> None:
    generator = np.random.default_rng(0)
    values, weights = generator.standard_normal(50).astype(np.float32), generator.integers(1, 9, 50)
    meter = Meter()
    for value, weight in zip(values, weights, strict=True):
        meter.add({"on_device": torch.tensor(value), "on_host": float(value)}, weight=int(weight))
    expected = np.average(values.astype(np.float64), weights=weights)
    found = meter.read()
    assert found["on_device"] == pytest.approx(expected, rel=1e-12)
    assert found["on_host"] == pytest.approx(expected, rel=1e-12)


def test_a_reading_forgets_what_was_read() -> None:
    meter = Meter()
    assert meter.read() == {}
    meter.add({"loss": torch.tensor(1.0)})
    meter.count({"bad": 1})
    assert meter.read() == {"loss": 1.0, "bad": 1.0}
    assert meter.read() == {}
    meter.add({"loss": 7.0})
    assert meter.read() == {"loss": 7.0}


def test_a_figure_may_be_missing_and_change_between_host_and_device() -> None:
    meter = Meter()
    meter.add({"loss": torch.tensor(1.0), "a": torch.tensor(3.0)})
    meter.add({"loss": 3.0})
    meter.add({"b": torch.tensor(5.0), "loss": torch.tensor(8.0)}, weight=2)
    assert meter.read() == {"loss": 5.0, "a": 3.0, "b": 5.0}


def test_values_are_copied_because_a_compiled_step_overwrites_its_outputs() -> None:
    meter, output = Meter(), torch.tensor(1.0, dtype=torch.float64)
    for value in (1.0, 2.0, 6.0):
        output.fill_(value)
        meter.add({"loss": output})
    output.fill_(1000.0)
    assert meter.read() == {"loss": 3.0}


def test_figures_of_different_types_keep_every_bit() -> None:
    third, tenth = torch.tensor(1 / 3), torch.tensor(0.1, dtype=torch.float64)
    meter = Meter()
    meter.add({"single": third})
    meter.add({"double": tenth})
    meter.add({"half": torch.tensor(0.1, dtype=torch.float16)})
    assert meter.read() == {"single": float(third), "double": 0.1, "half": float(torch.tensor(0.1).half())}


def test_small_steps_are_not_lost_in_large_sums() -> None:
    meter = Meter()
    meter.count({"n": torch.tensor(2**24), "half": torch.tensor(2.0**12, dtype=torch.bfloat16)})
    for _ in range(100):
        meter.count({"n": torch.tensor(1), "half": torch.tensor(1.0, dtype=torch.bfloat16)})
    assert meter.read() == {"n": 2**24 + 100, "half": 2**12 + 100}


def test_large_counts_beside_floats_are_exact() -> None:
    meter = Meter()
    meter.count({"tokens": torch.tensor(2**40 + 1), "seconds": torch.tensor(0.5)})
    assert meter.read() == {"tokens": 2**40 + 1, "seconds": 0.5}


def test_nan_and_infinity_stay() -> None:
    meter = Meter()
    for value in (1.0, math.nan, 2.0):
        meter.add({"loss": torch.tensor(value), "norm": torch.tensor(abs(value) if value == 1 else math.inf)})
    found = meter.read()
    assert math.isnan(found["loss"])
    assert found["norm"] == math.inf


def test_a_weight_of_nothing_names_a_figure_and_its_value_does_not_matter() -> None:
    meter = Meter()
    meter.add({"loss": torch.tensor(math.nan), "host": math.nan}, weight=0)
    assert all(math.isnan(value) for value in meter.read().values())
    meter.add({"loss": torch.tensor(math.nan), "host": math.nan}, weight=0)
    meter.add({"loss": torch.tensor(2.0), "host": 2.0}, weight=3)
    assert meter.read() == {"loss": 2.0, "host": 2.0}


def test_over_ranks_sums_and_weights_are_added_up_in_one_go() -> None:
    meters = [Meter(), Meter()]
    for meter, (loss, weight, bad) in zip(meters, [(1.0, 3, 1), (5.0, 1, 0)], strict=True):
        meter.add({"loss": torch.tensor(loss), "host": loss}, weight=weight)
        meter.count({"bad": torch.tensor(bad)})
    sent: list[Tensor] = []
    meters[0].read(across=lambda vector: sent.append(vector.clone()) or vector)
    found = meters[1].read(across=lambda vector: vector + sent[0])
    assert found == {"loss": 2.0, "host": 2.0, "bad": 1.0}


def test_figures_of_an_evaluation_and_of_training_go_together() -> None:
    meter = Meter()
    with torch.inference_mode():
        meter.add({"loss": torch.tensor(1.0)})
    meter.add({"loss": torch.tensor(3.0, requires_grad=True)})
    with torch.inference_mode():
        meter.add({"loss": torch.tensor(5.0)})
    assert meter.read() == {"loss": 3.0}


def test_nothing_holds_on_to_the_graph() -> None:
    meter, parameter = Meter(), torch.ones(3, requires_grad=True)
    loss = (parameter * 2).sum()
    meter.add({"loss": loss})
    released = weakref.ref(loss)
    loss.backward()
    del loss
    assert released() is None
    assert parameter.grad is not None


def test_everything_wrong_with_figures_is_told_and_nothing_is_taken() -> None:
    meter = Meter()
    meter.count({"bad": 1})
    wrong = {"x": torch.ones(2), "z": torch.tensor(1j), "text": "1.0", "bad": 2, "fine": 1.0}
    with pytest.raises(UsageError) as raised:
        meter.add(wrong)  # type: ignore[arg-type]
    assert list(raised.value.problems) == [
        "'x' is torch.float32 of shape (2,); one real number",
        "'z' is torch.complex64 of shape (); one real number",
        "'text' is str; a number, or a tensor of one number",
        "'bad' was a count before",
    ]
    for weight in (-1, math.nan, math.inf, torch.tensor(2)):
        with pytest.raises(UsageError, match="weight is"):
            meter.add({"fine": 1.0}, weight=weight)  # type: ignore[arg-type]
    meter.add({"fine": 3.0})
    with pytest.raises(UsageError, match="'fine' was a mean before"):
        meter.count({"fine": 3.0})
    assert meter.read() == {"bad": 1.0, "fine": 3.0}


def test_a_meter_that_went_through_a_checkpoint_reads_the_same_bits() -> None:
    def fill(meter: Meter, values: list[float]) -> None:
        for value in values:
            meter.add({"loss": torch.tensor(value), "lr": value / 3}, weight=3)
            meter.count({"bad": torch.tensor(value > 0), "skipped": 1})

    values = np.random.default_rng(0).standard_normal(20).tolist()
    unbroken, before, after = Meter(), Meter(), Meter()
    fill(unbroken, values)
    fill(before, values[:7])
    after.load_state(json.loads(json.dumps(before.state())))
    fill(after, values[7:])
    found = unbroken.read()
    assert after.read() == found
    assert found["skipped"] == 20


def test_a_state_of_the_first_checkpoints_goes_on() -> None:
    """They kept sums of the device as vectors, by the names that came together."""
    meter = Meter()
    weights = {"loss": 2, "lr": 2, "bad": None}
    first = {"weights": weights, "host": {"lr": 0.5}, "names": [["loss"], ["bad"]], "sums": [[3.0], [1.0]]}
    meter.load_state(first)
    meter.add({"loss": torch.tensor(6.0), "lr": 0.25})
    meter.count({"bad": torch.tensor(1.0)})
    assert meter.read() == {"loss": 3.0, "lr": 0.25, "bad": 2.0}
