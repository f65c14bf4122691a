"""Where clips come from: folders, patterns and lists, captions, durations, and what is wrong with them."""

from __future__ import annotations

import csv
import json
import logging
import shutil
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

import frostline as fl
from frostline.errors import UsageError
from frostline_recipes.foveated import glyphs, splits
from frostline_recipes.foveated.data import clips

av = pytest.importorskip("av")


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> dict[float, Path]:
    """One clip of each length, in seconds."""
    folder = tmp_path_factory.mktemp("films")
    made = {}
    for seconds in (3.0, 6.0, 9.0):
        made[seconds] = folder / f"{seconds:g}.mp4"
        glyphs.film(glyphs.script(0, size=32, seconds=seconds), made[seconds], fps=4)
    return made


@pytest.fixture
def folder(tmp_path: Path, films: dict[float, Path]) -> Path:
    """a.mp4 of 3 s, b.mp4 of 6 s, deep/c.mp4 of 9 s, and a file that is none."""
    place = tmp_path / "clips"
    (place / "deep").mkdir(parents=True)
    for name, seconds in (("a", 3.0), ("b", 6.0), ("deep/c", 9.0)):
        shutil.copy(films[seconds], place / f"{name}.mp4")
    (place / "notes.txt").write_text("no clip")
    return place


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    """The rows as a list of the kind that the name says."""
    if path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    elif path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as parquet

        parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        with path.open("w", newline="") as text:
            table = csv.DictWriter(text, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
            table.writeheader()
            table.writerows(rows)
    return str(path)


def captions_of(source: Any) -> dict[str, str]:
    rows = [source.raw(i) for i in range(len(source))]
    return {row["key"]: row["caption"] for row in rows}


WHOLE = [
    {"path": "a.mp4", "caption": "one, with a comma"},
    {"path": "b.mp4", "caption": "zwei ü"},
    {"path": "deep/c.mp4", "caption": "three"},
]
TOLD = {row["path"]: row["caption"] for row in WHOLE}


def test_a_folder_gives_its_clips_with_their_durations(folder: Path) -> None:
    source = clips(str(folder))
    assert list(source.keys) == ["a.mp4", "b.mp4", "deep/c.mp4"]
    assert source.fields == ("key", "path", "duration_s")
    assert [source.raw(i)["duration_s"] for i in range(3)] == pytest.approx([3.0, 6.0, 9.0])
    assert source.raw(2)["path"] == str(folder / "deep" / "c.mp4")
    assert source.paths == ("path",)


def test_a_pattern_and_a_single_file_give_what_they_match(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(clips(str(folder / "**" / "*.mp4")).keys) == ["a.mp4", "b.mp4", "deep/c.mp4"]
    assert list(clips(str(folder / "*.mp4")).keys) == ["a.mp4", "b.mp4"]
    assert clips(str(folder / "b.mp4")).raw(0)["path"] == str(folder / "b.mp4")
    monkeypatch.chdir(folder)
    source = clips("*.mp4")
    assert Path(source.raw(0)["path"]).resolve() == folder / "a.mp4"


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".json", ".jsonl", ".parquet"])
def test_lists_of_every_format_are_read(folder: Path, suffix: str) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    named = write(folder / f"list{suffix}", WHOLE)
    assert captions_of(clips(named, need_captions=True)) == TOLD
    assert captions_of(clips(str(folder), captions=named, need_captions=True)) == TOLD


@pytest.mark.parametrize(("path", "caption"), [("video", "text"), ("file", "name"), ("Path", "Caption")])
def test_columns_go_by_their_usual_names(folder: Path, path: str, caption: str) -> None:
    rows = [{path: row["path"], caption: row["caption"], "other": 1} for row in WHOLE]
    assert captions_of(clips(write(folder / "list.csv", rows), need_captions=True)) == TOLD


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pandas.csv", ",path,caption\n0,a.mp4,one\n1,deep/c.mp4,zwei ü\n"),
        ("excel.csv", "\ufeffpath;caption\r\na.mp4;one\r\ndeep/c.mp4;zwei ü\r\n"),
        ("tabs.csv", "path\tcaption\na.mp4\tone\ndeep/c.mp4\tzwei ü\n"),
        ("commas.tsv", "path,caption\na.mp4,one\ndeep/c.mp4,zwei ü\n"),
        ("spaced.csv", 'path, caption\na.mp4, one\ndeep/c.mp4, "zwei ü"\n'),
        ("bom.json", '\ufeff[{"path": "a.mp4", "caption": "one"}, {"path": "deep/c", "caption": "zwei ü"}]'),
        ("bom.jsonl", '\ufeff{"path": "a", "caption": "one"}\n{"path": "deep/c", "caption": "zwei ü"}\n'),
        ("several.json", '{"a.mp4": ["one", "said otherwise"], "deep/c.mp4": "zwei ü"}'),
    ],
)
def test_lists_are_read_as_other_programs_write_them(folder: Path, name: str, text: str) -> None:
    (folder / name).write_bytes(text.encode())
    expected = {"a.mp4": "one", "deep/c.mp4": "zwei ü"}
    assert captions_of(clips(str(folder / name), need_captions=True)) == expected


def test_a_column_without_a_name_is_no_caption(folder: Path) -> None:
    (folder / "list.csv").write_text(",path\n0,a.mp4\n7,b.mp4\n")
    assert clips(str(folder / "list.csv")).fields == ("key", "path", "duration_s")


def test_what_ends_a_line_elsewhere_may_stand_in_a_caption(folder: Path) -> None:
    told = "one\u2028two\x85three"
    line = json.dumps({"path": "a.mp4", "caption": told}, ensure_ascii=False)
    (folder / "list.jsonl").write_text(line + "\n", "utf-8")
    assert captions_of(clips(str(folder / "list.jsonl"))) == {"a.mp4": told}


def test_an_empty_cell_of_pandas_is_no_caption(folder: Path) -> None:
    (folder / "list.json").write_text(json.dumps([WHOLE[0], {"path": "b.mp4", "caption": float("nan")}]))
    with pytest.raises(UsageError, match=r"1 of 2 clips .* have no caption") as told:
        clips(str(folder / "list.json"), need_captions=True)
    assert told.value.problems == ("b.mp4",)


def test_an_id_may_hold_seconds(folder: Path) -> None:
    shutil.copy(folder / "a.mp4", folder / "v_x_10.5_20.0.mp4")
    (folder / "list.csv").write_text("video_id,caption\nv_x_10.5_20.0,cut out\n")
    expected = {"v_x_10.5_20.0.mp4": "cut out"}
    assert captions_of(clips(str(folder / "list.csv"))) == expected
    assert captions_of(clips(str(folder / "v_*.mp4"), captions=str(folder / "list.csv"))) == expected


def test_the_first_clips_of_a_long_list_need_not_be_there(tmp_path: Path, films: dict[float, Path]) -> None:
    (tmp_path / "videos").mkdir()
    shutil.copy(films[3.0], tmp_path / "videos" / "150.mp4")
    rows = [{"videoid": str(i), "name": f"clip {i}"} for i in range(200)]
    assert captions_of(clips(write(tmp_path / "list.csv", rows))) == {"150.mp4": "clip 150"}


def test_links_are_followed_but_not_round_in_circles(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "disk" / "more")
    (folder / "linked").symlink_to(tmp_path / "disk")
    (tmp_path / "disk" / "back").symlink_to(folder)
    (folder / "d.mp4").symlink_to(folder / "a.mp4")
    (folder / "nowhere.mp4").symlink_to(folder / "gone.mp4")
    own = ["a.mp4", "b.mp4", "d.mp4", "deep/c.mp4"]
    linked = [f"linked/more/{name}" for name in ("a.mp4", "b.mp4", "deep/c.mp4")]
    assert list(clips(str(folder)).keys) == own + linked


@pytest.mark.parametrize("name", ["A.MP4", "phone.3gp", "00001.m2ts"])
def test_a_folder_holds_what_cameras_write(folder: Path, name: str) -> None:
    shutil.copy(folder / "a.mp4", folder / name)
    assert name in clips(str(folder)).keys


def test_hidden_files_are_no_clips(folder: Path) -> None:
    shutil.copy(folder / "a.mp4", folder / "._a.mp4")
    shutil.copytree(folder / "deep", folder / ".trash")
    assert list(clips(str(folder)).keys) == ["a.mp4", "b.mp4", "deep/c.mp4"]


@pytest.mark.parametrize("beside", ["", "videos"])
def test_a_webvid_list_finds_its_clips_by_page_and_id(
    tmp_path: Path, films: dict[float, Path], beside: str
) -> None:
    rows = []
    for name, page in (("0012", "000001_000050"), ("777", "000051_000100")):
        place = tmp_path / beside / page / f"{name}.mp4"
        place.parent.mkdir(parents=True)
        shutil.copy(films[3.0], place)
        url = f"https://example.org/videos/{name}/preview/stock-{name}.mp4"
        rows.append(
            {"videoid": name, "contentUrl": url, "duration": "PT3S", "page_dir": page, "name": f"clip {name}"}
        )
    rows.append({**rows[0], "videoid": "999", "name": "never downloaded"})
    source = clips(write(tmp_path / "results_2M_train.csv", rows), need_captions=True)
    assert captions_of(source) == {
        "000001_000050/0012.mp4": "clip 0012",
        "000051_000100/777.mp4": "clip 777",
    }
    assert all(Path(source.raw(i)["path"]).is_file() for i in range(2))


def test_content_urls_alone_name_a_clip_by_their_last_part(folder: Path) -> None:
    rows = [{"contentUrl": "https://example.org/x/b.mp4?token=1", "name": "by its url"}]
    assert captions_of(clips(write(folder / "list.json", rows))) == {"b.mp4": "by its url"}


def test_json_may_give_captions_by_name(folder: Path) -> None:
    (folder / "list.json").write_text(json.dumps({"a.mp4": "one", "b": "two"}))
    assert captions_of(clips(str(folder / "list.json"))) == {"a.mp4": "one", "b.mp4": "two"}
    (folder / "list.json").write_text(json.dumps({"a.mp4": {"caption": ["first", "second"]}}))
    assert captions_of(clips(str(folder / "list.json"))) == {"a.mp4": "first"}


def test_captions_are_matched_by_path_name_or_id_but_never_by_an_ambiguous_name(
    folder: Path, tmp_path: Path, films: dict[float, Path]
) -> None:
    elsewhere = tmp_path / "lists"
    elsewhere.mkdir()
    rows = [
        {"path": str(folder / "a.mp4"), "caption": "absolute"},
        {"path": "b", "caption": "by id"},
        {"path": "other/c.mp4", "caption": "by name"},
    ]
    named = write(elsewhere / "list.csv", rows)
    expected = {"a.mp4": "absolute", "b.mp4": "by id", "deep/c.mp4": "by name"}
    assert captions_of(clips(str(folder), captions=named)) == expected
    rows.append({"path": "third/c.mp4", "caption": "which of the two?"})
    expected["deep/c.mp4"] = ""
    assert captions_of(clips(str(folder), captions=write(elsewhere / "list.csv", rows))) == expected


def test_a_clip_never_gets_the_line_of_another_clip_of_its_name(
    tmp_path: Path, films: dict[float, Path]
) -> None:
    for name in ("a/000", "a/001", "b/000"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(films[3.0], tmp_path / f"{name}.mp4")
    rows = [{"path": f"a/00{i}.mp4", "caption": str(i), "split": "train"} for i in range(2)]
    write(tmp_path / "captions.csv", [{k: row[k] for k in ("path", "caption")} for row in rows])
    assert captions_of(clips(str(tmp_path))) == {"a/000.mp4": "0", "a/001.mp4": "1", "b/000.mp4": ""}
    with pytest.raises(UsageError, match=r"1 of 3 clips .* have no caption") as told:
        clips(str(tmp_path), need_captions=True)
    assert told.value.problems == ("b/000.mp4",)
    write(tmp_path / "captions.csv", rows)
    with pytest.raises(UsageError, match=r"1 of 3 clips .* are of no split"):
        clips(str(tmp_path))
    write(tmp_path / "captions.csv", [{"path": "c/000.mp4", "caption": "of which of the two?"}])
    with pytest.raises(UsageError, match=r"3 of 3 clips .* have no caption"):
        clips(str(tmp_path), need_captions=True)


def test_a_name_without_its_suffix_is_no_clips_own_where_two_have_it(
    tmp_path: Path, films: dict[float, Path]
) -> None:
    for name in ("x/1.mp4", "x/1.mov"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(films[3.0], tmp_path / name)
    named = write(tmp_path / "list.csv", [{"path": "y/1.webm", "caption": "which?"}])
    assert clips(str(tmp_path), captions=named).fields == ("key", "path", "duration_s")
    (tmp_path / "x" / "1.mov").unlink()
    assert captions_of(clips(str(tmp_path), captions=named)) == {"x/1.mp4": "which?"}


def test_a_folders_own_captions_are_found(folder: Path) -> None:
    write(folder / "captions.csv", WHOLE)
    assert captions_of(clips(str(folder), need_captions=True)) == TOLD


def test_several_captions_of_a_clip_give_one_sample_with_the_first(folder: Path) -> None:
    rows = [*WHOLE, {"path": "./a.mp4", "caption": "said otherwise"}]
    assert captions_of(clips(write(folder / "list.csv", rows))) == TOLD


def test_the_embedded_set_is_read_as_it_was_made(tmp_path: Path) -> None:
    place = glyphs.make(tmp_path, n=4, size=32, seconds=3.0)
    source = clips(str(place), min_s=2, max_s=4, need_captions=True)
    rows = [source.raw(i) for i in range(4)]
    assert [row["split"] for row in rows] == ["train", "train", "val", "test"]
    assert [row["caption"] for row in rows] == [
        glyphs.caption(glyphs.script(i, size=32, seconds=3.0)) for i in range(4)
    ]
    below = clips(str(place / "clips"), captions=str(place / "captions.csv"), need_captions=True)
    assert [below.raw(i)["caption"] for i in range(4)] == [row["caption"] for row in rows]


def test_splits_come_from_a_column_or_from_folders(folder: Path, tmp_path: Path) -> None:
    rows = [{**row, "split": s} for row, s in zip(WHOLE, ("Training", "validation", "test"), strict=True)]
    source = clips(write(folder / "list.csv", rows))
    assert [source.raw(i)["split"] for i in range(3)] == ["train", "val", "test"]
    for name, sub in (("a.mp4", "train"), ("b.mp4", "valid"), ("deep/c.mp4", "test")):
        (tmp_path / "parts" / sub).mkdir(parents=True)
        shutil.copy(folder / name, tmp_path / "parts" / sub)
    source = clips(str(tmp_path / "parts"))
    assert {source.raw(i)["key"]: source.raw(i)["split"] for i in range(3)} == {
        "train/a.mp4": "train",
        "valid/b.mp4": "val",
        "test/c.mp4": "test",
    }
    assert "split" not in clips(str(folder)).fields  # "deep" is no split


def splits_of(source: Any) -> dict[str, str]:
    return {key: source.raw(i)["split"] for i, key in enumerate(source.keys)}


@pytest.mark.parametrize("n", [3, 8, 24])
def test_few_clips_are_divided_so_that_no_split_is_empty(
    tmp_path: Path, films: dict[float, Path], n: int
) -> None:
    for i in range(n):
        shutil.copy(films[3.0], tmp_path / f"tape-{i}.mp4")
    found = splits_of(clips(str(tmp_path), divide=True))
    assert set(found.values()) == {"train", "val", "test"}
    by_hash = by_shares([*found])
    moved = [key for key, split in found.items() if split != by_hash[key]]
    assert 1 <= len(moved) <= 2, "all others stay where the shares put them"
    assert splits_of(clips(str(tmp_path / "*.mp4"), divide=True)) == found
    assert "split" not in clips(str(tmp_path)).fields


def by_shares(keys: list[str]) -> dict[str, str]:
    """As a workload divides them."""
    data = fl.Pipeline(fl.Source.table([{"key": key} for key in keys]))
    work = fl.Workload(data, run=print, splits=splits.SPLITS)
    return {key: str(work.split_of(key)) for key in keys}


@hypothesis.given(st.sets(st.text(st.characters(codec="utf-8"), min_size=1), min_size=1, max_size=60))
def test_keys_move_only_where_a_split_would_be_empty(keys: set[str]) -> None:
    by_hash = by_shares([*keys])
    found = splits.divided([*keys])
    whole = set(by_hash.values()) == set(splits.SPLITS)
    assert bool(found) == (not whole)
    if 0 < len(keys) < 3:
        assert found == dict.fromkeys(keys, "train")
    elif found:
        assert found.keys() == keys
        assert set(found.values()) == set(splits.SPLITS)
        assert found == splits.divided(sorted(keys)), "whatever their order"
        moved = sum(found[key] != by_hash[key] for key in keys)
        assert moved <= 2


def only_sound(path: Path) -> None:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=8000, layout="mono")
        for k in range(24):
            frame = av.AudioFrame(format="fltp", layout="mono", samples=1024)
            frame.planes[0].update(bytes(4096))
            frame.sample_rate, frame.pts = 8000, 1024 * k
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def torn(path: Path) -> None:
    path.write_bytes(b"torn")


@pytest.mark.parametrize("spoil", [torn, only_sound])
def test_a_split_does_not_rest_on_a_file_without_a_film(
    tmp_path: Path, films: dict[float, Path], spoil: Callable[[Path], None]
) -> None:
    for i in range(8):
        shutil.copy(films[3.0], tmp_path / f"tape-{i}.mp4")
    alone = [key for key, split in splits_of(clips(str(tmp_path), divide=True)).items() if split == "val"]
    spoil(tmp_path / alone[0])
    source = clips(str(tmp_path), min_s=1, max_s=10, divide=True)
    assert source.raw(source.keys.index(alone[0]))["duration_s"] == 0.0
    found = splits_of(source)
    del found[alone[0]]
    assert set(found.values()) == {"train", "val", "test"}


@pytest.mark.parametrize("torn", [0, 3])
@pytest.mark.parametrize("n", [1, 2])
def test_one_or_two_clips_are_all_trained_on(
    tmp_path: Path, films: dict[float, Path], n: int, torn: int
) -> None:
    for i in range(n):
        shutil.copy(films[3.0], tmp_path / f"tape-{i}.mp4")
    for i in range(torn):
        (tmp_path / f"torn-{i}.mp4").write_bytes(b"torn")
    assert [*splits_of(clips(str(tmp_path), divide=True)).values()] == ["train"] * (n + torn)


def test_clips_of_unknown_length_can_be_divided(tmp_path: Path) -> None:
    for i in range(3):
        without_duration(tmp_path / f"live-{i}.mkv")
    assert set(splits_of(clips(str(tmp_path), divide=True)).values()) == {"train", "val", "test"}


def test_splits_that_are_named_stay_as_they_are(folder: Path) -> None:
    rows = [{**row, "split": "train"} for row in WHOLE]
    assert set(splits_of(clips(write(folder / "list.csv", rows), divide=True)).values()) == {"train"}


def test_unknown_splits_are_refused(folder: Path) -> None:
    rows = [{**row, "split": s} for row, s in zip(WHOLE, ("train", "holdout", ""), strict=True)]
    with pytest.raises(UsageError) as told:
        clips(write(folder / "list.csv", rows))
    assert len(told.value.problems) == 2
    assert "row 2: split is 'holdout'" in str(told.value)


def test_splits_of_only_some_clips_are_refused(folder: Path, tmp_path: Path) -> None:
    rows = [{**row, "split": "train"} for row in WHOLE]
    named = write(tmp_path / "list.csv", rows[:1])
    with pytest.raises(UsageError, match=r"2 of 3 clips .* are of no split; .*list\.csv names one") as told:
        clips(str(folder), captions=named)
    assert told.value.problems == ("b.mp4", "deep/c.mp4")
    assert f"put that list into {folder} and give it there as videos=" in str(told.value)
    assert len(clips(str(folder), captions=named, max_s=4)) == 1, "the others are not used"
    assert "split" not in clips(str(folder), captions=write(tmp_path / "list.csv", WHOLE[:1])).fields


def test_clips_outside_the_durations_are_left_out_and_said_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "frostline"):
        assert list(clips(str(folder), min_s=6, max_s=6).keys) == ["b.mp4"]
    [said] = [record.getMessage() for record in caplog.records]
    assert "2 outside 6…6 s (they last 3.0 to 9.0 s)" in said
    assert "1 clips kept" in said


def test_nothing_is_said_when_nothing_is_left_out(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    clips(str(folder), min_s=1, max_s=10)
    assert caplog.records == []


def without_duration(path: Path, kind: str = "matroska") -> None:
    """A clip of 3 s as a camera sends it: what is written first cannot tell how long it will last."""
    live = {"live": "1"} if kind == "matroska" else {}
    with path.open("wb") as file, av.open(file, "w", format=kind, options=live) as container:
        stream = container.add_stream("libx264", rate=4)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        for k in range(12):
            pixels = glyphs.frame(glyphs.script(0, size=32, seconds=3.0), k / 4).transpose(1, 2, 0)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels.copy(), format="rgb24")))
        container.mux(stream.encode())


@pytest.mark.parametrize(("kind", "seconds"), [("matroska", 3.0), ("h264", 12 / 25)])
def test_where_a_header_tells_no_duration_the_packets_do(folder: Path, kind: str, seconds: float) -> None:
    """As of a film that a browser recorded, or of a bare stream, which is decoded as 25 frames a second."""
    without_duration(folder / "live.mkv", kind)
    source = clips(str(folder), max_s=8)
    told = {key: source.raw(i)["duration_s"] for i, key in enumerate(source.keys)}
    assert told["live.mkv"] == pytest.approx(seconds, abs=0.01)
    assert "live.mkv" not in clips(str(folder), min_s=6).keys


def test_clips_that_tell_no_duration_at_all_stay_in_and_are_said(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_duration(folder / "live.mkv")
    monkeypatch.setattr("frostline_recipes.foveated.data._counted", lambda clip, film: 0.0)
    (folder / "torn.mp4").write_bytes(b"")  # freezing will say so
    source = clips(str(folder))
    assert [source.raw(i)["duration_s"] for i in range(5)] == pytest.approx([3.0, 6.0, 9.0, 0.0, 0.0])
    assert caplog.records == [], "any duration will do"
    assert list(clips(str(folder), min_s=6, max_s=10).keys) == ["b.mp4", "deep/c.mp4", "live.mkv", "torn.mp4"]
    [said] = [record.getMessage() for record in caplog.records]
    assert "1 of them without a duration or time stamps, so perhaps outside 6…10 s" in said
    assert "the first: live.mkv); left out: 1 outside 6…10 s" in said


def test_a_home_folder_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    write(folder / "list.csv", WHOLE)
    for source in (clips("~/clips", captions="~/clips/list.csv"), clips("~/clips/list.csv")):
        assert captions_of(source) == TOLD
        assert source.raw(0)["path"] == str(folder / "a.mp4")


def test_no_clip_within_the_durations_says_how_long_they_last(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"lasts 20 to 60 s(.|\n)*3 outside .*last 3\.0 to 9\.0 s"):
        clips(str(folder), min_s=20, max_s=60)


def test_files_that_cannot_be_opened_stay_in(folder: Path) -> None:
    (folder / "empty.mp4").write_bytes(b"")
    (folder / "noise.mp4").write_bytes(bytes(range(256)) * 40)
    (folder / "cut.mp4").write_bytes((folder / "b.mp4").read_bytes()[:600])
    source = clips(str(folder), min_s=5, max_s=7)
    rows = {source.raw(i)["key"]: source.raw(i)["duration_s"] for i in range(len(source))}
    assert rows == {"b.mp4": pytest.approx(6.0), "cut.mp4": 0.0, "empty.mp4": 0.0, "noise.mp4": 0.0}


def test_listed_clips_that_are_not_there_are_left_out_and_said(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    named = write(folder / "list.csv", [*WHOLE, {"path": "gone.mp4", "caption": "x"}])
    assert len(clips(named)) == 3
    assert "1 that are not there (the first: gone.mp4)" in caplog.text
    named = write(folder / "list.csv", [{"path": "gone.mp4", "caption": "x"}])
    with pytest.raises(UsageError, match=r"No videos: none of the 1 files(.|\n)*gone\.mp4"):
        clips(named)


def test_a_limit_takes_its_share_of_every_split_and_counts_what_is_kept(
    tmp_path: Path, films: dict[float, Path]
) -> None:
    rows = []
    for i in range(20):
        split = "train" if i < 10 else "val" if i < 15 else "test"
        rows.append({"path": f"{i:02d}.mp4", "caption": str(i), "split": split})
        shutil.copy(films[9.0 if i in (0, 10) else 3.0], tmp_path / f"{i:02d}.mp4")
    named = write(tmp_path / "list.csv", rows)
    source = clips(named, max_s=5, limit=8)
    kept = [source.raw(i)["split"] for i in range(len(source))]
    assert len(kept) == 8
    assert all(kept.count(split) >= 2 for split in ("train", "val", "test"))
    assert "00.mp4" not in source.keys
    assert list(source.keys) == sorted(source.keys)
    assert len(clips(named, limit=1000)) == 20


def test_no_videos_is_an_error_that_says_what_was_found(tmp_path: Path) -> None:
    (tmp_path / "readme.txt").write_text("nothing here")
    for videos, said in (
        (str(tmp_path), "none of the 1 files in it"),
        (str(tmp_path / "*.mp4"), "it matches nothing"),
        (str(tmp_path / "absent"), "there is no such file or folder"),
        (str(tmp_path / "absent.csv"), "There is no list of clips at"),
    ):
        with pytest.raises(UsageError, match=said.replace("*", r"\*")):
            clips(videos)


def test_missing_captions_name_up_to_ten_clips(tmp_path: Path, films: dict[float, Path]) -> None:
    for i in range(13):
        shutil.copy(films[3.0], tmp_path / f"{i:02d}.mp4")
    with pytest.raises(UsageError, match=r"13 of 13 clips .* captions= a list") as told:
        clips(str(tmp_path), need_captions=True)
    assert told.value.problems[:10] == tuple(f"{i:02d}.mp4" for i in range(10))
    assert told.value.problems[10:] == ("… and 3 more",)
    write(tmp_path / "captions.csv", [{"path": f"{i:02d}.mp4", "caption": "x" * (i % 2)} for i in range(12)])
    with pytest.raises(UsageError, match="7 of 13 clips"):
        clips(str(tmp_path), need_captions=True)
    assert len(clips(str(tmp_path))) == 13


def test_a_list_without_the_columns_says_which_it_has(folder: Path) -> None:
    named = write(folder / "list.csv", [{"path": "a.mp4", "views": "3"}])
    assert clips(named).fields == ("key", "path", "duration_s")
    for given in ({"videos": named, "need_captions": True}, {"videos": str(folder), "captions": named}):
        with pytest.raises(UsageError, match=r"it has path, views(.|\n)*no column holds captions"):
            clips(**given)
    named = write(folder / "list.csv", [{"views": "3"}])
    with pytest.raises(UsageError) as told:
        clips(named, need_captions=True)
    assert len(told.value.problems) == 2


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("list.json", "{", "cannot be read"),
        ("list.json", "[]", "it is empty"),
        ("list.json", '{"a": 3}', "expected"),
        ("list.json", '["a.mp4"]', "row 1 is 'a.mp4'"),
        ("list.jsonl", '{"path": "a.mp4"}\n{', "cannot be read .* line 2, column 2"),
        ("list.csv", "path,caption\na.mp4\n", "row 1 has more or fewer cells"),
        ("list.csv", "path,caption\n", "it is empty"),
        ("list.csv", "path,caption\n,x\n", "row 1 has no path"),
        ("list.tsv", 'path\tcaption\na.mp4\tone\nb.mp4\t"two" and more\n', "line 3: "),
        ("list.json", '{"videos": [{"path": "a.mp4"}]}', "expected"),
        ("list.parquet", "PAR?", "cannot be read"),
    ],
)
def test_lists_that_cannot_be_read_are_refused(folder: Path, name: str, text: str, said: str) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    (folder / name).write_text(text)
    with pytest.raises(UsageError, match=said):
        clips(str(folder / name))


def test_how_far_looking_at_clips_is_is_said_now_and_then(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clips(str(folder))
    assert "was looked at" not in caplog.text
    monkeypatch.setattr("frostline_recipes.foveated.data._AT_ONCE", 2)
    monkeypatch.setattr("frostline_recipes.foveated.data._TELL_S", -1.0)
    clips(str(folder))
    said = [r.message.split(": ")[-1] for r in caplog.records]
    assert said == [f"how long they last was looked at of {n} of 3 clips" for n in (2, 3)]


def test_captions_by_language_are_refused_where_they_are_told(folder: Path) -> None:
    captions = [{"en": "a cat"}, [{"en": "a cat"}], ["a cat", "a dog"]]
    rows = [{"path": f"{name}.mp4", "caption": told} for name, told in zip("abc", captions, strict=True)]
    listed = write(folder / "list.json", rows)
    with pytest.raises(UsageError, match="rows that cannot be used") as told:
        clips(listed, need_captions=True)
    assert [p.split(";")[0] for p in told.value.problems] == [
        "row 1: caption is {'en': 'a cat'}",
        "row 2: caption is [{'en': 'a cat'}]",
    ]
    assert len(clips(listed)) == 2


@pytest.mark.parametrize("row", [{"path": "a.mp4", "caption": " "}, {"path": "c.mp4", "caption": "two"}])
def test_a_clip_without_a_caption_says_what_a_line_of_it_may_lack(
    folder: Path, tmp_path: Path, row: dict[str, str]
) -> None:
    """An empty one, and a name that two clips have."""
    shutil.copy(folder / "a.mp4", folder / "c.mp4")
    rows = [{"path": name, "caption": "one"} for name in ("a.mp4", "b.mp4")]
    listed = write(tmp_path / "list.csv", [row, *rows])
    with pytest.raises(UsageError, match="nor with a name that no other clip or line has; or the caption"):
        clips(str(folder), captions=listed, need_captions=True)


def test_a_list_in_another_encoding_says_which_is_expected(folder: Path) -> None:
    (folder / "list.csv").write_text("path,caption\na.mp4,ein Bär\n", encoding="utf-16")
    with pytest.raises(UsageError, match=r"list\.csv cannot be read .* Save it as UTF-8\."):
        clips(str(folder / "list.csv"))


def test_names_are_matched_however_their_letters_are_composed(folder: Path, tmp_path: Path) -> None:
    for name in ("a.mp4", "b.mp4"):
        (folder / name).rename(folder / unicodedata.normalize("NFD", f"ü {name}"))
    rows = [{"path": name, "caption": name} for name in ("ü a.mp4", "ü b.mp4", "deep/c.mp4")]
    listed = write(tmp_path / "list.csv", rows)
    told = captions_of(clips(str(folder), captions=listed, need_captions=True))
    assert {unicodedata.normalize("NFC", key): text for key, text in told.items()} == {
        row["path"]: row["caption"] for row in rows
    }


def paths_of(source: Any) -> dict[str, str]:
    return {key: source.raw(i)["path"] for i, key in enumerate(source.keys)}


@pytest.mark.parametrize("how", ["absolute", "up", "mixed"])
def test_paths_of_a_list_may_be_written_otherwise_if_they_lie_below_its_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    up = f"../{folder.name}"
    before = {"absolute": [str(folder)] * 3, "up": [up] * 3, "mixed": [str(folder), up, "."]}[how]
    rows = [{**row, "path": f"{at}/{row['path']}"} for at, row in zip(before, WHOLE, strict=True)]
    place = write(folder / "list.csv", rows)
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(folder)
    for videos in (place, "list.csv", f"{up}/list.csv", str(tmp_path / "link" / "list.csv")):
        assert captions_of(clips(videos, need_captions=True)) == TOLD, "keys as of a list with short paths"


def test_a_list_that_leads_out_of_its_folder_is_refused_and_told_where_to_go(
    folder: Path, tmp_path: Path
) -> None:
    rows = [
        {"path": "deep/../../x.mp4"}, {"path": "/etc/x.mp4"}, {"path": "deep/../a.mp4"},
        {"path": f"{folder}-2/x.mp4"},
    ]  # fmt: skip
    with pytest.raises(UsageError, match=r"not below its folder .*/clips \(3 of 4\)") as told:
        clips(write(folder / "list.csv", rows))
    assert told.value.problems == ("../x.mp4", "/etc/x.mp4", f"{folder}-2/x.mp4")
    apart = tmp_path / "lists"
    apart.mkdir()
    named = write(apart / "list.csv", [{**row, "path": str(folder / row["path"])} for row in WHOLE])
    with pytest.raises(UsageError) as told:
        clips(named)
    assert f"Put it into {folder}, where all of them are" in str(told.value)
    shutil.move(named, folder / "list.csv")
    assert captions_of(clips(str(folder / "list.csv"))) == TOLD


def test_a_clip_named_by_two_paths_is_one(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"path": "a.mp4", "caption": "one"}, {"path": str(folder / "a.mp4"), "caption": "two"}]
    assert captions_of(clips(write(folder / "list.csv", rows))) == {"a.mp4": "one"}
    assert "clips that are named again with another caption: 1." in caplog.text
    apart = [{**row, "split": split} for row, split in zip(rows, ("train", "val"), strict=True)]
    with pytest.raises(UsageError, match="names clips more than once, with different splits") as told:
        clips(write(folder / "list.csv", apart))
    assert told.value.problems == ("a.mp4: train and val",)


@pytest.mark.parametrize("row", [{"path": "clips/a.mp4"}, {"path": "a.mp4"}, {"path": "{folder}/a.mp4"}])
@pytest.mark.parametrize("empty", [False, True])
def test_the_advice_to_use_only_listed_clips_works(
    folder: Path, tmp_path: Path, row: dict[str, str], empty: bool
) -> None:
    """Whatever its paths start from, and with lines that have no caption."""
    path = row["path"].format(folder=folder)
    rows = [{"path": path, "caption": "one"}, {"path": path.replace("a.mp4", "b.mp4"), "caption": ""}]
    named = write(tmp_path / "list.csv", rows[: 1 + empty])
    with pytest.raises(UsageError, match=r"[12] of 3 clips .* have no caption") as told:
        clips(str(folder), captions=named, need_captions=True)
    said = str(told.value)
    near = path != "a.mp4"
    assert (f"put that list into {folder} and give it there as videos=" in said) == (not near)
    assert ("give that list as videos=" in said) == near
    assert ("take out lines without a caption" in said) == empty
    followed = write((tmp_path if near else folder) / "list.csv", rows[:1])
    assert [*captions_of(clips(followed, need_captions=True)).values()] == ["one"]


def test_names_that_lead_nowhere_from_a_folder_are_to_be_written_out(folder: Path, tmp_path: Path) -> None:
    named = write(tmp_path / "list.csv", [{"path": "c.mp4", "caption": "found by its name"}])
    with pytest.raises(UsageError, match="2 of 3 clips") as told:
        clips(str(folder), captions=named, need_captions=True)
    assert f"in that list write each clip's path below {folder}; then put that list into" in str(told.value)


@pytest.mark.parametrize("name", ["list.txt", "clips.LST", "my.list"])
def test_a_text_file_of_paths_says_how_it_becomes_a_list(folder: Path, name: str) -> None:
    text = "a.mp4\ndeep/c.mp4\n"
    (folder / name).write_text(text)
    with pytest.raises(UsageError, match=r"is a text file; lists of clips are \.json, .*first line .*`path`"):
        clips(str(folder / name))
    (folder / "list.csv").write_text("path\n" + text)
    assert list(clips(str(folder / "list.csv")).keys) == ["a.mp4", "deep/c.mp4"]


def test_arguments_that_cannot_work_are_refused_all_at_once() -> None:
    with pytest.raises(UsageError) as told:
        clips("", min_s=9, max_s=3, limit=0)
    assert [p.split()[0] for p in told.value.problems] == ["videos", "min_s..max_s", "limit"]
