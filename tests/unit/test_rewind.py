"""Random numbers and buffers, put back where they were."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor, nn

from frostline.ranks import Alone
from frostline.rewind import Buffers, Moment

CPU = torch.device("cpu")


def drawn() -> list[float]:
    found = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.standard_normal()]
    return [*found, float(torch.rand(())), float(torch.randn(()))]


def test_what_is_drawn_after_a_moment_is_drawn_again() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    for _ in range(5):  # normal numbers come in pairs: the second is kept for the next call
        moment = Moment(CPU)
        first, other = drawn(), drawn()
        assert first != other
        moment.restore()
        assert drawn() == first


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        for name in ("fixed", "replaced", "longer"):
            self.register_buffer(name, torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.replaced = self.replaced + 1
        self.longer = torch.cat([self.longer, torch.ones(1)])
        out: Tensor = self.norm(x)
        return out


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.named_buffers()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


def test_buffers_that_a_pass_wrote_or_replaced_go_back() -> None:
    model = Model()
    buffers = Buffers(model)
    for _ in range(3):
        buffers.keep()
        before = buffers_of(model)
        model(torch.randn(4, 3))
        buffers.look(Alone())
        after = buffers_of(model)
        assert not equal({k: v for k, v in before.items() if k != "longer"}, after)
        buffers.restore(where=torch.tensor(0.0))
        assert equal({k: v for k, v in after.items() if k != "longer"}, buffers_of(model))
        model.longer = after["longer"]
        buffers.restore()
        assert equal(before, buffers_of(model))


def test_buffers_that_no_pass_writes_are_left_alone_from_the_first_look_on() -> None:
    model = Model()
    buffers = Buffers(model)
    buffers.keep()
    model(torch.randn(4, 3))
    buffers.look(Alone())
    model.fixed = torch.full((2,), 7.0)  # somebody else's
    buffers.restore()
    assert model.fixed.tolist() == [7.0, 7.0]


def test_statistics_of_a_norm_whose_branch_the_first_pass_did_not_take_go_back() -> None:
    """As with stochastic depth; one in eval mode writes nothing and needs no care."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3).eval())
    buffers = Buffers(model)
    buffers.keep()
    buffers.look(Alone())
    assert len(buffers.tensors()) == 3
    buffers.keep()
    before = buffers_of(model)
    model(torch.full((4, 3), torch.nan))
    buffers.restore()
    assert equal(before, buffers_of(model))
