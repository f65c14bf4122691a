"""What is computed from a sample's fields: `Stage`, `lazy` and `Pick`. Nothing here runs anything.

A `Stage` is one named step, `lazy` a network that is loaded when it is needed, `Pick` reads part of a row.

A picked read touches the bytes of its frames and no others: the indices are known before the read, because
they are a function of (seed, epoch, sample key, stage) and of nothing that happens at run time.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from frostline import keyed
from frostline.errors import FrostlineError, UsageError
from frostline.store.field import Field, check_fields

Rows = NDArray[np.int64]
Eval = Literal["spread", "first", "random"]
On = Literal["cpu", "device"]
Precision = Literal["fp32", "bf16", "fp16"]

DEFAULT_CHUNK = 32
"""Samples a call of a device stage that names no batch_size."""


@dataclass(frozen=True, eq=False)
class Lazy:
    """A function and its arguments: what it returns is made at the first `get()`, once, and kept.

    It is made with a seed of its own: weights that are in no file, as a head that a checkpoint lacks, are
    the same in every process, and a store's rows those of one network.
    """

    loader: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    _made: list[Any] = field(default_factory=list, repr=False)
    _lock: Any = field(default_factory=threading.Lock, repr=False)

    @property
    def loaded(self) -> bool:
        return bool(self._made)

    def get(self) -> Any:
        with self._lock:  # two threads that ask at once must not load two networks
            if not self._made:
                with _drawn_alike():
                    self._made.append(self.loader(*self.args, **self.kwargs))
        return self._made[0]

    def __reduce__(self) -> tuple[Any, ...]:
        return (Lazy, (self.loader, self.args, dict(self.kwargs)))


@contextmanager
def _drawn_alike() -> Iterator[None]:
    """torch draws the same here each time, and goes on afterwards as if nothing had been drawn."""
    import torch

    usual, begun = torch.initial_seed(), torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(range(torch.cuda.device_count()) if begun else []):
        torch.default_generator.manual_seed(0)
        torch.cuda.manual_seed_all(0)  # also of cards that the loader is the first to use
        try:
            yield
        finally:
            if not begun:  # then there is no state to put back, only the seed that cards begin with
                torch.cuda.manual_seed_all(usual)


def lazy(loader: Callable[..., Any], *args: Any, **kwargs: Any) -> Lazy:
    """`loader(*args, **kwargs)`, called when its result is first needed: never, when a store has its rows.

    >>> import frostline as fl, torch
    >>> encoder = fl.lazy(torch.nn.Linear, 4, 2)
    >>> encoder.loaded, encoder.get().out_features, encoder.loaded
    (False, 2, True)
    """
    if not callable(loader):
        raise UsageError(
            f"fl.lazy({loader!r}): expected a function that loads something, as in "
            f"fl.lazy(load_encoder, 'weights.safetensors'); got {type(loader).__name__}."
        )
    return Lazy(loader, args, kwargs)


@dataclass(frozen=True, init=False, eq=False)
class Stage:
    """One named step from fields to fields. Pure, unless it is marked `random=True`.

    >>> import frostline as fl, torch
    >>> fl.Stage("features", torch.nn.Linear(4, 2), reads="x", on="device", batch_size=64)
    <Stage features: x → features, on the device, 64 samples a call>

    fn:         a function, callable, nn.Module or `fl.lazy(loader, …)`. On the CPU it gets one sample's
                values; on the device, or with batch_size, tensors `[batch_size, …]` (strings as lists).
    reads:      the fields given to fn, in this order.
    writes:     the fields it returns, a value, or a tuple or dict of several; default: one, called like the
                stage. `{"tokens": fl.Field((None,), "int32")}` also says how they are stored, which
                otherwise the first samples show.
    batch_size: samples a call, always so many (the last call is padded), because a row's bits can differ
                between batch shapes.
    random:     fn is given `rng=` and runs every epoch. For one sample it is a numpy Generator of (seed,
                epoch, sample key, stage); for a chunk it has such a stream for each row: `rng.uniform(3)`,
                `rng.normal(3)`, `rng.integers(0, 2)` are tensors `[batch_size, …]`, `rng[i]` a Generator.
    eval:       what evaluation uses instead of a random fn; without it, evaluation is refused.
    version:    stands for the code in the fingerprint: you say when it changes. For code without source.
    precision:  "bf16" or "fp16": run a network's weights and inputs so. None: as they are.
    compile:    run a network through torch.compile.
    """

    name: str
    fn: Any
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    fields: Mapping[str, Field]
    on: On
    batch_size: int | None
    random: bool
    eval: Callable[..., Any] | None
    version: str | None
    precision: Precision | None
    compile: bool

    def __init__(
        self,
        name: str,
        fn: Any,
        *,
        reads: str | Sequence[str],
        writes: str | Sequence[str] | Mapping[str, Field] | None = None,
        on: On = "cpu",
        batch_size: int | None = None,
        random: bool = False,
        eval: Callable[..., Any] | None = None,
        version: str | None = None,
        precision: Precision | None = None,
        compile: bool = False,
    ) -> None:
        written = name if writes is None else writes
        declared = dict(written) if isinstance(written, Mapping) else {}
        values = {
            "name": name, "fn": fn, "reads": _names(reads), "writes": _names(written), "fields": declared,
            "on": on, "batch_size": batch_size, "random": random, "eval": eval, "version": version,
            "precision": precision, "compile": compile,
        }  # fmt: skip
        for attribute, value in values.items():
            object.__setattr__(self, attribute, value)
        problems = [*self._problems()]
        if problems:
            raise UsageError(f"Stage({name!r}, …) cannot work:", problems=problems)

    def _problems(self) -> list[str]:
        found = []
        if not isinstance(self.name, str) or not self.name:
            found.append(f"its name is {self.name!r}; expected a word such as 'features'")
        if not isinstance(self.fn, Lazy) and not callable(self.fn):
            given = f"{type(self.fn).__name__} {self.fn!r}"
            found.append(f"fn is {given}; expected a function, a module or fl.lazy(loader)")
        for what in ("reads", "writes"):
            names = getattr(self, what)
            wrong = [n for n in names if not isinstance(n, str)]
            if wrong or not names or len(set(names)) < len(names):
                found.append(f"{what} is {names}; name at least one field, each once")
        found += self._option_problems()
        try:
            check_fields({n: self.fields.get(n, Field((), "str")) for n in self.writes})
        except FrostlineError as e:
            found.append(str(e))
        return found or self._call_problems()

    def _option_problems(self) -> list[str]:
        found = []
        for option, among in (("on", get_args(On)), ("precision", (None, *get_args(Precision)))):
            if getattr(self, option) not in among:
                found.append(f"{option} is {getattr(self, option)!r}; one of {', '.join(map(repr, among))}")
        if self.batch_size is not None and (type(self.batch_size) is not int or self.batch_size < 1):
            found.append(f"batch_size is {self.batch_size!r}; a whole number of at least 1")
        if self.eval is not None and not (self.random and callable(self.eval)):
            found.append(
                "eval= is what evaluation uses instead of a random fn: give a function, with random=True"
            )
        if type(self.version) not in (str, NoneType):
            found.append(f"version is {self.version!r}; expected a string such as '2'")
        if self.on == "cpu" and (self.precision or self.compile):
            found.append("precision and compile are for networks: give on='device'")
        return found

    def _call_problems(self) -> list[str]:
        """Whether fn takes that many values; unknown where it has no signature, or is not loaded."""
        if isinstance(self.fn, Lazy):
            return []
        try:
            signature = inspect.signature(getattr(self.fn, "forward", self.fn))
        except (ValueError, TypeError):
            return []
        extra = {"rng": None} if self.random else {}
        try:
            signature.bind(*self.reads, **extra)
        except TypeError as e:
            rng = " and rng=" if self.random else ""
            return [f"fn{signature} cannot be called with {', '.join(self.reads)}{rng}: {e}"]
        return []

    @property
    def chunk(self) -> int | None:
        """Samples a call; None: called with the values of one sample."""
        return self.batch_size or (DEFAULT_CHUNK if self.on == "device" else None)

    def with_options(self, **options: Any) -> Stage:
        """The same stage with other options."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        declared = values.pop("fields")
        if declared:
            values["writes"] = {name: declared[name] for name in self.writes if name in declared}
        return Stage(**(values | options))

    def __repr__(self) -> str:
        where = "" if self.on == "cpu" else ", on the device"
        where += f", {self.chunk} samples a call" if self.chunk else ""
        where += ", random" if self.random else ""
        return f"<Stage {self.name}: {', '.join(self.reads)} → {', '.join(self.writes)}{where}>"


def _names(given: Any) -> tuple[Any, ...]:
    several = isinstance(given, Iterable) and not isinstance(given, str | bytes)
    return tuple(given) if several else (given,)


@dataclass(frozen=True, init=False)
class Pick:
    """n of the entries along the first dimension of a field, the same for all its fields.

    >>> Pick("features", n=4).indices(0, 0, ["clip-7"], [24], train=False)
    array([[ 0,  8, 15, 23]])

    In training they are drawn at random without replacement, in ascending order, anew each epoch. In
    evaluation: "spread" evenly over the whole length with both ends (n=1: the middle), "first" n, or
    "random" as in training.
    """

    fields: tuple[str, ...]
    n: int
    axis: int
    eval: Eval

    def __init__(self, fields: str | Sequence[str], n: int, *, axis: int = 0, eval: Eval = "spread") -> None:
        names = (fields,) if isinstance(fields, str) else tuple(fields)
        problems = []
        if not names or len(set(names)) < len(names):
            problems.append(f"fields are {names}; name at least one, each once")
        if type(n) is not int or n < 1:
            problems.append(f"n is {n!r}; a whole number of at least 1")
        if axis != 0:
            problems.append(f"axis is {axis}; only axis=0, the first dimension of a row, can be read in part")
        if eval not in get_args(Eval):
            problems.append(f"eval is {eval!r}; one of {', '.join(map(repr, get_args(Eval)))}")
        if problems:
            raise UsageError("Pick(...) cannot work:", problems=problems)
        for name, value in (("fields", names), ("n", n), ("axis", axis), ("eval", eval)):
            object.__setattr__(self, name, value)

    def indices(self, seed: int, epoch: int, keys: Sequence[str], lengths: ArrayLike, train: bool) -> Rows:
        """[B, n] ascending indices for samples whose first dimensions are lengths [B] (or one for all)."""
        sizes = np.broadcast_to(np.asarray(lengths, np.int64), (len(keys),))
        self._check(keys, sizes)
        if train or self.eval == "random":
            ids = keyed.derive_many(seed, epoch, keys, "pick/" + "/".join(self.fields))
            return keyed.choose(ids, self.n, sizes)
        if self.eval == "first":
            return np.tile(np.arange(self.n, dtype=np.int64), (len(keys), 1))
        return self._spread(sizes)

    def _spread(self, sizes: Rows) -> Rows:
        """The nearest to n evenly spaced points; in whole numbers, so that every machine rounds alike."""
        if self.n == 1:
            return (sizes // 2)[:, None]
        gaps = self.n - 1
        return (2 * np.arange(self.n) * (sizes[:, None] - 1) + gaps) // (2 * gaps)

    def _check(self, keys: Sequence[str], sizes: Rows) -> None:
        short = np.flatnonzero(sizes < self.n)
        if short.size:
            raise UsageError(
                f"Pick({', '.join(map(repr, self.fields))}, n={self.n}) needs rows at least that "
                f"long; {short.size} of these {len(keys)} are shorter. Lower n, or leave them out:",
                problems=[f"{keys[i]!r} has length {sizes[i]}" for i in short[:5]],
            )
