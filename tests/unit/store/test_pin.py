from __future__ import annotations

import fcntl
import gc
import os
from pathlib import Path

import pytest

from frostline.errors import StoreCorrupt, StoreError
from frostline.store.manifest import commit_numbers
from frostline.store.pin import Pin

# a fork is what these tests are about; Python 3.12 warns when torch has threads
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


def _held(store: Path, number: int) -> bool:
    fd = os.open(store / "commits" / f"{number:08d}.json", os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def test_a_pin_holds_the_newest_commit_until_closed_or_garbage(store: Path) -> None:
    newest = commit_numbers(store)[-1]
    pin, other = Pin(store), Pin(store, 1)
    assert (pin.number, other.number) == (newest, 1)
    assert _held(store, newest)
    pin.close()
    pin.close()
    assert not _held(store, newest)
    del other
    gc.collect()
    assert not _held(store, 1)


def test_a_forked_child_that_ends_does_not_let_go(store: Path) -> None:
    pin = Pin(store)
    child = os.fork()
    if child == 0:
        pin.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert _held(store, pin.number)


def test_a_commit_being_collected_is_passed_over(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector locks and unlinks the newest as we come; its successor is there on a second look."""
    newest = commit_numbers(store)[-1]
    listed = iter([[newest + 5], [newest + 6], [newest]])
    monkeypatch.setattr("frostline.store.pin.commit_numbers", lambda root: next(listed, [newest]))
    assert Pin(store).number == newest


def test_nothing_to_pin(store: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="never begun"):
        Pin(tmp_path)
    with pytest.raises(StoreCorrupt, match="missing"):
        Pin(store, 99)
