"""Hooks of ours: nothing that a script saves, copies or exports knows of them, and their errors stay ours."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from frostline.profiler.inside import hooks
from frostline.profiler.inside.calls import Calls, Inputs
from frostline.profiler.inside.modules import Use
from frostline.profiler.inside.spans import Spans

X = torch.ones(3, 4)


@pytest.fixture
def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))


@pytest.fixture
def calls(net: nn.Sequential) -> Iterator[list[Any]]:
    """As pass B has them, and as frozen modules do: (module, rows) of each call that was seen."""
    seen: list[Any] = []
    others = "__reduce_ex__" in vars(nn.Module)  # hooks that another test left on modules of its own
    inputs = Inputs(net[0])
    spans = Calls([Use(net, 0, 0, name="net"), Use(net[1], 1, 1, name="net.1")], Spans(cuda=False))
    ours = hooks.before(net, lambda module, args: seen.append((module, len(args[0]))))
    yield seen
    ours.remove()
    spans.remove()
    inputs.remove()
    assert ("__reduce_ex__" in vars(nn.Module)) == others
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in net.modules())


def saved(module: nn.Module, protocol: int = 2) -> bytes:
    target = io.BytesIO()
    torch.save(module, target, pickle_protocol=protocol)
    return target.getvalue()


def plain(net: nn.Sequential) -> nn.Sequential:
    """The same, without hooks."""
    found = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))
    found.load_state_dict(net.state_dict())
    return found


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize("protocol", [2, 5])
def test_what_is_saved_does_not_mention_us(net: nn.Sequential, protocol: int) -> None:
    assert b"frostline" not in saved(net, protocol)
    assert len(saved(net, protocol)) == len(saved(plain(net), protocol))


def test_a_copy_has_no_hooks_and_its_original_keeps_them(net: nn.Sequential, calls: list[Any]) -> None:
    copied = copy.deepcopy(net)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in copied.modules())
    assert torch.equal(copied(X), net(X))
    assert calls == [(net, 3)]


def test_the_scripts_own_hooks_are_copied(net: nn.Sequential, calls: list[Any]) -> None:
    """In their order, with what they were registered with."""
    own = net.register_forward_pre_hook(_twice, with_kwargs=True)
    copied = copy.deepcopy(net)
    assert [*copied._forward_pre_hooks.values()] == [_twice]
    assert len(copied._forward_pre_hooks_with_kwargs) == 1
    assert torch.equal(copied(X), net(X))
    assert len(calls) == 1
    own.remove()


def _twice(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return (2 * args[0],), kwargs


def test_a_module_with_a_state_of_its_own(calls: list[Any]) -> None:
    class Own(nn.Linear):
        def __getstate__(self) -> dict[str, Any]:
            return {**self.__dict__, "told": 1}

    net = Own(4, 4)
    hook = hooks.before(net, lambda module, args: calls.append(module))
    copied = copy.deepcopy(net)
    hook.remove()
    assert copied.told == 1
    assert not copied._forward_pre_hooks


def test_a_copy_that_is_made_in_another_way_is_not_looked_at(calls: list[Any]) -> None:
    """A graph module copies its attributes by itself."""
    net = fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4)))
    hook = hooks.before(net, lambda module, args: calls.append(module))
    copied = copy.deepcopy(net)
    assert b"frostline" not in saved(net)
    copied(X)
    assert calls == []
    net(X)
    hook.remove()
    assert calls == [net]


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
def test_it_can_be_scripted_and_traced(net: nn.Sequential, calls: list[Any]) -> None:
    scripted, traced = torch.jit.script(net), torch.jit.trace(net, X, check_trace=False)
    assert "detach" not in str(traced.inlined_graph)
    assert calls == []
    assert torch.equal(scripted(X), net(X))
    assert torch.equal(traced(X), net(X))
    assert len(calls) == 2


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
def test_what_cannot_be_scripted_has_its_hooks_afterwards(net: nn.Sequential, calls: list[Any]) -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {1, x}

    with pytest.raises(torch.jit.frontend.UnsupportedNodeError):
        torch.jit.script(nn.Sequential(net, Odd()))
    net(X)
    assert len(calls) == 1


def test_an_error_of_ours_is_noted_once_and_is_none_of_the_scripts(net: nn.Sequential) -> None:
    hooks.failures.clear()
    bad: Any = {}
    each = [hooks.before(net, lambda *_: bad["x"]), hooks.after(net, lambda *_: bad["x"])]
    every = hooks.of_all(lambda *_: bad["y"], lambda *_: bad["y"])
    net(X)
    net(X)
    for handle in (*each, *every):
        handle.remove()
    assert sorted(hooks.failures) == ["KeyError: 'x'", "KeyError: 'y'"]
    hooks.failures.clear()


def test_nothing_of_ours_is_compiled(net: nn.Sequential, calls: list[Any]) -> None:
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    assert torch.equal(compiled(X), plain(net)(X))
    assert calls == []
    torch._dynamo.reset()
