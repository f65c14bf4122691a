"""TensorBoard and W&B get every field of metrics.jsonl; what they wrote is read back."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from frostline.errors import MissingExtra, UsageError
from frostline.trainer import sinks
from frostline.trainer.recorder import Recorder, read_metrics

Field = tuple[str, int, Any]
"""'kind/name', step, value."""


def fields(folder: Path) -> list[Field]:
    """Every field of every line of metrics.jsonl."""
    return sorted(
        (f"{line['kind']}/{name}", line["step"], value)
        for line in read_metrics(folder)
        for name, value in line.items()
        if name not in ("step", "kind")
    )


def run_to(recorder: Recorder, first: int, last: int) -> None:
    for step in range(first, last + 1):
        values = {"loss": 1 / step, "lr": 1e-3, "peak_bytes": 2**34, "bad": step, "clipped": step % 2 == 0}
        recorder.write(step, values)
        if step % 5 == 0:
            recorder.write(step, {"accuracy": step / 8}, kind="eval")
            recorder.write(step, {"what": f"saved {step}", "seconds": 0.25}, kind="event")


# TensorBoard


def in_tensorboard(folder: Path) -> list[Field]:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    everything = {"scalars": 0, "tensors": 0}
    found = accumulators.EventAccumulator(str(folder / "tensorboard"), size_guidance=everything)
    found.Reload()
    numbers = [(tag, e.step, e.value) for tag in found.Tags()["scalars"] for e in found.Scalars(tag)]
    texts = [
        (tag.removesuffix("/text_summary"), e.step, e.tensor_proto.string_val[0].decode())
        for tag in found.Tags()["tensors"]
        for e in found.Tensors(tag)
    ]
    return sorted(field for field in numbers + texts if field[0] != "config")


def as_float32(found: list[Field]) -> list[Field]:
    return [(tag, step, v if isinstance(v, str) else float(np.float32(v))) for tag, step, v in found]


def test_tensorboard_has_every_field(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with Recorder(tmp_path, tensorboard=True, config={"lr": 1e-3, "path": tmp_path}) as recorder:
        run_to(recorder, 1, 12)
    assert len(fields(tmp_path)) == 12 * 5 + 2 * 3
    assert in_tensorboard(tmp_path) == as_float32(fields(tmp_path))


def test_tensorboard_shows_nan_and_the_infinities(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with Recorder(tmp_path, tensorboard=True) as recorder:
        recorder.write(1, {"a": math.nan, "b": math.inf, "c": -math.inf})
    (_, _, a), (_, _, b), (_, _, c) = in_tensorboard(tmp_path)
    assert math.isnan(a)
    assert (b, c) == (math.inf, -math.inf)


def test_tensorboard_of_an_interrupted_run_is_that_of_an_unbroken_one(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    killed = Recorder(tmp_path, tensorboard=True)
    run_to(killed, 1, 10)
    killed.flush()
    run_to(killed, 11, 14)
    killed.flush()
    assert in_tensorboard(tmp_path)[-1][1] == 14
    with Recorder(tmp_path, tensorboard=True) as recorder:
        recorder.rewind(10)
        run_to(recorder, 11, 20)
    assert len(fields(tmp_path)) == 20 * 5 + 4 * 3
    assert in_tensorboard(tmp_path) == as_float32(fields(tmp_path))
    killed.close()


def test_tensorboard_asked_for_only_after_a_resume_has_the_past_as_well(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with Recorder(tmp_path) as recorder:
        run_to(recorder, 1, 9)
    with Recorder(tmp_path, tensorboard=True) as recorder:
        recorder.rewind(7)
        run_to(recorder, 8, 12)
    assert in_tensorboard(tmp_path) == as_float32(fields(tmp_path))


# W&B, without a network


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name, value in {"MODE": "offline", "SILENT": "true", "CONSOLE": "off"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    return pytest.importorskip("wandb")


def records(path: Path) -> Iterator[Any]:
    """W&B's offline file: seven bytes, then a LevelDB log (blocks of 32 KiB) of protocol buffers."""
    messages = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    data = path.read_bytes()
    at, whole = 7, b""
    while at + 7 <= len(data):
        if (room := 32768 - at % 32768) < 7:
            at += room
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        if at + 7 + length > len(data):  # it is being written
            return
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # full, or the last part
            record = messages.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def all_records(folder: Path) -> list[Any]:
    """Of all processes of a run, once W&B's own process has written the end of the last one."""
    for _ in range(4000):
        files = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))  # by the second they began in
        found = [list(records(path)) for path in files]
        if any(record.WhichOneof("record_type") == "exit" for record in found[-1]):
            return [record for each in found for record in each]
        time.sleep(0.05)  # `finish()` returns before the file is written
    raise AssertionError(f"the run in {folder} does not end")


def in_wandb(folder: Path) -> list[Field]:
    found = []
    for record in all_records(folder):
        items = record.history.item if record.WhichOneof("record_type") == "history" else []
        line = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
        step = line.pop("step", None)
        found += [(name, step, value) for name, value in line.items() if not name.startswith("_")]
    return sorted(found)


def run_records(folder: Path) -> list[Any]:
    return [record.run for record in all_records(folder) if record.WhichOneof("record_type") == "run"]


def test_wandb_has_every_field(tmp_path: Path, offline: Any) -> None:
    config = {"lr": 1e-3, "path": tmp_path, "nested": {"a": [1, 2]}}
    with Recorder(tmp_path, wandb="team/project", config=config, run_id="run-7") as recorder:
        run_to(recorder, 1, 12)
    assert len(fields(tmp_path)) == 12 * 5 + 2 * 3
    assert in_wandb(tmp_path) == fields(tmp_path)
    run = run_records(tmp_path)[0]
    assert (run.entity, run.project, run.run_id) == ("team", "project", "run-7")
    told = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert {name: told[name] for name in config} == config | {"path": str(tmp_path)}
    assert offline.run is None  # it was closed


def test_wandb_shows_nan_and_the_infinities(tmp_path: Path, offline: Any) -> None:
    with Recorder(tmp_path, wandb=True) as recorder:
        recorder.write(1, {"a": math.nan, "b": math.inf, "c": -math.inf})
    (_, _, a), (_, _, b), (_, _, c) = in_wandb(tmp_path)
    assert math.isnan(float(a))
    assert (float(b), float(c)) == (math.inf, -math.inf)


def test_a_resumed_wandb_run_is_the_same_run_and_misses_nothing(tmp_path: Path, offline: Any) -> None:
    with Recorder(tmp_path, wandb=True) as recorder:
        run_to(recorder, 1, 14)
    time.sleep(1.1)  # W&B names the files of a process by the second
    with Recorder(tmp_path, wandb=True) as recorder:
        recorder.rewind(10)
        run_to(recorder, 11, 20)
    assert len({run.run_id for run in run_records(tmp_path)}) == 1
    assert sorted(set(in_wandb(tmp_path))) == fields(tmp_path)
    found = in_wandb(tmp_path)
    twice = [field for field in fields(tmp_path) if found.count(field) == 2]
    assert {step for _, step, _ in twice} == {11, 12, 13, 14}  # it takes nothing back


def test_a_killed_wandb_run_misses_nothing_once_it_went_on(tmp_path: Path, offline: Any) -> None:
    code = (
        "import os, sys, signal; from frostline.trainer.recorder import Recorder\n"
        "recorder = Recorder(sys.argv[1], wandb=True)\n"
        "for step in range(1, 301): recorder.write(step, {'loss': 1 / step})\n"
        "recorder.flush()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL
    time.sleep(1.1)
    with Recorder(tmp_path, wandb=True) as recorder:
        recorder.rewind(300)
        run_to(recorder, 301, 305)
    assert sorted(set(in_wandb(tmp_path))) == fields(tmp_path)
    assert len({run.run_id for run in run_records(tmp_path)}) == 1


def test_a_wandb_run_that_is_already_active_is_used_and_left_open(tmp_path: Path, offline: Any) -> None:
    with offline.init(dir=str(tmp_path), project="mine", id="mine") as mine:
        with Recorder(tmp_path, wandb=True) as recorder:
            run_to(recorder, 1, 5)
        mine.log({"train/after": 1, "step": 6})
    assert in_wandb(tmp_path) == sorted([*fields(tmp_path), ("train/after", 6, 1)])
    assert {run.run_id for run in run_records(tmp_path)} == {"mine"}


def test_wandb_is_told_whether_the_run_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    asked: list[dict[str, Any]] = []
    run = SimpleNamespace(
        id="x",
        define_metric=lambda name, **options: None,
        finish=lambda exit_code: codes.append(exit_code),
    )
    fake = SimpleNamespace(
        run=None, init=lambda **given: asked.append(given) or run, errors=SimpleNamespace(Error=RuntimeError)
    )
    monkeypatch.setattr(sinks, "import_module", lambda name: fake)
    with Recorder(tmp_path, wandb=True):
        pass
    with pytest.raises(ZeroDivisionError), Recorder(tmp_path, wandb=True):
        _ = 1 / 0
    assert codes == [0, 1]
    assert [given["resume"] for given in asked] == ["allow", "allow"]
    assert asked[1]["id"] == "x"  # kept in the folder
    assert not any("mode" in given for given in asked)  # WANDB_MODE decides


def test_wandb_that_cannot_start_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**given: Any) -> None:
        raise RuntimeError("no API key configured")

    fake = SimpleNamespace(run=None, init=refuse, errors=SimpleNamespace(Error=RuntimeError))
    monkeypatch.setattr(sinks, "import_module", lambda name: fake)
    with pytest.raises(UsageError, match=r"no API key configured.*WANDB_MODE=offline"):
        Recorder(tmp_path, wandb=True)
    assert not (tmp_path / "wandb_id").exists()  # there is no run to go on with


# both


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_package_that_is_missing_is_named_with_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for module in [m for m in sys.modules if m.split(".")[0] == name or m == "torch.utils.tensorboard"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtra, match=rf"pip install 'frostline\[{name}\]'"):
        Recorder(tmp_path, **{name: True})


def test_one_that_breaks_is_given_up_and_the_metrics_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    written: list[int] = []

    class Breaks:
        lost_bytes, errors = 0.0, (OSError,)

        def __init__(self, folder: Path, config: Any) -> None: ...

        def write(self, step: int, kind: str, values: Any) -> None:
            written.append(step)
            if step == 2:
                raise OSError("No space left on device")

        def close(self, failed: bool) -> None: ...

    monkeypatch.setattr("frostline.trainer.recorder.TensorBoard", Breaks)
    with Recorder(tmp_path, tensorboard=True) as recorder, caplog.at_level(logging.WARNING):
        for step in range(1, 6):
            recorder.write(step, {"loss": 1.0})
    assert written == [1, 2]
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]
    assert caplog.text.count("gets no more metrics (OSError: No space left on device)") == 1
