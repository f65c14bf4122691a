"""Sources: files, tables, and anything with an index."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest

import frostline as fl
from frostline.errors import UsageError
from frostline.source import inside


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("clips/b.mp4", "clips/a.mp4", "clips/deep/c.mp4", "clips/notes.txt", "more/d.mp4"):
        place = tmp_path / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(b"")
    return tmp_path


def message(make) -> str:
    with pytest.raises(UsageError) as caught:
        make()
    return str(caught.value)


# files


@pytest.mark.parametrize(
    ("pattern", "keys"),
    [
        ("clips/*.mp4", ["a.mp4", "b.mp4"]),
        ("clips/**/*.mp4", ["a.mp4", "b.mp4", "deep/c.mp4"]),
        ("clips", ["a.mp4", "b.mp4", "deep/c.mp4", "notes.txt"]),
        (Path("clips/deep"), ["c.mp4"]),
        ("clips/a.mp4", ["a.mp4"]),
        (["clips/*.mp4", "more/*.mp4"], ["clips/a.mp4", "clips/b.mp4", "more/d.mp4"]),
        (["clips/*.mp4", "./clips/a.*"], ["a.mp4", "b.mp4"]),
        ("*/d.mp4", ["more/d.mp4"]),
    ],
)
def test_keys_are_paths_below_the_fixed_part(folder: Path, pattern, keys) -> None:
    source = fl.Source.files(pattern)
    assert list(source.keys) == keys
    assert (source.fields, source.paths) == (("path",), ("path",))
    assert all(Path(source.raw(i)["path"]).is_file() for i in range(len(source)))


def test_keys_stay_when_the_folder_moves(folder: Path) -> None:
    before = list(fl.Source.files("clips/**/*.mp4").keys)
    (folder / "clips").rename(folder / "elsewhere")
    assert list(fl.Source.files(folder / "elsewhere" / "**" / "*.mp4").keys) == before


def test_listing_waits_until_it_is_needed(folder: Path) -> None:
    source = fl.Source.files("later/*.mp4")
    (folder / "later").mkdir()
    (folder / "later" / "x.mp4").touch()
    assert list(source.keys) == ["x.mp4"]
    (folder / "later" / "y.mp4").touch()
    assert len(source) == 1, "a listing is kept"
    assert len(copy.copy(source)) == 2, "and found anew by a copy, as in another process"


def test_nothing_that_matches_says_where_it_looked(folder: Path) -> None:
    text = message(lambda: len(fl.Source.files("clips/*.avi")))
    assert "clips is there, but nothing in it matches" in text
    assert str(folder) in text
    assert "no folder gone" in message(lambda: len(fl.Source.files("gone/*.mp4")))


@pytest.mark.parametrize("pattern", ["", [], ["a", ""], 3, b"clips", [None]])
def test_what_is_no_pattern(pattern) -> None:
    assert "expected a pattern such as" in message(lambda: fl.Source.files(pattern))


def test_names_that_are_no_utf8_have_text_as_keys(tmp_path: Path) -> None:
    name = os.path.join(os.fsencode(tmp_path), b"caf\xe9.png")
    with open(name, "wb") as file:
        file.write(b"x")
    source = fl.Source.files(tmp_path / "*.png")
    assert list(source.keys) == ["caf\\xe9.png"]
    source.keys[0].encode("utf-8")
    assert Path(source.raw(0)["path"]).read_bytes() == b"x"
    (tmp_path / "caf\\xe9.png").touch()
    assert "stand there more than once" in message(lambda: fl.Source.files(tmp_path / "*.png").keys)


# tables


def test_rows_of_a_list() -> None:
    source = fl.Source.table([{"id": 7, "x": 1}, {"id": 8}], key="id")
    assert (list(source.keys), source.key, source.fields) == (["7", "8"], "id", ("id", "x"))
    assert source.raw(1) == {"id": 8, "x": None}
    several = fl.Source.table([{"video": "v", "frame": 3}], key=["video", "frame"])
    assert (list(several.keys), several.key) == (["v/3"], None)


def test_a_csv_key_of_digits_stays_as_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("key,n\n1,1\n10,2\n")
    source = fl.Source.table(tmp_path / "t.csv")
    assert source.raw(1) == {"key": "10", "n": 2}
    (tmp_path / "t.csv").write_text("key,code\na,007\nb,12\n")
    assert fl.Source.table(tmp_path / "t.csv").raw(0)["code"] == "007"


def test_a_key_that_is_not_there_or_not_usable() -> None:
    assert "no field 'kye' (did you mean 'key'?)" in message(lambda: fl.Source.table([{"key": 1}], key="kye"))
    text = message(lambda: fl.Source.table([{"key": 1.5}, {"key": "a"}, {"x": 1}, {"key": True}]).keys)
    assert "3 rows" in text
    assert "row 0: 1.5" in text
    assert "row 3: True" in text


def test_repeated_keys_are_named() -> None:
    source = fl.Source.table([{"key": k} for k in "abcab"])
    text = message(lambda: source.keys)
    assert "2 keys of 5 rows" in text
    assert "'a'" in text
    assert "'b'" in text


def test_paths_lie_below_the_table(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("key,image\na,images/a.png\nb,x/../b.png\n")
    source = fl.Source.table(tmp_path / "t.csv", paths="image")
    assert source.raw(0)["image"] == str(tmp_path / "images" / "a.png")
    assert source.raw(1)["image"] == str(tmp_path / "b.png")
    moved = fl.Source.table(tmp_path / "t.csv", paths="image", root="other")
    assert moved.raw(0)["image"] == os.path.join("other", "images", "a.png")


@pytest.mark.parametrize("path", ["../x", "a/../../x", "/etc/passwd", "..", "", None, 3, "a\0b"])
def test_paths_that_lead_out_are_refused(path) -> None:
    source = fl.Source.table([{"key": "a", "image": path}], paths=["image"], root="data")
    assert "'image' of 'a'" in message(lambda: source.raw(0))
    assert inside("data", "..a/b", "it") == os.path.join("data", "..a", "b")


# anything with an index


class HuggingFace:
    """Looks like a data set of theirs: columns by name, rows by number, and a fingerprint."""

    column_names = ("id", "text")
    _fingerprint = "0123abcd"

    def __init__(self) -> None:
        self.column_names = ["id", "text"]
        self.rows_read = 0

    def __len__(self) -> int:
        return 3

    def __getitem__(self, i):
        if isinstance(i, str):
            return [f"{i}-{n}" for n in range(3)]
        self.rows_read += 1
        return {"id": f"id-{i}", "text": f"text-{i}"}


def test_a_hugging_face_data_set() -> None:
    data = HuggingFace()
    source = fl.Source.dataset(data, key="id")
    assert (list(source.keys), data.rows_read) == (["id-0", "id-1", "id-2"], 0)
    assert (source.fields, source.version, source.cheap) == (("id", "text"), "0123abcd", False)
    assert source.raw(2) == {"id": "id-2", "text": "text-2"}
    assert fl.Source.dataset(data, version="mine").version == "mine"


def test_tuples_have_names() -> None:
    data = [("p0", 0), ("p1", 1)]
    source = fl.Source.dataset(data, fields=("image", "label"))
    assert (list(source.keys), source.raw(1)) == (["00000000", "00000001"], {"image": "p1", "label": 1})
    assert list(fl.Source.dataset(data, fields=("image", "label"), key="image").keys) == ["p0", "p1"]
    assert "name them, e.g. fields=" in message(lambda: fl.Source.dataset(data))
    assert "of 2 parts" in message(lambda: fl.Source.dataset(data, fields=("image",)).raw(0))


def test_what_has_no_index() -> None:
    assert "with len() and [i]" in message(lambda: fl.Source.dataset(iter([1])))
    assert "as dataset['train']" in message(lambda: fl.Source.dataset({"train": [1], "test": []}))
    assert "did you mean 'text'" in message(lambda: fl.Source.dataset([{"text": 1}], key="txet"))
    assert "lists nothing" in message(lambda: fl.Source.dataset([]).keys)
