"""Splits where there is next to nothing to divide, as a person meets them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from frostline_recipes.foveated import splits

pytest.importorskip("av")
pytest.importorskip("transformers")
Shell = Any  # of conftest.py


def test_fewer_keys_than_splits_are_all_trained_on() -> None:
    assert splits.divided([]) == {}
    assert splits.divided(["a"]) == {"a": "train"}
    assert splits.divided(["b", "a"]) == {"b": "train", "a": "train"}
    assert set(splits.divided(["a", "b", "c"]).values()) == set(splits.SPLITS)


@pytest.mark.parametrize("live", [True, False])
def test_two_clips_can_be_trained_on_and_that_is_said(
    shell: Shell, little: Path, tmp_path: Path, live: bool
) -> None:
    for i in range(2):
        shutil.copy(little / "clips" / f"{i:06d}.mp4", tmp_path / f"{i}.mp4")
    (tmp_path / "captions.csv").write_text("path,caption\n0.mp4,one\n1.mp4,two\n")
    how = ("--live",) if live else ("--store", str(tmp_path / "store"))
    out = ("--out", str(tmp_path / "run"))
    told = shell.foveated("train", "--steps", "1", *how, *out, videos=tmp_path, batch_size=2)
    assert told.code == 0, told.err
    assert "no split called 'val': evaluation is on the samples trained on" in told.told
