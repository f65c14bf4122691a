"""The feed when things go wrong: damaged rows, missing and cut files, signals, abandoned iterators."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import frostline as fl
from frostline.errors import FeedError
from frostline.feed import feed as feed_module

ROOT = Path(__file__).resolve().parents[2]
TIERS = ["mmap", "disk", "pinned"]


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    yield
    assert not [t.name for t in threading.enumerate() if t.name.startswith("frostline")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """60 rows of a small and a large field, 10 to a shard."""
    fields = {
        "number": fl.Field((), "int64"),
        "x": fl.Field((20_000,), "float32"),
        "ragged": fl.Field((None,), "int64"),
    }
    with fl.Store.create(tmp_path / "store", fields=fields, rows_per_shard=10) as writer:
        for i in range(60):
            row = {"number": i, "x": torch.full((20_000,), float(i)), "ragged": torch.full((500 + i,), i)}
            writer.append(f"k{i}", row)
    return tmp_path / "store"


def shard_file(path: Path, field: str, shard: int) -> Path:
    """A shard's file, found by looking for the field's folder."""
    (folder,) = path.glob(f"data/*-{field}")
    return sorted(folder.glob("*.safetensors"))[shard]


def flip(file: Path, offset: int) -> None:
    data = bytearray(file.read_bytes())
    data[offset] ^= 1
    file.write_bytes(bytes(data))


def numbers(feed: fl.Feed) -> list[int]:
    return [n for batch in feed for n in batch["number"].tolist()]


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("field", ["number", "x", "ragged"])
def test_a_damaged_row_is_named(path: Path, tier: str, field: str) -> None:
    flip(shard_file(path, field, 3), -1)  # the values lie last: the last row of shard 3
    feed = fl.Feed(fl.Store.open(path, check="read"), 4, tier=tier, order=fl.Sequential())
    for _ in range(2):  # the feed can be asked again, and says the same
        feed.set_epoch(0)
        with pytest.raises(FeedError, match=rf"key 'k39' \(field '{field}', shard 3\) failed: .*checksum"):
            numbers(feed)


@pytest.mark.parametrize("group_bytes", [1, 2_000_000, 1 << 30])
def test_what_comes_before_the_damage_is_delivered_and_what_comes_after_can_be(
    path: Path, group_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(feed_module._GROUP_BYTES, "cpu", group_bytes)
    flip(shard_file(path, "x", 3), -1)
    store = fl.Store.open(path, check="read")
    feed = fl.Feed(store, 10, order=fl.Sequential())
    seen: list[int] = []
    with pytest.raises(FeedError, match="k39"):
        seen.extend(n for batch in feed for n in batch["number"].tolist())
    assert seen == list(range(30))
    assert feed.state_dict()["cursor"] == 3
    feed.load_state_dict({**feed.state_dict(), "cursor": 4})  # leave that batch out
    assert numbers(feed) == list(range(40, 60))
    good = fl.Feed(store.at(store.positions([k for k in store.keys if k != "k39"])), 10)
    assert sorted(numbers(good)) == [i for i in range(60) if i != 39]


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("how", ["deleted", "cut"])
@pytest.mark.parametrize("field", ["number", "x", "ragged"])
def test_a_file_that_went_before_it_was_opened(path: Path, tier: str, how: str, field: str) -> None:
    feed = fl.Feed(fl.Store.open(path), 4, tier=tier, order=fl.Sequential())
    file = shard_file(path, field, 2)
    if how == "deleted":
        file.unlink()
    else:
        os.truncate(file, file.stat().st_size - 100)
    with pytest.raises(FeedError, match=rf"key 'k2\d'.*{file.name}") as caught:
        numbers(feed)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("tier", ["mmap", "disk"])
@pytest.mark.parametrize("field", ["number", "x", "ragged"])
def test_a_file_cut_while_open(path: Path, tier: str, field: str) -> None:
    """Not a SIGBUS: the size is looked at before mapped bytes are touched."""
    feed = fl.Feed(fl.Store.open(path), 4, tier=tier, order=fl.Sequential())
    assert numbers(feed) == list(range(60))
    file = shard_file(path, field, 2)
    os.truncate(file, 4096)
    with pytest.raises(FeedError, match=r"key 'k2\d'.*cut short"):
        numbers(feed)


@pytest.mark.parametrize("tier", ["mmap", "disk"])
def test_a_file_deleted_while_open_is_still_read(path: Path, tier: str) -> None:
    feed = fl.Feed(fl.Store.open(path), 4, tier=tier)
    numbers(feed)
    shard_file(path, "x", 2).unlink()
    assert sorted(numbers(feed)) == list(range(60))


def test_a_failing_disk_names_the_row(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def broken(fd: int, buffers: Any, offset: int) -> int:
        last = offset + sum(len(buffer) for buffer in buffers)
        if "/x/" in os.readlink(f"/proc/self/fd/{fd}").replace("-x/", "/x/") and last > 500_000:
            raise OSError(5, "Input/output error")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", broken)
    feed = fl.Feed(fl.Store.open(path, check="open"), 4, tier="disk", order=fl.Sequential())
    with pytest.raises(FeedError, match=r"key 'k\d+' \(field 'x', shard 0\) failed: .*Input/output error"):
        numbers(feed)
    monkeypatch.undo()
    assert sorted(numbers(feed)) == list(range(60)), "usable afterwards"


# whole processes

CHILD = """
import sys, time
import frostline as fl
feed = fl.Feed(fl.Store.open(sys.argv[1]), 2, tier=sys.argv[2], order=fl.Sequential())
"""


def child(path: Path, body: str, tier: str = "mmap") -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-W", "error", "-c", CHILD + body, str(path), tier]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.parametrize("tier", ["mmap", "disk"])
def test_ctrl_c_ends_it_at_once(path: Path, tier: str) -> None:
    body = "while True:\n    for i, batch in enumerate(feed):\n        time.sleep(0.01)\n"
    body += "        if i == 3: print('on', flush=True)\n"
    with child(path, body, tier) as running:
        assert running.stdout
        assert running.stdout.readline() == "on\n"
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=200)
    assert running.returncode in (130, -signal.SIGINT)
    assert errors.strip().endswith("KeyboardInterrupt")
    assert errors.count("Traceback") == 1


@pytest.mark.parametrize(
    "body",
    [
        "it = iter(feed)\nnext(it)\nprint('left')\n",
        "it = iter(feed)\nkept = next(it)\nfeed.cycle = it\nprint('left')\n",
        "it = iter(feed)\nnext(it)\nprint('left')\nsys.exit(0)\n",
        "kept = list(feed)\nprint('left')\n",
        "it = iter(feed)\nnext(it)\ntime.sleep(0.3)\nprint('left', flush=True)\nimport threading\n"
        "threading.Thread(target=lambda: [time.sleep(0.2), next(it)]).start()\n",
    ],
)
def test_an_iterator_left_open_at_the_end_does_not_hang(path: Path, body: str) -> None:
    with child(path, body) as running:
        try:
            out, errors = running.communicate(timeout=200)
        except subprocess.TimeoutExpired:
            running.kill()
            raise
    assert (running.returncode, out, errors) == (0, "left\n", "")
