"""Where steps end: after the last optimiser of a cycle, or where an outermost call recurs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from frostline.profiler.inside import starts as module
from frostline.profiler.inside.starts import Starts


class Agent:
    def __init__(self) -> None:
        self.ends: list[str] = []

    def boundary(self, name: str) -> None:
        self.ends.append(name)

    def guarded(self, ours: Any) -> Any:
        return ours


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1)


def ended(starts: Starts, *optimizers: Any) -> list[bool]:
    return [starts.is_last(optimizer) for optimizer in optimizers]


def test_one_optimiser_ends_every_step_but_the_first() -> None:
    one = sgd()
    assert ended(Starts(None), one, one, one) == [False, True, True]


def test_of_three_in_a_cycle_the_last_ends_the_step() -> None:
    a, b, c = sgd(), sgd(), sgd()
    assert ended(Starts(None), a, b, c, a, b, c, a, b, c) == [False] * 5 + [True, False, False, True]


@pytest.mark.parametrize("cycle", ["ddg", "dgg", "dddddg", "eddg"])
def test_a_cycle_in_which_some_step_twice_has_one_end(cycle: str) -> None:
    """The one that steps once ends it. It is known after three cycles; what was taken for steps until then is
    dropped."""
    starts, each = Starts(None), {name: sgd() for name in "deg"}
    ended(starts, *(each[name] for name in 3 * cycle))
    assert starts.changed
    starts.changed = False
    for _ in range(4):
        assert sum(ended(starts, *(each[name] for name in cycle))) == 1
    assert not starts.changed


def test_optimisers_that_take_turns_of_many_steps_end_each_of_them() -> None:
    """Known when the first of them comes back; before, each had been taken for the next training."""
    starts, a, b = Starts(None), sgd(), sgd()
    turns = [*5 * [a], *5 * [b]]
    ended(starts, *turns, *turns)
    starts.changed = False
    assert all(ended(starts, *turns, *turns))
    assert not starts.changed


def test_an_optimiser_that_steps_now_and_then_ends_no_steps() -> None:
    """Every ten steps: a step of the other is the step."""
    starts, often, seldom = Starts(None), sgd(), sgd()
    ended(starts, *[*10 * [often], seldom] * 3)
    assert ended(starts, often, often, seldom) == [True, True, False]
    assert not starts.changed


def test_an_optimiser_that_is_left_out_now_and_then_does_not_matter() -> None:
    """A loss scaler skips G's step where gradients overflow."""
    starts, d, g = Starts(None), sgd(), sgd()
    ended(starts, d, g, d, g)
    assert ended(starts, d, d, g) == [False, False, True]
    assert not starts.changed


def test_one_that_died_is_forgotten_also_where_the_next_one_lies_in_its_place() -> None:
    """Each stage of a training makes its own optimiser, often where the last one lay."""
    starts, one = Starts(None), sgd()
    assert ended(starts, one, one) == [False, True]
    del one
    two = sgd()
    assert ended(starts, two) == [False]
    assert starts.changed
    starts.changed = False
    assert ended(starts, two, two) == [True, True]
    assert not starts.changed


def test_one_that_is_still_there_but_steps_no_more_is_forgotten() -> None:
    starts, warm, main = Starts(None), sgd(), sgd()
    ended(starts, warm, warm)
    found = ended(starts, *[main] * (module._AGAIN + 3))
    assert found[-1]
    assert starts.changed


def call(starts: Starts, *modules: nn.Module, times: int) -> None:
    """As hooks on all modules would tell it, and then calls them."""
    for _ in range(times):
        for each in modules:
            starts.called(each)
            each(torch.ones(1, 2))


def no_optimizer(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "alive", lambda kind: [])


def test_in_a_loop_of_calls_each_call_ends_a_step(monkeypatch: Any) -> None:
    no_optimizer(monkeypatch)
    agent, model = Agent(), nn.Linear(2, 2)
    starts = Starts(agent)
    call(starts, model, times=module._CALLS)
    assert starts.by_calls
    agent.ends.clear()
    call(starts, model, times=3)
    assert agent.ends == ["call of Linear"] * 3
    starts.remove()
    call(starts, model, times=3)
    assert len(agent.ends) == 3


def test_of_two_models_the_one_that_is_called_once_a_step(monkeypatch: Any) -> None:
    """A vision tower once, a language model for every token."""
    no_optimizer(monkeypatch)
    agent, tower, language = Agent(), nn.Linear(2, 2), nn.Identity()
    starts = Starts(agent)
    call(starts, tower, *[language] * 5, times=module._CALLS // 6)
    agent.ends.clear()
    call(starts, language, tower, language, times=1)
    assert agent.ends == ["call of Linear"]


def test_with_an_optimiser_around_calls_are_not_counted_as_steps() -> None:
    agent, model = Agent(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    starts = Starts(agent)
    call(starts, model, times=2 * module._CALLS)
    assert not starts.by_calls
    assert agent.ends == []
    del optimizer


def test_with_one_that_never_steps_they_are_after_a_while_and_a_training_may_yet_come(
    monkeypatch: Any,
) -> None:
    """A script that tests a model builds its optimiser too."""
    agent, model = Agent(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    monkeypatch.setattr(module, "alive", lambda kind: [optimizer])
    starts = Starts(agent)
    with torch.no_grad():
        call(starts, model, times=module._UNSTEPPED * module._CALLS)
    assert (starts.by_calls, starts.unsure, starts.unseen) == (True, True, False)


def test_with_gradients_one_that_does_not_step_yet_is_waited_for(monkeypatch: Any) -> None:
    """It gathers gradients, or the loss is no number."""
    agent, model = Agent(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    monkeypatch.setattr(module, "alive", lambda kind: [optimizer])
    starts = Starts(agent)
    call(starts, model, times=8 * module._CALLS)
    assert not starts.by_calls


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_one_that_steps_without_being_seen_is_known_by_what_it_writes_to(monkeypatch: Any, kind: Any) -> None:
    """A compiled step runs no hooks."""
    agent, model = Agent(), nn.Linear(2, 2)
    optimizer = kind(model.parameters(), 0.1)
    monkeypatch.setattr(module, "alive", lambda kind: [optimizer])
    starts = Starts(agent)
    for _ in range(module._UNSTEPPED * module._CALLS + 1):
        call(starts, model, times=1)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert (starts.by_calls, starts.unsure, starts.unseen) == (True, False, True)


def test_an_optimiser_that_steps_after_all_ends_the_counting_of_calls(monkeypatch: Any) -> None:
    no_optimizer(monkeypatch)
    agent, model = Agent(), nn.Linear(2, 2)
    starts = Starts(agent)
    call(starts, model, times=module._CALLS)
    agent.ends.clear()
    starts.forget_calls()
    starts.is_last(sgd())
    call(starts, model, times=2 * module._CALLS)
    assert (starts.by_calls, agent.ends) == (False, [])
