"""An optimiser's state under the names of its parameters, and back, bit for bit.

torch numbers the parameters of a state_dict; a parameter more or less would shift every momentum after it in
silence. Here names decide, and whatever differs is listed before anything is changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from frostline.errors import CheckpointError, UsageError
from frostline.trainer.differences import some
from frostline.trainer.plain import Plain, whole
from frostline.trainer.wrapping import parameter_names
from frostline.update import BUILT, laid_out

_HOW = ("foreach", "fused", "capturable", "differentiable")
"""How a step is computed, not what: these stay as the optimiser of now has them, maybe on another device."""
_PARTS = ("class", "groups", "shapes", "state", "other", "more", "on_host")
_FLAT = ("LBFGS",)
"""Optimisers that lay all parameters end to end, so that their order is part of the state."""
_BEGINS = (
    (torch.optim.Adam, "amsgrad", "max_exp_avg_sq"),
    (torch.optim.RMSprop, "centered", "grad_avg"),
    (torch.optim.RMSprop, "momentum", "momentum_buffer"),
)
"""Options that need a state, which torch makes in a parameter's first step only; it begins with zeros."""


def optimizer_tensors(optimizer: Optimizer, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and JSON for a checkpoint. The tensors are the optimiser's own, not copies.

    >>> net = nn.Linear(2, 1, bias=False)
    >>> adam = torch.optim.Adam(net.parameters(), lr=0.1)
    >>> net(torch.ones(1, 2)).sum().backward(); adam.step()
    >>> tensors, about = optimizer_tensors(adam, net)
    >>> sorted(tensors), about["groups"][0]["options"]["lr"]
    (['weight/exp_avg', 'weight/exp_avg_sq', 'weight/step'], 0.1)
    """
    groups = _names(optimizer, model)
    built = BUILT.get(optimizer, [])
    state = optimizer.state_dict()
    if not {"state", "param_groups"} <= set(state):
        raise UsageError(
            f"{_class(optimizer)}.state_dict() has no 'state' and 'param_groups'; it cannot be saved."
        )
    by_number = {
        i: (name, parameter)
        for numbered, named, now in zip(state["param_groups"], groups, optimizer.param_groups, strict=True)
        for i, name, parameter in zip(numbered["params"], named, now["params"], strict=True)
    }
    plain = Plain()
    states, on_host = {}, []
    for i, values in state["state"].items():
        if i in by_number:
            name, parameter = by_number[i]
            own = Plain()
            states[name] = own.of(values, name)
            on_host += _on_host(own.tensors, parameter)
            plain.tensors |= own.tensors
            plain.problems += own.problems
    about = {
        "class": _class(optimizer),
        "groups": [
            {
                "params": names,
                "options": plain.of(_options(group), f"group {i}"),
                "built": plain.of(built[i] if i < len(built) else {}, f"built {i}"),
            }
            for i, (group, names) in enumerate(zip(state["param_groups"], groups, strict=True))
        ],
        "shapes": {name: list(parameter.shape) for name, parameter in by_number.values()},
        "state": states,
        "other": plain.of({k: v for k, v in state["state"].items() if k not in by_number}, "other state"),
        "more": plain.of({k: v for k, v in state.items() if k not in ("state", "param_groups")}, "more"),
        "on_host": on_host,
    }
    plain.refuse(f"The state of {_class(optimizer)} cannot be kept in a checkpoint:")
    return plain.tensors, about


def _on_host(tensors: Mapping[str, Tensor], parameter: Tensor) -> list[str]:
    """State that the optimiser keeps in memory although its parameter is on a device (a counter, mostly)."""
    if parameter.device.type == "cpu":
        return []
    return [name for name, tensor in tensors.items() if tensor.device.type == "cpu"]


def _class(optimizer: Optimizer) -> str:
    return type(optimizer).__qualname__


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def _parameters(optimizer: Optimizer, model: nn.Module) -> list[tuple[Tensor, str]]:
    names = parameter_names(model)
    return [(p, names[p]) for group in optimizer.param_groups for p in group["params"]]


def _names(optimizer: Optimizer, model: nn.Module) -> list[list[str]]:
    """The parameters of each group by name; those that the model does not have are an error."""
    names = parameter_names(model)
    problems = [
        f"parameter {i} of group {g}, {list(p.shape)}"
        for g, group in enumerate(optimizer.param_groups)
        for i, p in enumerate(group["params"])
        if p not in names
    ]
    if problems:
        raise UsageError(
            f"{_class(optimizer)} trains parameters that the model does not have, so they have no name in a "
            f"checkpoint. Make them part of the model (an attribute of it), or leave them out:",
            problems=problems,
        )
    return [[names[p] for p in group["params"]] for group in optimizer.param_groups]


def load_optimizer(
    optimizer: Optimizer, model: nn.Module, tensors: Mapping[str, Tensor], about: Mapping[str, Any]
) -> None:
    """Put a checkpoint's state into the optimiser; `about` is the JSON of `optimizer_tensors`.

    Unless class, groups, names and shapes are the same, nothing is changed and the error lists all that
    differs. Learning rates and the other options become those of the checkpoint, which a step or a schedule
    may have changed; except those that the optimiser is given otherwise now than when it was saved.
    """
    groups = _names(optimizer, model)
    lacks = [f"the part {key!r} is missing" for key in _PARTS if key not in about]
    problems = lacks or _differences(optimizer, model, groups, about)
    if problems:
        raise CheckpointError(
            "The checkpoint's optimiser state does not fit this optimiser. Go on with the one it was trained "
            "with, or begin a new run with its weights: `--init-from RUN --out NEW`. What differs:",
            problems=problems,
        )
    numbers = {name: i for i, name in enumerate(name for names in groups for name in names)}
    state = {numbers[name]: whole(value, tensors) for name, value in about["state"].items()}
    other, more = whole(about["other"], tensors), whole(about["more"], tensors)
    saved = [whole(group["options"], tensors) for group in about["groups"]]
    built = [whole(group.get("built", {}), tensors) for group in about["groups"]]
    options = [
        _as_now(_options(now), {**then, **_changed(_options(now), given)})
        for now, then, given in zip(optimizer.param_groups, saved, built, strict=True)
    ]
    packed = [
        {**values, "params": [numbers[name] for name in names]}
        for values, names in zip(options, groups, strict=True)
    ]
    optimizer.load_state_dict({**more, "state": {**state, **other}, "param_groups": packed})
    for group, values in zip(optimizer.param_groups, options, strict=True):
        # load_state_dict has copied these; a captured graph knows the ones that were there
        group.update({k: v for k, v in values.items() if isinstance(v, Tensor)})
    on_host = set(about["on_host"])
    for parameter, name in _parameters(optimizer, model):
        if name in about["state"]:
            now = optimizer.state[parameter]
            settled = _settled(now, state[numbers[name]], name, on_host)
            optimizer.state[parameter] = {key: _laid_out(v, parameter) for key, v in settled.items()}
    _begin(optimizer)


def _laid_out(value: Any, parameter: Tensor) -> Any:
    """In memory as the parameter is: a file holds no strides, and fused kernels go by those of the parameter.

    With others they would take momentum for that of another weight, in silence (channels_last, `.t()`).
    """
    fits = isinstance(value, Tensor) and value.shape == parameter.shape
    return laid_out(value, parameter) if fits else value


def _differences(
    optimizer: Optimizer, model: nn.Module, groups: list[list[str]], about: Mapping[str, Any]
) -> list[str]:
    problems = []
    if about["class"] != _class(optimizer):
        problems.append(f"it is that of {about['class']}; this is {_class(optimizer)}")
    saved = [group["params"] for group in about["groups"]]
    if len(saved) != len(groups):
        problems.append(f"{len(saved)} groups of parameters in the checkpoint, {len(groups)} here")
    here, there = _group_of(groups), _group_of(saved)
    problems += [f"{name}: not in the checkpoint" for name in here if name not in there]
    problems += [f"{name}: in the checkpoint, but not trained here" for name in there if name not in here]
    problems += [
        f"{name}: group {there[name]} in the checkpoint, {here[name]} here"
        for name in here
        if name in there and here[name] != there[name]
    ]
    shapes = about["shapes"]
    problems += [
        f"{name}: {shapes[name]} in the checkpoint, {list(p.shape)} here"
        for p, name in _parameters(optimizer, model)
        if name in shapes and shapes[name] != list(p.shape)
    ]
    if not problems and _class(optimizer) in _FLAT and saved != groups:
        problems.append(f"{_class(optimizer)} needs its parameters in the same order: {some(saved[0])}")
    return problems


def _group_of(groups: Iterable[Iterable[str]]) -> dict[str, int]:
    return {name: i for i, names in enumerate(groups) for name in names}


def _changed(now: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Options that are given otherwise now. A checkpoint that does not tell what was given has none."""
    return {k: v for k, v in now.items() if k in given and not _same(v, given[k])}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one.detach().cpu(), other.detach().to("cpu", one.dtype))
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return False
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other)


def _begin(optimizer: Optimizer) -> None:
    """State for options that are new in a run that goes on."""
    wanted = [(option, name) for kind, option, name in _BEGINS if isinstance(optimizer, kind)]
    for group in optimizer.param_groups:
        names = [name for option, name in wanted if group.get(option)]
        for parameter in group["params"]:
            for name in names if optimizer.state.get(parameter) else ():
                optimizer.state[parameter].setdefault(name, torch.zeros_like(parameter))


def _as_now(now: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """The saved options in the form that the optimiser of now has them: a rate may be a number or a tensor,
    which is filled in place (a captured graph holds its address)."""
    out = {**now, **saved, **{k: now[k] for k in _HOW if k in now}}
    for key, mine in now.items():
        value = out[key]
        if isinstance(mine, Tensor) and value is not mine:
            with torch.no_grad():
                mine.copy_(value if isinstance(value, Tensor) else torch.as_tensor(value))
            out[key] = mine
        elif isinstance(value, Tensor) and not isinstance(mine, Tensor):
            out[key] = value.item()
    return out


def _settled(now: Any, saved: Any, place: str, on_host: set[str]) -> Any:
    """What load_state_dict made of the state, with the types that were saved (it casts to the parameter's),
    in memory of its own: a step must not change the checkpoint it was loaded from."""
    if isinstance(saved, str):  # load_state_dict takes a text for a list of letters
        return saved
    if isinstance(now, dict):
        return {k: _settled(v, saved[k], f"{place}/{k}", on_host) if k in saved else v
                for k, v in now.items()}  # fmt: skip
    if isinstance(now, list | tuple) and isinstance(saved, list | tuple) and len(now) == len(saved):
        each = [_settled(v, s, f"{place}/{i}", on_host)
                for i, (v, s) in enumerate(zip(now, saved, strict=True))]  # fmt: skip
        return each if isinstance(now, list) else tuple(each)
    if not isinstance(now, Tensor) or not isinstance(saved, Tensor):
        return now
    if now.dtype != saved.dtype and not place.endswith("/step"):
        now = saved.to(now.device)
    if place in on_host and not place.endswith("/step"):
        now = now.cpu()
    return now.clone() if now.data_ptr() == saved.data_ptr() and now.numel() else now
