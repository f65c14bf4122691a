"""Keys as paths: every key has its own, inside the folder, and comes back from it."""

from __future__ import annotations

import posixpath
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.errors import UsageError
from frostline.store.field import Field
from frostline.store.folder import SIDECAR, Exported, is_long, key_of, path_of
from frostline.store.formats import SUFFIXES

# characters and words that upset paths come up far more often than by chance
PARTS = st.sampled_from(
    ["", ".", "..", "/", "//", "a", "A", "%", "%2E", "%long", "con", "NUL.txt", "\0", "\\", " ", ".pt"]
)
KEYS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.lists(st.one_of(PARTS, st.text(st.characters(exclude_categories=["Cs"]), max_size=3))).map("".join),
    st.lists(PARTS).map("/".join),
    st.builds(lambda part, n: part * n, st.sampled_from(["x", "é", "a/", "%"]), st.integers(150, 1200)),
)


@given(KEYS, st.sampled_from(SUFFIXES))
def test_a_path_stays_inside_and_gives_its_key_back(key: str, suffix: str) -> None:
    path = path_of(key) + suffix
    assert not path.startswith("/")
    assert posixpath.normpath(path) == path  # no empty part, no `.`, no `..`
    assert not any(part.startswith(".") for part in path.split("/"))
    assert all(len(part.encode()) <= 255 for part in path.split("/"))
    assert len(path.encode()) < 1024
    assert path.isprintable() or all(ord(c) >= 32 for c in path)
    if not is_long(path_of(key)):
        assert key_of(path_of(key)) == key


@given(st.sets(KEYS, min_size=2, max_size=8), st.sampled_from(SUFFIXES))
def test_keys_share_no_file_and_need_no_folder_where_a_file_is(keys: set[str], suffix: str) -> None:
    paths = [path_of(key) + suffix for key in keys]
    assert len(set(paths)) == len(keys)
    folders = {path[:i] for path in paths for i, c in enumerate(path) if c == "/"}
    assert not folders & set(paths)


@pytest.mark.parametrize(
    ("key", "path"),
    [
        ("train/clip-7", "train/clip-7"),
        ("../x", "%2E%2E/x"),
        ("/abs", "%/abs"),
        ("a//b/", "a/%/b/%"),
        ("", "%"),
        ("con", "%63on"),
        ("a.pt/b", "a%2Ept/b"),
        ("100%", "100%25"),
        (".frostline-export.json", "%2Efrostline-export.json"),
        ("caf\u00e9/日本", "caf\u00e9/日本"),
    ],
)
def test_examples(key: str, path: str) -> None:
    assert path_of(key) == path
    assert key_of(path) == key


def test_long_keys_are_named_by_their_hash() -> None:
    assert is_long(path_of("x" * 300))
    assert path_of("x" * 300) != path_of("x" * 301)
    assert not is_long(path_of("x" * 150))
    assert not is_long(path_of("%long/a"))


def test_the_record_of_an_export(tmp_path: Path) -> None:
    assert Exported.of(tmp_path) is None
    record = Exported(
        {"x": Field((None, 2), "float16", fingerprint="f", provenance={"a": 1})}, {"%long/1": "k"}
    )
    record.write(tmp_path)
    assert Exported.of(tmp_path) == record


RECORD = '{"format": "frostline-export", "version": 1, "long_keys": {}, "fields": %s}'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "null",
        '{"format": "x", "version": 1}',
        '{"format": "frostline-export", "version": 9}',
        RECORD % '{"../x": {"shape": [], "dtype": "str"}}',
        RECORD % '{"x": {"shape": [-1], "dtype": "int8"}}',
        RECORD % '{"x": 3}',
        RECORD % "{}",
    ],
)
def test_a_record_that_is_none_says_what_to_do(tmp_path: Path, text: str) -> None:
    (tmp_path / SIDECAR).write_text(text)
    with pytest.raises(UsageError, match="delete that file"):
        Exported.of(tmp_path)
