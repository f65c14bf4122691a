from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import xxhash

from frostline.errors import StoreCorrupt, StoreError, StoreFull, StoreLocked
from frostline.store.disk import Lock, make_folder, open_inside, read_inside, refuse_links, write_whole

# a fork is what these tests are about; Python 3.12 warns when torch has threads
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


def test_a_file_is_whole_checksummed_and_nothing_is_left_aside(tmp_path: Path) -> None:
    size, digest = write_whole(tmp_path / "f", [b"abc", memoryview(b"defg")])
    assert (tmp_path / "f").read_bytes() == b"abcdefg"
    assert (size, digest) == (7, xxhash.xxh3_64_intdigest(b"abcdefg"))
    assert os.listdir(tmp_path) == ["f"]


def test_a_failed_write_leaves_the_old_file_and_nothing_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_whole(tmp_path / "f", [b"old"])

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StoreFull, match=r"needs 3 bytes, .* free"):
        write_whole(tmp_path / "f", [b"new"])
    assert os.listdir(tmp_path) == ["f"]
    assert (tmp_path / "f").read_bytes() == b"old"


def test_short_writes_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, bytes(data[:2])))
    write_whole(tmp_path / "f", [b"abcdefg"])
    assert (tmp_path / "f").read_bytes() == b"abcdefg"


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_a_folder_that_may_not_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refused(*args: object, **options: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(StoreError, match="Give this user write access"):
        write_whole(tmp_path / "f", [b""])


def test_a_full_disk_when_parents_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(StoreFull):
        make_folder(tmp_path / "a" / "b" / "c")


@pytest.mark.parametrize("name", ["", ".", "..", "../f", "/etc/hostname", "a/b", "f\0"])
def test_names_that_leave_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(StoreCorrupt, match="would leave the store's folder"):
        open_inside(tmp_path, name)
    with pytest.raises(StoreCorrupt, match="would leave the store's folder"):
        open_inside(tmp_path, name, "f")


def test_links_pipes_folders_and_missing_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "f").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "real" / "f")
    (tmp_path / "folder").symlink_to(tmp_path / "real")
    os.mkfifo(tmp_path / "fifo")
    os.close(open_inside(tmp_path, "real", "f"))
    for parts in [("link",), ("folder", "f"), ("real", "f", "g"), ("fifo",), ("real",), ("none",)]:
        with pytest.raises(StoreCorrupt):
            open_inside(tmp_path, *parts)
    with pytest.raises(StoreCorrupt, match="is a link"):
        refuse_links(tmp_path / "real", tmp_path / "folder")


def test_no_descriptor_is_left_open_by_a_refusal(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("f")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        with pytest.raises(StoreCorrupt):
            open_inside(tmp_path, "link")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_small_file_that_is_large_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with open(tmp_path / "f", "wb") as f:
        f.truncate(1 << 40)  # sparse
    with pytest.raises(StoreCorrupt, match="at most 1,024 are expected"):
        read_inside(tmp_path, "f", limit=1024)


def test_one_lock_at_a_time_and_the_other_is_told_who_has_it(tmp_path: Path) -> None:
    lock = Lock(tmp_path)
    with pytest.raises(StoreLocked, match=f'"pid": {os.getpid()}'):
        Lock(tmp_path)
    lock.release()
    lock.release()
    Lock(tmp_path).release()
    assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()


def test_a_dead_owners_lock_is_free(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from frostline.store.disk import Lock\n"
        "lock = Lock(Path(sys.argv[1])); print('locked', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        with pytest.raises(StoreLocked, match=f'"pid": {owner.pid}'):
            Lock(tmp_path)
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    Lock(tmp_path).release()


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    lock = Lock(tmp_path)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # lives on after its parent let go
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    os.close(reader)
    lock.release()
    Lock(tmp_path).release()
    os.close(writer)
    assert os.waitpid(child, 0)[1] == 0


def test_a_forked_child_does_not_free_the_lock(tmp_path: Path) -> None:
    lock = Lock(tmp_path)
    child = os.fork()
    if child == 0:
        lock.release()
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(StoreLocked):
        Lock(tmp_path)
    lock.release()


def test_a_full_disk_does_not_keep_the_lock_from_being_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who holds it is only for messages, and `store gc` is what frees the disk."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    lock = Lock(tmp_path)
    with pytest.raises(StoreLocked):
        Lock(tmp_path)
    lock.release()
    Lock(tmp_path).release()


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"no store at .*gone any more: it was moved or deleted"):
        open_inside(tmp_path / "gone", "f")
