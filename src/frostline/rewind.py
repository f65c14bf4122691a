"""What a step puts back when it is tried again: random numbers, and what a forward pass wrote."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Sequence
from copy import deepcopy
from fnmatch import fnmatch
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from frostline.ranks import Ranks


class Moment:
    """Where the random numbers stood.

    >>> moment = Moment(torch.device("cpu"))
    >>> before = random.random(), np.random.rand(), torch.rand(())
    >>> moment.restore()
    >>> before == (random.random(), np.random.rand(), torch.rand(()))
    True
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._python, self._numpy = random.getstate(), np.random.get_state(legacy=False)
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if self._device is not None else None

    def restore(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._cpu)
        if self._device is not None and self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)


class Buffers:
    """The buffers that a forward pass writes, as they were before the step. The first step shows which.

    Their values do: batch norm writes its statistics where no version counter of torch's sees it. Those that
    begin to move later (a mean after a warm-up, a teacher that began as a copy) are seen by the counter, and
    kept from the step after.
    """

    def __init__(self, model: nn.Module) -> None:
        # places, not tensors: a model may put another tensor under the same name, or the first one
        found = [
            (module, name, buffer)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is None or buffer.layout is torch.strided
        ]
        self._places = [(module._buffers, name) for module, name, _ in found]
        self._of_norms = [module if isinstance(module, _NormBase) else None for module, *_ in found]
        self._caches = {
            (id(module._buffers), name)
            for module in model.modules()
            for name in module._non_persistent_buffers_set
        }
        self._there = [buffer is not None and bool(buffer.numel()) for *_, buffer in found]
        self._kept: list[Tensor | None] = []
        self._looked = False
        self._resting: list[tuple[dict[str, Tensor | None], str, bool, Tensor | None, int]] = []
        """Those that no pass has moved: where they are, whether always, the tensor and its version."""

    def tensors(self) -> list[Tensor]:
        """Those that there were from the beginning: what every rank has."""
        return [now for now, there in zip(self._now(), self._there, strict=True) if there and now is not None]

    def _now(self) -> list[Tensor | None]:
        return [buffers[name] for buffers, name in self._places]

    @torch.no_grad()
    def keep(self) -> None:
        now = self._now()
        if len(self._kept) != len(now) or not all(map(_alike, self._kept, now)):
            self._kept = [None if buffer is None else buffer.clone() for buffer in now]
        elif tensors := [buffer for buffer in now if buffer is not None]:
            torch._foreach_copy_([kept for kept in self._kept if kept is not None], tensors)

    def look(self, ranks: Ranks) -> None:
        """After the first pass: those that it left alone, on every rank, need no care until they move.

        Statistics of a norm in train mode always do: its branch may be one that the first pass did not take.
        Of later passes one process looks here; several tell each other what is `stirred`.
        """
        if self._looked:
            if ranks.world == 1:
                self.watch(self.stirred())
            return
        pairs = zip(self._now(), self._kept, self._of_norms, strict=True)
        told = ranks.gather(
            [
                int((norm is not None and norm.training and now is not None) or not _equal(now, before))
                for now, before, norm in pairs
            ]
        )
        moved = [any(flags) for flags in zip(*told, strict=True)]
        found = [*zip(self._places, self._there, self._kept, moved, strict=True)]
        self._places = [place for place, *_, wrote in found if wrote]
        self._there = [there for _, there, _, wrote in found if wrote]
        self._kept = [kept for *_, kept, wrote in found if wrote]
        self._resting = [
            (*place, there, now := place[0][place[1]], _version(now))
            for place, there, _, wrote in found
            if not wrote
        ]
        self._looked = True

    def stirred(self) -> list[int]:
        """Which of those that no pass had moved this one did, with the others of their modules."""
        modules = {
            id(buffers)
            for buffers, name, _, before, version in self._resting
            if name in buffers and ((now := buffers[name]) is not before or _version(now) != version)
        }
        return [
            i
            for i, (buffers, name, *_) in enumerate(self._resting if modules else ())
            if id(buffers) in modules and name in buffers  # a model may have deleted it
        ]

    @torch.no_grad()
    def watch(self, which: Collection[int]) -> None:
        """Keep these too; what they were before this step is not known any more."""
        for i in sorted(which):
            buffers, name, there, _, _ = self._resting[i]
            now = buffers[name]
            self._places.append((buffers, name))
            self._there.append(there)
            self._kept.append(None if now is None else now.clone())
        if which:
            self._resting = [one for i, one in enumerate(self._resting) if i not in which]

    @torch.no_grad()
    def restore(self, where: Tensor | None = None) -> None:
        """As they were; where: 1.0 to put them back, 0.0 to leave them, without looking.

        One that got another shape is looked for: it is replaced as a whole, or left. One that is not
        persistent is left: it is a cache that grew, and the model may know its length from elsewhere.
        """
        for (buffers, name), kept in zip(self._places, self._kept, strict=True):
            now = buffers[name]
            if now is not None and not _alike(now, kept) and (id(buffers), name) in self._caches:
                continue
            if kept is None or now is None or not _alike(now, kept):
                if now is not kept and (where is None or bool(where)):
                    buffers[name] = None if kept is None else kept.clone()
            elif where is not None:
                now.copy_(torch.where(where.bool(), kept, now))
            elif torch._debug_has_internal_overlap(now) != 1:
                now.copy_(kept)
            elif not torch.equal(now, kept):  # one that was expanded takes no copy
                buffers[name] = kept.clone()


class Kept(Buffers):
    """The buffers, and parameters that follow others instead of training, as an EMA teacher does.

    They are what `unused` names and the optimiser does not train. A first pass would not show them: a teacher
    that begins as a copy of its student does not move in it. And weights that a forward pass writes: those a
    rehearsal shows.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, unused: Sequence[str]) -> None:
        super().__init__(model)
        trained = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        self.followers: list[Tensor] = [
            parameter
            for name, parameter in model.named_parameters()
            if id(parameter) not in trained and any(fnmatch(name, pattern) for pattern in unused)
        ]
        self._before: list[Tensor] = []

    def keep(self) -> None:
        super().keep()
        with torch.no_grad():
            if len(self._before) != len(self.followers):
                self._before = [follower.clone() for follower in self.followers]
            elif self.followers:
                torch._foreach_copy_(self._before, self.followers)

    def follow(self, weights: Sequence[Tensor]) -> None:
        """Keep these too; they are as they were before the step."""
        known = {id(follower) for follower in self.followers}
        self.followers += [weight for weight in weights if id(weight) not in known]
        self.keep()

    def restore(self, where: Tensor | None = None) -> None:
        super().restore(where)
        with torch.no_grad():
            for follower, before in zip(self.followers, self._before, strict=True):
                follower.copy_(before if where is None else torch.where(where.bool(), before, follower))


class Weights:
    """Parameters that train, as they were. A forward pass may write them, as one that normalises them does.

    On the host: a rehearsal is to show what fits into a device's memory. Not of more than a few GB, which
    would take long, and memory that may not be there.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        few = parameters if sum(parameter.nbytes for parameter in parameters) <= _COPIED else ()
        self._kept = [(parameter, parameter.detach().to("cpu", copy=True)) for parameter in few]

    @torch.no_grad()
    def restore(self, ranks: Ranks) -> list[Tensor]:
        """As they were; → those that were not, on some rank."""
        wrote = [i for i, (now, before) in enumerate(self._kept) if not torch.equal(now.cpu(), before)]
        moved = [self._kept[i] for i in sorted({i for told in ranks.gather(wrote) for i in told})]
        for now, before in moved:
            now.copy_(before)
        return [now for now, _ in moved]


class Attributes:
    """What a model's modules hold in attributes of Python, as it was: flags, counters, caches, hooks.

    >>> model = nn.Identity()
    >>> model.ready, model.seen = False, [1]
    >>> kept = Attributes(model)
    >>> model.ready, model.more = True, 3
    >>> model.seen.append(2)
    >>> kept.restore()
    >>> model.ready, model.seen, hasattr(model, "more")
    (False, [1], False)

    A flag that says what a buffer holds has to go back with it. What is in lists and dicts goes back, what is
    within that does not; nor do parts and parameters: one that comes with the first pass is to be seen.
    """

    def __init__(self, model: nn.Module) -> None:
        self._kept = [
            (module.__dict__, {n: (v, _inside(v)) for n, v in module.__dict__.items() if n not in _STRUCTURE})
            for module in model.modules()
        ]

    def restore(self) -> None:
        for now, before in self._kept:
            for name in [name for name in now if name not in before and name not in _STRUCTURE]:
                del now[name]
            for name, (value, inside) in before.items():
                now[name] = value
                if inside is not None:
                    value.clear()
                    (value.extend if isinstance(value, list | deque) else value.update)(inside)


class Extra:
    """What the model's modules give as their extra state, as it was: counters, generators of their own."""

    def __init__(self, model: nn.Module) -> None:
        own = nn.Module.get_extra_state, nn.Module.set_extra_state
        self._kept = [
            (module, deepcopy(module.get_extra_state()))
            for module in model.modules()
            if type(module).get_extra_state is not own[0] and type(module).set_extra_state is not own[1]
        ]

    def restore(self) -> None:
        for module, kept in self._kept:
            module.set_extra_state(deepcopy(kept))


_STRUCTURE = ("_modules", "_parameters")
_COPIED = 4 << 30


def _inside(value: Any) -> Any:
    """The contents of what can be emptied and filled again; None for anything else."""
    plain = type(value) in (dict, OrderedDict, defaultdict, list, set, deque)
    return value.copy() if plain else None


def _version(tensor: Tensor | None) -> int:
    """How often torch has written into it; inference tensors do not count."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def _alike(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether one can be copied into the other."""
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and one.dtype == other.dtype


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)
