"""Random numbers and buffers, put back where they were."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor, nn

from frostline.ranks import Alone
from frostline.rewind import Attributes, Buffers, Extra, Moment

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
        assert equal(after, buffers_of(model))
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


class Late(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first: Tensor | None
        self.register_buffer("first", None)
        self.register_buffer("none", torch.zeros(0))
        self.register_buffer("graph", torch.eye(2).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        self.first = x.clone() if self.first is None else self.first + 1
        self.none = torch.cat([self.none, x])
        return x


def test_buffers_that_come_with_the_first_pass_go_away_again() -> None:
    model = Late()
    buffers = Buffers(model)
    buffers.keep()
    model(torch.ones(2))
    buffers.restore(where=torch.tensor(0.0))
    assert model.first is not None
    buffers.restore()
    assert model.first is None
    assert model.none.numel() == 0
    model(torch.ones(2))
    buffers.look(Alone())
    assert buffers.tensors() == []  # of none did all ranks know before
    buffers.keep()
    model(torch.ones(2))
    buffers.restore()
    assert model.first.tolist() == [1.0, 1.0]  # type: ignore[attr-defined]


def test_a_buffer_that_was_expanded_is_left_or_replaced() -> None:
    model = nn.Module()
    model.register_buffer("wide", torch.zeros(1).expand(3))
    buffers, place = Buffers(model), model.wide
    buffers.keep()
    buffers.restore()
    assert model.wide is place
    model.wide = torch.ones(1).expand(3)
    buffers.restore()
    assert model.wide.tolist() == [0.0, 0.0, 0.0]


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def get_extra_state(self) -> list[int]:
        return self.seen

    def set_extra_state(self, state: list[int]) -> None:
        self.seen = state


def test_extra_state_goes_back_as_often_as_it_is_wanted() -> None:
    model = nn.Sequential(Counting(), nn.Identity())
    kept = Extra(model)
    for _ in range(2):
        model[0].seen.append(1)
        kept.restore()
        assert model[0].seen == []


def test_buffers_that_begin_to_move_later_are_kept_from_the_step_after() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3).eval(), Model())
    model[1].register_buffer("longest", torch.zeros(1))
    buffers = Buffers(model)
    buffers.keep()
    model[1](torch.randn(4, 3))
    buffers.look(Alone())
    kept = len(buffers.tensors())
    del model[1].longest
    buffers.look(Alone())
    assert len(buffers.tensors()) == kept  # nothing moved
    model[0].train()
    model[0](torch.randn(4, 3))  # its statistics move unseen, its counter does not
    model[1].fixed = torch.ones(2)
    buffers.look(Alone())
    assert len(buffers.tensors()) == kept + 4
    buffers.keep()
    before = buffers_of(model)
    model(torch.full((4, 3), torch.nan))
    model[1].fixed.add_(1)
    buffers.restore()
    assert equal(before, buffers_of(model))


def test_a_cache_that_grew_is_left() -> None:
    """The model may know from elsewhere how long it is."""
    model = nn.Module()
    model.register_buffer("cache", torch.zeros(2), persistent=False)
    model.register_buffer("later", None, persistent=False)
    buffers = Buffers(model)
    for where in (None, torch.tensor(1.0)):
        buffers.keep()
        model.cache, model.later = torch.ones(3), torch.ones(1)
        buffers.restore(where)
        assert (len(model.cache), model.later) == (3, torch.ones(1))
        model.cache, model.later = torch.zeros(2), None
    buffers.keep()
    model.cache += 1
    buffers.restore()
    assert model.cache.tolist() == [0.0, 0.0]


def test_a_buffer_of_a_graph_does_not_hold_on_to_it() -> None:
    """As one in which a model leaves a part of its loss."""
    model = nn.Linear(2, 1)
    model.register_buffer("aside", torch.zeros(()))
    buffers = Buffers(model)
    for _ in range(3):
        buffers.keep()
        model.aside = model(torch.ones(1, 2)).sum()
        buffers.look(Alone())
    assert [kept.grad_fn for kept in buffers._kept if kept is not None] == [None]


def test_attributes_of_modules_go_back_but_no_part_goes_away() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.cache, model.seen, model.first = {"a": 1}, [1], None
    kept, hook = Attributes(model), torch.zeros(1)
    for _ in range(2):
        model.cache["b"], model.first, model.flag = 2, hook, True
        model.seen.append(2)
        model[0].register_forward_hook(lambda *given: None)
        model.register_buffer("mean", torch.zeros(1), persistent=False)
        model.add_module("late", nn.Linear(1, 1))
        kept.restore()
        assert (model.cache, model.seen, model.first) == ({"a": 1}, [1], None)
        assert not hasattr(model, "flag")
        assert not model[0]._forward_hooks
        assert [*model.named_buffers()] == []
        assert model.late.weight is not None
