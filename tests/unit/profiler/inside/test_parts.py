"""The parts of a step: each has its span, nothing changes its result, and all is put back."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from frostline.profiler.inside.parts import Parts, _crosses
from frostline.profiler.inside.spans import Spans

OWNERS = (
    torch, torch.autograd, torch.optim.Optimizer, nn.Module, nn.utils, clip_grad, Tensor, torch.cuda,
    torch.cuda.Stream, torch.cuda.Event,
)  # fmt: skip


@contextmanager
def parts(*, cuda: bool = False) -> Iterator[tuple[Spans, Parts]]:
    spans = Spans(cuda=False)
    found = Parts(spans, cuda)
    found.install()
    try:
        yield spans, found
    finally:
        found.uninstall()


def told(spans: Spans) -> list[tuple[str, int]]:
    assert all(span.end >= span.start for span in spans.found)
    return [(span.kind, span.parent) for span in spans.found]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    nn.utils.clip_grad_value_(model.parameters(), 0.1)
    optimizer.step()
    return loss.detach()


def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    return model, torch.optim.AdamW(model.parameters(), 0.1)


def test_each_part_is_told_once_in_its_order() -> None:
    model, optimizer = made(0)
    with parts() as (spans, _):
        step(model, optimizer, torch.randn(3, 4))
        model.zero_grad()
        torch.save(model.state_dict(), io.BytesIO())
    assert told(spans) == [
        (kind, -1) for kind in ("zero_grad", "backward", "clip", "clip", "zero_grad", "save")
    ]


def test_a_gradient_that_is_asked_for_is_backward_too() -> None:
    x = torch.randn(3, requires_grad=True)
    with parts() as (spans, _):
        torch.autograd.grad(x.square().sum(), x)
    assert told(spans) == [("backward", -1)]


def test_the_optimiser_is_what_lies_between_its_hooks_with_a_closure_inside() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)
    with parts() as (spans, found):
        before = optimizer.register_step_pre_hook(lambda o, *_: found.begin_optimizer(o))
        after = optimizer.register_step_post_hook(lambda *_: found.end_optimizer())

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(1, 2)).sum().square()
            loss.backward()
            return loss

        optimizer.step(closure)
        before.remove()
        after.remove()
    assert told(spans) == [("optimizer", -1), ("zero_grad", 0), ("backward", 0)]
    assert spans.found[0].name == "LBFGS.step"


def test_an_error_passes_and_its_span_ends() -> None:
    x = torch.ones(2, requires_grad=True)
    loss = x.square().sum()
    with parts() as (spans, _):
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    assert told(spans) == [("backward", -1), ("backward", -1)]


def test_results_and_random_numbers_are_the_same_bits() -> None:
    seed = int(torch.randint(1 << 30, ()))
    found = []
    for watched in (False, True):
        model, optimizer = made(seed)
        around: Callable[[], Any] = parts if watched else (lambda: contextmanager(lambda: iter([0]))())
        with around():
            losses = [step(model, optimizer, torch.randn(5, 4)) for _ in range(4)]
        found.append([*losses, *(p.detach() for p in model.parameters()), torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def everything() -> dict[tuple[int, str], Any]:
    return {(i, name): value for i, owner in enumerate(OWNERS) for name, value in vars(owner).items()}


@pytest.mark.parametrize("cuda", [False, True])
def test_everything_is_put_back(cuda: bool) -> None:
    before = everything()
    with parts(cuda=cuda):
        during = everything()
    after = everything()
    assert [key for key in before if before[key] is not during.get(key)]
    assert after.keys() == before.keys()
    assert not [key for key in before if before[key] is not after[key]]


def test_wrappers_of_a_gpu_leave_what_is_on_the_cpu_alone() -> None:
    x = torch.randn(4)
    with parts(cuda=True) as (spans, found):
        y = torch.zeros(4)
        y.copy_(x)
        got = [x.sum().item(), float(x.sum()), bool(x.sum() > 0), x.tolist(), x.to(torch.float64), x.cpu(),
               x.to("cpu"), x.to(x), [1, 2, 3][torch.tensor(1)], x.numpy(), x.nonzero()]  # fmt: skip
    assert (told(spans), found.copies) == ([], {})
    assert got[0] == x.sum().item()
    assert got[5] is x
    assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "crosses"),
    [
        ("to", ("cuda",), {}, True),
        ("to", (torch.device("cuda", 0),), {}, True),
        ("to", (0,), {}, True),
        ("to", (), {"device": "cuda:0", "non_blocking": True}, True),
        ("to", ("cpu",), {}, False),
        ("to", (torch.float16,), {}, False),
        ("to", (torch.ones(1),), {}, False),
        ("to", (), {"dtype": torch.float16}, False),
        ("cuda", (), {}, True),
        ("copy_", (torch.ones(1),), {}, False),
        ("copy_", (3.0,), {}, False),
    ],
)
def test_what_crosses_to_a_device(name: str, args: Any, kwargs: Any, crosses: bool) -> None:
    assert _crosses(name, torch.ones(1), args, kwargs) == crosses


class Device:
    """A tensor of a GPU, as far as `copied` looks at it."""

    is_cuda, element_size, numel = True, staticmethod(lambda: 4), staticmethod(lambda: 6)


def test_copies_are_counted_by_kind_and_by_whether_the_host_waits() -> None:
    x = torch.ones(2, 3)
    spans = Spans(cuda=False)
    found = Parts(spans, True)
    to = found._copying(lambda tensor, *args, **kwargs: "moved", "to")
    assert to(x, "cuda") == "moved"
    to(x, "cuda", non_blocking=True)  # pageable memory: the host waits all the same
    to(x, "cpu")
    assert {key: held[:2] for key, held in found.copies.items()} == {("pageable", True): [2.0, 48.0]}
    to(Device(), "cpu")  # back to the host: a wait, not a copy to the device
    assert [span.kind for span in spans.found] == ["copy", "copy", "sync"]
    assert len(found.copies) == 1
