"""The gradient audit: what it finds, what may be so, and nothing where all is well."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import nn

from frostline.batch import Batch
from frostline.errors import UsageError
from frostline.ranks import Alone
from frostline.step import Step
from frostline.trainer.gradients import GradientAudit
from frostline.training import Training


class Net(nn.Module):
    """Three layers; `forward` uses those that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.side, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, *, side: bool) -> torch.Tensor:
        out: torch.Tensor = self.head(self.side(self.body(x)) if side else self.body(x))
        return out


def audited(
    net: Net,
    *,
    optimised: Sequence[nn.Parameter] | None = None,
    unused: Sequence[str] = (),
    side: Callable[[int], bool] = lambda step: True,
    meanwhile: Callable[[], None] = lambda: None,
) -> GradientAudit:
    """Three steps of SGD with an audit that was called as the step calls it."""
    optimizer = torch.optim.SGD([*(optimised or net.parameters())], 0.1)
    audit = GradientAudit(net, optimizer, unused)
    for step in range(3):
        optimizer.zero_grad(set_to_none=True)
        net.zero_grad(set_to_none=True)
        net(torch.ones(2, 3), side=side(step)).square().mean().backward()
        audit()
        optimizer.step()
        meanwhile()
    return audit


def problems(audit: GradientAudit) -> tuple[str, ...]:
    with pytest.raises(UsageError, match="gradient audit") as caught:
        audit.verdict()
    return tuple(caught.value.problems)


def test_nothing_where_all_is_well() -> None:
    audit = audited(Net())
    assert audit.looked == 3
    audit.verdict()


def test_a_layer_that_is_not_used_is_named() -> None:
    told = "side.bias, side.weight trains but got no gradient in 3 steps"
    assert problems(audited(Net(), side=lambda step: False)) == (told,)


def test_a_branch_that_is_used_in_one_of_the_steps_is_fine() -> None:
    audited(Net(), side=lambda step: step == 2).verdict()


def test_a_gradient_of_zeros_is_one() -> None:
    net = Net()
    with torch.no_grad():
        net.side.weight.zero_()  # nothing reaches body, and it is zeros that do not
    audited(net).verdict()


def test_what_the_optimiser_does_not_have_is_named_once_also_when_it_gets_no_gradient() -> None:
    net = Net()
    some = [*net.body.parameters(), *net.head.parameters()]
    told = ("side.weight, side.bias requires gradients but is not in the optimiser",)
    assert problems(audited(net, optimised=some)) == told
    assert problems(audited(net, optimised=some, side=lambda step: False)) == told


def test_a_frozen_parameter_that_moves_is_named() -> None:
    net = Net()
    net.side.requires_grad_(False)

    def nudge() -> None:
        net.side.weight.data[1, 2] += 1e-6

    told = ("side.weight is frozen (requires_grad=False) but moved",)
    assert problems(audited(net, meanwhile=nudge)) == told


def test_two_values_that_change_places_have_moved() -> None:
    net = Net()
    net.side.requires_grad_(False)
    moved = iter([True, False, False])

    def swap() -> None:
        if next(moved):
            net.side.bias.data[:] = net.side.bias.data.flip(0)

    assert problems(audited(net, meanwhile=swap)) == ("side.bias is frozen (requires_grad=False) but moved",)


@pytest.mark.parametrize(
    "kind",
    [
        torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
        pytest.param(
            torch.complex64
        ),
        pytest.param(
            torch.complex128
        ),
    ],
)  # fmt: skip
def test_frozen_ones_of_every_type_are_watched(kind: torch.dtype) -> None:
    net = Net()
    net.register_parameter("table", nn.Parameter(torch.tensor([0.25, 0.5]).to(kind), requires_grad=False))

    def change() -> None:
        net.table.data = torch.tensor([0.25, 0.75]).to(kind)

    audited(net).verdict()
    assert problems(audited(net, meanwhile=change)) == ("table is frozen (requires_grad=False) but moved",)


def test_a_frozen_one_in_the_optimiser_that_stays_is_fine() -> None:
    net = Net()
    net.side.requires_grad_(False)
    audited(net, optimised=[*net.parameters()]).verdict()


@pytest.mark.parametrize("unused", [["side.*"], ["side.weight", "side.bias"], ["*"]])
def test_what_is_meant_to_be_so_is_not_told(unused: list[str]) -> None:
    net = Net()
    audited(net, unused=unused, side=lambda step: False).verdict()
    some = [*net.body.parameters(), *net.head.parameters()]
    audited(net, unused=unused, optimised=some).verdict()


def test_a_frozen_parameter_that_is_meant_to_move_may() -> None:
    net = Net()
    net.side.requires_grad_(False)

    def nudge() -> None:
        net.side.weight.data += 1
        net.side.bias.data += 1

    audited(net, meanwhile=nudge, unused=["side.*"]).verdict()
    audit = audited(net, meanwhile=nudge, unused=["side.weight"])
    assert problems(audit) == ("side.bias is frozen (requires_grad=False) but moved",)
    with pytest.raises(UsageError, match=r"'unused': .* a frozen teacher that follows its student"):
        audit.verdict()


def test_a_pattern_covers_what_it_fits_and_no_more() -> None:
    audit = audited(Net(), unused=["*.bias", "sid"], side=lambda step: False)
    assert problems(audit) == ("side.weight trains but got no gradient in 3 steps",)


def test_all_findings_come_together() -> None:
    net = Net()
    net.head.requires_grad_(False)

    def nudge() -> None:
        net.head.bias.data += 1

    found = problems(
        audited(net, optimised=[*net.body.parameters()], side=lambda step: False, meanwhile=nudge)
    )
    assert found == (
        "side.weight, side.bias requires gradients but is not in the optimiser",
        "head.bias is frozen (requires_grad=False) but moved",
    )


def test_many_names_are_counted() -> None:
    net = nn.Sequential(*(nn.Linear(1, 1) for _ in range(6)))
    audit = GradientAudit(net, torch.optim.SGD(net.parameters(), 0.1), ())
    audit()
    (told,) = problems(audit)
    assert told.endswith("(and 4 more) trains but got no gradient in 1 steps")
    assert told.count(",") == 7


def test_tied_weights_are_looked_at_once() -> None:
    net = Net()
    net.side.weight = net.body.weight
    audited(net, side=lambda step: False, unused=["side.bias"]).verdict()


class Two(Alone):
    """One of two processes; the other one has the same rows."""

    world = 2

    def agree(self, *, fits: bool, rows: int) -> tuple[bool, int]:
        return fits, 2 * rows

    def add_up(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            tensor *= 2


@pytest.mark.parametrize("ranks", [Alone(), Two()], ids=["alone", "two"])
def test_a_silent_layer_is_found_in_the_step_of_one_and_of_several_processes(ranks: Alone) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    step = Step(
        net, lambda model, batch: model(batch["x"], side=False).square().mean(), optimizer,
        training=Training(), ranks=ranks,
    )  # fmt: skip
    step.on_grads = audit = GradientAudit(net, optimizer, ())
    step(Batch({"x": torch.ones(2, 3)}, ["a", "b"]))
    assert problems(audit) == ("side.bias, side.weight trains but got no gradient in 1 steps",)


class Centred(nn.Module):
    """A loss with a centre that follows, and a weight that stays."""

    centre: torch.Tensor
    weight: torch.Tensor

    def __init__(self, net: Net, pace: float) -> None:
        super().__init__()
        self.net, self.pace = net, pace
        self.register_buffer("centre", torch.zeros(()))
        self.register_buffer("weight", torch.ones(()))

    def forward(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        out: torch.Tensor = model(batch["x"], side=True)
        self.centre.lerp_(out.detach().mean(), self.pace)
        return (self.weight * (out - self.centre)).square().mean()

    def method(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        found: torch.Tensor = self(model, batch)
        return found


CRITERION = Centred(Net(), 0.5)


def of_a_global(model: nn.Module, batch: Batch) -> torch.Tensor:
    found: torch.Tensor = CRITERION(model, batch)
    return found


def given_beforehand(model: nn.Module, batch: Batch, criterion: nn.Module) -> torch.Tensor:
    found: torch.Tensor = criterion(model, batch)
    return found


def within(criterion: nn.Module) -> Callable[..., torch.Tensor]:
    return lambda model, batch: criterion(model, batch)


@pytest.mark.parametrize(
    ("made", "name"),
    [
        (lambda centred: centred, "loss"),
        (lambda centred: centred.method, "loss"),
        (lambda centred: of_a_global, "CRITERION"),
        (within, "criterion"),
        (lambda centred: partial(given_beforehand, criterion=centred), "criterion"),
    ],
    ids=["module", "method", "global", "closure", "partial"],
)
def test_what_moves_in_the_loss_beside_the_model_is_named(
    made: Callable[[Centred], Callable[..., torch.Tensor]], name: str
) -> None:
    def looked_at(pace: float, *unused: str) -> GradientAudit:
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        CRITERION.pace = pace
        loss = made(Centred(net, pace))
        audit = GradientAudit(net, optimizer, unused, loss)
        step = Step(net, loss, optimizer, training=Training())
        step.on_grads = audit
        step(Batch({"x": torch.ones(2, 3)}, ["a", "b"]))
        return audit

    told = problems(looked_at(0.5))
    assert told == (f"{name}.centre moved and is in no checkpoint: make it a part of the model",)
    looked_at(0.5, f"{name}.centre").verdict()
    looked_at(0.0).verdict()
