"""A network by its content: every parameter and buffer, and the structure that they are used in.

>>> import torch
>>> net = torch.nn.Linear(2, 2)
>>> before = weights_of(net)
>>> with torch.no_grad():
...     _ = net.bias[0].add_(1e-3)
>>> before.differing(weights_of(net))
['bias']

Where the tensors lie, whether they require gradients and train or eval mode do not count.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from frostline.errors import UsageError
from frostline.fingerprint import origin
from frostline.fingerprint.values import Tree, digest, tree

if TYPE_CHECKING:
    import torch

    from frostline.fingerprint.code import Code
    from frostline.fingerprint.walk import Walk

_PIECE = 64 << 20
"""Bytes brought from a device at a time."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_PASSING = {
    *("_name_or_path", "transformers_version", "_commit_hash", "_diffusers_version", "_use_default_values")
}
"""Entries of a config that say where it came from, not what it does."""
_ASIDE = {
    *("_is_hf_initialized", "_hf_hook", "_old_forward", "all_tied_weights_keys"),
    *("default_cfg", "pretrained_cfg", "feature_info"),
}
"""Attributes by which transformers and timm keep their books: nothing is computed with them."""
_HOOKED = {"_hf_hook", "_old_forward"}
"""With these, `forward` is accelerate's own: it brings tensors to a device and calls the old one."""
_DEEPEST = 4
"""Dicts and objects inside each other that are looked into: deeper ones are no settings."""


@dataclass(frozen=True)
class Weights:
    """What a network computes with.

    digest:    of names, shapes, dtypes and bytes of all tensors.  structure: of classes and attributes.
    of_tensor: a digest for each tensor.  code: of the user's own classes and functions in it.
    """

    digest: str
    tensors: int
    bytes: int
    structure: str
    code: Code = field(repr=False)
    of_tensor: dict[str, str] = field(repr=False)

    def differing(self, other: Weights) -> list[str]:
        """Names of the tensors that differ, or that only one of the two has."""
        names = {*self.of_tensor, *other.of_tensor}
        return sorted(n for n in names if self.of_tensor.get(n) != other.of_tensor.get(n))


def weights_of(module: torch.nn.Module, *, vouched: bool = False) -> Weights:
    """The content of a network. vouched: its own classes count by name, not by source.

    >>> import torch
    >>> weights_of(torch.nn.Linear(3, 2)).tensors
    2
    """
    from frostline.fingerprint.code import summary
    from frostline.fingerprint.walk import Walk

    module = _unwrapped(module)
    named = dict(_tensors(module))
    empty = [name for name, value in named.items() if value.is_meta]
    if empty:
        raise UsageError(
            f"A {type(module).__qualname__} has no fingerprint: {len(empty)} of its {len(named)} tensors "
            "have no content (device 'meta'), first " + ", ".join(empty[:3]) + ". Load the weights first."
        )
    of_tensor = {name: tensor_digest(value) for name, value in named.items()}
    walk = Walk(vouched=vouched)
    structure = _structure(module, walk, type(module).__qualname__)
    walk.finish(f"a network of class {type(module).__qualname__}")
    return Weights(
        digest=digest(of_tensor),
        tensors=len(named),
        bytes=sum(value.numel() * value.element_size() for value in named.values()),
        structure=digest(structure),
        code=summary(walk, {"network": type(module).__qualname__}),
        of_tensor=of_tensor,
    )


def network(module: torch.nn.Module, walk: Walk, where: str) -> Tree:
    """A network met on a walk. Hashed once a walk, however many functions use it."""
    module = _unwrapped(module)
    for known, found in walk.hashed:
        if known is module:
            return found
    named = dict(_tensors(module))
    if any(value.is_meta for value in named.values()):
        return walk.problem(f"{where} is a network without content (device 'meta'); load its weights first")
    tensors = {name: tensor_digest(value) for name, value in named.items()}
    found = {"weights": digest(tensors), "structure": digest(_structure(module, walk, where))}
    walk.hashed.append((module, found))
    return found


def _unwrapped(module: Any) -> torch.nn.Module:
    """Without `torch.compile`, which counts as an option of its Stage."""
    inner: torch.nn.Module = module.__dict__.get("_modules", {}).get("_orig_mod", module)
    return inner


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers, shared ones under each of their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


# --- bytes --------------------------------------------------------------------------------------------


def tensor_digest(value: torch.Tensor) -> str:
    """Dtype, shape and bytes. A tensor on a device is brought over in pieces of bounded size.

    >>> import torch
    >>> tensor_digest(torch.zeros(2)) == tensor_digest(torch.zeros(2, dtype=torch.bfloat16))
    False
    """
    import torch

    from frostline.flat import flat_bytes

    state = xxhash.xxh3_128(f"{value.dtype} {list(value.shape)} ".encode())
    with torch.no_grad():
        for part in _dense(value.detach()):
            line = flat_bytes(part)
            for start in range(0, line.numel(), _PIECE):
                state.update(line[start : start + _PIECE].cpu().numpy().data)
    return str(state.hexdigest())


def _dense(value: torch.Tensor) -> list[torch.Tensor]:
    import torch

    if value.layout == torch.strided:
        return [value.dequantize()] if value.is_quantized else [value]
    sparse = value.to_sparse(layout=torch.sparse_coo).coalesce()
    return [sparse.indices(), sparse.values()]


# --- structure ----------------------------------------------------------------------------------------


def _structure(module: torch.nn.Module, walk: Walk, where: str) -> Tree:
    """Class, attributes and hooks of each part, by its name in the network."""
    out: dict[str, Tree] = {}
    for name, part in module.named_modules(remove_duplicate=False):
        at = f"{where}.{name}" if name else where
        out[name] = {"class": walk.cls(type(part)), **_attributes(part, walk, at)}
        hooks = [tree(hook, walk, f"a hook of {at}") for kind in _HOOKS for hook in _hooks(part, kind)]
        if hooks:
            out[name]["hooks"] = hooks
        if type(part).__module__.startswith("torch.jit"):
            out[name]["script"] = str(getattr(part, "code", ""))
    return out


def _hooks(module: torch.nn.Module, kind: str) -> list[Any]:
    return list(getattr(module, kind, {}).values())


def _attributes(module: torch.nn.Module, walk: Walk, where: str) -> dict[str, Tree]:
    own = origin.kind_of(type(module).__module__) == "own"
    found = {}
    aside = _bookkeeping() | ({"forward"} if vars(module).keys() >= _HOOKED else set())
    for name, value in sorted(vars(module).items()):
        if name in aside:
            continue
        counted = value if own else _counted(value, private=name.startswith("_"))
        if _is_config(name, value):
            found[name] = _config(value, walk, f"{where}.{name}")
        elif counted is not None or value is None:
            found[name] = tree(counted, walk, f"{where}.{name}")
    return {"attributes": found} if found else {}


def _bookkeeping() -> set[str]:
    import torch

    return {*vars(torch.nn.Module()), *_ASIDE}


def _counted(value: Any, *, private: bool) -> Any:
    """What counts of an attribute in a library's own class, or None; of a list, the parts that do."""
    deep = 0 if private else _DEEPEST
    if _simple(value, deep):
        return value
    parts = value if isinstance(value, list | tuple) else ()
    return [part for part in parts if _simple(part, deep)] or None


def _simple(value: Any, deep: int) -> bool:
    """Whether something in a library's own class counts. It may hold caches besides, which change while it
    runs: dicts and objects that hold arrays, and private ones.

    deep: how many dicts or objects inside each other are looked into.
    """
    import torch

    if isinstance(value, tuple | list):
        return all(_simple(part, deep) for part in value)
    if isinstance(value, functools.partial):
        return _simple([value.func, *value.args, *value.keywords.values()], deep)
    kinds = (bool, int, float, complex, str, Enum, np.ndarray, np.generic, torch.dtype, torch.Tensor)
    code = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, torch.nn.Module)
    if value is None or isinstance(value, (*kinds, *code)):
        return True
    if origin.kind_of(type(value).__module__) == "own":
        return True
    parts = _parts(value) if deep else None
    return parts is not None and not any(
        isinstance(part, np.ndarray | torch.Tensor) or not _simple(part, deep - 1) for part in parts
    )


def _parts(value: Any) -> list[Any] | None:
    """What a dict, a set or an object holds; None for an empty cache, and for what cannot be looked into."""
    if isinstance(value, Mapping):
        return [*value, *value.values()] or None
    if isinstance(value, set | frozenset):
        return [*value] or None
    plain = hasattr(value, "__dict__") and not isinstance(value, types.ModuleType)
    return [*vars(value).values()] if plain else None


def _is_config(name: str, value: Any) -> bool:
    return name == "_internal_dict" or callable(getattr(value, "to_dict", None))  # diffusers; transformers


def _config(value: Any, walk: Walk, where: str) -> Tree:
    given = value.to_dict() if hasattr(value, "to_dict") else value
    shown = {str(k): v for k, v in dict(given).items() if k not in _PASSING}
    attention = getattr(value, "_attn_implementation", None)  # chosen on loading, absent from to_dict()
    if isinstance(attention, str):
        shown["_attn_implementation"] = attention
    return {"config": tree(shown, walk, where)}
