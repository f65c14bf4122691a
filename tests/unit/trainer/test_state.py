from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel

from frostline.errors import CheckpointError, UsageError
from frostline.trainer.checkpoint import Checkpoints, load
from frostline.trainer.state import init_from, load_model, model_state, model_tensors


class Net(nn.Module):
    """A tied pair, batch statistics, a cache that grows, extra state."""

    def __init__(self, seed: int = 0, *, tied: bool = True, width: int = 4) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(6, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 6, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.register_buffer("later", None, persistent=False)
        self.seen: Any = 0

    def forward(self, x: Tensor) -> Tensor:
        self.cache = torch.cat([self.cache, torch.ones(1)])
        self.later = torch.tensor(float(len(self.cache)))
        self.seen += 1
        return self.head(self.norm(self.embed(x)))

    def get_extra_state(self) -> Any:
        return {"seen": self.seen, "table": torch.full((2,), float(self.seen))}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]
        self.table = state["table"]


def used(**options: Any) -> Net:
    net = Net(**options)
    for _ in range(3):
        net(torch.arange(6))
    return net


def loaded_into(path: Path, saved: nn.Module, into: nn.Module) -> None:
    groups, about = model_state(saved)
    found = load(Checkpoints(path).save(1, groups, {"model": about}))
    g = found.groups
    load_model(into, g["model"], buffers=g["buffers"], extra=g["extra"], about=found.state["model"])


def test_everything_comes_back_the_tied_as_one_the_loose_buffers_too(tmp_path: Path) -> None:
    net, other = used(), Net(seed=9)
    loaded_into(tmp_path, net, other)
    assert other.head.weight is other.embed.weight
    assert all(torch.equal(v, other.state_dict()[k]) for k, v in net.state_dict().items() if "extra" not in k)
    assert torch.equal(other.cache, net.cache)
    assert torch.equal(other.later, net.later)
    assert (other.seen, other.table.tolist()) == (3, [3.0, 3.0])
    assert torch.equal(net(torch.arange(6)), other(torch.arange(6)))


def test_a_tied_tensor_is_stored_once_and_slices_of_one_memory_are_not_tied() -> None:
    groups, about = model_state(Net())
    assert about["shared"] == {"head.weight": "embed.weight"}
    assert "head.weight" not in groups["model"]
    whole = torch.randn(8)
    parts = nn.ParameterList([whole[:4], whole[4:]])
    assert model_state(parts)[1]["shared"] == {}


def test_loose_buffers_of_the_same_shape_are_filled_in_place() -> None:
    net = Net()
    place = net.cache
    load_model(net, model_tensors(Net()), buffers={"cache": torch.full((2,), 7.0)})
    assert net.cache is place
    assert place.tolist() == [7.0, 7.0]


@pytest.fixture(autouse=True)
def _plain_extra_state(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Most tests are about tensors: no extra state there."""
    if "everything" not in request.node.name and "extra" not in request.node.name:
        monkeypatch.delattr(Net, "get_extra_state")
        monkeypatch.delattr(Net, "set_extra_state")


def wrapped(how: str, net: Net) -> nn.Module:
    if how == "compiled":
        return torch.compile(net, backend="eager")  # type: ignore[return-value]
    if how == "compiled inside":
        net.norm = torch.compile(net.norm, backend="eager")
    if how == "parallel":
        return DataParallel(net)
    if how == "parallel, compiled":
        return torch.compile(DataParallel(net), backend="eager")  # type: ignore[return-value]
    if how == "compiled, parallel":
        return DataParallel(torch.compile(net, backend="eager"))  # type: ignore[arg-type]
    return net


WRAPS = ("plain", "compiled", "compiled inside", "parallel", "parallel, compiled", "compiled, parallel")


@pytest.mark.parametrize("how", WRAPS)
@pytest.mark.parametrize("into", ["plain", "compiled", "compiled inside", "parallel, compiled"])
def test_wrappers_leave_no_trace_in_names(tmp_path: Path, how: str, into: str) -> None:
    net, other = used(), Net(seed=9)
    saved = wrapped(how, net)
    groups, _ = model_state(saved)
    assert groups["model"].keys() == model_tensors(Net()).keys()
    assert not any("_orig_mod" in n or n.startswith("module.") for group in groups.values() for n in group)
    loaded_into(tmp_path, saved, wrapped(into, other))
    assert torch.equal(other.embed.weight, net.embed.weight)
    assert torch.equal(other.norm.running_mean, net.norm.running_mean)  # type: ignore[arg-type]
    assert torch.equal(other.cache, net.cache)


def test_a_part_that_is_called_module_keeps_its_name() -> None:
    net = nn.Module()
    net.module = nn.Linear(2, 2)
    assert list(model_tensors(net)) == ["module.weight", "module.bias"]


def test_every_difference_is_listed_and_nothing_is_changed() -> None:
    net = Net()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    tensors = model_tensors(Net(seed=3, width=5))
    tensors["norm.num_batches_tracked"] = torch.tensor(0.0)
    tensors["old.weight"] = torch.ones(1)
    del tensors["norm.bias"]
    with pytest.raises(CheckpointError) as caught:
        load_model(
            net, tensors, about={"shared": {"head.weight": "embed.weight"}}, buffers={"odd": torch.ones(1)}
        )
    for part in (
        "embed.weight: [6, 5] in the checkpoint, [6, 4] here",
        "head.weight: [6, 5] in the checkpoint, [6, 4] here",
        "norm.bias: not in the checkpoint",
        "norm.num_batches_tracked: float32 in the checkpoint, int64 here",
        "old.weight: in the checkpoint, but not here",
        "cache: not in the checkpoint",
        "odd: in the checkpoint, but not here",
    ):
        assert part in caught.value.problems
    assert all(torch.equal(v, net.state_dict()[k]) for k, v in before.items())


def test_ties_that_differ_are_differences() -> None:
    groups, about = model_state(Net())
    with pytest.raises(CheckpointError, match=r"one tensor with embed\.weight in the checkpoint, two"):
        load_model(Net(tied=False), groups["model"], about=about)
    with pytest.raises(CheckpointError, match=r"one tensor with embed\.weight here, two different ones"):
        load_model(Net(), model_tensors(Net(tied=False)))
    both = {**groups["model"], "head.weight": groups["model"]["embed.weight"].clone()}
    other = Net(seed=9)
    load_model(other, both)
    assert torch.equal(other.embed.weight, both["head.weight"])


def test_missing_and_unknown_extra_state_is_a_difference() -> None:
    groups, about = model_state(Net())
    with pytest.raises(CheckpointError, match="_extra_state: not in the checkpoint"):
        load_model(Net(), groups["model"], about={"shared": about["shared"]})
    with pytest.raises(CheckpointError, match="_extra_state: in the checkpoint, but not here"):
        load_model(nn.Linear(1, 1), {}, about=about)


def test_extra_state_that_cannot_be_kept_is_refused() -> None:
    net = Net()
    net.seen = object()
    net.get_extra_state = lambda: {"seen": net.seen}  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="_extra_state/seen: a object"):
        model_state(net)


def test_lazy_modules_are_named() -> None:
    with pytest.raises(UsageError, match=r"without a shape yet: weight, bias.*one batch"):
        model_tensors(nn.LazyLinear(3))


def test_types_and_nan_come_back_bit_for_bit(tmp_path: Path) -> None:
    net = nn.Linear(3, 2).to(torch.bfloat16)
    with torch.no_grad():
        net.bias.copy_(torch.tensor([float("nan"), -0.0]))
    other = nn.Linear(3, 2).to(torch.bfloat16)
    loaded_into(tmp_path, net, other)
    assert torch.equal(other.bias.view(torch.int16), net.bias.view(torch.int16))
    with pytest.raises(CheckpointError, match="bias: bfloat16 in the checkpoint, float32 here"):
        load_model(nn.Linear(3, 2), model_tensors(net))


def test_init_from_takes_what_fits_and_says_what_not() -> None:
    net, source = Net(), Net(seed=5)
    tensors = {**model_tensors(source), "norm.weight": torch.ones(9), "old": torch.ones(1)}
    del tensors["norm.bias"]
    before = net.norm.bias.clone()
    taken = init_from(net, tensors)
    assert torch.equal(net.embed.weight, source.embed.weight)
    assert torch.equal(net.norm.bias, before)
    assert {"embed.weight", "head.weight"} <= set(taken.taken)
    assert taken.without == {
        "norm.weight": "[9] in the checkpoint, [4] here",
        "norm.bias": "not in the file",
    }
    assert taken.unused == ["norm.weight", "old"]
    assert "norm.bias (not in the file)" in taken.told()


def test_init_from_untied_gets_the_tied_weights_under_both_names() -> None:
    groups, about = model_state(Net(seed=5))
    net = Net(tied=False)
    assert init_from(net, groups["model"], shared=about["shared"]).without == {}
    assert torch.equal(net.head.weight, groups["model"]["embed.weight"])
    assert torch.equal(net.embed.weight, net.head.weight)


def test_init_from_converts_types_and_reads_names_with_wrappers() -> None:
    source = {f"module._orig_mod.{name}": t.half() for name, t in model_tensors(nn.Linear(2, 3)).items()}
    net = nn.Linear(2, 3)
    assert init_from(net, source).taken == ["weight", "bias"]
    assert net.weight.dtype == torch.float32
    assert torch.equal(net.weight.half(), source["module._orig_mod.weight"])


def test_init_from_something_else_altogether_is_an_error() -> None:
    with pytest.raises(CheckpointError, match=r"None of the 2 tensors fits(.|\n)*the model has 0\.weight"):
        init_from(nn.Sequential(nn.Linear(2, 3)), model_tensors(nn.Linear(2, 3)))
