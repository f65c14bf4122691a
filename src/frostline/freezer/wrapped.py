"""`cached`: an encoder in somebody's own loop, whose rows come from a store when it has them.

A long file, because it is one object under one lock: what the encoder is, which rows are there, and when they
are written must be decided together, or rows of one network would be written under the name of another.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
import torch
import xxhash
from torch import Tensor

from frostline.errors import FrostlineError, StoreError, UsageError
from frostline.execution import Ready
from frostline.execution.columns import kind_of, padded
from frostline.fingerprint import differences, fingerprint
from frostline.fingerprint.weights import tensor_digest
from frostline.flat import flat_bytes
from frostline.freezer.precision import without_autocast
from frostline.freezer.writing import delete_rows
from frostline.inspector import audit
from frostline.inspector.reach import reach
from frostline.stage import DEFAULT_CHUNK, Lazy, Precision, Stage
from frostline.store import Field, Store
from frostline.store.manifest import commit_numbers

OUTPUT, INPUT = "output", "_input"
"""The store's fields: the encoder's output, and a hash of the input that it was computed from."""
_FLUSH_BYTES = 64 << 20
_SHOWN = 5
Stale = Literal["error", "recompute"]


def cached(
    encoder: Any,
    store: str | os.PathLike[str],
    *,
    batch_size: int = DEFAULT_CHUNK,
    codec: str = "raw",
    precision: Precision | None = None,
    stale: Stale = "error",
    check_inputs: bool = True,
    check_weights: bool = True,
) -> Cached:
    """Called as `encoder(x, keys=…)`: rows that the store has are read, the others computed and stored.

    >>> import frostline as fl, tempfile, torch
    >>> encoder = torch.nn.Linear(4, 2).requires_grad_(False).eval()
    >>> with fl.cached(encoder, tempfile.mkdtemp() + "/store") as fast:
    ...     first = fast(torch.ones(3, 4), keys=["a", "b", "c"])
    ...     again = fast(torch.ones(3, 4), keys=["c", "b", "a"])
    >>> torch.equal(first, again), fast.computed, fast.read
    (True, 3, 3)

    encoder:       a frozen nn.Module, method, function or fl.lazy(loader) that gives a tensor. It is audited
                   first.
    batch_size:    rows are computed so many at a time, padded: the same bits whatever batch asked for them.
    precision:     "bf16" or "fp16": run its weights and inputs so. `torch.autocast` around a call is not
                   heeded: rows must not depend on who asked for them first.
    stale:         what to do when the store's rows were computed otherwise: "error", or "recompute" them.
    check_inputs:  compare x with what a row was computed from. Off, a key is believed, and x may be None.
    check_weights: compare the weights of all networks that it uses at every call (some 0.1 s per GB). Off,
                   when the store is opened only.
    """
    stage = Stage(OUTPUT, encoder, reads="x", on="device", batch_size=batch_size, precision=precision)
    return Cached(stage, Path(store), codec, stale, check_inputs, check_weights)


@dataclass(frozen=True)
class _Alone:
    """A pipeline of one stage, for its fingerprint."""

    stages: tuple[Stage, ...]

    def writer_of(self, field: str) -> Stage | None:
        return next((stage for stage in self.stages if field in stage.writes), None)


@dataclass(frozen=True)
class _Weights:
    """Digests by name: of the tensors of networks, and of those that an encoder keeps otherwise."""

    networks: dict[str, str]
    kept: dict[str, str]

    def differ_from(self, before: _Weights) -> bool:
        """Something that is kept since is no change: a table of positions is made when it is needed."""
        changed = any(self.kept.get(name) != digest for name, digest in before.kept.items())
        return changed or self.networks != before.networks


def _digest(value: Tensor | np.ndarray[Any, Any]) -> str:
    if isinstance(value, Tensor):
        return kind_of(value) if value.is_meta else tensor_digest(value)
    data = repr(value.tolist()).encode() if value.dtype.hasobject else value.tobytes()
    return f"{xxhash.xxh3_128_hexdigest(data)} {kind_of(value)}"


def _is_key(key: object) -> bool:
    """Whether a store can have it as a key: text without half characters."""
    if not isinstance(key, str):
        return False
    try:
        key.encode()
    except UnicodeEncodeError:
        return False
    return True


class Cached:
    """What `cached` returns. Close it, or use it as a context manager: rows in memory are then written.

    One that nobody closes writes them when it is let go of, or when the program ends.
    """

    def __init__(
        self, stage: Stage, root: Path, codec: str, stale: Stale, check_inputs: bool, check_weights: bool
    ) -> None:
        self._waiting: dict[str, tuple[Tensor, str]] = {}
        self._waiting_bytes, self._pid = 0, os.getpid()
        self._encoder = stage.fn.get() if isinstance(stage.fn, Lazy) else stage.fn
        self._stage, self._root, self._codec, self._stale = stage, root, codec, stale
        self._check_inputs, self._check_weights = check_inputs, check_weights
        self._ready: dict[torch.device, Ready] = {}
        self._audited: tuple[bool, ...] | None = None
        self._lock = threading.RLock()
        self._store: Store | None = None
        self.read = self.computed = 0
        self._look()
        _open.add(self)

    # what it is computed from

    def _look(self) -> None:
        """Compare the encoder with what the store's rows were computed by."""
        stage = self._stage.with_options(fn=self._encoder)
        self._mark, weights = fingerprint(_Alone((stage,)))[OUTPUT], self._weights_now()
        self._reopen()
        held = self._held()
        if self._store is not None and held is None and not self._emptied(self._store):
            raise StoreError(
                f"The store at {self._root} holds {', '.join(self._store.fields)}; fl.cached did not "
                f"make it. Give it a folder of its own."
            )
        if held is not None:
            codec = replace(held, codec=self._codec).codec
            if (held.fingerprint, held.codec) != (self._mark.digest, codec):
                self._outdated(held, codec)
        self._weights = weights  # last: what is refused once is refused again

    def _held(self) -> Field | None:
        """The store's field of the encoder's output, if there is one."""
        return self._store.fields.get(OUTPUT) if self._store is not None else None

    @staticmethod
    def _emptied(store: Store) -> bool:
        """Whether rows are being computed again, and none was written since the old ones went."""
        return list(store.fields) == [INPUT] and not len(store)

    def _outdated(self, held: Field, codec: str) -> None:
        """Take the old rows out, then the old field; the new field comes with the first new rows.

        Killed in between, the store holds no rows of anybody: nothing stale, and nothing to refuse.
        """
        told = differences(held.provenance, self._mark.parts)
        told += [f"codec {held.codec} → {codec}"] if held.codec != codec else []
        why = "; ".join(told) or "it was computed otherwise"
        store = Store.open(self._root)
        if self._stale == "error" and len(store):
            raise StoreError(
                f"The store at {self._root} holds rows of another encoder: {why}. Give fl.cached another "
                f"folder, or stale='recompute' to compute them again."
            )
        if len(store):
            delete_rows(self._root, list(store.keys))
        Store.retire(self._root, OUTPUT)
        self._reopen()

    def _weights_now(self) -> _Weights:
        """Of whatever it uses: a method's own network, one in a closure, one that a callable object keeps."""
        if not self._check_weights:
            return _Weights({}, {})
        found = reach(self._encoder)
        kept = {n: v for n, v in found.values.items() if isinstance(v, Tensor | np.ndarray)}
        return _Weights(
            {name: tensor_digest(value) for name, value in found.tensors().items()},
            {name: _digest(value) for name, value in kept.items()},
        )

    def _modes(self) -> tuple[bool, ...]:
        """Which parts are in train mode: `model.train()` in a loop reaches a frozen encoder in it, too."""
        return tuple(part.training for _, part in reach(self._encoder).named_modules())

    def _look_at_weights(self) -> None:
        now = self._weights_now()
        if now.differ_from(self._weights):
            self._forget() if self._stale == "recompute" else self.flush()
            self._ready.clear()
            self._audited = None
            self._look()
        else:
            self._weights = now

    def _reopen(self) -> None:
        self._store = Store.open(self._root) if commit_numbers(self._root) else None

    # calling it

    def __call__(self, x: Tensor | None, keys: Sequence[str]) -> Tensor:
        """The encoder's output for each key, on x's device, without gradients."""
        keys = [*keys]
        self._refuse(x, keys)
        with self._lock, without_autocast():
            self._look_at_weights()
            texts = self._texts(x, keys)
            rows = self._found(keys, texts)
            missing = [i for i, key in enumerate(keys) if key not in rows]
            if missing:
                rows |= self._compute(x, keys, texts, missing)
            self.read += len(keys) - len(missing)
            self.computed += len(missing)
        out = torch.stack([rows[key] for key in keys])
        return out if x is None else out.to(x.device)

    def _refuse(self, x: Tensor | None, keys: list[str]) -> None:
        odd = [key for key in keys if not _is_key(key)]
        problems = [
            f"key {key!r:.60} ({type(key).__name__}) is not valid Unicode text" for key in odd[:_SHOWN]
        ]
        if odd:
            problems.append(f"keys: {len(odd)} of {len(keys)} are no text; give for instance str(number)")
        elif len(set(keys)) < len(keys) or not keys:
            problems.append("keys: at least one, and each once; a key names one input")
        if x is None and self._check_inputs:
            problems.append("x is None, which needs fl.cached(…, check_inputs=False): keys are then believed")
        if x is not None and len(x) != len(keys):
            problems.append(f"{len(keys)} keys for {len(x)} rows of x")
        if problems:
            raise UsageError("Cannot encode:", problems=problems)

    def _texts(self, x: Tensor | None, keys: list[str]) -> list[str]:
        if x is None or not self._check_inputs:
            return [""] * len(keys)
        rows = x.detach().cpu()
        kind = kind_of(rows[0])
        data = flat_bytes(rows).reshape(len(rows), rows[0].nbytes).numpy()
        return [f"{xxhash.xxh3_128_hexdigest(row)} {kind}" for row in data]

    def _found(self, keys: list[str], texts: list[str]) -> dict[str, Tensor]:
        """Rows that are there, of the same inputs: from those not written yet, and from the store."""
        rows = {k: self._waiting[k][0] for k, t in zip(keys, texts, strict=True) if self._same(k, t)}
        there = [
            key for key in keys if key not in self._waiting and self._store is not None and key in self._store
        ]
        if not there or self._store is None:
            return rows
        batch = self._store.rows(there, [OUTPUT, INPUT] if self._check_inputs else [OUTPUT])
        wanted = dict(zip(keys, texts, strict=True))
        for i, key in enumerate(there):
            if not self._check_inputs or batch[INPUT][i] == wanted[key]:
                rows[key] = batch[OUTPUT][i]
        return rows

    def _same(self, key: str, text: str) -> bool:
        return key in self._waiting and (not self._check_inputs or self._waiting[key][1] == text)

    def _compute(
        self, x: Tensor | None, keys: list[str], texts: list[str], missing: list[int]
    ) -> dict[str, Tensor]:
        if x is None:
            lacking = [keys[i] for i in missing]
            raise UsageError(
                f"The store at {self._root} lacks {lacking[:5]} ({len(lacking)} in all); give x."
            )
        inputs = x.detach()[torch.tensor(missing, device=x.device)]
        fresh = self._audited != self._modes()
        if fresh:
            size = self._stage.chunk or 1
            audit(self._encoder, padded(inputs[:size], size)).raise_if_not_frozen()
        if x.device not in self._ready:  # with precision=, a copy of the network: made once
            self._ready[x.device] = Ready(self._stage.with_options(fn=self._encoder), x.device)
        out = self._ready[x.device].many([keys[i] for i in missing], [inputs])[OUTPUT]
        if fresh:  # a first call may have loaded a network
            self._audited, self._weights = self._modes(), self._weights_now()
        if not isinstance(out, Tensor):
            raise UsageError(
                f"The encoder returned {type(out).__name__}; fl.cached needs one that gives a tensor."
            )
        self._refuse_other_shape(out, [keys[i] for i in missing])
        rows = {keys[i]: row for i, row in zip(missing, self._stored(out.detach().cpu()), strict=True)}
        for i in missing:
            self._wait_with(keys[i], rows[keys[i]], texts[i])
        if self._waiting_bytes >= _FLUSH_BYTES:
            self.flush()
        return rows

    def _wait_with(self, key: str, row: Tensor, text: str) -> None:
        before = self._waiting.get(key)
        self._waiting_bytes += row.nbytes - (before[0].nbytes if before is not None else 0)
        self._waiting[key] = row, text

    def _refuse_other_shape(self, out: Tensor, keys: list[str]) -> None:
        held = self._held()
        rows = [row for row, _ in self._waiting.values()][:1]
        before = f"{held.dtype} {[*held.shape]}" if held else kind_of(rows[0]) if rows else None
        if before is not None and kind_of(out[0]) != before:
            raise UsageError(
                f"The encoder gave {kind_of(out[0])} for {keys[:3]}, and {before} for the rows before. A "
                f"store has rows of one shape: give inputs of one size, or fl.cached another folder for each."
            )

    def _stored(self, out: Tensor) -> Tensor:
        """As the rows will be read back: a lossy codec must not show only from the second epoch on."""
        from frostline.store.codecs import decode, encode

        spec = self._spec(out)
        return out if spec.codec == "raw" else decode(encode(out, spec, OUTPUT, ""), spec)

    def _spec(self, out: Tensor) -> Field:
        return self._held() or Field(
            tuple(out.shape[1:]), str(out.dtype), self._codec, self._mark.digest, self._mark.parts
        )

    # writing

    def flush(self) -> None:
        """Write the rows that are only in memory so far."""
        with self._lock:
            if not self._waiting:
                return
            first = next(iter(self._waiting.values()))[0]
            fields = {OUTPUT: self._spec(first[None]), INPUT: Field((), "str")}
            if self._store is not None and self._held() is None:
                Store.extend(self._root, {OUTPUT: fields[OUTPUT]}).close()
            with Store.create(self._root, fields, resume=True) as writer:
                for key, (row, text) in self._waiting.items():
                    put = writer.replace if key in writer else writer.append
                    put(key, {OUTPUT: row, INPUT: text})
            self._forget()
            self._reopen()

    def _forget(self) -> None:
        self._waiting.clear()
        self._waiting_bytes = 0

    def close(self) -> None:
        self.flush()

    def _write_ours(self) -> None:
        """Nothing in a forked process: the rows that it was born with are its parent's."""
        if self._waiting and self._pid == os.getpid():
            self.flush()

    def __del__(self) -> None:
        self._write_ours()

    def __enter__(self) -> Cached:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.flush()


_open: weakref.WeakSet[Cached] = weakref.WeakSet()


def _write_all() -> None:
    """Write what nobody wrote before the program ended; one that fails is told, and the others go on."""
    for one in list(_open):
        try:
            one._write_ours()
        except (FrostlineError, OSError, RuntimeError):
            sys.excepthook(*sys.exc_info())
            one._forget()  # told once is enough


# The store's writer has a thread, and when `atexit` runs no thread may be started any more: this runs before.
# It is concurrent.futures' own way out, without a public name.
getattr(threading, "_register_atexit", atexit.register)(_write_all)
