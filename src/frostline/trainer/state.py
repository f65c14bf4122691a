"""A model's state as named tensors and JSON, and back. (Optimisers and generators: beside this file.)

Names are those of the model itself: whatever torch.compile and DDP put around it leaves no trace in them, so
a compiled run goes on uncompiled, one process as several, and the other way round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from frostline.errors import CheckpointError, UsageError
from frostline.flat import flat_bytes
from frostline.trainer.differences import misfit, some, unexpected
from frostline.trainer.generators import restore_rng, rng_tensors
from frostline.trainer.optimizers import load_optimizer, optimizer_tensors
from frostline.trainer.plain import Plain, whole
from frostline.trainer.wrapping import clean, unwrapped
from frostline.wording import many

__all__ = [
    "Taken", "init_from", "load_model", "load_optimizer", "model_state", "model_tensors", "optimizer_tensors",
    "restore_rng", "rng_tensors", "unwrapped",
]  # fmt: skip

Groups = dict[str, dict[str, Tensor]]


def model_state(model: nn.Module) -> tuple[Groups, dict[str, Any]]:
    """Groups of tensors for a checkpoint, and JSON that belongs to them.

    >>> net = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 4, bias=False))
    >>> net[1].weight = net[0].weight
    >>> groups, about = model_state(net)
    >>> list(groups["model"]), about["shared"]
    (['0.weight'], {'1.weight': '0.weight'})

    "model" is the state_dict, each tensor once; "buffers" are those that state_dict leaves out
    (persistent=False) and "extra" what get_extra_state gave, so that going on is exact. The tensors are the
    model's own, not copies.
    """
    named, extra = _named(model)
    shared = _shared(named)
    plain = Plain()
    about = {"shared": shared, "extra": {name: plain.of(value, name) for name, value in extra.items()}}
    plain.refuse("What get_extra_state gives cannot be kept in a checkpoint:")
    tensors = {name: t.detach() for name, t in named.items() if name not in shared}
    buffers = {name: t.detach() for name, t in _loose(model).items() if t is not None}
    return {"model": tensors, "buffers": buffers, "extra": plain.tensors}, about


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's own tensors, each once, under names without traces of torch.compile and DDP."""
    return model_state(model)[0]["model"]


def load_model(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    *,
    about: Mapping[str, Any] | None = None,
    buffers: Mapping[str, Tensor] | None = None,
    extra: Mapping[str, Tensor] | None = None,
) -> None:
    """Put a checkpoint's tensors into the model. First every name, shape and type is compared: unless all
    fit, nothing is changed and the error lists every difference.

    `load_model(model, groups["model"], buffers=groups["buffers"], extra=groups["extra"], about=about)` undoes
    `model_state`. Without `about`, what is one tensor here is taken to be one there. buffers=None leaves
    those that state_dict leaves out as they are; their shapes may differ, since such a buffer is often a
    cache that grows.
    """
    named, extras = _named(model)
    shared: Mapping[str, str] = _shared(named) if about is None else about.get("shared", {})
    sources = {name: name if name in tensors else shared.get(name, "") for name in named}
    vacant = _vacant(unwrapped(model))
    late = {name: tensor for name, tensor in tensors.items() if name in vacant}
    problems = _compare(named, {n: t for n, t in tensors.items() if n not in late}, sources, shared)
    kept = (about or {}).get("extra", {})
    problems += [f"{name}: not in the checkpoint" for name in extras if name not in kept]
    problems += unexpected(extras, kept)
    if buffers is not None:
        loose = _loose(model)
        absent = [name for name, t in loose.items() if t is not None and name not in buffers]
        problems += [f"{name}: not in the checkpoint" for name in absent]
        problems += unexpected(loose, buffers)
    if problems:
        raise CheckpointError("The checkpoint does not fit this model:", problems=problems)
    values: dict[str, Any] = {name: tensors[source] for name, source in sources.items()}
    values |= {name: whole(value, extra or {}) for name, value in kept.items()}
    root = unwrapped(model)
    root.load_state_dict({real: values[name] for name, real in _real_names(root).items()})
    near = next((t.device for t in root.parameters()), torch.device("cpu"))
    for name, tensor in late.items():
        module, key = vacant[name]
        module._buffers[key] = tensor.detach().clone().to(near)
    _load_buffers(root, buffers or {})


def _compare(
    named: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    sources: Mapping[str, str],
    shared: Mapping[str, str],
) -> list[str]:
    problems = []
    for name, tensor in named.items():
        if sources[name] not in tensors:
            problems.append(f"{name}: not in the checkpoint")
        elif wrong := misfit(tensor, tensors[sources[name]]):
            problems.append(f"{name}: {wrong}")
    problems += unexpected(named, tensors)
    here = {name: _place(t) for name, t in named.items()}
    for name, other in shared.items():
        if name in named and other in named and here[name] != here[other]:
            problems.append(f"{name}: one tensor with {other} in the checkpoint, two here")
    for name, other in _shared(named).items():
        one, two = tensors.get(sources[name]), tensors.get(sources[other])
        if one is not None and two is not None and not _equal(one, two):
            problems.append(f"{name}: one tensor with {other} here, two different ones in the checkpoint")
    return problems


def _equal(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, so that NaN equals itself."""
    if a is b:
        return True
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(flat_bytes(a), flat_bytes(b))


def _real_names(root: nn.Module) -> dict[str, str]:
    """{name without wrappers: name in state_dict}."""
    out: dict[str, str] = {}
    for real in root.state_dict(keep_vars=True):
        name = clean(real)
        if name in out:
            raise UsageError(f"Two entries of the model, {out[name]} and {real}, are both called {name}.")
        out[name] = real
    return out


def _named(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors of the state_dict under clean names; what stands in it besides (extra state)."""
    root = unwrapped(model)
    state = root.state_dict(keep_vars=True)
    refuse_lazy(root)
    found = {name: state[real] for name, real in _real_names(root).items()}
    is_extra = {name: name.rpartition(".")[2] == "_extra_state" for name in found}
    tensors = {n: t for n, t in found.items() if isinstance(t, Tensor) and not is_extra[n]}
    return tensors, {n: v for n, v in found.items() if n not in tensors}


def refuse_lazy(model: nn.Module) -> None:
    """UsageError for a model that takes its shapes from a first batch: a checkpoint could not be compared."""
    named = [*model.named_parameters(), *model.named_buffers()]
    if lazy := [clean(name) for name, tensor in named if nn.parameter.is_lazy(tensor)]:
        raise UsageError(
            f"The model has lazy modules without a shape yet: {some(lazy)}. Give them their sizes, or put "
            f"one batch through the model first, where it is made: `model(torch.zeros(1, …)); return model`."
        )


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for two names of one tensor; an empty one has no place, and is only itself."""
    if not tensor.numel() or tensor.is_meta or tensor.layout is not torch.strided:
        return (id(tensor),)
    return (str(tensor.device), tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def _shared(named: Mapping[str, Tensor]) -> dict[str, str]:
    """{later name: first name} of tensors that have several."""
    first: dict[tuple[Any, ...], str] = {}
    out = {}
    for name, tensor in named.items():
        before = first.setdefault(_place(tensor), name)
        if before != name:
            out[name] = before
    return out


# buffers that state_dict leaves out


def _loose_places(root: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    for prefix, module in root.named_modules():
        for key in sorted(module._non_persistent_buffers_set):
            yield clean(f"{prefix}.{key}" if prefix else key), module, key


def _loose(model: nn.Module) -> dict[str, Tensor | None]:
    """Without sparse ones, which no file holds: the graph of a network on graphs is made with the model."""
    found = {name: module._buffers.get(key) for name, module, key in _loose_places(unwrapped(model))}
    return {name: t for name, t in found.items() if t is None or t.layout is torch.strided}


def _vacant(root: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Buffers without a tensor yet, which a pass may give them. A norm's stay so: it has no statistics."""
    return {
        clean(f"{prefix}.{key}" if prefix else key): (module, key)
        for prefix, module in root.named_modules()
        if not isinstance(module, _NormBase)
        for key, buffer in module._buffers.items()
        if buffer is None and key not in module._non_persistent_buffers_set
    }


def _load_buffers(root: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """In place where the shape is the same: a captured graph holds the address."""
    near = next((t.device for t in root.parameters()), torch.device("cpu"))
    for name, module, key in list(_loose_places(root)):
        if name not in buffers:
            continue
        there, here = buffers[name], module._buffers.get(key)
        if here is not None and misfit(here, there) is None:
            with torch.no_grad():
                here.copy_(there)
        else:
            module._buffers[key] = there.detach().clone().to(here.device if here is not None else near)


# weights only


@dataclass(frozen=True)
class Taken:
    """What `init_from` did: names that were taken, names of the model that got nothing (with the reason),
    names of the file that were not used."""

    taken: list[str]
    without: dict[str, str] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)

    def told(self) -> str:
        """For people: how many, and which were not taken (20 names of each; the lists have all).

        >>> print(Taken(["a", "b"], {"head.weight": "not in the file"}, ["old.weight"]).told())
        2 tensors taken; 1 of the model not: head.weight (not in the file); not used: old.weight
        """
        parts = [f"{many(len(self.taken), 'tensor')} taken"]
        if self.without:
            left = [f"{name} ({why})" for name, why in self.without.items()]
            parts.append(f"{len(left):,} of the model not: {some(left, 20)}")
        if self.unused:
            parts.append(f"not used: {some(self.unused, 20)}")
        return "; ".join(parts)


def init_from(
    model: nn.Module, tensors: Mapping[str, Tensor], *, shared: Mapping[str, str] | None = None
) -> Taken:
    """Take weights whose name and shape fit (types are converted); says which. Nothing fits: an error.

    `shared` is that of the checkpoint: {name: the name under which its tensor was stored}.
    """
    given = _cleaned(tensors)
    given |= {name: given[other] for name, other in (shared or {}).items() if other in given}
    named, _ = _named(model)
    for name, other in _shared(named).items():  # one tensor of two names needs only one of them
        for missing, there in ((name, other), (other, name)):
            if missing not in given and there in given:
                given[missing] = given[there]
    wrong = {name: _why_not(tensor, given.get(name)) for name, tensor in named.items()}
    taken = [name for name, why in wrong.items() if why is None]
    without = {name: why for name, why in wrong.items() if why is not None}
    unused = [name for name in given if name not in taken]
    if not taken:
        raise CheckpointError(
            f"None of the {many(len(given), 'tensor')} fits this model, nothing was taken. The file has "
            f"{some(unused)}; the model has {some(list(named))}."
        )
    with torch.no_grad():
        for name in taken:
            named[name].copy_(given[name])
    return Taken(taken, without, unused)


def _why_not(here: Tensor, there: Tensor | None) -> str | None:
    return "not in the file" if there is None else misfit(here, there, dtypes=False)


def _cleaned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names without what torch.compile and DDP put in front, in files that were written with it."""
    out = {clean(name): tensor for name, tensor in tensors.items()}
    if out and all(name.startswith("module.") for name in out):
        out = {name.removeprefix("module."): tensor for name, tensor in out.items()}
    return out
