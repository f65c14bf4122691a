"""Gradients become an update, or none: what is looked at, what is clipped, what stays as it was."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from frostline.errors import UsageError
from frostline.rewind import Buffers
from frostline.update import Update

FINE = torch.tensor(1.0)
NO_BUFFERS = Buffers(nn.Identity())
SHAPES = [(3, 4), (5,), (), (2, 3, 2), (0,), (7, 1)]
KINDS = {
    "float32": [torch.float32] * 6,
    "float64": [torch.float64] * 6,
    "bfloat16": [torch.bfloat16] * 6,
    "mixed": [torch.float32, torch.bfloat16] * 3,
}


def parameters(seed: int, dtypes: Sequence[torch.dtype] = KINDS["float32"]) -> list[nn.Parameter]:
    """With gradients, of all shapes; the last has none."""
    make = torch.Generator().manual_seed(seed)
    found = [
        nn.Parameter(torch.randn(shape, generator=make).to(dtype))
        for shape, dtype in zip(SHAPES, dtypes, strict=True)
    ]
    for parameter in found[:-1]:
        parameter.grad = torch.randn(parameter.shape, generator=make).to(parameter.dtype)
    return found


def sgd(given: list[nn.Parameter], **options: Any) -> Update:
    return Update(torch.optim.SGD(given, 0.5), **options)


def copies(given: Sequence[Tensor]) -> list[Tensor]:
    return [one.detach().clone() for one in given]


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_one_number_that_is_none_in_any_gradient_skips_the_update(
    kind: str, value: float, place: int
) -> None:
    given = parameters(0, KINDS[kind])
    update, before = sgd(given), copies(given)
    gradient = given[place].grad
    assert gradient is not None
    gradient.view(-1)[-1] = value
    assert float(update({"loss": FINE}, NO_BUFFERS)["bad"]) == 1
    assert same(given, before)
    assert all(p.grad is None for p in given)
    given[0].grad = torch.ones_like(given[0])
    assert float(update({"loss": FINE}, NO_BUFFERS)["bad"]) == 0
    assert torch.equal(given[0], before[0] - 0.5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_loss_of_any_type_that_is_no_number_skips_the_update(kind: str, dtype: torch.dtype) -> None:
    for value, bad in [(1.5, 0), (math.nan, 1), (math.inf, 1), (torch.finfo(dtype).max, 0)]:
        given = parameters(1, KINDS[kind])
        before, loss = copies(given), torch.tensor(value, dtype=dtype)
        figures = sgd(given)({"loss": loss}, NO_BUFFERS)
        assert float(figures["bad"]) == bad
        assert same(given, before) == bool(bad)
        assert torch.equal(figures["loss"], torch.tensor(value, dtype=dtype)) or math.isnan(value)


def test_looking_leaves_every_bit_of_a_gradient_alone() -> None:
    smallest, tiny, largest = 1e-45, torch.finfo().tiny, torch.finfo().max
    values = torch.tensor([smallest, -smallest, tiny / 3, tiny, -0.0, 0.0, 1 / 3, largest, -largest])
    weight = nn.Parameter(torch.zeros_like(values))
    weight.grad = values.clone()
    seen: list[Tensor] = []
    optimizer = torch.optim.SGD([weight], 1e-3)
    optimizer.register_step_pre_hook(lambda *_: seen.append(weight.grad.clone()))  # type: ignore[union-attr]
    assert float(Update(optimizer)({"loss": FINE}, NO_BUFFERS)["bad"]) == 0
    assert torch.equal(seen[0].view(torch.int32), values.view(torch.int32))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan, "both", None])
def test_a_large_gradient_is_bad_for_a_number_that_is_none_and_not_for_large_ones(
    norm: bool, wrong: float | str | None
) -> None:
    """Sums and norms of numbers may be none: 1e36 ninety thousand times is beyond float32."""
    large, small = nn.Parameter(torch.zeros(300, 300)), nn.Parameter(torch.zeros(3))
    large.grad, small.grad = torch.full((300, 300), 1e36), torch.ones(3)
    place = int(torch.randint(90_000, ()))
    if wrong == "both":
        large.grad.view(-1)[0], large.grad.view(-1)[-1] = math.inf, -math.inf
    elif wrong is not None:
        large.grad.view(-1)[place] = wrong
    figures = Update(torch.optim.SGD([large, small], 1.0))({"loss": FINE}, NO_BUFFERS, norm=norm)
    assert float(figures["bad"]) == (wrong is not None), place
    assert float(small.detach()[0]) == (0.0 if wrong is not None else -1.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clip", [None, 0.3, 1000.0])
def test_what_is_done_does_not_depend_on_whether_the_norm_is_wanted(kind: str, clip: float | None) -> None:
    given, other = parameters(2, KINDS[kind]), parameters(2, KINDS[kind])
    expected = torch.nn.utils.get_total_norm([p.grad for p in given if p.grad is not None])
    figures = sgd(given, clip=clip)({"loss": FINE}, NO_BUFFERS, norm=True)
    assert torch.allclose(figures["grad_norm"].double(), expected.double(), rtol=1e-6)
    assert "grad_norm" not in sgd(other, clip=clip)({"loss": FINE}, NO_BUFFERS)
    assert same(given, other)
    assert not same(given, parameters(2, KINDS[kind]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clip", [0.3, 1000.0])
def test_clipping_is_torchs_bit_for_bit(kind: str, clip: float) -> None:
    given, theirs = parameters(3, KINDS[kind]), parameters(3, KINDS[kind])
    sgd(given, clip=clip)({"loss": FINE}, NO_BUFFERS)
    optimizer = torch.optim.SGD(theirs, 0.5, fused=True)
    torch.nn.utils.clip_grad_norm_(theirs, clip)
    optimizer.step()
    assert same(given, theirs)


def fused_sgd(given: list[nn.Parameter], **options: Any) -> Update:
    """The way a GPU goes: torch's fused kernel is told by `found_inf` whether to do anything."""
    update = Update(torch.optim.SGD(given, 0.1, fused=True, **options))
    update._without_a_look = True
    return update


def test_a_first_update_that_is_skipped_leaves_no_momentum_of_unwritten_memory() -> None:
    given, plain = parameters(4), parameters(4)
    update, optimizer = fused_sgd(given, momentum=0.9), torch.optim.SGD(plain, 0.1, momentum=0.9)
    kept = copies([p.grad for p in given if p.grad is not None])
    given[0].grad.fill_(math.nan)  # type: ignore[union-attr]
    assert float(update({"loss": FINE}, NO_BUFFERS)["bad"]) == 1
    assert not any(state.get("momentum_buffer") is not None for state in update.optimizer.state.values())
    for parameter, gradient in zip(given[:-1], kept, strict=True):
        parameter.grad = gradient
    for _ in range(3):  # the last parameter gets its first gradient in the second step
        update({"loss": FINE}, NO_BUFFERS)
        optimizer.step()
        for parameter in [*given, *plain]:
            parameter.grad = torch.ones_like(parameter)
    for mine, theirs in zip(given, plain, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-6, atol=1e-7)  # another kernel rounds otherwise


def test_a_state_that_is_loaded_is_looked_at_again() -> None:
    given = parameters(6)[:-1]
    update = fused_sgd(given, momentum=0.9)
    update({"loss": FINE}, NO_BUFFERS)
    given[0].grad = torch.zeros_like(given[0])
    update({"loss": FINE}, NO_BUFFERS)  # all have their momentum
    saved = update.optimizer.state_dict()
    update.optimizer.load_state_dict(
        {**saved, "state": {i: {"momentum_buffer": None} for i in saved["state"]}}
    )
    before = copies(given)
    for value in (math.nan, 1.0):
        for parameter in given:
            parameter.grad = torch.full_like(parameter, value)
        update({"loss": FINE}, NO_BUFFERS)
    assert all(torch.allclose(p, old - 0.1, atol=1e-6) for p, old in zip(given, before, strict=True))


UPDATES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "Adam": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1, lr_decay=0.01),
}


@pytest.mark.parametrize("make", UPDATES.values(), ids=UPDATES)
def test_a_fused_kernel_is_as_near_to_the_truth_as_the_default_one(make: Any) -> None:
    """Twenty updates of random gradients; the truth is float64."""
    seed = int(torch.randint(1 << 30, ()))
    found = {}
    for kind, dtype, how in (("exact", torch.float64, {"foreach": False}), ("default", torch.float32, {}),
                             ("ours", torch.float32, {})):  # fmt: skip
        draw = torch.Generator().manual_seed(seed)
        weight = nn.Parameter(torch.randn(65, 33, generator=draw).to(dtype))
        optimizer = make([weight], **how)
        update = Update(optimizer) if kind == "ours" else None
        for _ in range(20):
            weight.grad = torch.randn(65, 33, generator=draw).to(dtype)
            if update is None:
                optimizer.step()
            else:
                update({"loss": FINE}, NO_BUFFERS)
        found[kind] = weight.detach().double()
        assert optimizer.param_groups[0]["fused"] is (True if kind == "ours" else None)
    ours, default = (float((found[kind] - found["exact"]).abs().max()) for kind in ("ours", "default"))
    assert ours <= 2 * default + 1e-7, seed


@pytest.mark.parametrize(
    "how", [{"fused": False}, {"foreach": True}, {"foreach": False}, {"differentiable": True}]
)
def test_who_chose_a_kernel_keeps_it(how: dict[str, bool]) -> None:
    given = parameters(7)
    optimizer = torch.optim.AdamW(given, 0.1, **how)  # type: ignore[arg-type]
    Update(optimizer)
    assert not optimizer.param_groups[0].get("fused")


LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "as torch makes them": (lambda p: p, lambda g: g),
    "a transposed gradient": (lambda p: p, lambda g: g.transpose(0, 1).contiguous().transpose(0, 1)),
    "channels last, a plain gradient": (lambda p: p.to(memory_format=torch.channels_last), lambda g: g),
    "a slice": (lambda p: p[:, ::2], lambda g: g),
}


@pytest.mark.parametrize("make", UPDATES.values(), ids=UPDATES)
@pytest.mark.parametrize(("laid", "given"), LAYOUTS.values(), ids=LAYOUTS)
def test_an_update_goes_to_its_own_numbers_however_they_lie_in_memory(
    make: Any, laid: Callable[[Tensor], Tensor], given: Callable[[Tensor], Tensor]
) -> None:
    """torch's fused kernels on a CPU go through memory from its beginning, whatever the strides."""
    values = torch.randn(4, 6, 3, 3)
    held = values.clone()
    ours, theirs = nn.Parameter(laid(held)), nn.Parameter(laid(values).clone().contiguous())
    update, optimizer = Update(make([ours])), make([theirs])
    for _ in range(3):
        gradient = torch.randn(ours.shape)
        ours.grad, theirs.grad = given(gradient), gradient.clone()
        update({"loss": FINE}, NO_BUFFERS)
        optimizer.step()
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    if ours.shape != held.shape:
        assert torch.equal(held[:, 1::2], values[:, 1::2])


def embedded(table: nn.Embedding, rows: Sequence[int]) -> Tensor:
    found: Tensor = table(torch.tensor(rows)).square().sum()
    return found


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's Adagrad
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam])
def test_sparse_gradients_train_as_torch_trains_them(make: Any, clip: float | None) -> None:
    """A row that was used twice is one row; clipped like dense gradients."""
    torch.manual_seed(8)
    start, rows = torch.randn(10, 4), [1, 3, 3, 7]
    ours, theirs = (nn.Embedding.from_pretrained(start.clone(), freeze=False, sparse=True) for _ in "ab")
    dense = nn.Embedding.from_pretrained(start.clone(), freeze=False)
    update, optimizer = Update(make(ours.parameters(), lr=0.1), clip=clip), make(theirs.parameters(), lr=0.1)
    for _ in range(3):
        for table in (ours, theirs, dense):
            embedded(table, rows).backward()  # type: ignore[no-untyped-call]
        figures = update({"loss": FINE}, NO_BUFFERS, norm=True)
        size = torch.nn.utils.get_total_norm([dense.weight.grad])  # type: ignore[list-item]
        assert torch.allclose(figures["grad_norm"], size)
        if clip is not None:
            theirs.weight.grad = theirs.weight.grad.coalesce() * min(1.0, clip / (float(size) + 1e-6))  # type: ignore[union-attr]
        optimizer.step()
        assert torch.allclose(ours.weight, theirs.weight, rtol=1e-6)
        optimizer.zero_grad()
        dense.weight.data, dense.weight.grad = ours.weight.detach().clone(), None
    before = ours.weight.detach().clone()
    (embedded(ours, rows) * math.nan).backward()  # type: ignore[no-untyped-call]
    assert float(update({"loss": FINE}, NO_BUFFERS)["bad"]) == 1
    assert torch.equal(ours.weight, before)


def test_an_optimiser_that_needs_a_closure_is_refused_and_one_with_a_scheduler_is_not() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    with pytest.raises(UsageError, match=r"LBFGS.step\(…\) needs a closure(.|\n)*Use an optimiser"):
        Update(torch.optim.LBFGS(parameters))
    scheduled = torch.optim.SGD(parameters, 0.1)
    torch.optim.lr_scheduler.LinearLR(scheduled)  # wraps its step
    Update(scheduled)


def test_no_gradient_at_all_is_an_error() -> None:
    with pytest.raises(UsageError, match="No parameter of the optimiser got a gradient"):
        sgd([nn.Parameter(torch.ones(2))])({"loss": FINE}, NO_BUFFERS)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("make", UPDATES.values(), ids=UPDATES)
def test_on_a_gpu_bad_gradients_of_every_type_are_skipped_and_others_applied(
    kind: str, clip: float | None, make: Any
) -> None:
    given = [nn.Parameter(p.detach().cuda()) for p in parameters(5, KINDS[kind])]
    update = Update(make(given), clip=clip)
    loss = FINE.cuda()
    for value, bad in [(1.0, 0), (math.nan, 1), (math.inf, 1), (2.0, 0)]:
        for parameter in given:
            parameter.grad = torch.ones_like(parameter)
        given[3].grad[0, 0, 0] = value  # type: ignore[index]
        before = copies(given)
        assert float(update({"loss": loss}, NO_BUFFERS)["bad"]) == bad
        assert same(given, before) == bool(bad)
