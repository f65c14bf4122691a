from __future__ import annotations

import pytest

from frostline.errors import UsageError
from frostline.freezer.options import Options


def test_everything_that_is_wrong_is_told_at_once() -> None:
    wrong = Options(limit=0, max_hours=-1.0, workers="fibres", n_workers=True)  # type: ignore[arg-type]
    with pytest.raises(UsageError) as caught:
        wrong.check()
    assert [text.split(" is ")[0] for text in caught.value.problems] == [
        "limit",
        "max_hours",
        "workers",
        "n_workers",
    ]


@pytest.mark.parametrize(
    "options", [{}, {"limit": 1, "max_hours": 0.5, "workers": "threads", "n_workers": 3}]
)
def test_what_is_right_passes(options: dict[str, object]) -> None:
    Options(**options).check()  # type: ignore[arg-type]


@pytest.mark.parametrize("hours", [0, float("nan")])
def test_hours_are_above_zero(hours: float) -> None:
    with pytest.raises(UsageError, match="max_hours"):
        Options(max_hours=hours).check()


@pytest.mark.parametrize("device", ["foo", "cuda:99"])
def test_a_device_that_is_not_there_is_told(device: str) -> None:
    with pytest.raises(UsageError, match=f"device is '{device}', which cannot be used"):
        Options(device=device).check()
