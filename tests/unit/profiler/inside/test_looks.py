"""Under the dispatch mode: where the host would wait, how much is computed, and that nothing changes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import frostline
from frostline.batch import Batch
from frostline.profiler.inside import looks
from frostline.profiler.inside.looks import Look, _back
from frostline.step import Step
from frostline.training import Training


def here() -> int:
    return sys._getframe(1).f_lineno


def lines(look: Look) -> dict[int, float]:
    """Line of this file → times."""
    found: dict[int, float] = {}
    for (where, _), (times, _) in look.waits.items():
        file, line = where.split(" ")[0].rsplit(":", 1)
        assert file == __file__
        found[int(line)] = found.get(int(line), 0) + times
    return found


def test_every_way_to_read_a_number_back_is_found_at_its_line() -> None:
    x = torch.rand(5)
    with Look() as look:
        at = here()
        x.sum().item()
        float(x.sum())
        int(x.sum())
        bool(x.sum() > 0)
        if x.sum() > 0:
            x.nonzero()
        torch.equal(x, x.clone())
        x.unique()
        x.masked_select(x > 0)
    assert lines(look) == {at + i: 1 for i in range(1, 10)}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_also_where_no_gradients_are_kept(mode: Any) -> None:
    x = torch.rand(5)
    with Look() as look, mode():
        at = here()
        x.sum().item()
        float(x.sum())
        bool(x.sum() > 0)
    assert lines(look) == {at + i: 1 for i in range(1, 4)}


def test_a_mask_of_truths_waits_for_how_many_there_are() -> None:
    """On a GPU `x[x > 0]` reads back how large its result is."""
    x = torch.rand(5)
    with Look() as look:
        at = here() + 1
        x[x > 0.5]
    assert lines(look) == {at: 1}


def test_each_time_counts() -> None:
    x = torch.rand(5)
    with Look() as look:
        for value in x:
            at = here() + 1
            float(value)
    assert lines(look) == {at: 5}


def test_what_computes_on_is_no_wait() -> None:
    x = torch.rand(5, 5)
    with Look() as look:
        y = (x @ x).relu().sum()
        y = torch.where(y > 0, y, -y).clone()
        x.copy_(x + 1)
        x.to(torch.float64)
    assert not look.waits
    assert look.operators > 5


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_an_optimisers_own_counters_are_no_wait(kind: Any) -> None:
    p = torch.ones(3, requires_grad=True)
    optimizer = kind([p], 0.1)
    with Look() as look:
        for _ in range(2):
            p.sum().backward()
            optimizer.step()
    assert not look.waits


def test_what_our_update_reads_where_there_is_no_device_is_no_wait() -> None:
    """On a GPU nothing is read: the fused kernel is told by the device whether to do anything."""
    model = nn.Linear(300, 300)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    step = Step(model, lambda model, batch: model(batch["x"]).mean(), optimizer, training=Training())
    with Look() as look:
        step(Batch({"x": torch.rand(4, 300)}, list("abcd")))
    assert not look.waits


def test_a_closures_own_reading_is_told_though_an_optimiser_calls_it() -> None:
    p = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([p], 0.1)
    at = 0

    def closure() -> float:
        nonlocal at
        at = here() + 1
        return p.sum().item()

    with Look() as look:
        optimizer.step(closure)
    assert lines(look) == {at: 1}


def run_as(file: str, code: str) -> Look:
    with Look() as look:
        exec(compile(code, file, "exec"), {"torch": torch})
    return look


def places(look: Look) -> list[str]:
    return [where.split(" ")[0] for where, _ in look.waits]


def test_a_script_whose_folder_is_named_like_torchs_optimisers_is_the_users() -> None:
    file = "/home/me/mytorch/optimization/train.py"
    assert places(run_as(file, "torch.ones(1).item()")) == [f"{file}:1"]


@pytest.mark.parametrize("home", ["frostline_recipes", "frostline-tries"])
def test_a_script_beside_a_library_of_a_similar_name_is_the_users(home: str) -> None:
    file = f"{Path(frostline.__file__).parents[1]}/{home}/train.py"
    assert places(run_as(file, "\ntorch.ones(1).item()")) == [f"{file}:2"]


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Linear(8, 16), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


def trained(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward()


def without_grad(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        model(x)


def in_inference(model: nn.Module, x: Tensor) -> None:
    with torch.inference_mode():
        model(x)


@pytest.mark.parametrize("run", [trained, without_grad, in_inference])
def test_operations_are_as_many_as_torch_itself_counts(run: Callable[[nn.Module, Tensor], None]) -> None:
    model, x = transformer(), torch.randn(3, int(torch.randint(2, 9, ())), 8)
    if run is not trained:
        model.train()  # the fused path of evaluation is no operator of torch's table
    with FlopCounterMode(display=False) as counter:
        run(model, x)
    with Look() as look:
        run(model, x)
    assert look.flops == counter.get_total_flops() > 0
    assert look.flops_by_dtype == {"float32": look.flops}


def test_operations_are_told_by_their_precision() -> None:
    a = torch.ones(4, 4)
    with Look() as look:
        a @ a
        a.bfloat16() @ a.bfloat16()
    assert look.flops_by_dtype == {"float32": 128.0, "bfloat16": 128.0}


def test_an_operator_that_cannot_be_counted_does_not_stop_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    def formula(*args: Any, **kwargs: Any) -> int:
        raise AssertionError("heads differ")

    monkeypatch.setitem(looks.flop_registry, torch.ops.aten.mm, formula)
    with Look() as look:
        found = torch.ones(2, 3) @ torch.ones(3, 4)
    assert found.sum() == 24
    assert (look.flops, look.uncounted) == (0, "aten.mm: AssertionError: heads differ")


def test_results_and_random_numbers_are_the_same_bits() -> None:
    seed = int(torch.randint(1 << 30, ()))
    found = []
    for looked in (False, True):
        torch.manual_seed(seed)
        model = nn.Sequential(transformer(), nn.Dropout(0.5))
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        x = torch.randn(2, 3, 8)
        look = Look()
        if looked:
            look.__enter__()
        for _ in range(2):
            optimizer.zero_grad()
            trained(model, x)
            optimizer.step()
        if looked:
            look.__exit__(None, None, None)
        found.append([*(p.detach() for p in model.parameters()), torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_an_error_passes_and_the_mode_is_off_again() -> None:
    with pytest.raises(RuntimeError), Look() as look:
        torch.ones(2, 3) @ torch.ones(2, 3)
    before = look.operators
    torch.ones(2).sum()
    assert look.operators == before


def test_a_copy_that_stays_on_the_host_is_no_wait() -> None:
    x = torch.ones(2)
    assert _back((x,), {"device": "cpu"}) is None
    assert _back((x, x), {}) is None
    assert _back((x,), {"dtype": torch.float64}) is None


@pytest.mark.gpu
def test_on_a_gpu_what_waits_takes_time_and_what_is_on_the_host_does_not_wait() -> None:
    x = torch.ones(5, device="cuda")
    with Look() as look:
        at = here()
        x.sum().item()
        x.cpu()
        x.to("cpu", non_blocking=True)
        torch.ones(1).item()
    assert lines(look) == {at + 1: 1, at + 2: 1}


def test_no_step_is_looked_at_beside_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a dispatch mode it runs as it is written, with other random numbers; or not at all."""
    monkeypatch.setattr(looks, "_compiled", lambda: True)
    assert "torch.compile" in looks.cannot()


def test_what_torch_compile_made_is_found_also_before_it_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(*objects: Any) -> bool:
        with monkeypatch.context() as only:
            only.setattr(looks.gc, "get_objects", lambda: [*objects])  # other tests' may still be around
            return looks._compiled()

    net, kept = nn.Linear(2, 2), nn.Linear(2, 2)
    kept.compile(backend="eager")
    assert found(torch.compile(lambda x: x, backend="eager"))
    assert found(torch.compile(net, backend="eager").forward)
    assert found(kept._compiled_call_impl)
    assert not found(net, torch._dynamo.disable(lambda x: x), net.forward)


def test_within_the_backward_pass_no_step_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "_compiled", lambda: False)
    assert looks.cannot() == ""
    said: list[str] = []
    x = torch.ones(2, requires_grad=True)
    x.register_post_accumulate_grad_hook(lambda p: said.append(looks.cannot()))
    x.sum().backward()
    assert "backward" in said[0]
