from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from frostline.errors import CheckpointError, UsageError
from frostline.trainer.checkpoint import Checkpoints, load
from frostline.trainer.state import load_model, load_optimizer, model_state, optimizer_tensors
from frostline.update import Update

o = torch.optim
MADE: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: o.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "SGD, no momentum": lambda p: o.SGD(p, lr=0.1),
    "Adam": lambda p: o.Adam(p, lr=0.01),
    "Adam, fused": lambda p: o.Adam(p, lr=0.01, fused=True),
    "Adam, foreach, rate in a tensor": lambda p: o.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "AdamW": lambda p: o.AdamW(p, lr=0.01, amsgrad=True, weight_decay=0.1),
    "Adagrad": lambda p: o.Adagrad(p, lr=0.1, initial_accumulator_value=0.3),
    "RMSprop": lambda p: o.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "Adafactor": lambda p: o.Adafactor(p, lr=0.01),
    "NAdam": lambda p: o.NAdam(p, lr=0.01),
    "RAdam": lambda p: o.RAdam(p, lr=0.01),
    "Adadelta": lambda p: o.Adadelta(p),
    "Rprop": lambda p: o.Rprop(p),
    "ASGD": lambda p: o.ASGD(p),
    "Adamax": lambda p: o.Adamax(p),
    "LBFGS": lambda p: o.LBFGS(p, lr=0.1, max_iter=3, history_size=3),
}


def net(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2)).to(dtype)


def train(model: nn.Module, optimizer: Optimizer, n: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    for _ in range(n):
        x = torch.randn(8, 5, generator=draw).to(dtype)

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and (a.dtype, a.device) == (b.dtype, b.device) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def resumed(
    path: Path, model: nn.Module, optimizer: Optimizer, make: Callable[[Any], Optimizer], into: nn.Module
) -> Optimizer:
    groups, about = model_state(model)
    tensors, json = optimizer_tensors(optimizer, model)
    saved = Checkpoints(path).save(1, {**groups, "optimizer": tensors}, {"model": about, "optimizer": json})
    loaded = load(saved)
    load_model(into, loaded.groups["model"], about=loaded.state["model"])
    other = make(into.parameters())
    load_optimizer(other, into, loaded.groups["optimizer"], loaded.state["optimizer"])
    return other


@pytest.mark.parametrize("name", MADE)
def test_training_goes_on_bit_for_bit(tmp_path: Path, name: str) -> None:
    model = net()
    optimizer = MADE[name](model.parameters())
    train(model, optimizer, 4, seed=1)
    again = net(seed=5)
    other = resumed(tmp_path, model, optimizer, MADE[name], again)
    assert same(optimizer.state_dict(), other.state_dict())
    for m, opt in ((model, optimizer), (again, other)):
        train(m, opt, 4, seed=2)
    assert same(model.state_dict(), again.state_dict())
    assert same(optimizer.state_dict(), other.state_dict())


@pytest.mark.parametrize("make", [o.AdamW, o.SGD, o.Adagrad])
def test_state_lies_in_memory_as_its_parameter_does(tmp_path: Path, make: Any) -> None:
    """Fused kernels take it for granted: with other strides, momentum went to other weights."""

    def built(seed: int) -> nn.Sequential:
        model = net(seed)
        first, last = model[0], model[-1]
        for layer in (first, last):
            layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
        return model

    def fused(parameters: Any) -> Optimizer:
        more = {"momentum": 0.9} if make is o.SGD else {}
        made: Optimizer = make(parameters, lr=0.1, fused=True, **more)
        return made

    model, again = built(0), built(5)
    optimizer = fused(model.parameters())
    train(model, optimizer, 4, seed=1)
    other = resumed(tmp_path, model, optimizer, fused, again)
    for m, opt in ((model, optimizer), (again, other)):
        train(m, opt, 4, seed=2)
    assert not model[0].weight.is_contiguous()
    assert same(model.state_dict(), again.state_dict())
    assert same(optimizer.state_dict(), other.state_dict())


def test_a_step_does_not_change_the_checkpoint_it_was_loaded_from() -> None:
    model = net()
    optimizer = o.Adam(model.parameters())
    train(model, optimizer, 2, seed=1)
    tensors, json = optimizer_tensors(optimizer, model)
    held = {name: tensor.clone() for name, tensor in tensors.items()}
    kept = copy.deepcopy(held)
    again = net()
    other = o.Adam(again.parameters())
    load_optimizer(other, again, held, json)
    train(again, other, 2, seed=3)
    assert same(held, kept)


class Wide(o.SGD):
    """Keeps its sums in float32 beside bfloat16 parameters, and a counter beside the parameters."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("sum", torch.full(p.shape, 1 / 3)).add_(1e-4)
                self.state[p].setdefault("codes", torch.arange(p.numel(), dtype=torch.uint8)).add_(1)
                self.state[p]["history"] = [1.5, None, (2, "x")]


def test_state_of_other_types_than_the_parameters_is_not_cast() -> None:
    model = net(dtype=torch.bfloat16)
    optimizer = Wide(model.parameters(), lr=0.1)
    optimizer.step()
    tensors, json = optimizer_tensors(optimizer, model)
    other = Wide(model.parameters(), lr=0.1)
    load_optimizer(other, model, tensors, json)
    assert same(optimizer.state_dict(), other.state_dict())
    assert other.state[model[0].weight]["sum"].dtype == torch.float32


def grouped(model: nn.Sequential, **options: Any) -> Optimizer:
    return o.AdamW(
        [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[3].parameters()}], **options
    )


def test_groups_keep_their_options_and_how_a_step_is_computed_stays_as_it_is_now() -> None:
    model = net()
    optimizer = grouped(model, lr=0.01, fused=True)
    optimizer.param_groups[1]["initial_lr"] = 0.3
    optimizer.param_groups[1]["lr"] = 0.02
    train(model, optimizer, 2, seed=1)
    tensors, json = optimizer_tensors(optimizer, model)
    other = grouped(model, lr=0.5, foreach=True)
    load_optimizer(other, model, tensors, json)
    assert [group["lr"] for group in other.param_groups] == [0.1, 0.02]
    assert other.param_groups[1]["initial_lr"] == 0.3
    assert (other.param_groups[0]["fused"], other.param_groups[0]["foreach"]) == (None, True)
    assert other.param_groups[0]["betas"] == (0.9, 0.999)


def test_a_rate_takes_the_form_that_the_optimiser_of_now_has() -> None:
    model = net()
    tensor_rate = torch.tensor(0.5)
    held = o.Adam(model.parameters(), lr=tensor_rate, foreach=False)
    number = o.Adam(model.parameters(), lr=0.25)
    load_optimizer(held, model, *optimizer_tensors(number, model))
    assert held.param_groups[0]["lr"] is tensor_rate
    assert tensor_rate.item() == 0.25
    load_optimizer(number, model, *optimizer_tensors(held, model))
    assert number.param_groups[0]["lr"] == 0.25


def given(make: Callable[[nn.Module], Optimizer], model: nn.Module) -> Optimizer:
    """As a training makes it."""
    optimizer = make(model)
    Update(optimizer)
    return optimizer


def moved_on(
    tmp_path: Path, before: Callable[[nn.Module], Optimizer], after: Callable[[nn.Module], Optimizer]
) -> Optimizer:
    """An optimiser that went on from the checkpoint of another, whose rate a schedule had changed."""
    model, again = net(), net(seed=5)
    optimizer = given(before, model)
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].mul_(0.5)
        else:
            group["lr"] *= 0.5
        group["initial_lr"], group["k"] = 0.3, 7
    train(model, optimizer, 2, seed=1)
    other = resumed(tmp_path, model, optimizer, lambda parameters: given(after, again), again)
    train(again, other, 2, seed=2)
    return other


def options(optimizer: Optimizer, *names: str) -> list[Any]:
    return [group[name] for group in optimizer.param_groups for name in names]


def test_options_that_are_given_otherwise_now_are_taken_and_the_others_stay(tmp_path: Path) -> None:
    other = moved_on(
        tmp_path,
        lambda m: o.AdamW(m.parameters(), lr=0.1, weight_decay=0.01, betas=(0.9, 0.99)),
        lambda m: o.AdamW(m.parameters(), lr=0.1, weight_decay=0.5, betas=(0.8, 0.99), eps=1e-6),
    )
    assert options(other, "weight_decay", "betas", "eps") == [0.5, (0.8, 0.99), 1e-6]
    assert options(other, "lr", "initial_lr", "k") == [0.05, 0.3, 7]


def test_each_group_is_compared_with_its_own(tmp_path: Path) -> None:
    def made(first: float, second: float) -> Callable[[nn.Module], Optimizer]:
        def make(model: nn.Module) -> Optimizer:
            one, *rest = model.parameters()
            groups = [{"params": [one], "weight_decay": first}, {"params": rest, "weight_decay": second}]
            return o.AdamW(groups, lr=0.1)

        return make

    other = moved_on(tmp_path, made(0.1, 0.2), made(0.1, 0.3))
    assert options(other, "weight_decay") == [0.1, 0.3]


def test_what_a_running_optimiser_changed_stays_unless_it_is_given_otherwise() -> None:
    """As optimisers do that keep counters, or a decay that falls, among their options."""
    model = net()

    def make(decay: float) -> Optimizer:
        return given(
            lambda m: o.SGD([{"params": m.parameters(), "k": 0, "weight_decay": decay}], lr=0.1), model
        )

    optimizer = make(0.4)
    optimizer.param_groups[0] |= {"k": 12, "weight_decay": 0.1}
    saved = optimizer_tensors(optimizer, model)
    same_again, changed = make(0.4), make(0.3)
    load_optimizer(same_again, model, *saved)
    load_optimizer(changed, model, *saved)
    assert options(same_again, "k", "weight_decay") == [12, 0.1]
    assert options(changed, "k", "weight_decay") == [12, 0.3]
    again = make(0.3)  # the change is not made anew by the call after it
    changed.param_groups[0]["weight_decay"] = 0.05
    load_optimizer(again, model, *optimizer_tensors(changed, model))
    assert options(again, "k", "weight_decay") == [12, 0.05]


def test_a_rate_in_a_tensor_is_compared_with_what_was_given(tmp_path: Path) -> None:
    def make(rate: float) -> Callable[[nn.Module], Optimizer]:
        return lambda m: o.Adam(m.parameters(), lr=torch.tensor(rate), foreach=False)

    assert options(moved_on(tmp_path / "a", make(0.25), make(0.25)), "lr")[0].item() == 0.125
    assert options(moved_on(tmp_path / "b", make(0.25), make(0.75)), "lr")[0].item() == 0.75


@pytest.mark.parametrize(
    ("make", "changed"),
    [
        (o.AdamW, {"amsgrad": True}), (o.Adam, {"amsgrad": True}), (o.RMSprop, {"centered": True}),
        (o.RMSprop, {"momentum": 0.9}), (o.SGD, {"momentum": 0.9, "nesterov": True}),
    ],
)  # fmt: skip
def test_an_option_that_needs_a_state_begins_with_an_empty_one(
    tmp_path: Path, make: Any, changed: dict[str, Any]
) -> None:
    other = moved_on(
        tmp_path, lambda m: make(m.parameters(), lr=0.1), lambda m: make(m.parameters(), lr=0.1, **changed)
    )
    assert options(other, *changed) == [*changed.values()]


def test_a_checkpoint_that_does_not_tell_what_was_given_keeps_all_options() -> None:
    model = net()
    tensors, json = optimizer_tensors(
        given(lambda m: o.SGD(m.parameters(), 0.1, weight_decay=0.2), model), model
    )
    for group in json["groups"]:
        del group["built"]
    other = given(lambda m: o.SGD(m.parameters(), 0.1, weight_decay=0.7), model)
    load_optimizer(other, model, tensors, json)
    assert options(other, "weight_decay") == [0.2]


def test_every_difference_is_listed_and_nothing_is_changed() -> None:
    model = net()
    optimizer = grouped(model, lr=0.01)
    train(model, optimizer, 1, seed=1)
    tensors, json = optimizer_tensors(optimizer, model)
    small = nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.LayerNorm(3), nn.Linear(3, 2, bias=False))
    other = o.SGD([{"params": small.parameters()}], lr=0.7, momentum=0.9)
    with pytest.raises(CheckpointError) as caught:
        load_optimizer(other, small, tensors, json)
    for part in (
        "that of AdamW; this is SGD",
        "2 groups of parameters in the checkpoint, 1 here",
        "0.weight: [4, 5] in the checkpoint, [3, 5] here",
        "2.weight: not in the checkpoint",
        "3.bias: in the checkpoint, but not trained here",
        "3.weight: group 1 in the checkpoint, 0 here",
    ):
        assert part in str(caught.value)
    assert (other.param_groups[0]["lr"], len(other.state)) == (0.7, 0)
    with pytest.raises(CheckpointError, match="part 'class' is missing"):
        load_optimizer(other, small, {}, {})


def test_names_decide_not_positions() -> None:
    model = net()
    optimizer = o.SGD(list(model.parameters()), lr=0.1, momentum=0.9)
    train(model, optimizer, 1, seed=1)
    turned = o.SGD(list(model.parameters())[::-1], lr=0.1, momentum=0.9)
    load_optimizer(turned, model, *optimizer_tensors(optimizer, model))
    for p in model.parameters():
        assert torch.equal(turned.state[p]["momentum_buffer"], optimizer.state[p]["momentum_buffer"])
    flat = o.LBFGS(model.parameters())
    with pytest.raises(CheckpointError, match="the same order"):
        load_optimizer(o.LBFGS(list(model.parameters())[::-1]), model, *optimizer_tensors(flat, model))


def test_a_parameter_that_the_model_does_not_have_is_refused() -> None:
    model = net()
    optimizer = o.SGD([*model.parameters(), nn.Parameter(torch.ones(3, 7))], lr=0.1)
    with pytest.raises(UsageError, match=r"does not have(.|\n)*parameter 6 of group 0, \[3, 7\]"):
        optimizer_tensors(optimizer, model)


def test_state_that_cannot_be_kept_is_refused_by_name() -> None:
    model = net()
    optimizer = o.SGD(model.parameters(), lr=0.1)
    optimizer.state[model[0].weight]["odd"] = object()
    with pytest.raises(CheckpointError, match=r"0\.weight/odd: a object cannot be kept"):
        optimizer_tensors(optimizer, model)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}])
@pytest.mark.parametrize("make", [o.AdamW, o.NAdam])
def test_counters_are_where_the_optimiser_wants_them_on_a_gpu(make: Any, options: dict[str, bool]) -> None:
    if make is o.NAdam and "fused" in options:
        options = {}
    model = net().cuda()
    optimizer = make(model.parameters(), **options)
    model(torch.randn(3, 5, device="cuda")).sum().backward()
    optimizer.step()
    tensors, json = optimizer_tensors(optimizer, model)
    other = make(model.parameters(), **options)
    load_optimizer(other, model, {name: tensor.cpu() for name, tensor in tensors.items()}, json)
    assert same(optimizer.state_dict(), other.state_dict())
