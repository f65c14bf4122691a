"""What all tests share: `--full`, markers, hypothesis without deadlines, watching for waits on a device."""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # no test waits for a hub; read once, when transformers is imported
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in a shell's background: children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

if "FROSTLINE_CACHE" not in os.environ:  # no test, and no process that one starts, may touch the user's
    os.environ["FROSTLINE_CACHE"] = tempfile.mkdtemp(prefix="frostline-test-")
    atexit.register(shutil.rmtree, os.environ["FROSTLINE_CACHE"], ignore_errors=True)

if importlib.util.find_spec("hypothesis"):  # a machine with a GPU may have little else
    from hypothesis import settings

    # No deadline: time is never asserted, and a shared machine can stall any single example.
    settings.register_profile("ci", deadline=None)
    settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests marked `full` (minutes)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _skip(items, "full", unless=lambda: config.getoption("--full"), reason="runs with --full only")
    _skip(items, "gpu", unless=_has_cuda, reason="needs a CUDA device")


def _skip(items: list[pytest.Item], marker: str, *, unless, reason: str) -> None:
    marked = [item for item in items if item.get_closest_marker(marker)]
    if marked and not unless():  # asked only when a test needs it: importing torch takes seconds
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture
def nothing_waits() -> Callable[[], AbstractContextManager[None]]:
    """A context in which torch raises as soon as anything makes the host wait for the device."""
    import torch

    @contextmanager
    def watched() -> Iterator[None]:
        torch.cuda.synchronize()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls the mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return watched
