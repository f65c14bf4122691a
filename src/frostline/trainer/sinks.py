"""Where the lines of `metrics.jsonl` go as well, when asked: TensorBoard and W&B, under "kind/name"."""

from __future__ import annotations

import json
import math
import os
import uuid
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from frostline.errors import MissingExtra, UsageError

_WANDB_HOLDS = 64 << 10
"""Bytes. W&B writes blocks of 32 KiB and its process ends with ours: a SIGKILL takes up to a block of records
(measured with 0.31: of 200 small lines the last 17, of 50 all). The same figures are shorter as our lines."""

KINDS = ("train", "eval", "event")
Value = float | int | str


class Sink(Protocol):
    """Somewhere else that the lines go to."""

    lost_bytes: float
    """How many bytes of the lines before this process it may be without: inf when it is new."""
    errors: tuple[type[Exception], ...]
    """What it raises when it breaks: a full disk, a process that went away."""

    def write(self, step: int, kind: str, values: Mapping[str, Value]) -> None: ...
    def rewind(self, step: int) -> None: ...
    def flush(self) -> None: ...
    def close(self, failed: bool) -> None: ...


class TensorBoard:
    """Event files beside the metrics. Numbers are float32 there; that is TensorBoard's format."""

    errors: tuple[type[Exception], ...] = (OSError,)

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        try:
            self._module = import_module("torch.utils.tensorboard")
        except ImportError as e:
            raise MissingExtra.needed("TensorBoard", package="tensorboard", extra="tensorboard") from e
        self._folder = folder / "tensorboard"
        self.lost_bytes = 0 if any(self._folder.glob("events.*")) else math.inf
        self._writer = self._made(None)
        if self.lost_bytes and config:
            shown = json.dumps(_json(config), indent=2)
            self._writer.add_text("config", f"```\n{shown}\n```")

    def _made(self, purge_step: int | None) -> Any:
        return self._module.SummaryWriter(str(self._folder), purge_step=purge_step, flush_secs=10)

    def write(self, step: int, kind: str, values: Mapping[str, Value]) -> None:
        self.lost_bytes = 0
        for name, value in values.items():
            add = self._writer.add_text if isinstance(value, str) else self._writer.add_scalar
            add(f"{kind}/{name}", value, step)

    def rewind(self, step: int) -> None:
        self._writer.close()
        self._writer = self._made(step + 1)

    def flush(self) -> None:
        self._writer.flush()

    def close(self, failed: bool) -> None:
        self._writer.close()


class Wandb:
    """A run of W&B, which also works without a network (WANDB_MODE=offline).

    Its own step counter cannot go back, and drops what is behind it: after a resume that would be everything
    up to where the killed run had got. So the step is a figure like the others, and the axis of them all.
    """

    def __init__(self, folder: Path, to: bool | str, config: Mapping[str, Any], run_id: str | None) -> None:
        try:
            wandb = import_module("wandb")
        except ImportError as e:
            raise MissingExtra.needed("W&B", package="wandb", extra="wandb") from e
        self.errors: tuple[type[Exception], ...] = (OSError, wandb.errors.Error)
        self._file = folder / "wandb_id"
        kept, *closed = self._file.read_text(encoding="utf-8").split() if self._file.exists() else [""]
        self._borrowed = wandb.run is not None
        try:
            name = run_id or kept or uuid.uuid4().hex[:12]
            self._run = wandb.run or wandb.init(**_asked(folder, to, name, config))
        except wandb.errors.Error as e:
            raise UsageError(
                f"W&B cannot start: {e}. Log in with `wandb login`, or set WANDB_MODE=offline."
            ) from e
        self.lost_bytes = math.inf if self._run.id != kept else 0 if closed else _WANDB_HOLDS
        _put(self._file, f"{self._run.id}\n")
        self._run.define_metric("step")
        for kind in KINDS:
            self._run.define_metric(f"{kind}/*", step_metric="step")

    def write(self, step: int, kind: str, values: Mapping[str, Value]) -> None:
        self.lost_bytes = 0
        self._run.log({"step": step, **{f"{kind}/{name}": value for name, value in values.items()}})

    def rewind(self, step: int) -> None:
        """Nothing: see above."""

    def flush(self) -> None:
        """Nothing: W&B has no such call. What a kill takes is written again after the resume."""

    def close(self, failed: bool) -> None:
        if not self._borrowed:
            self._run.finish(exit_code=int(failed))
            _put(self._file, f"{self._run.id}\nclosed\n")


def _json(config: Mapping[str, Any]) -> Any:
    """Only what JSON has; anything else as its text."""
    return json.loads(json.dumps(dict(config), default=str))


def _asked(folder: Path, to: bool | str, run_id: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """What wandb.init is asked for. For the rest its own variables hold: WANDB_PROJECT, WANDB_MODE."""
    entity, _, project = to.rpartition("/") if isinstance(to, str) else ("", "", "")
    return {
        "dir": str(folder.resolve()),
        "entity": entity or None,
        "project": project or None,
        "id": run_id,
        "resume": "allow",
        "config": _json(config),
        "allow_val_change": True,  # a resumed run may have a larger budget
    }


def _put(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.aside")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)
