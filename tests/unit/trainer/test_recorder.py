"""The file of metrics: whole lines, valid JSON, and after a resume the same as without one."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from frostline.errors import CheckpointFull, FrostlineError, UsageError
from frostline.trainer import checkpoint
from frostline.trainer import recorder as module
from frostline.trainer.recorder import Recorder, read_metrics


def lines(folder: Path) -> list[str]:
    return (folder / "metrics.jsonl").read_text().splitlines()


def run_to(recorder: Recorder, first: int, last: int) -> None:
    """Steps as a training would write them, with an evaluation every fifth."""
    for step in range(first, last + 1):
        recorder.write(step, {"loss": 1 / (step + 1), "lr": 1e-3 * step})
        if step % 5 == 0:
            recorder.write(step, {"accuracy": step / 100}, kind="eval")


def test_a_line_is_in_the_file_when_write_returns(tmp_path: Path) -> None:
    with Recorder(tmp_path / "new" / "run") as recorder:
        for step in range(3):
            recorder.write(step, {"loss": 0.1 + step, "note": "α\nβ"})
            found = [json.loads(line) for line in lines(tmp_path / "new" / "run")]
            assert found[-1] == {"step": step, "kind": "train", "loss": 0.1 + step, "note": "α\nβ"}
            assert len(found) == step + 1


def test_floats_come_back_bit_for_bit(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal(200) * 10.0 ** np.arange(-100, 100)
    with Recorder(tmp_path) as recorder:
        for step, value in enumerate(values):
            recorder.write(step, {"x": float(value)})
    assert [line["x"] for line in read_metrics(tmp_path)] == values.tolist()


def test_numbers_that_json_does_not_have_are_spelled_and_read_back(tmp_path: Path) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    with Recorder(tmp_path) as recorder:
        recorder.write(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": np.float32("nan"), "e": True})
    (line,) = lines(tmp_path)
    spelled = {"a": "nan", "b": "inf", "c": "-inf", "d": "nan", "e": True}
    assert json.loads(line, parse_constant=refuse) == {"step": 1, "kind": "train"} | spelled
    (found,) = read_metrics(tmp_path)
    assert math.isnan(found["a"])
    assert math.isnan(found["d"])
    assert (found["b"], found["c"]) == (math.inf, -math.inf)
    assert read_metrics(tmp_path) == read_metrics(tmp_path)  # although nan is not equal to itself


def test_numbers_of_numpy_are_taken(tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder:
        recorder.write(1, {"a": np.float32(0.5), "b": np.int64(2**40)})
    assert read_metrics(tmp_path) == [{"step": 1, "kind": "train", "a": 0.5, "b": 2**40}]


def test_everything_wrong_with_a_line_is_told_and_nothing_is_written(tmp_path: Path) -> None:
    bad = {"step": 1.0, "loss": torch.tensor(1.0), "x": None, 3: 1.0}
    with Recorder(tmp_path) as recorder:
        with pytest.raises(UsageError) as raised:
            recorder.write(-1, bad, kind="test")  # type: ignore[arg-type]
        recorder.write(2, {"loss": 1.0})
    assert list(raised.value.problems) == [
        "step is -1; a whole number from 0",
        "kind is 'test'; one of train, eval, event",
        "'step' names the line itself",
        "'loss' is Tensor; a number, or a text",
        "'x' is NoneType; a number, or a text",
        "the name 3 is int; a text",
    ]
    assert [line["step"] for line in read_metrics(tmp_path)] == [2]


@pytest.mark.parametrize("torn", [b"", b'{"step": 14, "ki', b'{"step": 14, "kind": "train"}', b"\0\0\0"])
def test_an_interrupted_runs_file_is_that_of_an_unbroken_one(tmp_path: Path, torn: bytes) -> None:
    with Recorder(tmp_path / "unbroken") as recorder:
        run_to(recorder, 0, 20)
    run_to(Recorder(tmp_path / "killed"), 0, 13)  # never closed
    with open(tmp_path / "killed" / "metrics.jsonl", "ab") as file:
        file.write(torn)
    with Recorder(tmp_path / "killed") as recorder:
        recorder.rewind(10)
        assert read_metrics(tmp_path / "killed")[-1]["step"] == 10
        run_to(recorder, 11, 20)
    assert lines(tmp_path / "killed") == lines(tmp_path / "unbroken")
    assert [p.name for p in (tmp_path / "killed").iterdir()] == ["metrics.jsonl"]


def test_a_process_killed_while_it_writes_leaves_whole_lines(tmp_path: Path) -> None:
    code = (
        "import sys; from frostline.trainer.recorder import Recorder\n"
        "recorder = Recorder(sys.argv[1])\n"
        "for step in range(10**9):\n"
        "    recorder.write(step, {'loss': step / 3})\n"
        "    if step == 100: print('going', flush=True)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child.stdout:
        child.stdout.readline()
        child.send_signal(signal.SIGKILL)
        child.wait()
    with Recorder(tmp_path) as recorder:
        recorder.rewind(50)
        run_to(recorder, 51, 52)
    assert [line["step"] for line in read_metrics(tmp_path) if line["kind"] == "train"] == list(range(53))


def test_a_torn_line_never_runs_into_the_next_even_without_a_rewind(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "kind": "train"}\n{"step": 2, "kin')
    with Recorder(tmp_path) as recorder:
        recorder.write(2, {"loss": 1.0})
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]


def test_a_rewind_to_before_the_beginning_leaves_nothing(tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder:
        run_to(recorder, 1, 3)
        recorder.rewind(0)
        assert read_metrics(tmp_path) == []
        recorder.rewind(10)
        run_to(recorder, 1, 2)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]


def test_a_rewind_drops_lines_that_cannot_be_read_and_says_which(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Recorder(tmp_path) as recorder:
        run_to(recorder, 1, 2)
        with open(tmp_path / "metrics.jsonl", "ab") as file:
            file.write(b"what\n")
        run_to(recorder, 3, 4)
        with caplog.at_level(logging.WARNING):
            recorder.rewind(3)
    assert "line 3 cannot be read" in caplog.text
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3]


def test_a_full_disk_leaves_whole_lines_and_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write

    def full_after_five_bytes(fd: int, data: bytes) -> int:
        if len(data) < 40:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data[:5])

    recorder = Recorder(tmp_path)
    recorder.write(1, {"loss": 1.0})
    with monkeypatch.context() as patched:
        patched.setattr(module.os, "write", full_after_five_bytes)
        patched.setattr(checkpoint, "_free", lambda place: 8)
        with pytest.raises(CheckpointFull) as raised:
            recorder.write(2, {"loss": 2.0})
    assert str(raised.value) == (
        f"No room for the metrics in {tmp_path / 'metrics.jsonl'}: it needs 42 bytes, 8 are free, 34 are "
        f"missing (No space left on device). The checkpoints written before are whole; free some space, or "
        f"keep fewer of them, and run the same command again."
    )
    assert (raised.value.needed, raised.value.free, raised.value.missing) == (42, 8, 34)
    recorder.write(3, {"loss": 3.0})  # there is room again
    recorder.close()
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 3]


def failing(code: int) -> Callable[..., int]:
    def fail(*args: object) -> int:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (errno.ENOSPC, r"No room for the metrics in .*metrics\.jsonl: it needs [\d,]+ bytes, "),
        (errno.EDQUOT, "the quota of this user or folder is used up"),
        (errno.EFBIG, "a file is larger than its file system takes|may write files of"),
    ],
)
@pytest.mark.parametrize("call", ["write", "fsync", "ftruncate", "open"])
def test_a_disk_that_stays_full_is_told_at_every_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int, told: str
) -> None:
    """Writing, syncing, and going on from a file that has a torn line, or lines that are to be dropped."""
    recorder = Recorder(tmp_path)
    run_to(recorder, 1, 3)
    torn = b'{"step": 4, "ki'
    if call == "ftruncate":
        with open(tmp_path / "metrics.jsonl", "ab") as file:
            file.write(torn)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    uses: dict[str, list[Callable[[], object]]] = {
        "write": [lambda: recorder.write(4, {"loss": 1.0})],
        "fsync": [recorder.flush, lambda: recorder.rewind(1)],
        "ftruncate": [lambda: Recorder(tmp_path)],
        "open": [lambda: Recorder(tmp_path)],
    }
    monkeypatch.setattr(module.os, call, failing(code))
    for use in uses[call]:
        with pytest.raises(CheckpointFull, match=rf"({told})(.|\n)*are whole; .*run the same command again"):
            use()
    monkeypatch.undo()
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]
    recorder.rewind(2)
    run_to(recorder, 3, 4)
    recorder.close()
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4]


def test_a_limit_on_the_size_of_files_is_told_as_one(tmp_path: Path) -> None:
    code = (
        "import resource, sys\n"
        "from frostline.trainer.recorder import Recorder\n"
        "recorder = Recorder(sys.argv[1])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "for step in range(9): recorder.write(step, {'loss': 0.5})\n"
    )
    child = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert "this process may write files of 100 bytes at most (File too large)" in child.stderr
    assert "raise that limit (`ulimit -f`), and run the same command again" in child.stderr
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1]


def test_another_error_of_the_disk_is_told_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Recorder(tmp_path) as recorder:
        monkeypatch.setattr(module.os, "write", failing(errno.EIO))
        with pytest.raises(UsageError, match=r"metrics\.jsonl': Input/output error.*are whole"):
            recorder.write(1, {"loss": 1.0})
        monkeypatch.undo()


def test_a_folder_that_cannot_be_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"file/run/metrics.jsonl': .*Choose another folder"):
        Recorder(tmp_path / "file" / "run")


def test_a_closed_recorder_takes_nothing(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.close()
    recorder.close()
    for use in (lambda: recorder.write(1, {}), lambda: recorder.rewind(0), recorder.flush):
        with pytest.raises(FrostlineError, match="is closed"):
            use()


def test_flush_syncs_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    monkeypatch.setattr(module.os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size))
    with Recorder(tmp_path) as recorder:
        recorder.write(1, {})
        recorder.flush()
    assert synced == [(tmp_path / "metrics.jsonl").stat().st_size]


def test_the_reader_leaves_out_a_torn_last_line_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "kind": "train", "loss": 2.0}\n{"step": 2, "ki')
    with caplog.at_level(logging.WARNING):
        assert read_metrics(path) == [{"step": 1, "kind": "train", "loss": 2.0}]
    assert "torn" in caplog.text
    assert path.read_bytes().endswith(b'"ki')  # reading changes nothing


def test_the_reader_names_lines_that_are_no_metrics(tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text('[1]\n{"step": "a", "kind": "train"}\n{"step": 1, "kind": "train"}\n')
    with pytest.raises(UsageError) as raised:
        read_metrics(path)
    assert [problem.split(":")[0] for problem in raised.value.problems] == ["line 1", "line 2"]
    with pytest.raises(UsageError, match="no such file"):
        read_metrics(tmp_path / "missing.jsonl")
