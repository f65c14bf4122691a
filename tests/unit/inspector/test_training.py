"""One training step with planted faults: each is named, and the model is left as it was."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from frostline.errors import UsageError
from frostline.inspector import audit

BATCH = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).requires_grad_(False)
        self.head = nn.Linear(4, 1)

    def train(self, mode: bool = True) -> Model:
        super().train(mode)
        self.encoder.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


def square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def trainable(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.1)


def findings(model: nn.Module, *, loss=square, optimizer=trainable, injected=()) -> str:
    report = audit(model, BATCH, loss=loss, optimizer=optimizer, injected=injected)
    return "\n".join(report.training.findings)


def test_a_sound_step_has_no_findings() -> None:
    assert findings(Model()) == ""
    assert audit(Model(), BATCH, loss=square, optimizer=trainable).ok


def test_parameters_without_gradient_are_grouped_by_module() -> None:
    model = Model()
    model.extra = nn.Linear(2, 2)
    assert "2 trainable parameters got no gradient: extra (weight, bias)." in findings(model)
    assert "head (bias)" in findings(Model(), loss=lambda m, x: m(x).sum() - m(x).sum() + m.head.weight.sum())


class Lora(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.ones(2, base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


def no_rate(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)


@pytest.mark.parametrize("optimizer", [trainable, no_rate])
def test_what_begins_at_zero_is_given_a_second_chance(optimizer) -> None:
    model = nn.Sequential(Lora(nn.Linear(4, 4)), nn.Linear(4, 1))
    assert findings(model, optimizer=optimizer, injected=Lora) == ""


def test_frozen_parameters_that_move_are_named() -> None:
    class Writes(Model):
        def forward(self, x: Tensor) -> Tensor:
            self.encoder[0].weight.mul_(0.99)
            return super().forward(x)

    assert "1 frozen parameter moved in one step: encoder.0 (weight)." in findings(Writes())


def test_weight_decay_that_moves_frozen_parameters_is_seen() -> None:
    class Decays(torch.optim.SGD):
        def step(self, closure=None):
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    p.mul_(0.9)
            return super().step(closure)

    told = findings(Model(), optimizer=lambda m: Decays(m.parameters(), 0.1))
    assert "3 frozen parameters moved" in told  # the fourth is zero
    assert "4 frozen parameters in the optimiser: encoder.0 (weight, bias), encoder.1 (weight, bias)" in told


def test_statistics_of_a_frozen_batch_norm_that_move_are_named() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4).requires_grad_(False), nn.Linear(4, 1))
    assert "statistics of frozen modules moved: '0.running_mean', '0.running_var'" in findings(model)


def test_parameters_missing_from_the_optimiser_are_named() -> None:
    told = findings(Model(), optimizer=lambda m: torch.optim.SGD([m.head.weight], 0.1))
    assert "1 trainable parameter not in the optimiser: head (bias)" in told


# injected modules


class Wrapped(nn.Linear):
    pass


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 1, batch_first=True)
        self.attention.out_proj = Wrapped(4, 4)
        self.head = Wrapped(4, 1)
        self.unused = Wrapped(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        self.unused(x)
        return self.head(self.attention(x[:, None], x[:, None], x[:, None])[0])


def test_injected_modules_that_are_never_called_or_do_not_matter() -> None:
    told = findings(Attends(), injected=Wrapped)
    assert "3 modules injected, 2 called; never: 'attention.out_proj' (nn.MultiheadAttention reads" in told
    assert "1 of 3 injected modules are called, but the loss does not depend on what they return" in told
    model = Attends()
    assert "injected" not in findings(model, injected=[model.head])
    assert "'unused'" in findings(model, injected=["unused"])
    with pytest.raises(UsageError, match="'haed'"):
        findings(model, injected=["haed", model.head])


# no trace, clear errors


def test_the_step_is_undone() -> None:
    model = Model().eval()
    model.head.weight.grad = torch.ones(1, 4)
    optimizer = torch.optim.Adam(model.head.parameters(), 0.1)
    was, state, drawn = copy.deepcopy(model.state_dict()), optimizer.state_dict(), torch.get_rng_state()
    audit(model, BATCH, loss=square, optimizer=optimizer)
    assert all(torch.equal(was[name], now) for name, now in model.state_dict().items())
    assert torch.equal(model.head.weight.grad, torch.ones(1, 4))
    assert model.head.bias.grad is None
    assert optimizer.state_dict() == state
    assert not model.training
    assert torch.equal(drawn, torch.get_rng_state())
    assert not model.head._forward_hooks


def test_a_step_that_cannot_run_says_why_and_undoes_it() -> None:
    model = Model()
    was = copy.deepcopy(model.state_dict())
    with pytest.raises(UsageError, match=r"could not compute the loss .* KeyError: 'x'"):
        findings(model, loss=lambda m, b: {}["x"])
    with pytest.raises(UsageError, match=r"returned a tensor \[6, 1\]"):
        findings(model, loss=lambda m, b: m(b))
    with pytest.raises(UsageError, match="returned list; expected a torch optimiser"):
        findings(model, optimizer=lambda m: [])
    assert all(torch.equal(was[name], now) for name, now in model.state_dict().items())
