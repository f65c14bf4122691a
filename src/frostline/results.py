"""What the verbs find out, as plain frozen dataclasses: written as JSON, read back, drawn by `report/`.

Times are milliseconds a step unless a name says otherwise, sizes are bytes, shares run from 0 to 1.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from frostline.errors import UsageError

PROFILE_SCHEMA = 1
"""Version of profile.json; raised when a reader of the old one would misread the new."""


@dataclass(frozen=True)
class Steps:
    """The wall time of steps that nobody waited for in between: blocks of them, end to end."""

    ms: float
    """A step: all blocks' time over all blocks' steps."""
    low: float
    high: float
    """A 95 % interval of that mean (bootstrap over steps)."""
    count: int
    times: tuple[float, ...] = ()
    """Each step's: by the device's clock on a GPU, by the host's elsewhere."""
    blocks: tuple[float, ...] = ()
    """Each block's mean."""


@dataclass(frozen=True)
class Row:
    """Where a part of the step goes. Rows, the overlap (below zero) and "other" add up to pass B's step."""

    kind: str
    """data, copy, forward, backward, optimizer, zero_grad, clip, sync, save, overlap or other."""
    name: str
    """As people read it."""
    ms: float
    share: float
    """Of pass B's step."""
    note: str = ""


@dataclass(frozen=True)
class ModuleUse:
    """How one module of the script is used, a step."""

    name: str
    kind: str
    """Its class."""
    calls: float
    ms: float
    """Forward only, everything inside of it included."""
    rows: tuple[int, ...] = ()
    """The batch sizes that it was called with, the most frequent first."""
    depth: int = 0
    """0: called by the script itself."""
    parameters: int = 0
    trainable: int = 0
    frozen: str = ""
    """Why nothing in it can change: "parameters" (none is trained), "no_grad"; empty: it is trained."""
    compiled: bool = False
    prefix: str = ""
    """Partly trained: the last part of it, in the order of calls, before which nothing is trained."""
    prefix_ms: float = 0.0


@dataclass(frozen=True)
class Repeat:
    """Work on inputs that the same function had seen before."""

    what: str
    """"decode PIL.Image.open", "module encoder", "dataset items", …"""
    seen: int
    """Inputs that were looked at: rows of a module, files of a decoder, items of a dataset."""
    repeats: int
    ms: float | None
    """What the repeats cost, a step; None: their time cannot be told apart."""
    exact: bool = True
    """All inputs of the run were looked at, not a sample of them."""
    epochs: float | None = None
    """Storing the results pays when the training is longer than so many epochs; None: unknown."""
    note: str = ""
    stored: float | None = None
    """Bytes that the results of the whole data set take; None: unknown."""

    @property
    def share(self) -> float:
        return self.repeats / self.seen if self.seen else 0.0


@dataclass(frozen=True)
class Sync:
    """A place where the host waits for the device (or would, if there were one)."""

    where: str
    """file:line in the user's code, or in a library when none of the user's is on the stack."""
    what: str
    calls: float
    ms: float
    """The wait, a step; 0 on the CPU."""


@dataclass(frozen=True)
class Copies:
    """Host-to-device copies of one kind, a step."""

    kind: str
    """"pinned", "pageable"."""
    calls: float
    bytes: float
    ms: float
    """What the host waits for; of copies that it does not wait for, what the device takes (0: unknown)."""
    blocking: bool
    """The host waits until it is done."""


@dataclass(frozen=True)
class Loader:
    """A loader that the steps read from."""

    name: str
    workers: int
    batch_size: int | None
    batches: int | None
    """Of an epoch; None: the loader does not know."""
    calls: float
    """Batches a step."""
    wait_ms: float
    """What the script waits for it, a step."""
    prepare_ms: float | None = None
    """What one worker takes for one batch."""
    decode_ms: float | None = None
    """Of that, decoding images and video."""
    pinned: bool = False
    needed: int | None = None
    """Workers with which it would keep up with the rest of the step, each on a core of its own."""


@dataclass(frozen=True)
class Machine:
    """What it ran on, and how much of it was used."""

    device: str
    cores: int
    torch: str
    python: str
    ranks: int = 1
    busy: float | None = None
    """The device's: a kernel or a copy ran, over pass A's step. On the CPU: the step's own work did."""
    flops: float | None = None
    """Of the model a step, by torch's table of operators."""
    peak_flops: float | None = None
    """Of the device, dense, in the precision used; None: not known here."""
    mfu: float | None = None
    nvml_utilization: float | None = None
    """nvidia-smi's: the share of time in which any kernel at all ran."""
    power_w: float | None = None
    joules_per_sample: float | None = None
    peak_allocated: float | None = None
    peak_reserved: float | None = None
    alloc_retries: int = 0
    rss: float | None = None
    cores_used: float | None = None
    """Of the host, by this process and its workers."""
    disk_read_per_s: float | None = None
    major_faults: float = 0.0
    """Pages read back from disk or swap, a step."""


@dataclass(frozen=True)
class Idle:
    """Time in which the device had nothing to do, by cause: data, copy, launch, sync, optimizer, other."""

    cause: str
    ms: float
    share: float
    """Of pass A's step."""


@dataclass(frozen=True)
class Trial:
    """A differential run: the same steps with one thing changed."""

    name: str
    """"real": the data as they come, beside the others; "replayed": prepared batches again and again;
    "compute": one that lies on the device; "half": half of it; "cold": nothing in the page cache."""
    ms: float
    low: float
    high: float
    note: str = ""


@dataclass(frozen=True)
class Remedy:
    """Something that would help, and by how much at most."""

    name: str
    bound: float
    """The step's time over what would be left of it: 1.31 means at most 1.31 times as fast."""
    what: str
    """What to do."""
    why: str = ""
    """What was measured."""


@dataclass(frozen=True)
class Finding:
    """Something that a person should know."""

    kind: str
    """repeat, frozen, prefix, calls, batch, compile, sync, copy, loader or code."""
    title: str
    text: str
    ms: float | None = None
    """What it concerns, a step."""


@dataclass(frozen=True)
class Verdict:
    """What holds the step up."""

    kind: str
    """input-bound, transfer-bound, launch-bound, sync-bound, compute-bound, memory-thrashing, mixed or
    unclear."""
    text: str
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True)
class Epoch:
    """From the loader's own length."""

    seconds: float
    low: float
    high: float
    steps: float
    between_s: float = 0.0
    """What is spent once an epoch between its last and the next one's first step, where it was seen."""


@dataclass(frozen=True)
class Cost:
    """What the profiler itself takes: pass A over steps with nothing but the step's own hook, minus 1."""

    share: float
    low: float
    high: float


@dataclass(frozen=True)
class Span:
    """One bar of the timeline."""

    track: str
    """"host", "device", "worker 1", …"""
    kind: str
    name: str
    start: float
    ms: float
    step: int = 0
    depth: int = 0


@dataclass(frozen=True)
class Profile:
    """What `frostline profile` found. `Profile.read(path)` reads profile.json back."""

    command: str
    boundary: str
    """What ends a step: "AdamW.step", "call of Model"."""
    wall: Steps
    """Pass A: the only figure that rates and decisions use."""
    attributed: Steps | None
    """Pass B."""
    rows: tuple[Row, ...]
    verdict: Verdict
    machine: Machine
    samples: float | None = None
    """Rows of a batch, a step."""
    epoch: Epoch | None = None
    warmup: int = 0
    """Steps until it ran steadily."""
    cost: Cost | None = None
    remedies: tuple[Remedy, ...] = ()
    findings: tuple[Finding, ...] = ()
    modules: tuple[ModuleUse, ...] = ()
    repeats: tuple[Repeat, ...] = ()
    syncs: tuple[Sync, ...] = ()
    copies: tuple[Copies, ...] = ()
    loaders: tuple[Loader, ...] = ()
    idle: tuple[Idle, ...] = ()
    trials: tuple[Trial, ...] = ()
    timeline: tuple[Span, ...] = ()
    """A few steps of pass B."""
    notes: tuple[str, ...] = ()
    """What could not be measured, and why; how the script ended."""
    schema: int = PROFILE_SCHEMA
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def samples_per_s(self) -> float | None:
        return None if not self.samples or not self.wall.ms else 1000 * self.samples / self.wall.ms

    @property
    def reconciled(self) -> float | None:
        """What rows, overlap and other add up to, over pass A's step, minus 1."""
        return sum(row.ms for row in self.rows) / self.wall.ms - 1 if self.rows and self.wall.ms else None

    def write(self, path: Path) -> None:
        aside = path.with_name(f".{path.name}.part")
        aside.write_text(
            json.dumps(_plain(dataclasses.asdict(self)), indent=1, allow_nan=False) + "\n", encoding="utf-8"
        )
        aside.replace(path)

    @classmethod
    def read(cls, path: Path) -> Profile:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except OSError as e:
            raise UsageError(f"Cannot read the profile {path}: {e.strerror}.") from e
        except ValueError as e:
            raise UsageError(f"{path} is no profile.json: {e}.") from e
        if not isinstance(found, dict) or found.get("schema") != PROFILE_SCHEMA:
            given = found.get("schema") if isinstance(found, dict) else None
            raise UsageError(
                f"{path} has profile schema {given!r}; this frostline reads {PROFILE_SCHEMA}. Profile again."
            )
        try:
            return typing.cast(Profile, _made(cls, found))
        except (TypeError, ValueError, KeyError) as e:
            raise UsageError(f"{path} is no whole profile.json: {e}.") from e


def _plain(value: Any) -> Any:
    """Numbers that JSON has no word for are written as strings."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _made(kind: Any, value: Any) -> Any:
    """A value of JSON as the type that it was written from."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, dict):
            raise ValueError(f"{kind.__name__} is {type(value).__name__}, expected an object")
        hints = _hints(kind)
        return kind(**{name: _made(hints[name], item) for name, item in value.items() if name in hints})
    if isinstance(kind, types.UnionType):
        return None if value is None else _made(next(k for k in kind.__args__ if k is not type(None)), value)
    if typing.get_origin(kind) is tuple:
        return tuple(_made(typing.get_args(kind)[0], item) for item in value)
    if kind is float and (isinstance(value, int | float) or value in ("inf", "-inf", "nan")):
        return float(value)
    expected = typing.get_origin(kind) or kind
    if not isinstance(value, expected):
        raise ValueError(f"{value!r} is not a {expected.__name__}")
    return value
