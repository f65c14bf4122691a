"""Which modules are called, what they are named, and which of them nothing can change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from frostline.profiler.inside import hooks
from frostline.profiler.inside import modules as code
from frostline.profiler.inside.modules import Modules, Use


@pytest.fixture(autouse=True)
def only_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests' optimisers and compiled modules may still be around."""
    monkeypatch.setattr(code, "_trained", set)
    monkeypatch.setattr(code, "_compiled_in_place", list)


def watched(step: Callable[[], Any], steps: int = 2) -> Modules:
    found = Modules(lambda module: None)
    found.begin()
    for _ in range(steps):
        step()
        found.steps += 1
    found.end()
    return found


def names(found: Modules) -> dict[str, Use]:
    each = {use.name: use for use in found.called()}
    assert len(each) == len(found.called()), "a name stands for two modules"
    return each


def frozen(found: Modules) -> dict[str, str]:
    return {use.name: why for use, why in found.frozen()}


def prefix(found: Modules, name: str) -> str:
    held = names(found)[name].prefix
    return "" if held is None else found.uses[id(held)].name


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(self.a(x).relu())


class Net(nn.Module):
    def __init__(self, n: int = 12, fixed: int = 0) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = (
            nn.Linear(4, 4),
            nn.ModuleList(Block() for _ in range(n)),
            Block(),
        )
        for part in (self.embed, *self.blocks[:fixed]) if fixed else ():
            part.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


X = torch.randn(3, 4)


class Pictures(nn.Module):
    """What it is given goes through `before`, and then through a convolution."""

    def __init__(self, before: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.before, self.conv = before, nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.conv(self.before(x)))


@pytest.mark.parametrize(
    ("net", "shape", "rows"),
    [
        (Pictures(), (3, 8, 8), 1),
        (Pictures(), (6, 3, 8, 8), 6),
        (Pictures(lambda x: x[None]), (3, 8, 8), 1),
        (Pictures(lambda x: x[0]), (6, 3, 8, 8), 6),  # one after the other, inside
        (Pictures(lambda x: x[:, None].expand(-1, 3, -1, -1)), (6, 8, 8), 6),  # grey ones
        (nn.Sequential(nn.Conv1d(3, 4, 3), nn.ReLU()), (3, 8), 1),
        (nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2)), (8,), 1),
        (nn.Sequential(nn.Linear(8, 4), nn.Tanh()), (5, 8), 5),
        (nn.Sequential(nn.Unflatten(0, (5, 1)), nn.Linear(1, 4)), (5,), 5),  # numbers
    ],
)
def test_a_call_without_a_batch_dimension_is_one_row(
    net: nn.Module, shape: tuple[int, ...], rows: int
) -> None:
    found = names(watched(lambda: net(torch.ones(shape))))
    assert found[type(net).__name__].rows == {rows: 2}


def test_calls_depth_rows_and_sizes() -> None:
    net = Net(2)
    found = names(watched(lambda: net(X)))
    assert [*found] == [
        "Net", "Net.embed", "Net.blocks.0", "Net.blocks.0.a", "Net.blocks.0.b", "Net.blocks.1",
        "Net.blocks.1.a", "Net.blocks.1.b", "Net.head", "Net.head.a", "Net.head.b",
    ]  # fmt: skip
    assert [found[name].depth for name in ("Net", "Net.head", "Net.head.a")] == [0, 1, 2]
    assert {use.calls for use in found.values()} == {2}
    assert found["Net"].rows == {3: 2}
    assert found["Net"].out_bytes == 16


def test_outermost_calls_are_told_and_hooks_are_gone_afterwards() -> None:
    told: list[nn.Module] = []
    found, net = Modules(told.append), Net(1)
    found.begin()
    assert found.watching
    net(X)
    found.end()
    net(X)
    assert told == [net]
    assert not found.watching


def test_what_was_called_before_the_first_step_does_not_count() -> None:
    check, net = nn.Linear(4, 4), nn.Linear(4, 4)
    found = Modules(lambda module: None)
    found.begin()
    check(X)
    net(X)
    found.begin_counting()
    net(X)
    found.end()
    assert [use.module for use in found.called()] == [net]


def test_two_models_of_one_class_are_numbered_in_the_order_of_their_calls() -> None:
    one, two = nn.Linear(4, 4), nn.Linear(4, 4)
    found = names(watched(lambda: one(two(X))))
    assert [found["Linear#1"].module, found["Linear#2"].module] == [two, one]


def test_a_part_that_the_script_calls_by_itself_keeps_its_place() -> None:
    net = Net(1)
    found = names(watched(lambda: (net(X), net.head(X))))
    assert found["Net.head"].depth == 0
    assert found["Net.head"].calls == 4
    assert "Block" not in found


def test_parts_that_no_module_owns_have_names_of_their_own() -> None:
    """Held in a plain list: they are in nobody's named_modules."""

    class Loose(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = [Block(), Block()]

        def forward(self, x: Tensor) -> Tensor:
            return self.parts[1](self.parts[0](x))

    net = Loose()
    assert len(names(watched(lambda: net(X)))) == 7


def test_an_exception_in_a_forward_does_not_leave_its_parts_inside_of_it() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError

    bad, good = nn.Sequential(Fails()), nn.Linear(4, 4)

    def step() -> None:
        with pytest.raises(ValueError):  # noqa: PT011 -- it has no text
            bad(X)
        good(X)

    assert names(watched(step))["Linear"].depth == 0


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_module_has_its_own_name_and_says_so(backend: str) -> None:
    torch._dynamo.reset()
    net = Net(1)
    compiled = torch.compile(net, backend=backend)
    compiled(X)
    found = watched(lambda: compiled(X).sum().backward())
    (outer,) = [use for use in found.called() if use.depth == 0]
    assert (outer.name, code.is_compiled(outer.module), outer.calls) == ("Net", True, 2)
    told = {line["name"]: line for line in found.summary()}
    assert (told["Net"]["kind"], told["Net"]["compiled"]) == ("Net", True)
    assert all("_orig_mod" not in name for name in told)
    torch._dynamo.reset()


def test_a_module_compiled_in_place_is_found_though_its_hooks_do_not_run(monkeypatch: Any) -> None:
    torch._dynamo.reset()
    net = Net(1)
    net.compile(backend="eager")
    net(X)
    monkeypatch.setattr(code, "_compiled_in_place", lambda: [net])
    found = watched(lambda: net(X))
    assert names(found)["Net"].module is net
    assert [line["compiled"] for line in found.summary() if line["name"] == "Net"] == [True]
    torch._dynamo.reset()


def test_compiled_modules_are_found_by_looking_for_them(monkeypatch: Any) -> None:
    monkeypatch.undo()
    net, plain = nn.Linear(2, 2), nn.Linear(2, 2)
    net.compile(backend="eager")
    found = code._compiled_in_place()
    assert any(m is net for m in found)
    assert not any(m is plain for m in found)


def test_a_trained_model_is_not_frozen_and_has_no_prefix() -> None:
    net = Net(2)
    found = watched(lambda: net(X))
    assert (frozen(found), prefix(found, "Net")) == ({}, "")


def test_a_target_network_is_not_trained_whatever_its_parameters_ask_for() -> None:
    """It is copied to now and then, so it is not frozen either."""
    net = Net(2)
    target = copy.deepcopy(net)
    found = watched(lambda: (net(X), quietly(target)))
    told = {each["name"]: each["trainable"] for each in found.summary(moved=[id(target)])}
    assert (told["Net#1"], told["Net#1.head"]) == (20 + 3 * 40, 40)
    assert (told["Net#2"], told["Net#2.head"]) == (0, 0)


def test_parameters_that_another_call_trains_are_trained() -> None:
    net = Net(2)
    acting = nn.Sequential(net.embed, net.head)
    told = {each["name"]: each["trainable"] for each in watched(lambda: (net(X), quietly(acting))).summary()}
    assert told["Sequential"] == 20 + 40


def test_a_model_without_trained_parameters_is_frozen_as_a_whole() -> None:
    net = Net(2).requires_grad_(False)
    assert frozen(watched(lambda: net(X))) == {"Net": "parameters"}


def quietly(net: nn.Module) -> Tensor:
    with torch.no_grad():
        return net(X)  # type: ignore[no-any-return]


def test_a_model_that_runs_without_gradients_is_frozen() -> None:
    net = Net(2)
    assert frozen(watched(lambda: quietly(net))) == {"Net": "no_grad"}


def test_one_that_an_optimiser_trains_is_not_frozen_where_it_runs_without_gradients(monkeypatch: Any) -> None:
    """A GAN's generator makes pictures for the discriminator's step; a policy acts."""
    monkeypatch.undo()
    monkeypatch.setattr(code, "_compiled_in_place", list)
    net, other = Net(1), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    assert frozen(watched(lambda: (quietly(net), quietly(other)))) == {"Linear": "no_grad"}
    del optimizer


def test_one_that_is_called_with_gradients_now_and_then_is_not_frozen() -> None:
    net = Net(1)
    assert frozen(watched(lambda: (quietly(net), net(X)))) == {}


def test_what_has_no_parameters_is_not_frozen() -> None:
    net = nn.Sequential(nn.ReLU(), nn.Dropout())
    assert frozen(watched(lambda: quietly(net))) == {}


def test_twelve_blocks_of_which_six_are_frozen_end_with_the_sixth() -> None:
    net = Net(12, fixed=6)
    found = watched(lambda: net(X))
    assert prefix(found, "Net") == "Net.blocks.5"
    assert frozen(found) == {}, "its parts are told with the prefix"
    told = next(line for line in found.summary() if line["name"] == "Net")
    assert (told["prefix"], told["parameters"] - told["trainable"]) == ("Net.blocks.5", 20 + 6 * 40)


def test_a_frozen_encoder_before_a_head_is_no_prefix_but_frozen() -> None:
    net = nn.ModuleDict({"encoder": Net(3).requires_grad_(False), "head": nn.Linear(4, 2)})

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = net

        def forward(self, x: Tensor) -> Tensor:
            return self.parts["head"](self.parts["encoder"](x))  # type: ignore[no-any-return]

    both = Both()
    found = watched(lambda: both(X))
    assert prefix(found, "Both") == ""
    assert frozen(found) == {"Both.parts.encoder": "parameters"}


def test_what_is_frozen_after_something_trained_is_no_prefix() -> None:
    net = Net(4)
    net.blocks[2].requires_grad_(False)
    found = watched(lambda: net(X))
    assert prefix(found, "Net") == ""
    assert frozen(found) == {"Net.blocks.2": "parameters"}


@pytest.mark.parametrize(
    "part",
    [nn.Dropout(0.5), nn.BatchNorm1d(4), nn.RReLU(), nn.AlphaDropout(0.1)],
    ids=lambda m: type(m).__name__,
)
def test_a_frozen_encoder_that_is_random_is_told_but_not_as_one_to_store(part: nn.Module) -> None:
    encoder = nn.Sequential(nn.Linear(4, 4), part, nn.Linear(4, 4)).requires_grad_(False).train()
    found = watched(lambda: encoder(X))
    (said,) = found.random()
    assert frozen(found) == {}
    assert "Sequential.1 is in training mode" in said
    encoder.eval()
    found = watched(lambda: encoder(X))
    assert (frozen(found), found.random()) == ({"Sequential": "parameters"}, [])


@pytest.mark.parametrize(
    "part", [nn.Dropout(0.0), nn.LayerNorm(4), nn.GELU()], ids=lambda m: type(m).__name__
)
def test_what_draws_nothing_is_not_random_in_training_mode(part: nn.Module) -> None:
    encoder = nn.Sequential(nn.Linear(4, 4), part).requires_grad_(False).train()
    assert frozen(watched(lambda: encoder(X))) == {"Sequential": "parameters"}


def test_a_prefix_ends_before_what_is_random() -> None:
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    net[:5].requires_grad_(False)
    assert prefix(watched(lambda: net(X)), "Sequential") == "Sequential.4"
    net.insert(2, nn.Dropout(0.5))
    assert prefix(watched(lambda: net(X)), "Sequential") == "Sequential.1"


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_calls_with_nested_tensors_are_seen() -> None:
    """As torch's own encoder has them inside, where a mask pads."""
    net = nn.Identity()
    nested = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(5, 4)])
    hooks.failures.clear()
    found = names(watched(lambda: net(nested)))["Identity"]
    assert hooks.failures == []
    assert (dict(found.rows), found.out_bytes) == ({2: 2}, 7 * 4 * 4 / 2)


def test_an_error_of_ours_does_not_reach_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks.failures.clear()
    monkeypatch.setattr(code, "n_rows", lambda value: 1 // 0)
    net = nn.Linear(4, 4)
    watched(lambda: net(X))
    assert hooks.failures == ["ZeroDivisionError: integer division or modulo by zero"]
    hooks.failures.clear()


def test_the_prefix_follows_the_order_of_calls_not_of_names() -> None:
    class Turned(Net):
        def forward(self, x: Tensor) -> Tensor:
            for block in reversed(self.blocks):
                x = block(x)
            return self.head(x)

    net = Turned(4)
    net.blocks[2:].requires_grad_(False)
    assert prefix(watched(lambda: net(X)), "Turned") == "Turned.blocks.2"


def test_the_prefixs_end_is_among_what_pass_b_tells_apart() -> None:
    net = Net(12, fixed=6)
    found = watched(lambda: net(X))
    assert any(use.module is net.blocks[5] for use in found.worth(0.0))


def test_looking_leaves_results_and_random_numbers_alone() -> None:
    net = nn.Sequential(Net(2), nn.Dropout(0.5))
    other, state = copy.deepcopy(net), torch.get_rng_state()
    plain = other(X)
    torch.set_rng_state(state)
    given: list[Tensor] = []
    watched(lambda: given.append(net(X)), steps=1)
    assert torch.equal(given[0], plain)
