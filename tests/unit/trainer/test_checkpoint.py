from __future__ import annotations

import errno
import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from frostline.errors import CheckpointError, CheckpointFull, UsageError
from frostline.trainer import aside, checkpoint, tensorfile
from frostline.trainer.checkpoint import Checkpoints, load, weights


def groups(value: float = 1.0) -> dict[str, dict[str, Tensor]]:
    torch.manual_seed(0)
    return {
        "model": {"w": torch.full((3, 4), value), "n": torch.tensor(7)},
        "optimizer": {"w/m": torch.randn(12)},
    }


def steps(checkpoints: Checkpoints) -> list[int]:
    return [load(path).step for path in checkpoints.all()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


def test_what_is_saved_is_loaded_from_run_folder_checkpoints_or_the_one_itself(folder: Path) -> None:
    state = {
        "epoch": 3,
        "loss": math.nan,
        "best": math.inf,
        "betas": (0.9, 1e-300),
        "by": {1: [None, True, "é"]},
    }
    path = Checkpoints(folder).save(120, groups(), state)
    assert path.name == "step-00000120"
    assert sorted(os.listdir(path)) == ["checkpoint.json", "model.safetensors", "optimizer.safetensors"]
    for place in (path, folder, folder.parent, folder / "latest", folder / "latest.json"):
        loaded = load(place)
        assert (loaded.path, loaded.step) == (path, 120)
        assert math.isnan(loaded.state.pop("loss"))
        assert loaded.state == {k: v for k, v in state.items() if k != "loss"}
        for name, tensors in groups().items():
            assert all(torch.equal(loaded.groups[name][n], t) for n, t in tensors.items())


def test_the_json_is_strict_json(folder: Path) -> None:
    path = Checkpoints(folder).save(1, groups(), {"loss": math.nan})

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    json.loads((path / "checkpoint.json").read_text(), parse_constant=refuse)


def test_a_large_group_is_split_and_one_group_can_be_read_alone(folder: Path) -> None:
    many = {"big": {f"t{i}": torch.full((100,), float(i)) for i in range(7)}, "small": {"x": torch.ones(1)}}
    path = Checkpoints(folder, shard_bytes=1000).save(1, many, {})
    assert sorted(p.name for p in path.glob("big*")) == [
        f"big-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)
    ]
    loaded = load(path)
    assert list(loaded.groups["big"]) == list(many["big"])
    assert all(torch.equal(loaded.groups["big"][n], t) for n, t in many["big"].items())
    assert load(path, only=["small"]).groups.keys() == {"small"}
    with pytest.raises(CheckpointError, match="no group medium; it has: big, small"):
        load(path, only=["medium"])


def test_the_newest_every_nth_the_best_and_the_labelled_stay(folder: Path) -> None:
    checkpoints = Checkpoints(folder, keep=2, keep_every=50)
    for step in range(10, 130, 10):
        checkpoints.save(step, groups(), {}, best=step == 30, label="before-decay" if step == 70 else None)
    assert steps(checkpoints) == [30, 50, 70, 100, 110, 120]
    best, labelled, latest = checkpoints.best(), checkpoints.labelled("before-decay"), checkpoints.latest()
    assert best is not None
    assert labelled is not None
    assert latest is not None
    assert [load(p).step for p in (best, labelled, latest)] == [30, 70, 120]
    assert load(folder / "best").step == 30
    checkpoints.save(130, groups(), {}, best=True)
    assert steps(checkpoints) == [50, 70, 100, 120, 130]
    assert checkpoints.labelled("no-such") is None


def test_after_going_back_the_newest_is_the_one_written_last_and_is_never_deleted(folder: Path) -> None:
    checkpoints = Checkpoints(folder, keep=2)
    for step in (10, 20, 30, 40):
        checkpoints.save(step, groups(), {})
    assert checkpoints.save(15, groups(5.0), {}) == checkpoints.latest()
    assert steps(checkpoints) == [40, 15]
    checkpoints.save(16, groups(), {})
    assert steps(checkpoints) == [15, 16]


def test_a_step_that_is_saved_again_is_replaced(folder: Path) -> None:
    checkpoints = Checkpoints(folder)
    checkpoints.save(10, groups(1.0), {"try": 1})
    path = checkpoints.save(10, groups(2.0), {"try": 2})
    loaded = load(path)
    assert (loaded.state["try"], loaded.groups["model"]["w"].max().item()) == (2, 2.0)
    assert sorted(os.listdir(folder)) == ["latest.json", "step-00000010"]


def test_without_a_checkpoint_there_is_none_and_loading_says_what_is_expected(folder: Path) -> None:
    checkpoints = Checkpoints(folder)
    assert (checkpoints.latest(), checkpoints.best(), checkpoints.all()) == (None, None, [])
    with pytest.raises(CheckpointError, match="holds no whole checkpoint"):
        load(folder.parent)
    with pytest.raises(CheckpointError, match=r"checkpoint.json is missing"):
        load(folder / "step-00000007")


def test_a_damaged_one_is_passed_over_and_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = Checkpoints(folder)
    checkpoints.save(10, groups(), {})
    path = checkpoints.save(20, groups(), {}, best=True)
    os.truncate(path / "model.safetensors", 30)
    with caplog.at_level(logging.WARNING):
        latest = checkpoints.latest()
    assert latest is not None
    assert load(latest).step == 10
    assert "step-00000020" in caplog.text
    assert "model.safetensors has 30 bytes" in caplog.text
    caplog.clear()
    assert checkpoints.best() is None
    assert "best.json names step-00000020" in caplog.text
    shutil.rmtree(path)
    caplog.clear()
    assert checkpoints.latest() == folder / "step-00000010"
    assert "latest.json names step-00000020" in caplog.text


@pytest.mark.parametrize("content", [b"", b"[]", b'{"folder": "../../etc"}', b'{"folder": 3}', b"\xff"])
def test_a_damaged_name_is_passed_over_and_said(
    folder: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(folder)
    path = checkpoints.save(10, groups(), {}, best=True)
    (folder / "latest.json").write_bytes(content)
    (folder / "best.json").write_bytes(content)
    assert checkpoints.latest() == path
    assert checkpoints.best() is None
    assert caplog.text.count("is damaged") >= 2
    checkpoints.save(20, groups(), {})


def test_loading_says_all_that_is_wrong_at_once_and_what_is_whole(folder: Path) -> None:
    checkpoints = Checkpoints(folder, shard_bytes=40)
    checkpoints.save(10, groups(), {})
    path = checkpoints.save(20, groups(), {})
    os.unlink(path / "model-00001-of-00002.safetensors")
    os.truncate(path / "optimizer.safetensors", 9)
    with pytest.raises(CheckpointError) as caught:
        load(path)
    for part in ("model-00001-of-00002.safetensors is missing", "has 9 bytes", "step-00000010"):
        assert part in str(caught.value)


def test_weights_load_where_the_optimisers_state_was_not_sent_along(folder: Path) -> None:
    path = Checkpoints(folder).save(10, groups(), {})
    os.unlink(path / "optimizer.safetensors")
    assert load(path, only=["model"]).groups.keys() == {"model"}
    with pytest.raises(CheckpointError, match=r"optimizer.safetensors is missing"):
        load(path)


def test_checksums_name_every_file_that_differs(folder: Path) -> None:
    path = Checkpoints(folder).save(10, groups(), {})
    for name in ("model", "optimizer"):
        data = bytearray((path / f"{name}.safetensors").read_bytes())
        data[-1] ^= 64
        (path / f"{name}.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert len(caught.value.problems) == 2
    assert not torch.equal(load(path, check=False).groups["optimizer"]["w/m"], groups()["optimizer"]["w/m"])


def altered(path: Path, **values: Any) -> None:
    place = path / "checkpoint.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), **values}))


def test_another_version_an_altered_or_foreign_json_and_none_are_refused(folder: Path) -> None:
    checkpoints = Checkpoints(folder)
    path = checkpoints.save(10, groups(), {"epoch": 1})
    original = (path / "checkpoint.json").read_bytes()
    for change, said in (({"version": 2}, "format version 2"), ({"state": {"epoch": 2}}, "checksum"),
                         ({"format": "other"}, "not that of a frostline checkpoint")):  # fmt: skip
        altered(path, **change)
        with pytest.raises(CheckpointError, match=said):
            load(path)
        (path / "checkpoint.json").write_bytes(original)
    for content in (original[:-40], b"", b"\x80\x04", b"[]"):
        (path / "checkpoint.json").write_bytes(content)
        with pytest.raises(CheckpointError, match="step-00000010"):
            load(path)


def test_everything_that_cannot_be_saved_is_listed_and_nothing_is_written(folder: Path) -> None:
    bad = {"model": {"s": torch.eye(2).to_sparse()}, "../up": {"x": torch.ones(1)}}
    with pytest.raises(CheckpointError) as caught:
        Checkpoints(folder).save(-1, bad, {"model": object(), "t": torch.ones(1)}, label="latest")
    for part in ("step is -1", "model: s", "'../up'", "state/model", "state/t", "label is 'latest'"):
        assert part in str(caught.value)
    assert not folder.exists()


def test_settings_that_cannot_work_are_refused_together(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"keep is 0(.|\n)*keep_every is 0(.|\n)*shard_bytes"):
        Checkpoints(folder, keep=0, keep_every=0, shard_bytes=-1)


def test_a_full_disk_seen_ahead_writes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(folder)
    checkpoints.save(10, groups(), {})
    monkeypatch.setattr(checkpoint, "_free", lambda place: 1000)
    with pytest.raises(
        CheckpointFull, match=r"needs [\d,]+ bytes, 1,000 are free, [\d,]+ are missing"
    ) as caught:
        checkpoints.save(20, groups(), {})
    assert caught.value.missing == caught.value.needed - 1000 > 0
    assert steps(checkpoints) == [10]
    assert sorted(os.listdir(folder)) == ["latest.json", "step-00000010"]


def failure(run: Callable[[], object]) -> CheckpointError | None:
    try:
        run()
    except CheckpointError as e:
        return e
    return None


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EACCES])
@pytest.mark.parametrize("call", ["write", "fsync", "rename", "replace"])
def test_an_error_at_any_point_of_writing_keeps_what_was_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch, code: int, call: str
) -> None:
    checkpoints = Checkpoints(folder)
    checkpoints.save(10, groups(1.0), {})
    real, left = getattr(os, call), [0]

    def failing(*args: Any, **options: Any) -> Any:
        if left[0] == 0:
            raise OSError(code, os.strerror(code))
        left[0] -= 1
        return real(*args, **options)

    for after in range(3):
        left[0] = after
        with monkeypatch.context() as patched:
            patched.setattr(os, call, failing)
            raised = failure(lambda: checkpoints.save(10, groups(2.0), {}))
        assert raised is not None or after > 0
        if raised is not None:
            assert isinstance(raised, CheckpointFull) == (code in (errno.ENOSPC, errno.EDQUOT))
            assert "written before are whole" in str(raised)
        latest = checkpoints.latest()
        assert latest is not None
        assert load(latest).groups["model"]["w"].max().item() in (1.0, 2.0)
    checkpoints.save(10, groups(3.0), {})
    assert load(folder).groups["model"]["w"].max().item() == 3.0
    assert sorted(os.listdir(folder)) == ["latest.json", "step-00000010"]


@pytest.mark.parametrize(
    ("code", "limit", "told"),
    [
        (errno.ENOSPC, -1, r"500 are free, [\d,]+ are missing \(No space left .*free some space"),
        (errno.EDQUOT, -1, r"the quota of this user or folder is used up \(.*ask for more"),
        (
            errno.EFBIG,
            4096,
            r"this process may write files of 4,096 bytes at most \(File too large\).*ulimit -f",
        ),
        (errno.EFBIG, -1, r"a file is larger than its file system takes \(File too large\).*on another one"),
    ],
)
def test_what_kind_of_room_is_missing_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, code: int, limit: int, told: str
) -> None:
    def fail(*args: object) -> int:
        raise OSError(code, os.strerror(code))

    room = iter([10**9, 500])  # before, and by the time that it is told
    monkeypatch.setattr(checkpoint, "_free", lambda place: next(room))
    monkeypatch.setattr(checkpoint.resource, "getrlimit", lambda which: (limit, limit))
    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(CheckpointFull, match=rf"needs [\d,]+ bytes, (and )?{told}.*same command") as caught:
        Checkpoints(folder).save(10, groups(), {})
    assert ("are missing" in str(caught.value)) == (caught.value.missing > 0) == (code == errno.ENOSPC)


def test_a_disk_that_has_bytes_but_takes_none_is_told_as_such(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint, "_free", lambda place: 10**9)
    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(CheckpointFull, match=r"1,000,000,000 are free, but the disk takes no more \(`df -i`"):
        Checkpoints(folder).save(10, groups(), {})


KILLED = """
import os, signal, sys, warnings
from pathlib import Path
import torch
from frostline.trainer.checkpoint import Checkpoints

def die(call, after):
    real, left = getattr(os, call), [after]

    def fatal(*args, **options):
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        return real(*args, **options)

    setattr(os, call, fatal)

warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside torch's threads, none of them used
for folder, case in zip(sys.argv[1::2], sys.argv[2::2]):
    child = os.fork()
    if not child:
        die(case.split()[0], int(case.split()[1]))
        Checkpoints(Path(folder), keep=1).save(10, {"model": {"w": torch.full((3, 4), 2.0)}}, {}, best=True)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
POINTS = (
    "write 0",
    "write 1",
    "fsync 0",
    "fsync 2",
    "rename 0",
    "rename 1",
    "rmdir 0",
    "replace 1",
    "replace 2",
)


def test_a_kill_while_the_only_checkpoint_is_replaced_leaves_one_that_loads(tmp_path: Path) -> None:
    folders = {tmp_path / point.replace(" ", "-"): point for point in POINTS}
    for folder in folders:
        Checkpoints(folder, keep=1).save(10, {"model": {"w": torch.full((3, 4), 1.0)}}, {}, best=True)
    pairs = [text for folder, point in folders.items() for text in (str(folder), point)]
    done = subprocess.run([sys.executable, "-c", KILLED, *pairs], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(-signal.SIGKILL)] * len(POINTS)
    for folder in folders:
        assert load(folder).groups["model"]["w"].max().item() in (1.0, 2.0)
        checkpoints = Checkpoints(folder, keep=1)
        checkpoints.save(20, groups(3.0), {})
        assert [p for p in os.listdir(folder) if p.startswith(".")] == []
        assert 20 in steps(checkpoints)
        best = checkpoints.best()
        assert best is not None
        assert load(best).step == 10


def test_leftovers_of_dead_writers_go_and_those_of_living_ones_stay(folder: Path) -> None:
    checkpoints = Checkpoints(folder)
    checkpoints.save(10, groups(), {})
    dead = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as living:
        names = {f".step-00000020.{int(dead.stdout)}.tmp": False, f".step-00000021.{os.getpid()}.tmp": False,
                 f".step-00000022.{living.pid}.tmp": True}  # fmt: skip
        for name in names:
            (folder / name).mkdir()
        before = folder / f".step-00000023.{living.pid}.tmp"  # older than the process of that number
        before.mkdir()
        os.utime(before, (1, 1))
        checkpoints.save(30, groups(), {})
        assert {name: (folder / name).exists() for name in names} == names
        assert not before.exists()
        living.communicate(b"\n")


def test_an_old_one_that_cannot_be_deleted_is_said_and_the_save_counts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(folder, keep=1)
    checkpoints.save(10, groups(), {})

    def refused(place: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(aside, "remove", refused)
    assert load(checkpoints.save(20, groups(), {})).step == 20
    assert "step-00000010 cannot be deleted" in caplog.text


def test_a_file_in_place_of_the_folder_is_said(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CheckpointError, match="Cannot write a checkpoint"):
        Checkpoints(tmp_path / "checkpoints").save(1, groups(), {})


def test_weights_come_from_a_checkpoint_or_a_safetensors_file_and_from_no_pickle(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path / "checkpoints").save(1, groups(4.0), {})
    assert weights(tmp_path)["w"].max().item() == 4.0
    assert weights(path / "model.safetensors")["w"].max().item() == 4.0
    torch.save({"w": torch.ones(1)}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match="is a pickle"):
        weights(tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match="cannot be read"):
        weights(tmp_path / "none.safetensors")


def test_the_planned_size_covers_what_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(checkpoint, "_free", lambda place: 0)
    with pytest.raises(CheckpointFull) as caught:
        Checkpoints(folder).save(1, groups(), {"long": "x" * 5000})
    monkeypatch.undo()
    path = Checkpoints(folder).save(1, groups(), {"long": "x" * 5000})
    asked += [p.stat().st_size for p in path.iterdir()]
    assert sum(asked) <= caught.value.needed < sum(asked) + 100_000


def test_a_file_with_other_tensors_than_were_written_is_refused_before_it_is_read(folder: Path) -> None:
    """Of the same size, so that only its header tells."""
    path = Checkpoints(folder).save(1, {"model": {"a": torch.ones(2), "b": torch.ones(2)}}, {})
    place = path / "model.safetensors"
    size = place.stat().st_size
    tensorfile.write(path / "other", {"a" * 57: torch.ones(4)})
    data = (path / "other").read_bytes()
    text = data[8:-16].rstrip() + b" " * (size - 24 - len(data[8:-16].rstrip()))
    place.write_bytes(len(text).to_bytes(8, "little") + text + data[-16:])
    assert place.stat().st_size == size
    with pytest.raises(CheckpointError, match="1 tensors of 2"):
        load(path, check=False)
