"""What the audit's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def warnings_always() -> Iterator[None]:
    """Torch gives some warnings once a process, whichever test comes first: here each time."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)
