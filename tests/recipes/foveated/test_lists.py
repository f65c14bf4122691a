"""What a list of clips says: clips that are named twice, and names without an ending."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from frostline.errors import UsageError
from frostline_recipes.foveated import lists
from frostline_recipes.foveated.lists import Clip


def read(path: Path, rows: list[dict[str, Any]]) -> list[Clip]:
    path.write_text(json.dumps(rows))
    return lists.read(path, need_caption=False)


def test_a_clip_of_two_splits_is_refused_with_both(tmp_path: Path) -> None:
    rows = [{"path": f"{i:02d}.mp4", "split": split} for split in ("train", "valid") for i in range(12)]
    rows += [{"path": "./00.mp4", "split": "test"}, {"path": "x.mp4", "split": "test"}]
    with pytest.raises(UsageError, match=r"list\.json names clips more than once, with diff") as told:
        read(tmp_path / "list.json", rows)
    assert told.value.problems[0] == "00.mp4: train and val"
    assert told.value.problems[9:] == ("09.mp4: train and val", "… and 2 more")


def test_other_captions_of_a_clip_are_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [
        {"path": f"{i}.mp4", "caption": f"{i}, {told}"} for told in ("one", "two", "three") for i in range(3)
    ]
    with caplog.at_level(logging.WARNING, "frostline"):
        found = read(tmp_path / "list.json", [*rows, {"path": "x.mp4", "caption": "alone"}])
    assert [clip.caption for clip in found] == ["0, one", "1, one", "2, one", "alone"]
    [said] = [record.getMessage() for record in caplog.records]
    told = "clips that are named again with another caption: 3. The first caption is used (as of 0.mp4)"
    assert said == f"{tmp_path / 'list.json'}: {told}"


def test_lines_that_say_the_same_again_are_nothing_to_speak_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"path": "a.mp4", "caption": "one", "split": s} for s in ("val", "validation", "val")]
    assert read(tmp_path / "list.json", rows) == [Clip("a.mp4", "one", "val")]
    assert caplog.records == []


@pytest.mark.parametrize("beside", ["", "videos", "elsewhere"])
def test_a_file_without_an_ending_is_found_as_it_is_written(tmp_path: Path, beside: str) -> None:
    (tmp_path / beside / "page").mkdir(parents=True)
    (tmp_path / beside / "page" / "v_10.5").touch()
    (tmp_path / beside / "folder").mkdir()
    rows = [{"path": name} for name in ("page/v_10.5", "page/v_20.5", "folder", str(tmp_path / "list"))]
    found = [clip.path for clip in read(tmp_path / "list.json", rows)]
    there = "page/v_10.5" if beside != "elsewhere" else "page/v_10.5.mp4"
    assert found == [there, "page/v_20.5.mp4", "folder.mp4", f"{tmp_path / 'list'}.mp4"]
    (tmp_path / "list").touch()
    assert read(tmp_path / "list.json", rows)[-1].path == str(tmp_path / "list")


def test_an_id_is_never_a_whole_name(tmp_path: Path) -> None:
    (tmp_path / "page").mkdir()
    for name in ("123", "page/123"):
        (tmp_path / name).touch()
    assert read(tmp_path / "list.json", [{"video_id": "123"}]) == [Clip("123.mp4")]
    assert read(tmp_path / "list.json", [{"videoid": 123, "page_dir": "page"}]) == [Clip("page/123.mp4")]


def test_names_with_an_ending_are_not_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    real = os.path.isfile
    monkeypatch.setattr(os.path, "isfile", lambda path: looked.append(str(path)) or real(path))
    read(tmp_path / "list.json", [{"path": "a.mp4"}, {"path": "b.webm"}, {"path": "/far/c.mov"}])
    assert [path for path in looked if not path.endswith("list.json")] == []
