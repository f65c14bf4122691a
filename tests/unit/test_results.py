"""profile.json: what is written is read back, and what is none is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from frostline import results
from frostline.errors import UsageError
from frostline.results import Machine, Profile, Remedy, Row, Steps, Verdict

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
LEAVES: dict[Any, st.SearchStrategy[Any]] = {
    float: NUMBERS, str: st.text(max_size=8), int: st.integers(-(2**40), 2**40), bool: st.booleans(),
}  # fmt: skip


def strategy(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a type: of each field of each dataclass below Profile."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        return st.builds(kind, **{n: strategy(hint) for n, hint in hints.items() if n != "schema"})
    if isinstance(kind, types.UnionType):
        (inner,) = (k for k in kind.__args__ if k is not type(None))
        return st.none() | strategy(inner)
    if typing.get_origin(kind) is tuple:
        return st.lists(strategy(typing.get_args(kind)[0]), max_size=2).map(tuple)
    if typing.get_origin(kind) is dict:
        return st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2)
    return LEAVES[kind]


def profile(**given: Any) -> Profile:
    known: dict[str, Any] = {
        "command": "python train.py", "boundary": "SGD.step", "wall": Steps(10.0, 9.0, 11.0, 8),
        "attributed": None, "rows": (), "verdict": Verdict("unclear", ""),
        "machine": Machine("cpu", 2, "2", "3"),
    }  # fmt: skip
    return Profile(**(known | given))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(strategy(Profile))
def test_what_is_written_is_read_back(tmp_path: Path, found: Profile) -> None:
    path = tmp_path / "profile.json"
    found.write(path)
    assert Profile.read(path) == found
    assert [*tmp_path.iterdir()] == [path]


def no_constant(name: str) -> Any:
    raise AssertionError(f"{name} is not JSON")


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_written_is_json(value: float, tmp_path: Path) -> None:
    """A remedy that leaves nothing of the step has no finite bound; JSON has no infinity."""
    path = tmp_path / "profile.json"
    profile(remedies=(Remedy("all of it", value, "nothing is left"),)).write(path)
    json.loads(path.read_text(), parse_constant=no_constant)


def test_an_infinite_bound_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile(remedies=(Remedy("all of it", math.inf, "nothing is left"),)).write(path)
    assert math.isinf(Profile.read(path).remedies[0].bound)


def test_whole_numbers_are_read_as_the_floats_they_stand_for(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile(samples=8).write(path)
    path.write_text(path.read_text().replace('"ms": 10.0', '"ms": 10'))
    assert [type(v) for v in (Profile.read(path).wall.ms, Profile.read(path).samples)] == [float, float]


def test_fields_of_a_later_minor_version_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile().write(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "new": 1}))
    assert Profile.read(path) == profile()


@pytest.mark.parametrize("schema", [results.PROFILE_SCHEMA + 1, 0, None, "1"])
def test_another_schema_is_refused(schema: Any, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"schema": schema}))
    with pytest.raises(UsageError, match="Profile again"):
        Profile.read(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"Cannot read .*nowhere\.json"):
        Profile.read(tmp_path / "nowhere.json")
    with pytest.raises(UsageError, match="Cannot read"):
        Profile.read(tmp_path)


@pytest.mark.parametrize("text", [b"", b"{", b"<html>", b"\xff\xfe{}"])
def test_what_is_no_json_is_refused(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(text)
    with pytest.raises(UsageError, match=r"no profile\.json"):
        Profile.read(path)


@pytest.mark.parametrize("text", ["[]", "3", "null", '"a"'])
def test_json_that_is_no_profile_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="schema None"):
        Profile.read(path)


@pytest.mark.parametrize(
    "change",
    [{"wall": None}, {"wall": []}, {"rows": 3}, {"rows": [{"kind": "data"}]}, {"verdict": "good"},
     {"warmup": "ten"}, {"wall": {"ms": "x", "low": 0, "high": 0, "count": 1}}, {"versions": []}],
)  # fmt: skip
def test_a_field_that_is_something_else_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile().write(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UsageError, match="no whole"):
        Profile.read(path)


def test_a_field_that_is_missing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile().write(path)
    known = json.loads(path.read_text())
    del known["machine"]
    path.write_text(json.dumps(known))
    with pytest.raises(UsageError, match="machine"):
        Profile.read(path)


def test_rates_and_reconciliation() -> None:
    rows = (Row("data", "", 6.0, 0.6), Row("overlap", "", -1.0, -0.1), Row("other", "", 5.5, 0.5))
    found = profile(samples=32.0, rows=rows)
    assert found.samples_per_s == pytest.approx(3200)
    assert found.reconciled == pytest.approx(0.05)


@pytest.mark.parametrize("given", [{}, {"wall": Steps(0.0, 0.0, 0.0, 0), "samples": 8.0}])
def test_without_steps_or_samples_there_are_no_rates(given: dict[str, Any]) -> None:
    assert profile(**given).samples_per_s is None
    assert profile(**given).reconciled is None
