from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from frostline.profiler.inside.loaders import Loaders


@pytest.fixture
def loaders(tmp_path: Path) -> Iterator[Loaders]:
    found = Loaders(tmp_path)
    found.install()
    yield found
    found.uninstall()
