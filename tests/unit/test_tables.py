"""Tables from files: what becomes a number, what stays text, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from frostline.errors import UsageError
from frostline.tables import checked, fields_of, nearest, read


@pytest.fixture
def write(tmp_path: Path):
    def make(name: str, text: str | bytes) -> Path:
        place = tmp_path / name
        place.write_bytes(text if isinstance(text, bytes) else text.encode())
        return place

    return make


def column(write, *values: str) -> list[object]:
    return [row["x"] for row in read(write("t.csv", "key,x\n" + "".join(f"k,{v}\n" for v in values)))]


def test_columns_of_numbers_become_numbers(write) -> None:
    assert column(write, "1", "-2", "30") == [1, -2, 30]
    assert column(write, "1.5", "2", "1e+3") == [1.5, 2.0, 1000.0]
    assert [type(v) for v in column(write, "1", "2.5")] == [float, float]


@pytest.mark.parametrize("odd", ["007", "12e4", "+1", "1_000", " 1", "-0", "", "nan", "0x1f", "1,5"])
def test_what_is_no_plain_number_keeps_the_column_text(write, odd) -> None:
    text = f'"{odd}"' if "," in odd else odd
    assert column(write, "12", text) == ["12", odd]


def test_the_key_stays_text(write) -> None:
    rows = read(write("t.csv", "id,n\n1,1\n2,2\n"), as_text=("id",))
    assert list(rows) == [{"id": "1", "n": 1}, {"id": "2", "n": 2}]


def test_byte_order_mark_quotes_and_tabs(write) -> None:
    assert list(read(write("t.csv", b'\xef\xbb\xbfkey,x\na,"b, ""c""\nd"\n'))) == [
        {"key": "a", "x": 'b, "c"\nd'}
    ]
    assert list(read(write("t.TSV", "key\tx\na\t1\n"))) == [{"key": "a", "x": 1}]


def test_json_as_a_list_or_by_key(write) -> None:
    rows = [{"key": "a", "x": 1}, {"key": "b", "x": [1, 2]}]
    assert list(read(write("t.json", json.dumps(rows)))) == rows
    assert list(read(write("t.json", '{"a": {"x": 1}, "b": {"x": [1, 2]}}'))) == rows
    assert list(read(write("t.jsonl", '{"key": "a", "x": 1}\n\n{"key": "b", "x": [1, 2]}\n'))) == rows


def test_parquet(write, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"key": ["a", "b", "c"], "x": [1, None, 3]}), tmp_path / "t.parquet")
    rows = read(tmp_path / "t.parquet")
    assert (len(rows), fields_of(rows, "t")) == (3, ("key", "x"))
    assert rows[1] == {"key": "b", "x": None}
    assert [row["key"] for row in rows[1:]] == ["b", "c"]
    with pytest.raises(UsageError, match=r"cannot be read as \.parquet"):
        read(write("bad.parquet", b"junk"))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("t.csv", "key,x\na\n", "more or fewer values"),
        ("t.csv", "key,x\na,1,2\n", "more or fewer values"),
        ("t.csv", "key,x,x\na,1,2\n", "several columns are called 'x'"),
        ("t.csv", b"key,x\na,\xff\n", "utf-8"),
        ("t.csv", 'key\n"a\n', r"cannot be read as \.csv"),
        ("t.json", "{", r"cannot be read as \.json"),
        ("t.json", '{"a": 1}', "a list of objects, or an object of objects by key; got dict"),
        ("t.json", "[1, {}]", "1 of 2 rows are not dicts"),
        ("t.jsonl", "{}\n{]\n", "line 2"),
        ("t.xlsx", "", r"cannot read \.xlsx as a table"),
        ("table", "", "cannot read this as a table"),
    ],
)
def test_what_is_wrong_is_said(write, name, text, said) -> None:
    with pytest.raises(UsageError, match=said):
        read(write(name, text))


def test_a_table_that_is_not_there_suggests_the_nearest(write, tmp_path: Path) -> None:
    write("labels.csv", "key\na\n")
    with pytest.raises(UsageError, match=r"did you mean 'labels\.csv'"):
        read(tmp_path / "label.csv")
    with pytest.raises(UsageError, match="No table at"):
        read(tmp_path / "no" / "label.csv")


def test_rows_are_named_values() -> None:
    for rows in ("text", 3, {"a": 1}):
        with pytest.raises(UsageError, match="a list of dicts"):
            checked(rows)
    with pytest.raises(UsageError, match=r"nothing to work on: the source is empty \(0 rows\)"):
        fields_of([], "0 rows")
    with pytest.raises(UsageError, match=r"no row of the source has a field \(2 rows\)"):
        fields_of([{}, {}], "2 rows")
    assert fields_of([{"a": 1}, {"b": 2}], "t") == ("a", "b")


def test_nearest() -> None:
    assert nearest("featrues", ["features", "x"]) == " (did you mean 'features'?)"
    assert nearest("zzz", ["features"]) == ""
