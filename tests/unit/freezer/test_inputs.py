"""What a row was computed from, as one short text: which raw fields count, and when it changes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import frostline as fl
from frostline.errors import FrostlineError
from frostline.freezer.inputs import PREFIX, Inputs, changed, same, unrecorded


def table(*rows: dict[str, Any], **options: Any) -> fl.Source:
    return fl.Source.table([{"key": f"k{i}", **row} for i, row in enumerate(rows)], **options)


def inputs(source: fl.Source, reads: Any = "x", **options: Any) -> Inputs:
    several = reads if isinstance(reads, list) else [reads]
    stage = fl.Stage("y", lambda *values: 0, reads=several)
    return Inputs.of(fl.Pipeline(source, stage, outputs=["y"]), **options)


def test_only_what_frozen_stages_read_or_the_cut_holds_counts() -> None:
    source = table({"x": 1, "label": 2, "note": "n"})
    frozen = fl.Stage("y", lambda x: x, reads="x")
    moving = fl.Stage("z", lambda y, note, rng: y, reads=["y", "note"], random=True)
    assert Inputs.of(fl.Pipeline(source, frozen, outputs=["y"])).names == ("x",)
    assert Inputs.of(fl.Pipeline(source, frozen)).names == ("x", "label", "note")
    assert Inputs.of(fl.Pipeline(source, frozen, moving, outputs=["z"])).names == ("x", "note")


def test_the_text_changes_with_the_value_and_with_nothing_else() -> None:
    texts = [
        inputs(table({"x": x, "other": other})).text(0) for x, other in ((1, 1), (1, 2), (2, 1), (1.0, 1))
    ]
    assert texts[0] == texts[1]
    assert len({texts[0], texts[2], texts[3]}) == 3
    assert list(json.loads(texts[0])) == ["x"]


def test_arrays_count_by_their_content() -> None:
    def of(value: Any) -> str:
        return inputs(fl.Source.dataset([{"x": value}])).text(0)

    assert of(np.arange(3)) == of(np.arange(3))
    assert len({of(np.arange(3)), of(np.arange(3.0)), of(np.arange(3)[::-1])}) == 3


def test_files_count_by_content_whoever_names_them(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    os.utime(tmp_path / "a.txt", ns=(10**18, 10**18))
    sources = [
        fl.Source.files(tmp_path / "*.txt"),
        table({"path": "a.txt"}, paths="path", root=tmp_path),
        table({"path": str(tmp_path / "a.txt")}),  # nobody said that it is a path
    ]
    before = [inputs(source, "path").text(0) for source in sources]
    (tmp_path / "a.txt").write_text("two")
    os.utime(tmp_path / "a.txt", ns=(10**18, 10**18))
    after = [inputs(source, "path").text(0) for source in sources]
    assert len(set(before)) == 1
    assert len(set(after)) == 1
    assert before[0] != after[0]


def test_a_version_stands_for_the_content_and_nothing_is_read() -> None:
    class Data:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, i: int) -> dict[str, int]:
            if i:
                raise OSError("read")
            return {"x": 1}

    assert json.loads(inputs(fl.Source.dataset(Data(), version="7")).text(1)) == {"version": "7"}
    (first, second) = inputs(fl.Source.dataset(Data())).texts(range(2))
    assert isinstance(first[1], str)
    assert isinstance(second[1], FrostlineError)
    assert str(second[1]) == "OSError: read"


def test_what_cannot_be_looked_at_is_told_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    source = table({"path": "a"}, {"path": "gone"}, {"path": None}, paths="path", root=tmp_path)
    found = dict(inputs(source, "path").texts([2, 1, 0]))
    assert list(found) == [2, 1, 0]
    assert "gone" in str(found[1])
    assert "expected the path of a file" in str(found[2])
    assert isinstance(found[0], str)


def test_texts_made_otherwise_have_another_name() -> None:
    source = table({"x": 1, "z": 2})
    names = {inputs(source, reads, paranoid=p).name for reads in ("x", ["x", "z"]) for p in (False, True)}
    assert len(names) == 4
    assert all(name.startswith(PREFIX) for name in names)
    assert inputs(source).field.dtype == "str"
    assert inputs(source).field.provenance == {"reads": ["x"], "paranoid": False, "by_version": False}


def test_differences_are_told_of_what_both_know() -> None:
    assert changed('{"a":"1","b":"2"}', '{"a":"1","b":"3"}') == ["b"]
    assert changed('{"a":"1"}', '{"a":"1","b":"3"}') == []
    assert changed("{}", '{"a":"1"}') == []


@pytest.mark.parametrize("text", ["", "a\nb", "a\0b", "x" * 5000])
def test_text_that_is_no_path_is_hashed(text: str) -> None:
    assert len(json.loads(inputs(table({"x": text})).text(0))["x"]) == 16


PLAIN, FULL = "12 1700000000000000000 ab12", "12 1700000000000000000 ab12 ffee"


def test_full_hashes_count_when_both_texts_have_them() -> None:
    def text(part: str) -> str:
        return json.dumps({"path": part, "x": "9f3a"})

    assert changed(text(PLAIN), text(FULL)) == ["path"]  # asked for now, and not recorded then
    assert unrecorded(text(PLAIN), text(FULL))
    assert changed(text(FULL), text(PLAIN)) == []  # the plain parts are in the full text
    assert same(text(FULL), text(PLAIN))
    assert changed(text(FULL), text(FULL.replace("ffee", "ffef"))) == ["path"]
    touched = FULL.replace("1700000000000000000", "1700000000000000009")
    assert changed(text(FULL), text(touched)) == []  # all of it is the same
    assert changed(text(PLAIN), text(touched)) == ["path"]
    assert not unrecorded(text(PLAIN), text(touched))  # it differs, whatever its content is
    assert not unrecorded(text(FULL), text(PLAIN))
    assert changed(text(FULL), text(PLAIN.replace("12 17", "13 17"))) == ["path"]


def test_what_else_changed_is_no_missing_hash() -> None:
    old, new = json.dumps({"path": PLAIN, "x": "1"}), json.dumps({"path": FULL, "x": "2"})
    assert changed(old, new) == ["path", "x"]
    assert not unrecorded(old, new)


def test_a_version_may_be_any_text() -> None:
    assert changed('{"version":"1 2 beta three"}', '{"version":"1 2 beta four"}') == ["version"]
    assert not unrecorded('{"version":"a b c"}', '{"version":"a b d"}')


def test_texts_of_other_fields_are_not_the_same() -> None:
    assert not same("{}", '{"a":"1"}')
    assert not same('{"a":"1"}', '{"a":"1","b":"2"}')


@pytest.mark.parametrize("n", [1, 63, 5000])
def test_texts_come_in_order_however_many_there_are(n: int) -> None:
    look = inputs(table(*({"x": i} for i in range(n))), "x")
    places = [*reversed(range(n))]
    found = [*look.texts(places)]
    assert [place for place, _ in found] == places
    assert [text for _, text in found[:50]] == [look.text(place) for place in places[:50]]
