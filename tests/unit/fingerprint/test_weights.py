from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from frostline.errors import UsageError
from frostline.fingerprint import weights, weights_of


class Block(nn.Module):
    scale: torch.Tensor

    def __init__(self, act: Any = torch.relu) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.1)
        self.act = act
        self.sizes = (1, 2)
        self.register_buffer("scale", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.drop(self.act(self.norm(self.conv(x))))
        return out


def _block() -> Block:
    torch.manual_seed(0)
    return Block()


def _flip(tensor: torch.Tensor) -> None:
    tensor.detach().view(torch.uint8).view(-1)[5] ^= 1


CONTENT: dict[str, Callable[[Block], Any]] = {
    "one bit of a weight": lambda net: _flip(net.conv.weight),
    "running mean": lambda net: net.norm.running_mean.add_(1),  # type: ignore[union-attr]
    "batches counted": lambda net: net.norm.num_batches_tracked.add_(1),  # type: ignore[union-attr]
    "buffer that is not saved": lambda net: net.scale.mul_(2),
    "dtype": lambda net: net.conv.to(torch.float64),
    "new weights in the same object": lambda net: net.load_state_dict(Block().state_dict()),
}
STRUCTURE: dict[str, Callable[[Block], Any]] = {
    "eps": lambda net: setattr(net.norm, "eps", 1e-3),
    "dropout": lambda net: setattr(net.drop, "p", 0.2),
    "activation": lambda net: setattr(net, "act", torch.nn.functional.gelu),
    "tuple": lambda net: setattr(net, "sizes", (1, 3)),
    "new attribute": lambda net: setattr(net, "extra", 1),
    "hook": lambda net: net.conv.register_forward_hook(lambda module, args, out: out + 1),
    "pre-hook": lambda net: net.register_forward_pre_hook(lambda module, args: args),
    "forward": lambda net: setattr(net, "forward", lambda x: x),
    "class of a part": lambda net: setattr(net, "drop", nn.AlphaDropout(0.1)),
}
NOTHING: dict[str, Callable[[Block], Any]] = {
    "eval": lambda net: net.eval(),
    "requires_grad": lambda net: net.requires_grad_(False),
    "deep copy's memory": lambda net: net.conv.weight.data.set_(net.conv.weight.data.clone()),
    "channels last": lambda net: net.to(memory_format=torch.channels_last),  # type: ignore[call-overload]
}


@pytest.mark.parametrize("what", CONTENT)
def test_content_counts(what: str) -> None:
    net = _block()
    before = weights_of(net)
    CONTENT[what](net)
    after = weights_of(net)
    assert after.digest != before.digest
    assert before.differing(after)


@pytest.mark.parametrize("what", STRUCTURE)
def test_structure_counts_apart_from_content(what: str) -> None:
    net = _block()
    before = weights_of(net)
    STRUCTURE[what](net)
    after = weights_of(net)
    assert after.digest == before.digest
    assert after.structure != before.structure


@pytest.mark.parametrize("what", ["eval", "requires_grad", "deep copy's memory", "channels last"])
def test_bookkeeping_does_not_count(what: str) -> None:
    net = _block()
    before = weights_of(net)
    NOTHING[what](net)
    assert weights_of(net) == before


class Mode(Enum):
    nearest = 1
    bilinear = 2


class Shift:
    def __init__(self, by: int) -> None:
        self.by = by


def _filled(value: float) -> nn.Linear:
    net = nn.Linear(1, 1)
    nn.init.constant_(net.weight, value)
    nn.init.zeros_(net.bias)
    return net


SETTINGS: dict[str, Callable[[int], Any]] = {
    "an enum, as torchvision's Resize has": lambda n: Mode(n),
    "a list of modules, as torchvision's Compose has": lambda n: [nn.Dropout(n / 10), torch.device("cpu")],
    "a dict, as torchvision's ToDtype has": lambda n: {"size": n},
    "a set": lambda n: {n, "a"},
    "an array": lambda n: np.ones(n),
    "a number of numpy's": lambda n: np.float32(n),
    "a partial": lambda n: functools.partial(torch.add, alpha=n),
    "settings": lambda n: SimpleNamespace(scale=n),
    "an object of the user's own": lambda n: Shift(n),
    "a network that is no part of it": lambda n: _filled(n),
}


@pytest.mark.parametrize("what", SETTINGS)
@pytest.mark.parametrize("network", [nn.Identity, Block])
def test_settings_count_in_a_librarys_class_too(what: str, network: Callable[[], nn.Module]) -> None:
    def structure(n: int) -> str:
        net = network()
        vars(net)["setting"] = SETTINGS[what](n)
        return weights_of(net).structure

    assert structure(1) == structure(1) != structure(2)


def test_what_a_librarys_class_remembers_between_calls_does_not_count() -> None:
    net = nn.Linear(1, 1)
    before = weights_of(net)
    more = {"cache": {"cpu": torch.ones(2)}, "empty": {}, "_plan": {"a": 1}, "log": logging.getLogger("a")}
    vars(net).update(more)
    assert weights_of(net) == before


def test_what_accelerate_puts_around_forward_does_not_count() -> None:
    net = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    before = weights_of(net)
    for part in net.modules():
        old = part.forward
        vars(part).update(_hf_hook=object(), _old_forward=old)
        vars(part)["forward"] = functools.update_wrapper(functools.partial(nn.Module.__call__, part), old)
    assert weights_of(net) == before
    del net[0]._hf_hook  # somebody else's
    assert weights_of(net).structure != before.structure


def test_a_network_that_leads_back_to_itself_ends() -> None:
    net = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    vars(net[1])["parent"] = net
    assert weights_of(net) == weights_of(copy.deepcopy(net))


def test_a_config_of_diffusers_counts_without_how_it_was_given() -> None:
    def structure(**config: Any) -> str:
        net = nn.Linear(1, 1)
        vars(net)["_internal_dict"] = config
        return weights_of(net).structure

    given = structure(scaling_factor=0.18, _use_default_values=["a"])
    assert given == structure(scaling_factor=0.18) != structure(scaling_factor=1.0)


def test_a_copy_is_equal_and_the_differing_tensor_is_named() -> None:
    net = _block()
    other = copy.deepcopy(net)
    assert weights_of(net) == weights_of(other)
    _flip(other.conv.bias)  # type: ignore[arg-type]
    assert weights_of(net).differing(weights_of(other)) == ["conv.bias"]


def test_counts_and_libraries() -> None:
    found = weights_of(_block())
    assert found.tensors == 8
    assert found.bytes == sum(
        t.numel() * t.element_size() for t in [*_block().parameters(), *_block().buffers()]
    )
    assert found.code.libraries == {"torch": torch.__version__.split("+")[0]}
    assert any(name.endswith("Block.forward") for name in found.code.functions)


def test_code_of_own_classes_counts(lab: Any) -> None:
    work = "from torch import nn\nclass Net(nn.Module):\n    def forward(self, x):\n        return x + {}"
    one, two = (weights_of(lab.load("work:Net", work=work.format(n))()) for n in (1, 2))
    assert one.digest == two.digest
    assert one.code.digest != two.code.digest
    assert {name for name in one.code.functions if one.code.functions[name] != two.code.functions[name]} == {
        "work.Net.forward"
    }


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.bool, torch.int8, torch.complex64, torch.float8_e4m3fn]
)
def test_every_dtype_has_bytes(dtype: torch.dtype) -> None:
    one, two = torch.zeros(3).to(dtype), torch.ones(3).to(dtype)
    assert weights.tensor_digest(one) != weights.tensor_digest(two)
    assert weights.tensor_digest(torch.zeros(0, dtype=dtype)) != weights.tensor_digest(one)


def test_pieces_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(1000.0)[::2]
    before = weights.tensor_digest(x)
    monkeypatch.setattr(weights, "_PIECE", 12)
    assert weights.tensor_digest(x) == before
    assert weights.tensor_digest(x[4::999]) == weights.tensor_digest(torch.tensor([8.0]))  # of stride 1998


def test_shared_weights_and_compiled_networks() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight = net[0].weight
    assert "1.weight" in weights_of(net).of_tensor
    assert weights_of(torch.compile(net, backend="eager")) == weights_of(net)  # type: ignore[arg-type]


def test_configs_count_without_where_they_came_from() -> None:
    class Config:
        def __init__(self, **options: Any) -> None:
            self.options = options

        def to_dict(self) -> dict[str, Any]:
            return self.options

    def made(**options: Any) -> str:
        net = nn.Linear(1, 1)
        net.config = Config(**options)  # type: ignore[assignment]
        return weights_of(net).structure

    assert made(heads=2, _name_or_path="/a") == made(heads=2, _name_or_path="/b") != made(heads=3)


def test_a_network_without_content_is_refused() -> None:
    with torch.device("meta"):
        net = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="2 of its 2 tensors"):
        weights_of(net)


@pytest.mark.gpu
def test_the_device_does_not_count() -> None:
    net = _block()
    assert weights_of(net).digest == weights_of(net.cuda()).digest
